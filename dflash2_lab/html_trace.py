"""Traces as one page: how many responses, how they ended, how long they are, a few of them."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dflash2_lab.conditions import dataset_label, random_notes, repetition
from dflash2_lab.errors import LabError
from dflash2_lab.html_page import (
    Table,
    escape,
    facts,
    page,
    paragraph,
    provenance,
    quoted,
    section,
    warning_box,
)
from dflash2_lab.prompts import OWN_DATASET
from dflash2_lab.tables import Run

QUANTILES = {"least": 0.0, "10 %": 0.1, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "90 %": 0.9}
SHOWN = 3  # responses whose text is shown
TOKENS = 160  # of each
HOW_TO_READ = (
    "A trace is what drafters are recorded on: the target's own continuation of every prompt. On "
    "policy means that the target gives every token of the response under these sampling options; "
    "off-policy responses can be used for recall, not for acceptance. Responses that ended by "
    "length were cut there.",
    "Acceptance depends on all of this. Two recordings are comparable where prompt hash, template, "
    "precision and sampling agree.",
)


def trace_page(run: Run) -> str:
    """The page of a trace run. Raises LabError for a table that is missing, empty or malformed."""
    traces, info = run.traces, run.info
    if traces.empty:
        raise LabError("table 'traces': found no response, expected some")
    degenerate, notes = repetition(traces)
    off = int((~traces["on_policy"]).sum())
    if off:
        notes.append(f"{off} of {len(traces)} responses are off-policy: not the target's own")
    lengths = traces["response_ids"].map(len)
    prompts = traces["prompt_id"].nunique()
    about = (
        f"{len(traces):,} responses to {prompts:,} prompts, {lengths.sum():,} tokens, "
        f"T = {run.temperature:g}, target {info['target']['name']} ({info['target'].get('dtype')})"
    )
    body = [
        warning_box([*notes, *random_notes(traces["dataset"])]),
        section(
            "Responses",
            _responses(traces).to_html(),
            paragraph(
                f"On policy: {len(traces) - off} of {len(traces)} responses. Degenerate output: "
                f"{len(degenerate)} of {prompts} prompts have a response that repeats itself "
                "(fewer than half of its 4-grams are distinct), which raises acceptance."
            ),
        ),
        section("Tokens of a response", _lengths(traces).to_html()),
        section("Prompts and sampling", facts(_prompts(run))),
        section("Some of them", *_samples(traces, info)),
        section("How to read this page", *map(paragraph, HOW_TO_READ)),
        provenance(info),
    ]
    return page(f"Traces of {info['target']['name']}", about, body)


def _responses(traces: pd.DataFrame) -> Table:
    reasons = sorted(traces["finish"].unique())
    rows = [
        [
            name,
            f"{part['prompt_id'].nunique():,}",
            f"{len(part):,}",
            f"{part['response_ids'].map(len).sum():,}",
            *(f"{(part['finish'] == reason).sum():,}" for reason in reasons),
        ]
        for name, part in _groups(traces)
    ]
    ended = [f"ended by {reason}" for reason in reasons]
    return Table(["dataset", "prompts", "responses", "tokens", *ended], rows)


def _lengths(traces: pd.DataFrame) -> Table:
    rows = []
    for name, part in _groups(traces):
        lengths = part["response_ids"].map(len)
        found = [f"{lengths.quantile(point):.0f}" for point in QUANTILES.values()]
        rows.append([name, *found, f"{lengths.max()}", f"{lengths.mean():.1f}"])
    return Table(["dataset", *QUANTILES, "most", "mean"], rows)


def _groups(traces: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """All responses, and those of each dataset where there are several."""
    parts = [(dataset_label(str(name)), part) for name, part in traces.groupby("dataset")]
    return parts if len(parts) == 1 else [("all", traces), *parts]


def _prompts(run: Run) -> Mapping[str, Any]:
    names = ("prompt_set_hash", "template", "origin", "sampling", "max_new_tokens", "max_total")
    return {name: run.info.get(name) for name in (*names, "samples", "seed", "eos_token_ids")}


def _samples(traces: pd.DataFrame, info: Mapping[str, Any]) -> list[str]:
    """The first responses to the project's own prompts; texts of others are not copied."""
    own = traces[traces["dataset"] == OWN_DATASET].drop_duplicates("prompt_id").head(SHOWN)
    if own.empty:
        return [paragraph("Text is shown of the project's own prompts only; none is here.")]
    from dflash2_lab.target import local_tokenizer

    try:
        tokenizer = local_tokenizer(info["target"]["name"])
    except LabError as error:
        return [paragraph(f"No text: {error}")]
    parts = []
    for row in own.itertuples(index=False):
        cut = "" if len(row.response_ids) <= TOKENS else " ..."
        texts = (tokenizer.decode(ids) for ids in (row.prompt_ids, row.response_ids[:TOKENS]))
        parts.append(f"<h3>{escape(row.prompt_id)}</h3>" + quoted("".join(texts) + cut))
    return parts
