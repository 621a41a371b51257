"""Audits, comparisons and the mutation score laid out for people, with what they show or not.

Text only; the numbers come from `samples`, `two_sample`, `enumeration` and `mutation`.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_lab.losslessness.battery import smallest_tv
from dflash2_lab.report import WIDTH, text_table

POWER = 0.99  # of the smallest total variation that is named
VERDICTS = {
    "equal": "every greedy token is the target's argmax",
    "tie-level": "every greedy token is the target's argmax, or ties with it inside the noise band",
    "no difference": "no difference between the laws was found, which does not prove that there is "
    "none",
    "inconclusive": "no difference was found, but the samples are too few to expect one to show",
    "differ": "the tokens do not have the target's law under these options",
    "bug": "a greedy token lies further below the target's argmax than rounding explains",
}
_PRECISION = "an engine of another precision has other ties and cuts elsewhere: give its --dtype"
LOOKS = {
    "support": "tokens that the law rules out",
    "ks": "place of the token in the law, p descending: largest deviation",
    "ad": "the same, with more weight on the ends",
    "neyman": "the same, smooth deviations",
    "rank_cells": "how often choice 1, 2, 3, 4-5, 6-9 and later ones are taken",
    "ljung_box": "dependence of a token's place on the 10 before it",
    "streams": "dependence between samples at equal position",
    "heat": "surprise against the law's entropy: temperature",
}


def audit_text(result: Mapping[str, Any]) -> str:
    """The result of an audit for people."""
    head = (
        f"audit of {result['samples']} against {result['target']}, {result['dtype']} on "
        f"{result['device']}\n{result['num_samples']} samples of {result['num_prompts']} prompts, "
        f"{result['num_tokens']} tokens, {result['num_stopped']} samples ended by a stop token"
    )
    parts = [head, *(_wrapped(f"note: {note}") for note in result["notes"])]
    if result["sampled"] is not None:
        parts += _sampled(result["sampled"], result["dtype"])
    if result["greedy"] is not None:
        parts += _greedy(result["greedy"], result["dtype"])
    if result["noise_band"] is not None:
        parts.append(_band(result["noise_band"]))
    return "\n\n".join([*parts, _verdict(result["verdict"])])


def _sampled(part: Mapping[str, Any], dtype: str) -> list[str]:
    laws = "; ".join(part["laws"][:4]) + ("; ..." * (len(part["laws"]) > 4))
    rows = [
        [name, _number(p), "rejected" if name in part["rejected"] else "", LOOKS[name]]
        for name, p in part["p_values"].items()
    ]
    width = max(len(row[3]) for row in rows)
    table = text_table(
        ["test", "p", "", "looks at".ljust(width)],
        [[*row[:3], row[3].ljust(width)] for row in rows],
    )
    table = "\n".join(line.rstrip() for line in table.splitlines())
    lines = [
        f"outside the law: {one['where']}, position {one['position']}, token {one['token']}"
        for one in part["outside"]
    ]
    more = part["num_outside"] - len(lines)
    lines += [f"and {more} more"] if more else []
    lines += [_PRECISION] if part["outside"] and dtype == "float32" else []
    if part["num_edge"]:
        lines.append(
            f"at the edge of a cut, inside the noise band: {part['num_edge']} tokens, taken as kept"
        )
    return [
        f"T > 0: {part['num_samples']} samples, {part['num_tokens']} tokens, {laws}",
        table,
        *(["\n".join(lines)] if lines else []),
        _wrapped(meaning(part)),
    ]


def meaning(part: Mapping[str, Any]) -> str:
    """What the tests of sampled tokens show and what they do not, in words."""
    alpha, n = part["alpha"], part["num_tokens"]
    if part["rejected"]:
        return (
            f"rejected: {', '.join(part['rejected'])} (Holm at {alpha:g}, the chance of that if "
            "they do have the law). The tokens do not have the law "
            "of this target under these options. The engine's decoding can be at fault, and so can "
            "other weights, quantisation, template, temperature, filters or penalties than those "
            "given here."
        )
    text = (
        f"rejected: none (Holm at {alpha:g}). What {n:,} tokens could have shown in {POWER:.0%} of "
        f"all cases: a total variation of {_number(part['smallest_tv'])} at every token, or more, "
        "if one tested cell holds all of it. Not shown: that there is no smaller or rarer change, "
        "nor one that other prompts, options or loads of the engine bring."
    )
    if n < part["level_tokens"]:
        enough = smallest_tv(part["level_tokens"], alpha / len(part["p_values"]), POWER)
        text += (
            f" Level {part['level']} asks for {part['level_tokens']:,} tokens, which could show "
            f"{_number(enough)}."
        )
    return text


def _greedy(part: Mapping[str, Any], dtype: str) -> list[str]:
    worst = part["worst_argmax_gap"]
    lines = [
        f"T = 0: {part['num_samples']} samples, {part['num_tokens']} tokens: {part['num_argmax']} "
        f"are the argmax, {part['num_ties']} tie with it, {part['num_bugs']} are bugs"
    ]
    line = f"worst argmax gap: {_number(worst['gap'])}"
    if worst["gap"] > 0:
        verdict = "bug" if part["num_bugs"] else "tie"
        line += (
            f", {worst['where']}, position {worst['position']}, token {worst['token']} (best "
            f"{worst['best_token']}): {verdict}"
        )
    lines.append(line)
    if part["num_bugs"] and dtype == "float32":
        lines.append(_PRECISION)
    return ["\n".join(lines)]


def _band(noise: Mapping[str, Any]) -> str:
    ways = {"whole": "one pass", "eager": "blocks on a cache"}
    scorings = noise["by_scoring"]
    parts = [f"{_number(part['largest'])} ({ways[way]})" for way, part in scorings.items()]
    num = next(iter(scorings.values()))["num"]
    return _wrapped(
        f"noise band {_number(noise['band'])}: the most that rounding moves a token's score "
        f"against the best other one, from one pass in float32, at {num:,} tokens of the samples: "
        f"{', '.join(parts)}. A tie is a gap of at most twice the band."
    )


def comparison_text(result: Mapping[str, Any]) -> str:
    """The result of a comparison of two sample files for people."""
    first, second = result["samples"]
    (a, b), (m, n) = result["num_outputs"], result["num_tokens"]
    unit = result["unit"]
    tests = text_table(
        ["test", "statistic", "df", "p"],
        [
            ["mmd, Hamming kernel", _number(result["mmd"]), "-", _number(result["p_mmd"])],
            [
                f"G, first {unit[:-1]}",
                f"{result['statistic']:.2f}",
                str(result["df"]),
                _number(result["p_first_token"]) if result["df"] else "-",
            ],
        ],
    )
    head = (
        f"{first} against {second}\n{result['num_prompts']} prompts, {a} and {b} outputs, "
        f"{m:,} and {n:,} {unit}, the first {result['horizon']} places of each"
    )
    alpha = result["alpha"]
    return "\n\n".join(
        [
            head,
            tests,
            _wrapped(
                f"p of mmd: by exchanging whole outputs within a prompt, at least "
                f"{_number(result['smallest_p'])} here. Each test fails below {alpha / 2:g}. "
                "Without the law of the target this needs 25 to 125 times the tokens that an audit "
                "against it needs, and it tells that two files differ, not which one is right."
            ),
            _verdict(result["verdict"], {"differ": "the two files do not have one law"}),
        ]
    )


def enumeration_text(result: Mapping[str, Any]) -> str:
    """The enumeration suite for people: its worst configuration of each policy and rule."""
    rows = result["rows"]
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row["policy"], row["acceptance"]), []).append(row)
    table = []
    for (policy, rule), own in groups.items():
        worst = max(own, key=lambda row: row["worst"])
        largest = max(row["total_variation"] for row in own)
        num = str(sum(row["num_paths"] for row in own))
        table.append([policy, rule, num, _number(largest), _number(worst["worst"]), worst["case"]])
    header = ["policy", "acceptance", "branches", "largest TV", "worst", "worst case"]
    failed = sum(not row["passed"] for row in rows)
    branches = sum(row["num_paths"] for row in rows)
    verdict = f"{failed} of {len(rows)} configurations FAIL" if failed else "exact"
    return "\n\n".join(
        [
            f"every branch of two blocks, {len(rows)} configurations on vocabularies of 3 to 5 "
            f"tokens, {branches} branches",
            text_table(header, table, keys=2),
            "TV: total variation of the law of two blocks of tokens from the target's; worst: of "
            "any\nconditional law, too; no more than "
            f"{result['gate']:g} passes",
            f"verdict: {verdict}",
        ]
    )


def mutation_text(score: Mapping[str, Any]) -> str:
    """The mutation score for people."""

    def table(first: str, outcomes: Sequence[Mapping[str, Any]], passed: str) -> str:
        rows = [
            [
                one["name"],
                one["stage"],
                one["found_by"] or passed,
                f"{one['num_tokens' if one['tokens'] is None else 'tokens']:,}",
            ]
            for one in outcomes
        ]
        return text_table([first, "stage", "found by", "tokens"], rows, keys=3)

    controls = score["controls_passed"] + score["false_alarms"]
    by_contract = score["killed"] - score["killed_by_sampling"]
    return "\n\n".join(
        [
            table("broken decoder", score["mutants"], "NOT FOUND"),
            table("harmless decoder", score["controls"], "passed"),
            _wrapped(
                "tokens: emitted tokens from which on it is found, or all that were looked at, of "
                "a toy with a vocabulary of 40; a real one needs more. draw_contract: not found by "
                "sampling, but the law reported is not the law drawn from."
            ),
            f"mutation score: {score['killed']} of {score['total']} broken decoders found "
            f"({by_contract} by the draw contract alone);\n{score['controls_passed']} of "
            f"{controls} harmless ones passed, {score['false_alarms']} false alarms",
        ]
    )


def _verdict(name: str, own: Mapping[str, str] = VERDICTS) -> str:
    return _wrapped(f"verdict: {name} - {own.get(name, VERDICTS[name])}")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def _number(value: float) -> str:
    return f"{value:.3g}"
