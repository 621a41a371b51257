"""What the numbers of a recording depend on, and what puts them in doubt.

Comparisons and reports print both, so that a number does not travel without them.
"""

import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dflash2_lab.blocks import REQUEST_KEY
from dflash2_lab.stats import degenerate_output
from dflash2_lab.tables import Run

_TARGET = ("name", "dtype", "quantisation", "files")
_DRAFTER = ("name", "kind", "num_draft", "dtype", "weights_hash")


@dataclass(frozen=True)
class Doubts:
    """Prompts whose responses repeat themselves, and all warnings as lines of text."""

    degenerate: tuple[str, ...]
    warnings: tuple[str, ...]


def conditions(run: Run) -> dict[str, Any]:
    """Model revisions, precision, sampling, prompts and their number, as plain JSON values."""
    owners = run.anchors[["prompt_id", "dataset"]].drop_duplicates()
    sides = {"target": _TARGET, "drafter": _DRAFTER}
    found = {
        side: {key: run.info.get(side, {}).get(key) for key in keys} for side, keys in sides.items()
    }
    names = ("sampling", "prompt_set_hash", "template", "token_hash")
    return found | {
        **{name: run.info.get(name) for name in names},
        "datasets": {str(k): int(n) for k, n in owners.groupby("dataset").size().items()},
        "num_prompts": int(owners["prompt_id"].nunique()),
        "num_blocks": len(run.anchors),
    }


def doubts(run: Run) -> Doubts:
    """What to know before reading a recording's numbers: repetition, off-policy traces, anchors
    left out, traces by another target, prompts of random tokens."""
    traces = run.traces if run.has_table("traces") else responses(run)
    degenerate, notes = ((), []) if traces is None else repetition(traces)
    if run.info.get("on_policy") is False:
        notes.append(
            "off-policy traces: the responses are not the target's own, so recall can be read and "
            "acceptance cannot"
        )
    stride = run.info.get("anchor_stride", 1)
    if stride != 1:
        notes.append(f"anchor_stride {stride}: anchors are left out, so acceptance is unknown")
    target, traced = (run.info.get(key) or {} for key in ("target", "trace_target"))
    for key in ("dtype", "quantisation"):
        if traced and traced.get(key) != target.get(key):
            notes.append(
                f"the traces were made by a target of {key} {traced.get(key)}, recorded with "
                f"{target.get(key)}"
            )
    notes += random_notes(run.anchors["dataset"])
    return Doubts(degenerate, tuple(notes))


def repetition(traces: pd.DataFrame) -> tuple[tuple[str, ...], list[str]]:
    """Prompts with a response that repeats itself, and a warning where there are some."""
    table = degenerate_output(traces)
    degenerate = tuple(sorted(set(table.loc[table["degenerate"], "prompt_id"])))
    if not degenerate:
        return degenerate, []
    shown = ", ".join(degenerate[:5]) + (", ..." if len(degenerate) > 5 else "")
    note = (
        f"degenerate_output: {len(degenerate)} of {table['prompt_id'].nunique()} prompts "
        f"repeat themselves (few distinct 4-grams), which raises acceptance: {shown}"
    )
    return degenerate, [note]


def random_notes(datasets: pd.Series) -> list[str]:
    """A warning for each dataset of random tokens."""
    names = sorted(map(str, datasets.unique()))
    return [f"dataset {dataset_label(name)}" for name in names if is_random(name)]


def is_random(dataset: str) -> bool:
    """Tell whether a dataset calls itself random tokens, as in "random" or "random-512"."""
    return re.split(r"[^a-z]+", dataset.lower())[0] == "random"


def dataset_label(dataset: str) -> str:
    """The name of a dataset; one of random tokens is said to be so."""
    return f"{dataset} (random tokens, not text)" if is_random(dataset) else dataset


def responses(run: Run) -> pd.DataFrame | None:
    """The responses behind a recording, from its slots: all tokens but the first, a row a request.

    None when the anchors are so far apart that tokens are missing between them.
    """
    stride = run.info.get("anchor_stride", 1)
    if stride > run.num_draft:
        return None
    # with slots 1..stride every position of a response comes exactly once
    rows = run.slots[run.slots["slot"] <= stride].sort_values([*REQUEST_KEY, "anchor", "slot"])
    tokens = rows.groupby(REQUEST_KEY, sort=True)["target_token"].agg(list)
    return tokens.rename("response_ids").reset_index()
