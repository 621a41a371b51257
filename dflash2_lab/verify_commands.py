"""What the verify-replay command does: compares decode and replay, and lays the result out."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_lab.agreement.accepted_counts import ALPHA, POWER
from dflash2_lab.agreement.verify_replay import verify_replay as verify
from dflash2_lab.commands import Result, device_of, target_of, template_options
from dflash2_lab.models.io import load_drafter
from dflash2_lab.prompts import load_prompts
from dflash2_lab.report import text_table
from dflash2_lab.results import FAILED
from dflash2_lab.sampling import Sampling

MAX_LISTED = 10  # differences in the text; verify.json has them all
VERDICTS = {
    "equal": "every decode is the replay, block by block",
    "tie-level": "every difference is a numeric tie: its gap is inside the noise band",
    "bug": "something differs by more than rounding explains",
    "agree": "no difference between the laws was found",
    "differ": "live decoding and coupled replay accept drafts by different laws",
    "inconclusive": "too few conversations, or accepted drafts, to tell; give more --samples",
}


def verify_replay(arguments: argparse.Namespace) -> Result:
    """Decode, replay and compare; exit code 1 for a difference that is a bug."""
    target = target_of(arguments)
    drafter = load_drafter(
        arguments.drafter, target=target, dtype=arguments.dtype, device=device_of(arguments)
    )
    prompts = load_prompts(
        arguments.prompts or "default",
        limit=arguments.limit,
        system=arguments.system,
        template_options=template_options(arguments.template_option),
        target=target,
        seed=arguments.seed,
    )
    options = ("max_new_tokens", "max_total", "temperature", "top_p", "top_k", "seed", "samples")
    options += ("policy", "num_draft", "batch_size", "out", "acceptance")
    chosen = {name: getattr(arguments, name) for name in options}
    result = verify(target, drafter, prompts, **chosen)
    text = verification_text(result)
    folder = {}
    if arguments.out is not None:
        text += f"\nrun folder: {arguments.out}"
        folder = {"folder": str(arguments.out)}
    code = 1 if result["verdict"] in FAILED else 0
    return {"text": text, "json": result | folder, "code": code}


def verification_text(result: Mapping[str, Any]) -> str:
    """The result of `verify_replay` for people."""
    law = Sampling(**result["sampling"]).label
    head = (
        f"decode against replay: {result['drafter']} on {result['target']}\n"
        f"policy {result['policy']}, num_draft {result['num_draft']}, {result['acceptance']} "
        f"verification, {law}, {result['dtype']} on {result['device']}"
    )
    body = _greedy(result) if result["mode"] == "greedy" else _sampled(result)
    verdict = f"verdict: {result['verdict']} - {VERDICTS[result['verdict']]}"
    return "\n\n".join([head, *result["skipped"], *body, verdict])


def _greedy(result: Mapping[str, Any]) -> list[str]:
    equal, num = result["num_responses_equal"], result["num_responses"]
    responses = ", ".join(f"{way} {count} of {num}" for way, count in equal.items())
    rows = [
        [
            " = ".join(pair["ways"]),
            *(str(pair[name]) for name in ("num_blocks", "num_equal", "num_ties", "num_bugs")),
        ]
        for pair in result["engine_pairs"]
    ]
    parts = [
        f"{result['num_tokens']} tokens; responses equal to the traces token by token: {responses}",
        text_table(["blocks", "compared", "equal", "ties", "bugs"], rows),
        _band(result["noise_band"]),
        _worst(result["worst_argmax_gap"]),
    ]
    listed = [one for pair in result["engine_pairs"] for one in pair["differences"]]
    if listed:
        listed.sort(key=lambda one: one["verdict"])  # bugs first
        lines = [_difference(one) for one in listed[:MAX_LISTED]]
        more = len(listed) - len(lines)
        parts.append("\n".join([*lines, *([f"and {more} more in verify.json"] if more else [])]))
    return parts + [f"BROKEN {line}" for line in result["broken_scorings"]]


def _band(band: Mapping[str, Any]) -> str:
    rows = [
        [
            kind,
            way,
            _number(noise["largest"]),
            _number(noise["quantile_99"]),
            str(noise["num"]),
            str(noise["num_flips"]),
        ]
        for kind, ways in band["by_scoring"].items()
        for way, noise in ways.items()
    ]
    table = text_table(
        ["noise of", "scored by", "largest", "99 %", "scores", "flips"], rows, keys=2
    )
    return (
        f"{table}\nhow far rounding moves a token's score, against the best other one, from a "
        "float32 pass over\nthe same text; flips: choices that it changes. Band: target "
        f"{_number(band['target'])}, drafts {_number(band['draft'])};\n"
        "a tie is a gap of at most twice the band"
    )


def _worst(worst: Mapping[str, Any]) -> str:
    text = f"worst argmax gap of all tokens emitted: {_number(worst['gap'])}"
    if not worst["gap"]:
        return f"{text} (each one is the argmax)"
    return (
        f"{text}, {_place(worst)}, token {worst['token']} (best {worst['best_token']}): "
        f"{worst['verdict']}"
    )


def _difference(one: Mapping[str, Any]) -> str:
    first, second = one["ways"]
    mine, its = one["found"]
    what = {
        "target": f"{first} emits token {mine}, {second} {its}",
        "draft": f"{first} accepts {mine} drafts, {second} {its}",
        "table": f"steps differ: {first} {mine}, {second} {its}",
    }[one["kind"]]
    gap = "" if one["gap"] is None else f", gap {_number(one['gap'])}"
    return f"{one['verdict']}: {_place(one)}: {what}{gap}"


def _place(one: Mapping[str, Any]) -> str:
    parts = [f"prompt {one['prompt_id']}"]
    parts += [f"{name} {one[name]}" for name in ("turn", "sample") if one[name]]
    return ", ".join([*parts, f"position {one['position']}"])


def _sampled(result: Mapping[str, Any]) -> list[str]:
    pairs = result["engine_pairs"]
    parts = [_counts(pairs), _tests(pairs)]
    if len(pairs) > 1:
        shared, num = result["num_responses_shared"], result["num_responses"]
        parts.append(f"responses that the engines share token by token: {shared} of {num}")
    return parts


def _counts(pairs: Sequence[Mapping[str, Any]]) -> str:
    """Shares of the accepted counts, one row a way."""
    sides = [(pair["ways"][0], pair, 0) for pair in pairs] + [("replay", pairs[0], 1)]
    rows = []
    for way, pair, side in sides:
        counts, steps = pair["counts"][side], pair["num_steps"][side]
        shares = [f"{count / steps:.3f}" for count in counts]
        ends = [str(steps), str(pair["num_cut"][side]), f"{pair['mean_accepted'][side]:.3f}"]
        rows.append([way, *shares, *ends])
    header = ["accepted", *map(str, range(len(pairs[0]["counts"][0]))), "steps", "cut", "mean"]
    return (
        f"{text_table(header, rows)}\nshare of the verify steps that accept so many drafts; cut: "
        "steps left out, which a stop token or\nthe length limit cut; "
        f"{pairs[0]['num_conversations']} conversations a side"
    )


def _tests(pairs: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for pair in pairs:
        low, high = pair["low"], pair["high"]
        interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
        rows.append(
            [
                " = ".join(pair["ways"]),
                f"{pair['statistic']:.2f}",
                str(pair["df"]),
                _number(pair["p_value"]),
                _number(pair["p_value_independent"]),
                f"{pair['difference']:+.3f}{interval}",
                _number(pair["detectable"]),
            ]
        )
    header = ["test", "chi2", "df", "p", "p if indep.", "mean difference", "detectable"]
    return (
        f"{text_table(header, rows)}\np: by exchanging whole conversations within a prompt, at "
        f"least {_number(pairs[0]['smallest_p'])} here; the check\nfails below {ALPHA:g}. p if "
        "indep.: as if steps were independent. Mean difference: live minus\nreplay, 95 % interval "
        f"over prompts. Detectable: difference of means found in {POWER:.0%} of all cases"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
