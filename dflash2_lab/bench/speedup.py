"""`bench speedup`: acceptance lengths of a recording times measured cycle times.

A cycle of a batch gives each sequence L tokens (the acceptance length, bonus counted) in the time
t, plain decoding one token in the time t0, so the net speed-up over plain decoding at the same
batch size is L t0 / t. L comes from replaying the recording with a shorter or longer verify window,
t and t0 from `bench cycle`. The interval is that of L; times are known far better.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash2_lab.bench.report import finish, interval_text, load_bench, with_interval
from dflash2_lab.errors import LabError
from dflash2_lab.replaying import replay
from dflash2_lab.report import text_table
from dflash2_lab.tables import Run

PLAIN = "autoregressive"
SIDES = {  # (kind of drafter, policy): the side of `bench cycle`
    ("dflash", "top1"): "dflash",
    ("dflash2", "top1"): "dflash2 top1",
    ("dflash2", "selector"): "dflash2 selector",
    ("dspark", "markov"): "dspark markov",
}


def bench_speedup(run: Run, cycle_folder: Path, out: Path) -> dict[str, Any]:
    """Combine a record run with a run of `bench cycle`; write the run folder `out`.

    Policies and windows that either lacks are named as skipped. Raises `LabError` when nothing is
    left, for a folder of another kind, and as `replay`.
    """
    times = load_bench(cycle_folder, "cycle")
    kind, recorded = run.info["drafter"]["kind"], run.info["drafter"]["num_draft"]
    skipped = [
        f"skipped: policy {policy} (bench cycle does not time it for kind {kind})"
        for policy in run.policies
        if (kind, policy) not in SIDES
    ]
    policies = [policy for policy in run.policies if (kind, policy) in SIDES]
    windows = sorted({cell["num_draft"] for cell in times["cells"]})
    skipped += [
        f"skipped: {window} drafts (the recording has {recorded})"
        for window in windows
        if window > recorded
    ]
    windows = [window for window in windows if window <= recorded]
    if not policies or not windows:
        raise LabError(
            f"bench speedup: policies {', '.join(run.policies)} of a {kind} drafter with "
            f"{recorded} drafts found, expected one that {cycle_folder} times"
        )
    rows = [
        row
        for policy in policies
        for window in windows
        for row in _rows(run, policy, window, SIDES[kind, policy], times["cells"])
    ]
    result = {
        "drafter": run.info["drafter"]["name"],
        "target": run.info.get("target", {}).get("name"),
        "temperature": run.temperature,
        "shapes": times["shapes"],
        "device": times["device"],
        "cycle_run": str(cycle_folder),
        "rows": rows,
        "notes": _notes(run, times),
        "skipped": skipped,
    }
    target = run.info.get("target", {})
    return finish(out, "speedup", torch.device("cpu"), target, result, table(result))


def _rows(
    run: Run, policy: str, window: int, side: str, cells: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    length = replay(run, policy, window).pooled
    rows = []
    for cell in cells:
        if cell["num_draft"] != window:
            continue
        plain, cycle = (cell["sides"][name]["cycle"]["median"] for name in (PLAIN, side))
        rows.append(
            {
                "policy": policy,
                "num_draft": window,
                "batch": cell["batch"],
                "context": cell["context"],
                "acceptance_length": with_interval(length.value, length.low, length.high),
                "cycle_seconds": cycle,
                "autoregressive_seconds": plain,
                "speedup": with_interval(
                    *(part * plain / cycle for part in (length.value, length.low, length.high))
                ),
            }
        )
    return rows


def _notes(run: Run, times: Mapping[str, Any]) -> list[str]:
    notes = []
    target = run.info.get("target", {}).get("name")
    if target != times["shapes"]:
        notes.append(
            f"note: acceptance is that of target {target}, times are those of {times['shapes']} "
            "shapes: no model has both"
        )
    if run.temperature != times["temperature"]:
        notes.append(
            f"note: acceptance at temperature {run.temperature:g}, cycle times at "
            f"{times['temperature']:g}"
        )
    return notes


def table(result: Mapping[str, Any]) -> str:
    """A row for each policy and window, a column for each batch size."""
    batches = sorted({row["batch"] for row in result["rows"]})
    found: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault((row["policy"], row["num_draft"]), {})[row["batch"]] = row
    cells = []
    for (policy, window), by_batch in found.items():
        first = next(iter(by_batch.values()))
        speeds = [interval_text(by_batch[b]["speedup"]) if b in by_batch else "-" for b in batches]
        cells.append([policy, str(window), interval_text(first["acceptance_length"]), *speeds])
    header = ["policy", "drafts", "acceptance length", *(f"concurrency {b}" for b in batches)]
    best = [_best(result["rows"], batch) for batch in batches]
    parts = [
        f"{result['drafter']} on {result['target']}, T = {result['temperature']:g}: net speed-up "
        f"over plain decoding of the same engine,\nwith cycle times of {result['shapes']} shapes "
        f"on {result['device']} [95 % interval of the acceptance length]",
        text_table(header, cells, keys=2),
        "\n".join(best),
    ]
    return "\n\n".join([*parts, *result["notes"], *result["skipped"]])


def _best(rows: Sequence[Mapping[str, Any]], batch: int) -> str:
    row = max(
        (row for row in rows if row["batch"] == batch), key=lambda row: row["speedup"]["value"]
    )
    return (
        f"best at concurrency {batch}: {row['policy']}, {row['num_draft']} drafts, "
        f"{row['speedup']['value']:.2f}"
    )
