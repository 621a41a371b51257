"""`bench kernels`: every kernel alone at decode shapes, against its floor and what torch offers.

A case makes as many independent calls as are needed for their inputs to pass every cache (no call
finds what an earlier one left), captures them one behind the other in a CUDA graph where that is
possible, and times the graph; its figure is the time of one call, launch included. The floor is
the bytes that a call must read and write, over the copy bandwidth of the same run. Without a GPU
the same calls run as plain torch, at tiny shapes.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash2_lab.bench.kernel_cases import Case, Sizes, all_cases
from dflash2_lab.bench.report import at_least, at_most, check_counts, finish, micro, speeds
from dflash2_lab.bench.timing import (
    Spread,
    Timed,
    bandwidths,
    coverage,
    interleaved,
    order_statistic,
    ratios,
)
from dflash2_lab.errors import LabError
from dflash2_lab.report import text_table

log = logging.getLogger(__name__)

COLD_BYTES = 300e6  # five times the L2 cache of an H200
MAX_CALLS = 1000
SIZES = {"full": Sizes(), "tiny": Sizes.tiny()}


def bench_kernels(
    sizes_name: str | None, device: torch.device, repeats: int, only: Sequence[str], out: Path
) -> dict[str, Any]:
    """Measure, write the run folder `out`; {"text", "json"}.

    `only` keeps the cases whose kernel is named (none: all). Raises `LabError` for unknown names.
    """
    check_counts(repeats=repeats)
    skipped = []
    if sizes_name is None:
        sizes_name = "full" if device.type == "cuda" else "tiny"
    if sizes_name not in SIZES:
        raise LabError(f"shapes: found {sizes_name!r}, expected one of {', '.join(SIZES)}")
    if device.type != "cuda":
        skipped.append("skipped: Triton kernels and CUDA graphs (no GPU used; plain torch instead)")
    cases = all_cases(SIZES[sizes_name], device)
    names = list(dict.fromkeys(case.kernel for case in cases))
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise LabError(f"kernel: found {', '.join(unknown)}, expected some of {', '.join(names)}")
    bandwidth = bandwidths(device)
    rows = []
    for case in cases:
        if only and case.kernel not in only:
            continue
        log.info("%s, %s", case.kernel, case.shape)
        rows.append(measure(case, device, repeats, bandwidth["copy"]))
    result = {
        "shapes": sizes_name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "repeats": repeats,
        "bandwidth": bandwidth,
        "rows": rows,
        "skipped": skipped,
    }
    return finish(out, "kernels", device, {}, result, table(result))


def measure(case: Case, device: torch.device, repeats: int, copy: Spread) -> dict[str, Any]:
    """Time of one call of a case and of what it is compared with, round by round."""
    calls = max(2, min(MAX_CALLS, math.ceil(COLD_BYTES / case.num_bytes)))
    if device.type != "cuda":
        calls = 2
    works = [case.make(number) for number in range(calls)]
    sides = {"kernel": _turn([work.kernel for work in works], case.graph, device)}
    if works[0].other is not None:
        sides["other"] = _turn([work.other for work in works], case.graph, device)
    samples = interleaved(sides, repeats, 1, device)
    spreads = {
        name: Spread.of([value / calls for value in values]) for name, values in samples.items()
    }
    compared = None
    if "other" in samples:
        compared = Spread.of(ratios(samples["other"], samples["kernel"]))
    floor = case.num_bytes / copy.median
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "calls": calls,
        "graph": case.graph and device.type == "cuda",
        "bytes": case.num_bytes,
        "floor_seconds": floor,
        "seconds": {n: [value / calls for value in values] for n, values in samples.items()},
        "call": spreads["kernel"],
        "share": floor / spreads["kernel"].median,
        "other": spreads.get("other"),
        "other_name": case.other_name,
        "times_faster": compared,
        "bars": dict(case.bars),
    }


def _turn(calls: Sequence[Callable[[], object]], graph: bool, device: torch.device) -> Timed:
    """All calls once, from a CUDA graph if that is possible."""

    def once() -> None:
        for call in calls:
            call()

    if not graph or device.type != "cuda":
        return Timed(once)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
        calls[1]()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        once()
    return Timed(captured.replay)


def table(result: Mapping[str, Any]) -> str:
    """All rows, then the bars."""
    repeats = result["repeats"]
    level = 100 * coverage(repeats, order_statistic(repeats))
    header = ["kernel", "shape", "us", "interval", "floor us", "share", "other us", "x"]
    rows, bars, others = [], [], {}
    for row in result["rows"]:
        other: Spread | None = row["other"]
        rows.append(
            [
                row["kernel"],
                row["shape"],
                *micro(row["call"])[:2],
                f"{1e6 * row['floor_seconds']:.1f}",
                f"{row['share']:.0%}",
                "-" if other is None else f"{1e6 * other.median:.1f}",
                "-" if other is None else f"{row['times_faster'].median:.2f}",
            ]
        )
        if other is not None:
            others[row["kernel"]] = row["other_name"]
        if result["device"] != "cpu" and result["shapes"] == "full":
            bars += list(_bars(row))
    parts = [
        f"kernels at {result['shapes']} shapes on {result['device']}: one call, cold cache; median "
        f"of {repeats} interleaved rounds\n[{level:.0f} % interval]; {speeds(result['bandwidth'])}",
        "floor: bytes read and written over the copy bandwidth; share: of the floor in the time; "
        "x: how many\ntimes faster than the other way; filtered: T = 1, top-k 50, top-p 0.95",
        text_table(header, rows, keys=2),
        "\n".join(f"the other way, {name}: {text}" for name, text in others.items()),
    ]
    parts += ["\n".join(bars)] if bars else []
    return "\n\n".join([*(part for part in parts if part), *result["skipped"]])


def _bars(row: Mapping[str, Any]) -> Iterator[str]:
    name = f"{row['kernel']}, {row['shape']}"
    for kind, bar in row["bars"].items():
        if kind == "us":
            value = 1e6 * row["call"].median
            yield f"{name}: {value:.1f} us ({at_most(value, bar)})"
        elif kind == "share":
            value = 100 * row["share"]
            yield f"{name}: {value:.0f} % of the copy bandwidth ({at_least(value, bar)})"
        else:
            value = row["times_faster"].median
            yield f"{name}: {value:.2f} times faster ({at_least(value, bar)})"
