"""`bench record`: what recording costs, against stepping the published package anchor by anchor.

Sides that are compared alternate in one process; a figure is the median over the repeats with its
interval (see `timing`).
"""

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from dflash2_lab.attention_sums import AttentionSums
from dflash2_lab.bench.reference import published_or_reason
from dflash2_lab.bench.report import at_least, at_most, check_counts, finish
from dflash2_lab.bench.timing import Spread, alternate, coverage, order_statistic, ratios
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.models.io import load_drafter
from dflash2_lab.prompts import load_prompts
from dflash2_lab.published import PublishedDecoder
from dflash2_lab.recording import draft_tile, record
from dflash2_lab.tables import Run
from dflash2_lab.target import Target
from dflash2_lab.tracing import trace

log = logging.getLogger(__name__)

SPEED_BAR = 8.0  # stepping may not be faster than an eighth of recording
ATTENTION_BAR = 1.15  # recording with attention shares over without
CONTEXTS = (512, 8192)  # tokens at which the memory of attention shares is measured
MEMORY_ANCHORS = 32
NO_ATTENTION = "record, no attention"
PAIRS = 3  # runs with and without attention shares for each repeat of the rest


def bench_record(
    target: Target,
    drafter_name: str,
    limit: int,
    max_new_tokens: int,
    repeats: int,
    out: Path,
) -> dict[str, Any]:
    """Measure, write `out/run.json`, `out/bench.json` and `out/table.txt`; {"text", "json"}.

    Both sides work on the same greedy traces of the first `limit` own prompts. Without the package
    `dflash` (or a model in it for this drafter) the comparison is left out, and the text says so.
    Raises `LabError` for repeats < 1 and for whatever keeps the target, the drafter or the prompts
    from loading.
    """
    check_counts(repeats=repeats)
    dtype = str(target.dtype).removeprefix("torch.")
    drafter = load_drafter(drafter_name, target=target, dtype=dtype, device=target.device)
    prompts = load_prompts("default", limit=limit)
    traces = trace(target, prompts, max_new_tokens=max_new_tokens)
    model, reason = published_or_reason(drafter, target)
    skipped = None if model else f"skipped: stepping the published package ({reason})"
    if skipped:
        log.warning(skipped)
    work = sides(target, drafter, traces, model)
    plain = work.pop(NO_ATTENTION)
    seconds = alternate(work, repeats)
    # A few per cent are sought here, and a pair is cheap beside the package's turn.
    pairs = alternate({"record": work["record"], NO_ATTENTION: plain}, PAIRS * repeats)
    anchors = int((traces.traces["response_ids"].map(len) - 1).clip(lower=0).sum())
    result = {
        "drafter": drafter_name,
        "num_requests": len(traces.traces),
        "num_anchors": anchors,
        "repeats": repeats,
        "seconds": seconds,
        "attention_seconds": pairs,
        "seconds_per_anchor": {
            name: asdict(Spread.of([value / anchors for value in values]))
            for name, values in (seconds | {NO_ATTENTION: pairs[NO_ATTENTION]}).items()
        },
        "attention_time_ratio": asdict(Spread.of(ratios(pairs["record"], pairs[NO_ATTENTION]))),
        "attention_extra_bytes": {
            str(context): attention_extra_bytes(target, drafter, context) for context in CONTEXTS
        },
        "skipped": skipped,
    }
    if model is not None:
        result["speedup"] = asdict(Spread.of(ratios(seconds["published"], seconds["record"])))
    return finish(out, "record", target.device, target.identity, result, table(result))


def sides(
    target: Target, drafter: Drafter, traces: Run, model: nn.Module | None
) -> dict[str, Callable[[], object]]:
    """What is timed, by name. The package's side is the last and absent without `model`."""

    def recorded(attention: bool) -> None:
        with tempfile.TemporaryDirectory(prefix="dflash2-lab-bench-") as folder:
            record(target, drafter, traces, out=Path(folder) / "run", attention=attention)

    found: dict[str, Callable[[], object]] = {
        "record": lambda: recorded(True),
        NO_ATTENTION: lambda: recorded(False),
    }
    if model is not None:
        found["published"] = lambda: step_all(target, model, traces)
    return found


def step_all(target: Target, model: nn.Module, traces: Run) -> list[list[int]]:
    """One draft-verify cycle of the published package at every anchor; accepted counts by trace."""
    counts = []
    for row in tqdm(
        list(traces.traces.itertuples(index=False)), desc="published", delay=2, leave=False
    ):
        ids = torch.tensor([*row.prompt_ids, *row.response_ids], device=target.device)
        decoder = PublishedDecoder(model, target, ids, len(row.prompt_ids))
        steps = range(len(row.response_ids) - 1)
        counts.append([decoder.cycle().num_accepted for _ in steps])
    return counts


def attention_extra_bytes(target: Target, drafter: Drafter, context: int) -> int:
    """Peak memory of drafting one tile behind `context` tokens with attention shares, less without.

    Features and tokens are random, which changes nothing about sizes.
    """
    source = torch.Generator().manual_seed(0)
    length = context + MEMORY_ANCHORS
    ids = torch.randint(target.vocab_size, (length,), generator=source).to(target.device)
    shape = (1, length, drafter.fc.in_features)
    features = torch.randn(shape, generator=source).to(target.device, drafter.dtype)
    positions = np.arange(context, length)

    @torch.inference_mode()
    def draft(sums: AttentionSums | None) -> None:
        draft_tile(target, drafter, ids, keys, positions, sums)

    with torch.inference_mode():
        keys = drafter.context_keys(features)
    draft(None)  # lazily made buffers belong to neither side
    without = peak_bytes(lambda: draft(None), target.device)
    return peak_bytes(lambda: draft(AttentionSums()), target.device) - without


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most tensor memory that `work` holds at one time, beyond what there was before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return int(np.cumsum([0, *(size for _, size in changes)]).max())


def table(result: Mapping[str, Any]) -> str:
    """The result for people: every figure with its interval and its bar."""
    repeats = result["repeats"]
    level = 100 * coverage(repeats, order_statistic(repeats))
    lines = [
        f"recording {result['drafter']}: {result['num_anchors']} anchors of "
        f"{result['num_requests']} responses, median of {repeats} interleaved repeats "
        f"[{level:.0f} % interval]",
        "",
    ]
    for name, spread in result["seconds_per_anchor"].items():
        lines.append(f"{name:<62} {Spread(**spread).scaled(1e3).text()} ms an anchor")
    if "speedup" in result:
        spread = Spread(**result["speedup"])
        bar = at_least(spread.median, SPEED_BAR)
        lines.append(f"{'record against published':<62} {spread.text()} times faster   ({bar})")
    spread = Spread(**result["attention_time_ratio"])
    bar = at_most(spread.median, ATTENTION_BAR)
    name = f"attention shares, time with / without ({PAIRS * repeats} pairs)"
    lines.append(f"{name:<62} {spread.text()}   ({bar})")
    for context, extra in result["attention_extra_bytes"].items():
        name = f"attention shares, extra peak memory at {context} tokens of context"
        lines.append(f"{name:<62} {extra / 1e6:.3f} MB ({MEMORY_ANCHORS} anchors a tile)")
    return "\n".join([*lines, *([result["skipped"]] if result["skipped"] else [])])
