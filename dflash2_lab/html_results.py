"""Runs that are no recordings as pages: decodes, benchmarks, certificates, the battery's score."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from dflash2_lab import plots
from dflash2_lab.blocks import REQUEST_KEY
from dflash2_lab.conditions import dataset_label
from dflash2_lab.errors import LabError
from dflash2_lab.html_page import (
    Table,
    figure_block,
    page,
    paragraph,
    preformatted,
    provenance,
    section,
    warning_box,
)
from dflash2_lab.html_report import HOW_TO_READ, interval_text, plain_text
from dflash2_lab.intervals import Estimate, cluster_estimates, sum_by
from dflash2_lab.replaying import acceptance_lengths
from dflash2_lab.report import estimate_json
from dflash2_lab.results import read_results
from dflash2_lab.tables import Run

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_TEXTS = {"bench": "table.txt", "verify-decode": "certificate.txt"}
_FIGURES = {
    "cycle": "cycle_breakdown",
    "throughput": "throughput_by_concurrency",
    "verify-mutants": "tokens_to_detection",
    "monitor-paths": "monitor_path",
}
_TITLES = {
    "verify-decode": "Losslessness certificate",
    "verify-mutants": "Losslessness: the battery's score",
    "monitor-paths": "Losslessness: the monitor's paths",
}
KINDS = ("decode", "bench", *_TITLES)


def results_page(folder: Path) -> str:
    """The page of a benchmark, a certificate, the battery's score or the monitor's paths.

    Raises:
        LabError: another kind of run, or a file that is missing or malformed.
    """
    info = Run.open(folder).info
    kind = str(info.get("kind"))
    what = str(info.get("bench", kind))
    figures: dict[str, Figure] = {}
    if what in _FIGURES:
        name = _FIGURES[what]
        figures[name] = getattr(plots, name)({folder.resolve().name: read_results(folder, kind)})
    text = _text(folder, kind)
    failed = info.get("passed") is False or info.get("verdict") == "faulty"
    body = [
        warning_box(["this check did NOT pass"] if failed else []),
        section("Result", preformatted(text)) if text else "",
        section("Figures", *(figure_block(n, f) for n, f in figures.items())) if figures else "",
        provenance(info),
    ]
    made, target = info.get("environment", {}), info.get("target", {}).get("name")
    about = " on ".join(str(word) for word in (target, made.get("device")) if word)
    return page(_TITLES.get(kind, f"Benchmark: {what}"), about, body, figures)


def decode_page(run: Run) -> str:
    """The page of a decode: acceptance of its verify steps, pooled and by group of prompts.

    A steps table names no dataset; prompts are grouped by what their ids begin with, up to the
    first "/".
    """
    steps, info = run.steps, run.info
    if steps.empty:
        raise LabError("table 'steps': found no verify step, expected some: was there a drafter?")
    groups = steps["prompt_id"].map(lambda name: name.partition("/")[0] if "/" in name else "all")
    rows = [
        [dataset_label(str(name)), *_length_cells(part)]
        for name, part in steps.groupby(groups, sort=True)
    ]
    header = ["pooled", "per request", "uncut", "prompts", "steps"]
    slots = [
        [str(slot), interval_text(estimate_json(one), 3)]
        for slot, one in enumerate(_survival(steps, int(info["num_draft"])), start=1)
    ]
    about = (
        f"{steps['prompt_id'].nunique():,} prompts, {len(steps):,} verify steps, policy "
        f"{info['policy']}, T = {run.temperature:g}, {info['engine']} engine, target "
        f"{info['target']['name']} ({info['target'].get('dtype')})"
    )
    speed = info.get("tokens_per_second")
    body = [
        section(
            "Acceptance length",
            Table(["", *header], [["all", *_length_cells(steps)]]).to_html(),
            paragraph(
                "Tokens per verify step, bonus counted, with 95 % intervals over prompts; uncut: "
                "without the steps that a stop token or the length limit cut."
            ),
            paragraph(f"Speed: {speed:.1f} tokens/s by wall clock.") if speed else "",
        ),
        section("By group of prompts", Table(["group", *header], rows).to_html()),
        section("Survival by slot", Table(["slot", "survival"], slots).to_html()),
        section("How to read this page", *map(paragraph, HOW_TO_READ[:2])),
        provenance(info),
    ]
    return page(f"Decode with {info['drafter']['name']}", about, body)


def _length_cells(steps: pd.DataFrame) -> list[str]:
    uncut = steps["terminal"] == ""
    parts: dict[str, Any] = {"tokens": steps["num_emitted"], "steps": 1}
    parts |= {"tokens_uncut": steps["num_emitted"] * uncut, "steps_uncut": uncut.astype(int)}
    sums = steps[REQUEST_KEY].assign(**parts).groupby(REQUEST_KEY).sum().reset_index()
    found = {name: estimate_json(value) for name, value in acceptance_lengths(sums).items()}
    return [
        interval_text(found["pooled"]),
        interval_text(found["per_request"]),
        plain_text(found["pooled_uncut"]["value"], 2),
        f"{steps['prompt_id'].nunique():,}",
        f"{len(steps):,}",
    ]


def _survival(steps: pd.DataFrame, num_draft: int) -> tuple[Estimate, ...]:
    cluster, prompts = pd.factorize(steps["prompt_id"], sort=True)
    slot = np.arange(1, num_draft + 1)
    offered = steps["num_offered"].to_numpy()[:, None] >= slot
    accepted = offered & (steps["num_accepted"].to_numpy()[:, None] >= slot)
    sums = [sum_by(cluster, part, len(prompts)) for part in (accepted, offered)]
    return cluster_estimates(*sums)


def _text(folder: Path, kind: str) -> str:
    if kind == "verify-mutants":
        from dflash2_lab.losslessness.sample_report import mutation_text

        return mutation_text(read_results(folder, kind).values)
    if kind not in _TEXTS:
        return ""
    path = folder / _TEXTS[kind]
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: cannot be read ({error}), expected beside its run.json") from error
