"""Runs that are no recordings as pages: decodes, training, benchmarks, the monitor's paths."""

import json
from typing import Any

import numpy as np
import pandas as pd

from dflash2_lab import plots
from dflash2_lab.blocks import REQUEST_KEY
from dflash2_lab.conditions import dataset_label
from dflash2_lab.errors import LabError
from dflash2_lab.html_page import (
    Table,
    facts,
    figure_block,
    page,
    paragraph,
    preformatted,
    provenance,
    section,
)
from dflash2_lab.html_report import HOW_TO_READ, interval_text, plain_text
from dflash2_lab.intervals import Estimate, cluster_estimates, sum_by
from dflash2_lab.replaying import acceptance_lengths
from dflash2_lab.report import estimate_json
from dflash2_lab.results import read_results
from dflash2_lab.tables import Run

REPORTS = 20  # of a training run
_FIGURES = {"cycle": "cycle_breakdown", "throughput": "throughput_by_concurrency"}


def bench_page(run: Run) -> str:
    """The page of a benchmark: its printed table, and its figure where there is one."""
    what, path = str(run.info["bench"]), run.folder / "table.txt"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: cannot be read ({error}), expected beside its run.json") from error
    table = section("Result", preformatted(text))
    return _drawn(run, f"Benchmark: {what}", _FIGURES.get(what), [table])


def monitor_page(run: Run) -> str:
    """The page of the monitor's paths."""
    return _drawn(run, "Losslessness: the monitor's paths", "monitor_path", [])


def _drawn(run: Run, title: str, figure: str | None, body: list[str]) -> str:
    info, figures = run.info, {}
    if figure is not None:
        name = run.folder.resolve().name
        figures[figure] = getattr(plots, figure)({name: read_results(run.folder)})
        body.append(section("Figures", figure_block(figure, figures[figure])))
    target, made = info.get("target", {}).get("name"), info.get("environment", {})
    about = " on ".join(str(word) for word in (target, made.get("device")) if word)
    return page(title, about, [*body, provenance(info)], figures)


def train_page(run: Run) -> str:
    """The page of a training run: losses and recall of its reports, at most `REPORTS` of them."""
    path = run.folder / "train.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        reports = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: cannot be read ({error}), expected beside its run.json") from error
    if not reports:
        raise LabError(f"{path}: found no report, expected one a line")
    info, last, num = run.info, reports[-1], min(REPORTS, len(reports))
    shown = [reports[(n + 1) * len(reports) // num - 1] for n in range(num)]
    losses = [name for name in ("backbone", "selector") if name in last]
    recalls = [name for name in last if name.startswith(("recall@", "selector_accuracy"))]
    rows = [
        [
            f"{report['step']:,}",
            *(plain_text(report[name]) for name in losses),
            *(plain_text(report[name][0]) for name in recalls),
            *(plain_text(report[name], 2) for name in ("grad_norm", "steps_per_second")),
        ]
        for report in shown
    ]
    words = [name.replace("_", " ") for name in recalls]
    header = ["step", *(f"{name} loss" for name in losses), *(f"{w}, slot 1" for w in words)]
    slots = [
        [str(slot + 1), *(plain_text(last[name][slot]) for name in recalls)]
        for slot in range(len(last[recalls[0]]))
    ]
    body = [
        section("At the end, by slot", Table(["slot", *words], slots).to_html()),
        section(
            "Reports",
            Table([*header, "gradient norm", "steps/s"], rows).to_html(),
            paragraph(
                f"{num} of {len(reports)} reports. Losses are of the batch of that step; recall is "
                "over the sequences held out, at every slot by itself (marginal)."
            ),
        ),
        provenance(info),
    ]
    device, target = info["environment"]["device"], info["target"]["name"]
    about = f"{last['step']:,} of {info['config']['steps']:,} steps, target {target}, on {device}"
    return page(f"Training of a drafter for {target}", about, body)


def decode_page(run: Run) -> str:
    """The page of a decode: acceptance of its verify steps, pooled and by group of prompts.

    A steps table names no dataset; prompts are grouped by what their ids begin with, up to the
    first "/".
    """
    steps, info = run.steps, run.info
    if info["drafter"] is None:
        return _plain_decode(run)
    if steps.empty:
        raise LabError("table 'steps': found no verify step: every response is its first token")
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


def _plain_decode(run: Run) -> str:
    info, names = run.info, ("num_prompts", "num_requests", "num_tokens", "tokens_per_second")
    about = f"T = {run.temperature:g}, {info['engine']} engine, target {info['target']['name']}"
    body = [section("Result", facts({name: info[name] for name in names})), provenance(info)]
    return page("Decode without a drafter", about, body)


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
