"""A run in numbers: a dict with the vocabulary of the design for --json, and a text table.

`summarise` computes, `text_report` only lays out what summaries hold, so a table can be printed
again from stored JSON. Unary recall and path survival are separate series, always.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_lab import stats
from dflash2_lab.conditions import conditions, doubts
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import Estimate
from dflash2_lab.replaying import ReplayResult, replay
from dflash2_lab.tables import Run, assert_comparable

WIDTH = 100  # columns of the terminal
NAME = 16  # columns of a drafter's name
RECALL_KS = (1, 16)


def summarise(
    run: Run,
    policies: Sequence[str] | None = None,
    num_draft: int | None = None,
    acceptance: str = "token",
) -> dict[str, Any]:
    """Everything the report shows of one recorded run, as plain JSON values (NaN is None).

    Keys: drafter, target, temperature, prompt_set_hash, conditions (what the numbers depend on),
    suffix_decay, degenerate_output (prompts that repeat themselves), warnings, and policies,
    {policy: object} with the keys of the design: policy, num_draft, acceptance_length (pooled and
    per_request, each also without the steps that EOS or the length limit cut), position_recall@k
    and conditional_recall@k (unary candidates, all anchors), survival and conditional_acceptance
    (path), within_block_share by layer (empty when attention was not recorded), and more.

    Args:
        policies: recorded policies or "oracle@k"; None: the recorded ones and "oracle@16".
        num_draft, acceptance: as `replay`.

    Raises:
        LabError: as `replay`.
    """
    names = list(policies) if policies is not None else [*run.policies, "oracle@16"]
    if not names:
        raise LabError("policies: found none, expected at least one to report on")
    results = {name: replay(run, name, num_draft, acceptance) for name in names}
    headroom = _headroom(run, results, num_draft, acceptance)
    summary = summarise_unary(run, names[0])
    unary = summary.pop("unary")
    dropped = max((r.num_requests_dropped or 0 for r in results.values()), default=0)
    lost = [f"{dropped} requests without a verify step were dropped"] if dropped else []
    return summary | {
        "policies": {
            name: {**_policy(result), "headroom_recovered": headroom.get(name), **unary}
            for name, result in results.items()
        },
        "warnings": [*lost, *summary["warnings"]],
    }


def summarise_unary(run: Run, policy: str | None = None) -> dict[str, Any]:
    """What `summarise` says apart from the policies; needs no replay, so off-policy traces do too.

    `unary` holds the recall series and within_block_share. `policy` says which anchors a decode
    visits, which no number here depends on.
    """
    _, decay = stats.suffix_decay(run)
    found = doubts(run)
    return {
        "drafter": run.info["drafter"]["name"],
        "target": run.info.get("target", {}).get("name"),
        "temperature": run.temperature,
        "prompt_set_hash": run.info.get("prompt_set_hash"),
        "conditions": conditions(run),
        "suffix_decay": {
            "slope": _value(decay.slope, decay.slope_low, decay.slope_high),
            "drop": _value(decay.drop, decay.drop_low, decay.drop_high),
        },
        "within_block_share_uniform": _attention(run, "uniform"),
        "unary": {**_recall(run, policy), "within_block_share": _attention(run, "value")},
        "degenerate_output": list(found.degenerate),
        "warnings": list(found.warnings),
    }


def compare(runs: Mapping[str, Run], policies: Sequence[str] | None = None) -> str:
    """The text table of several runs, {name: run}, with a warning for what is not comparable."""
    if not runs:
        raise LabError("a report needs at least one run, found an empty mapping")
    warnings = assert_comparable(runs)
    return text_report({name: summarise(run, policies) for name, run in runs.items()}, warnings)


def text_report(summaries: Mapping[str, Mapping[str, Any]], warnings: Sequence[str] = ()) -> str:
    """Lay summaries {name: `summarise(run)`} out as aligned text of at most 100 columns."""
    parts = [
        "acceptance length: tokens per verify step, bonus counted [95 % interval over prompts]",
        _lengths(summaries),
        *_datasets(summaries),
        "by slot: unary recall over all anchors (marginal), and path survival over verify steps",
        _slots(summaries),
        "suffix decay of position_recall@1: log-slope per slot, drop from first slot to last",
        _decay(summaries),
    ]
    if any(_first(summary)["within_block_share"] for summary in summaries.values()):
        parts += ["within_block_share by layer, and the uniform baseline, %", _layers(summaries)]
    notes = [f"{name}: {note}" for name, s in summaries.items() for note in s["warnings"]]
    parts += wrapped([*warnings, *notes])
    return "\n\n".join(parts) + "\n"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], keys: int = 1) -> str:
    """Aligned columns, at most 100 wide; the first `keys` columns are left-aligned text.

    Columns that do not fit go to a further block below, which repeats the key columns.
    """
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    fixed = sum(widths[:keys]) + 2 * (keys - 1)
    blocks: list[list[int]] = [[]]
    used = fixed
    for column in range(keys, len(header)):
        if blocks[-1] and used + 2 + widths[column] > WIDTH:
            blocks.append([])
            used = fixed
        blocks[-1].append(column)
        used += 2 + widths[column]
    texts = []
    for block in blocks:
        lines = []
        for row in cells:
            left = [row[c].ljust(widths[c]) for c in range(keys)]
            lines.append("  ".join([*left, *(row[c].rjust(widths[c]) for c in block)]).rstrip())
        rule = "  ".join("-" * widths[c] for c in [*range(keys), *block])
        texts.append("\n".join([lines[0], rule, *lines[1:]]))
    return "\n\n".join(texts)


def number(value: float) -> float | None:
    """A value for JSON, which has no NaN."""
    return float(value) if math.isfinite(value) else None


def _value(value: float, low: float, high: float) -> dict[str, Any]:
    return {"value": number(value), "interval": [number(low), number(high)]}


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """A value with its interval and what it rests on."""
    return {**_value(estimate.value, estimate.low, estimate.high), "num": float(estimate.num)}


def _policy(result: ReplayResult) -> dict[str, Any]:
    # a step counts for slot j only when it offers j slots: survival x its steps are acceptances
    accepted = sum(slot.value * slot.num for slot in result.survival if slot.num)
    lengths = ("pooled", "per_request", "pooled_uncut", "per_request_uncut")
    return {
        "policy": result.policy,
        "num_draft": result.num_draft,
        "acceptance": result.acceptance,
        "acceptance_length": {name: estimate_json(getattr(result, name)) for name in lengths},
        "accepted_drafts_per_step": number(accepted / result.pooled.num),
        "tokens_per_step": number(result.pooled.value),
        "num_requests": result.num_requests,
        "num_requests_dropped": result.num_requests_dropped,
        "by_dataset": _by_dataset(result),
        "survival": [number(slot.value) for slot in result.survival],
        "conditional_acceptance": [number(slot.value) for slot in result.conditional_acceptance],
    }


def _by_dataset(result: ReplayResult) -> dict[str, Any]:
    table = result.by_dataset
    sets: dict[str, Any] = {}
    for row in table[table["terminal"] == "with"].itertuples():
        entry = _value(row.value, row.low, row.high) | {"num": float(row.num)}
        sets.setdefault(str(row.dataset), {})[row.aggregation] = entry
    return sets


def _recall(run: Run, policy: str | None) -> dict[str, list[float | None]]:
    # the policy decides on the visited rows only, which are not used here
    table = stats.recall_by_slot(run, ks=RECALL_KS, policy=policy)
    table = table[table["anchors"] == "all"]
    series = {}
    for k in RECALL_KS:
        for metric in ("position_recall", "conditional_recall"):
            rows = table[(table["metric"] == metric) & (table["k"] == k)]
            series[f"{metric}@{k}"] = [number(v) for v in rows.sort_values("slot")["value"]]
    return series


def _attention(run: Run, column: str) -> list[float | None]:
    if not run.has_table("attention"):
        return []
    table = stats.attention_by_layer(run)
    rows = table[(table["slot"] == 0) & (table["group"] == "within_block")]
    return [number(value) for value in rows.sort_values("layer")[column]]


def _headroom(
    run: Run, results: Mapping[str, ReplayResult], num_draft: int | None, acceptance: str
) -> dict[str, float | None]:
    """Share of (oracle@16 - top1) that each policy recovers; empty when top1 was not recorded."""
    if "top1" not in run.policies:
        return {}
    ends = [
        results[name] if name in results else replay(run, name, num_draft, acceptance)
        for name in ("top1", "oracle@16")
    ]
    floor, ceiling = (end.pooled.value for end in ends)
    if not ceiling > floor:
        return {}
    return {
        name: number((result.pooled.value - floor) / (ceiling - floor))
        for name, result in results.items()
    }


def _first(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(summary["policies"].values()))


def _short(name: str) -> str:
    half = (NAME - 1) // 2
    return name if len(name) <= NAME else f"{name[: NAME - 1 - half]}~{name[-half:]}"


def _with_interval(entry: Mapping[str, Any], digits: int = 2) -> str:
    if entry["value"] is None:
        return "-"
    low, high = entry["interval"]
    text = f"{entry['value']:.{digits}f}"
    return text if low is None or high is None else f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def _plain(value: float | None, digits: int = 3, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def _lengths(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    header = ["drafter", "policy", "pooled", "per request", "uncut", "accepted", "headroom"]
    rows = []
    for name, summary in summaries.items():
        for policy, entry in summary["policies"].items():
            length = entry["acceptance_length"]
            share = entry["headroom_recovered"]
            rows.append(
                [
                    _short(name),
                    policy,
                    _with_interval(length["pooled"]),
                    _with_interval(length["per_request"]),
                    _plain(length["pooled_uncut"]["value"], 2),
                    _plain(entry["accepted_drafts_per_step"], 2),
                    "-" if share is None else f"{share:.0%}",
                ]
            )
    legend = (
        "uncut: pooled, without the steps that EOS or the length limit cut; accepted: drafts per\n"
        "step; headroom: (policy - top1) / (oracle@16 - top1)"
    )
    return text_table(header, rows, keys=2) + "\n" + legend


def _datasets(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The per-dataset table, whenever a summary pools more than one dataset."""
    rows = [
        [
            _short(name),
            policy,
            _short(dataset),
            _with_interval(lengths["pooled"]),
            _with_interval(lengths["per_request"]),
            f"{lengths['pooled']['num']:.0f}",
        ]
        for name, summary in summaries.items()
        for policy, entry in summary["policies"].items()
        if len(entry["by_dataset"]) > 1
        for dataset, lengths in entry["by_dataset"].items()
    ]
    if not rows:
        return []
    header = ["drafter", "policy", "dataset", "pooled", "per request", "steps"]
    return ["acceptance length by dataset", text_table(header, rows, keys=3)]


def _slots(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, summary in summaries.items():
        for k in RECALL_KS:
            metric = f"position_recall@{k}"
            rows.append([_short(name), metric, *map(_plain, _first(summary)[metric])])
        for policy, entry in summary["policies"].items():
            rows.append([_short(name), f"survival {policy}", *map(_plain, entry["survival"])])
    slots = max(len(row) for row in rows) - 2
    padded = [[*row, *[""] * (slots + 2 - len(row))] for row in rows]
    return text_table(["drafter", "slot", *map(str, range(1, slots + 1))], padded, keys=2)


def _decay(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [_short(name), *(_with_interval(s["suffix_decay"][key], 3) for key in ("slope", "drop"))]
        for name, s in summaries.items()
    ]
    return text_table(["drafter", "slope", "drop"], rows)


def _layers(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, summary in summaries.items():
        for text, shares in (
            ("within_block", _first(summary)["within_block_share"]),
            ("uniform", summary["within_block_share_uniform"]),
        ):
            rows.append([_short(name), text, *(_plain(share, 1, 100.0) for share in shares)])
    layers = max(len(row) for row in rows) - 2
    padded = [[*row, *[""] * (layers + 2 - len(row))] for row in rows]
    return text_table(["drafter", "layer", *map(str, range(layers))], padded, keys=2)


def wrapped(notes: Sequence[str]) -> list[str]:
    lines = [
        textwrap.fill(f"warning: {note}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for note in notes
    ]
    return ["\n".join(lines)] if lines else []
