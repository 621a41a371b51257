"""A recording as one page: acceptance, recall and attention with intervals, figures, provenance.

The page holds nothing but what the run's tables and its run.json say, so the same tables give the
same bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_lab.conditions import dataset_label
from dflash2_lab.html_page import (
    Table,
    figure_block,
    page,
    paragraph,
    provenance,
    section,
    warning_box,
)
from dflash2_lab.recording_figures import record_figures, why_not_replayable
from dflash2_lab.report import RECALL_KS, summarise, summarise_unary
from dflash2_lab.tables import Run, assert_comparable

HOW_TO_READ = (
    "Acceptance length is the number of tokens that leave a verify step, the bonus token counted: "
    "pooled over all steps, or the mean over requests of each one's own mean. Brackets are 95 % "
    "intervals from resampling whole prompts. They say nothing about prompts of another kind, and "
    "over a dozen prompts or fewer they are too narrow.",
    "Recall asks whether the target's token is among the drafter's k best candidates at a slot, "
    "whatever happened at the slots before it (marginal), or given that they all were "
    "(conditional). Survival is about a policy's path: the share of verify steps that accepted all "
    "slots up to this one. Marginal recalls must not be multiplied into a length.",
    "oracle@k accepts the target's token whenever it is among the k best: an upper bound for every "
    "selector on those k. Headroom is the share of the way from top1 to oracle@16.",
    "Acceptance differs between datasets, chat templates and temperatures by factors: compare runs "
    "with dflash2-lab compare, which checks all of them.",
)


def record_page(run: Run) -> str:
    """The page of a recording, as HTML.

    Acceptance is left out, with a warning, where it cannot be replayed (off-policy traces, anchors
    left out). Raises LabError for tables that are missing or cannot be read.
    """
    summary = _summary(run)
    figures = record_figures({str(summary["drafter"]): run})
    body = [
        warning_box(summary["warnings"]),
        *_acceptance(summary),
        section("Figures", *(figure_block(name, figure) for name, figure in figures.items())),
        *_series(summary),
        section("How to read this page", *map(paragraph, HOW_TO_READ)),
        provenance(run.info),
    ]
    title = f"{summary['drafter']} on {summary['target'] or 'its target'}"
    return page(title, _about(summary), body, figures)


def main_job_page(run: Run) -> str:
    """The page of a folder of the main job: all of its recordings in the same figures.

    Raises LabError as `record_page`, for each of its recordings.
    """
    runs = {name: Run.open(run.folder / name, "record") for name in run.info["runs"]}
    summaries = {name: _summary(one) for name, one in runs.items()}
    figures = record_figures(runs)
    notes = [f"{name}: {note}" for name, s in summaries.items() for note in s["warnings"]]
    body = [
        warning_box([*assert_comparable(runs), *notes]),
        *(part for name, s in summaries.items() for part in _acceptance(s, f", {name}")),
        section("Figures", *(figure_block(name, figure) for name, figure in figures.items())),
        *(part for name, s in summaries.items() for part in _series(s, f", {name}")),
        section("How to read this page", *map(paragraph, HOW_TO_READ)),
        *(provenance(one.info, f", {name}") for name, one in runs.items()),
    ]
    title = f"The main job: {', '.join(runs)}"
    return page(title, _about(next(iter(summaries.values()))), body, figures)


def _summary(run: Run) -> dict[str, Any]:
    return summarise_unary(run) if why_not_replayable(run) else summarise(run)


def _about(summary: Mapping[str, Any]) -> str:
    found = summary["conditions"]
    return (
        f"{found['num_prompts']:,} prompts, {found['num_blocks']:,} blocks of "
        f"{found['drafter']['num_draft']} drafts, T = {summary['temperature']:g}, "
        f"target {found['target']['name']} ({found['target']['dtype'] or 'dtype not recorded'}), "
        f"{dataset_words(found['datasets'])}"
    )


def dataset_words(datasets: Mapping[str, int]) -> str:
    """As in "datasets gsm8k (12), self (24)"; random tokens are said to be so."""
    names = ", ".join(f"{dataset_label(name)} ({num})" for name, num in datasets.items())
    return f"dataset{'s' if len(datasets) > 1 else ''} {names}"


def interval_text(entry: Mapping[str, Any], digits: int = 2) -> str:
    """As in "2.42 [2.28, 2.57]" from {"value", "interval"}; "-" for a value that is not known."""
    if entry["value"] is None:
        return "-"
    numbers = [entry["value"], *(bound for bound in entry["interval"] if bound is not None)]
    texts = [f"{value:.{digits}f}" for value in numbers]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if len(texts) == 3 else texts[0]


def plain_text(value: float | None, digits: int = 3, scale: float = 1.0, unit: str = "") -> str:
    """A number, or "-" for one that is not known."""
    return "-" if value is None else f"{value * scale:.{digits}f}{unit}"


def _acceptance(summary: Mapping[str, Any], of: str = "") -> list[str]:
    policies = summary.get("policies", {})
    if not policies:
        return []
    rows = [
        [
            name,
            interval_text(entry["acceptance_length"]["pooled"]),
            interval_text(entry["acceptance_length"]["per_request"]),
            plain_text(entry["acceptance_length"]["pooled_uncut"]["value"], 2),
            plain_text(entry["accepted_drafts_per_step"], 2),
            plain_text(entry["headroom_recovered"], 0, 100, " %"),
        ]
        for name, entry in policies.items()
    ]
    header = ["policy", "pooled", "per request", "uncut", "accepted drafts", "headroom"]
    note = (
        "Tokens per verify step, bonus counted, with 95 % intervals over prompts. Uncut: pooled, "
        "without the steps that EOS or the length limit cut. Accepted drafts: per step, without "
        "the bonus."
    )
    tables = [Table(header, rows).to_html(), paragraph(note)]
    return [
        section(f"Acceptance length{of}", *tables),
        section(
            f"Acceptance length by dataset{of}",
            _datasets(summary).to_html(),
            _repetition(summary),
        ),
    ]


def _datasets(summary: Mapping[str, Any]) -> Table:
    """Also of a single dataset, so that no pooled number stands without it."""
    rows = [
        [
            dataset_label(dataset),
            name,
            interval_text(lengths["pooled"]),
            interval_text(lengths["per_request"]),
            str(summary["conditions"]["datasets"][dataset]),
            f"{lengths['pooled']['num']:,.0f}",
        ]
        for dataset in summary["conditions"]["datasets"]
        for name, entry in summary["policies"].items()
        if (lengths := entry["by_dataset"].get(dataset))
    ]
    header = ["dataset", "policy", "pooled", "per request", "prompts", "steps"]
    return Table(header, rows, keys=2)


def _repetition(summary: Mapping[str, Any]) -> str:
    num, prompts = len(summary["degenerate_output"]), summary["conditions"]["num_prompts"]
    return paragraph(
        f"Degenerate output: {num} of {prompts} prompts have a response that repeats itself (fewer "
        "than half of its 4-grams are distinct), which raises acceptance."
    )


def _slots(summary: Mapping[str, Any]) -> Table:
    """A row per slot, a column per series."""
    policies = summary.get("policies", {})
    unary = next(iter(policies.values())) if policies else summary["unary"]
    series = {
        f"{metric}@{k}": unary[f"{metric}@{k}"]
        for metric in ("position_recall", "conditional_recall")
        for k in RECALL_KS
    }
    series |= {f"survival {name}": entry["survival"] for name, entry in policies.items()}
    columns = list(series.values())
    rows = [
        [str(slot + 1), *(plain_text(values[slot]) for values in columns)]
        for slot in range(len(columns[0]))
    ]
    return Table(["slot", *(name.replace("_", " ") for name in series)], rows)


def _decay(summary: Mapping[str, Any]) -> str:
    slope, drop = (interval_text(summary["suffix_decay"][key], 3) for key in ("slope", "drop"))
    return paragraph(
        f"Suffix decay of position recall@1: log-slope {slope} per slot; drop from the first slot "
        f"to the last {drop}."
    )


def _series(summary: Mapping[str, Any], of: str = "") -> list[str]:
    """What there is by slot and by layer."""
    slots = section(f"By slot{of}", _slots(summary).to_html(), _decay(summary))
    return [slots, *_attention(summary, of)]


def _attention(summary: Mapping[str, Any], of: str) -> list[str]:
    policies = summary.get("policies", {})
    unary = next(iter(policies.values())) if policies else summary["unary"]
    shares: Sequence[float | None] = unary["within_block_share"]
    if not shares:
        return []
    uniform = summary["within_block_share_uniform"]
    rows = [
        [str(layer), plain_text(share, 1, 100, " %"), plain_text(uniform[layer], 1, 100, " %")]
        for layer, share in enumerate(shares)
    ]
    note = (
        "Attention of the drafted slots on their own block (anchor and drafted), mean over heads "
        "and slots, beside what uniform attention over the visible keys would give."
    )
    table = Table(["layer", "within block", "uniform"], rows)
    return [section(f"Attention by layer{of}", table.to_html(), paragraph(note))]
