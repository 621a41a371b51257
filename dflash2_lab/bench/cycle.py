"""`bench cycle`: the time of a whole draft-verify cycle by kind of drafter, against its floor.

Random weights of published shapes; every place of the batch runs, a fixed number of drafts counts
as accepted, and each turn starts again at the same context, so every cycle is a full one. The
engines take turns in one process (see `timing`): selector and conv cost well under a per cent of a
cycle, which only paired differences resolve. The floor is the weight bytes (see `floors`) over the
copy bandwidth of the same run.
"""

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash2_lab.bench.breakdown import kernel_times
from dflash2_lab.bench.cycle_table import table
from dflash2_lab.bench.floors import cache_bytes, draft_bytes, target_bytes
from dflash2_lab.bench.reference import cycle_seconds, published_or_reason
from dflash2_lab.bench.report import check_counts, finish
from dflash2_lab.bench.shapes import SHAPES, random_drafter, random_target
from dflash2_lab.bench.timing import (
    Spread,
    Timed,
    bandwidths,
    differences,
    interleaved,
    ratios,
    wait,
)
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.commit import RUNNING
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.target import Target

log = logging.getLogger(__name__)

MAX_CONTEXT = 131072
FAR = 2**40  # a length limit that no cycle comes near


@dataclass(frozen=True)
class Variant:
    """One side: a kind of drafter (None: plain decoding) and how it chooses its drafts."""

    kind: str | None
    policy: str | None
    deep: bool = False


VARIANTS = {
    "autoregressive": Variant(None, None),
    "dflash": Variant("dflash", "top1"),
    "dflash2 top1": Variant("dflash2", "top1"),
    "dflash2 selector": Variant("dflash2", "selector"),
    "dspark markov": Variant("dspark", "markov"),
    "dflash deep": Variant("dflash", "top1", deep=True),
}
OVERHEADS = {
    "selector": ("dflash2 selector", "dflash2 top1"),
    "conv": ("dflash2 top1", "dflash"),
    "both": ("dflash2 selector", "dflash"),
    "dspark": ("dspark markov", "dflash"),
    "deep": ("dflash deep", "dflash"),
}
PUBLISHED = {"dflash": "dflash", "dflash2": "dflash2 selector"}  # kind: the side like it


@dataclass(frozen=True)
class CycleOptions:
    """`num_drafts`: verify windows (None: all that is drafted); `forced` drafts count as accepted;
    `repeats` rounds of `inner` cycles a side; `reference_cycles` of the published package."""

    batches: Sequence[int] = (1,)
    num_drafts: Sequence[int] | None = None
    context: int = 512
    forced: int = 3
    repeats: int = 60
    inner: int = 8
    reference_cycles: int = 200

    def __post_init__(self) -> None:
        check_counts(batch=self.batches, context=self.context, repeats=self.repeats)
        check_counts(inner=self.inner)
        for name in ("forced", "reference_cycles"):
            if getattr(self, name) < 0:
                raise LabError(f"{name}: found {getattr(self, name)}, expected 0 or more")
        if self.context > MAX_CONTEXT:
            raise LabError(f"context: found {self.context}, expected at most {MAX_CONTEXT}")


def bench_cycle(
    shape_name: str | None, device: torch.device, options: CycleOptions, out: Path
) -> dict[str, Any]:
    """Measure every batch size and window, write the run folder `out`; {"text", "json"}.

    Without a name the shapes are Qwen3-4B's, or tiny ones where there is no GPU. Raises `LabError`
    for unknown shapes, windows that are not drafted, and too little memory.
    """
    skipped = []
    if shape_name is None:
        shape_name = "qwen3-4b" if device.type == "cuda" else "tiny"
    if device.type != "cuda":
        skipped.append(
            f"skipped: CUDA graphs (no GPU used; {shape_name} shapes on the CPU, plain torch)"
        )
    if shape_name not in SHAPES:
        raise LabError(f"shapes: found {shape_name!r}, expected one of {', '.join(SHAPES)}")
    shape = SHAPES[shape_name]
    trained = shape.block_size - 1
    windows = list(options.num_drafts or [trained])
    if not 1 <= min(windows) <= max(windows) <= trained:
        raise LabError(f"num_draft: found {windows}, expected 1 to {trained}, the drafted slots")
    target = random_target(shape, device)
    drafters = {
        (kind, deep): random_drafter(shape, kind, device, shape.deep_layers if deep else None)
        for kind, deep in dict.fromkeys((v.kind, v.deep) for v in VARIANTS.values() if v.kind)
    }
    bandwidth = bandwidths(device)
    published, reason = _published(target, drafters, options)
    skipped += [f"skipped: the published package ({reason})"] if reason else []
    cells = []
    for batch in options.batches:
        for window in windows:
            engines = Engines(target, drafters, batch, window, options)
            cells.append(engines.measure(bandwidth["copy"], profiled=not cells))
            del engines
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    result = {
        "shapes": shape.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "temperature": 0.0,
        "forced": options.forced,
        "repeats": options.repeats,
        "inner": options.inner,
        "block_size": shape.block_size,
        "layers": {"dflash": shape.draft_layers, "deep": shape.deep_layers},
        "bandwidth": bandwidth,
        "cells": cells,
        "published": published,
        "skipped": skipped,
    }
    return finish(out, "cycle", device, target.identity, result, table(result))


class Engines:
    """All sides at one batch size and window, each at the same state again before every turn."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[tuple[str, bool], Drafter],
        batch: int,
        num_draft: int,
        options: CycleOptions,
    ):
        self.target, self.options, self.batch, self.num_draft = target, options, batch, num_draft
        self.drafters, self.startup, self.engines = {}, {}, {}
        log.info("batch %d, %d drafts: starting %d engines", batch, num_draft, len(VARIANTS))
        longest = options.context + (options.inner + 2) * (num_draft + 1)
        for name, variant in VARIANTS.items():
            drafter = drafters[variant.kind, variant.deep] if variant.kind else None
            window = None if drafter is None else num_draft
            started = time.perf_counter()
            engine = GraphEngine(target, drafter, variant.policy, batch, longest, window)
            wait(target.device)
            self.startup[name] = time.perf_counter() - started
            self.drafters[name], self.engines[name] = drafter, engine

    def measure(self, copy: Spread, profiled: bool) -> dict[str, Any]:
        """Samples, floors and overheads of this cell; with `profiled` also each side's kernels."""
        options, device = self.options, self.target.device
        sides = {
            name: full_cycles(engine, options.context, options.forced)
            for name, engine in self.engines.items()
        }
        for name, side in sides.items():
            check_full(name, self.engines[name], side, options)
        samples = interleaved(sides, options.repeats, options.inner, device)
        return {
            "batch": self.batch,
            "num_draft": self.num_draft,
            "context": options.context,
            "sides": {name: self._side(name, values, copy) for name, values in samples.items()},
            "overheads": {name: overhead(samples, *pair) for name, pair in OVERHEADS.items()},
            "kernels": self._kernels(sides) if profiled else {},
        }

    def _kernels(self, sides: Mapping[str, Timed]) -> dict[str, Any]:
        """Kernels of every side; without a GPU, where it takes long, of the full cycle alone."""
        device = self.target.device
        names = list(sides) if device.type == "cuda" else ["dflash2 selector"]
        found = {}
        for name in names:
            sides[name].reset()
            found[name] = kernel_times(sides[name].step, device)
        return found

    def _side(self, name: str, values: Sequence[float], copy: Spread) -> dict[str, Any]:
        target, drafter = self.target, self.drafters[name]
        parts = target_bytes(target)
        if drafter is not None:
            parts |= draft_bytes(target, drafter, VARIANTS[name].policy, self.batch)
        return {
            "seconds": list(values),
            "cycle": Spread.of(values),
            "startup_seconds": self.startup[name],
            "weight_bytes": parts,
            "cache_bytes": cache_bytes(target, drafter, self.batch, self.options.context),
            "floor_seconds": sum(parts.values()) / copy.median,
        }


def full_cycles(engine: GraphEngine, context: int, forced: int) -> Timed:
    """Cycles of an engine whose places all run at the same context and accept `forced` drafts."""
    cycle, progress = engine.cycle, engine.cycle.progress
    source = torch.Generator(engine.target.device).manual_seed(0)
    sides = [cycle.large] if engine.drafter is None else [cycle.large, cycle.small]
    for side in sides:
        side.keys.normal_(generator=source)
        side.values.normal_(generator=source)
    shape, device = progress.anchor.shape, progress.anchor.device
    anchor = torch.randint(engine.target.vocab_size, shape, generator=source, device=device)
    cycle.laws.forced.fill_(min(forced, engine.num_draft))

    def reset() -> None:
        progress.anchor.copy_(anchor)
        for tensor, value in (
            (progress.start, context), (progress.length, 1), (progress.limit, FAR),
            (progress.steps, 0), (progress.offered, engine.num_draft),
            (progress.draft_counter, 0), (progress.final_counter, 0), (progress.status, RUNNING),
        ):  # fmt: skip
            tensor.fill_(value)

    return Timed(engine.step, reset)


def check_full(name: str, engine: GraphEngine, side: Timed, options: CycleOptions) -> None:
    """Raise LabError unless every cycle moves every place by what it was told to accept."""
    side.reset()
    for _ in range(options.inner):
        side.step()
    progress = engine.cycle.progress
    emitted = 1 + min(options.forced, engine.num_draft)
    if (progress.status != RUNNING).any() or (progress.length != 1 + options.inner * emitted).any():
        raise LabError(
            f"bench cycle, {name}: status {progress.status.tolist()} and lengths "
            f"{progress.length.tolist()} found after {options.inner} cycles, expected all to run "
            f"and to emit {emitted} tokens a cycle; its times would not be those of full cycles"
        )


def overhead(samples: Mapping[str, Sequence[float]], more: str, less: str) -> dict[str, Any]:
    """What one side costs more than another, in seconds and as a share of the DFlash cycle."""
    extra = differences(samples[more], samples[less])
    return {
        "of": [more, less],
        "seconds": extra,
        "extra": Spread.of(extra),
        "share": Spread.of(ratios(extra, samples["dflash"])),
    }


def _published(
    target: Target, drafters: Mapping[tuple[str, bool], Drafter], options: CycleOptions
) -> tuple[dict[str, Any], str | None]:
    """Cycle times of the package on the same weights at batch 1, or why there are none."""
    if options.reference_cycles == 0:
        return {}, "--reference-cycles 0"
    found: dict[str, Any] = {}
    source = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.vocab_size, (1, options.context), generator=source)
    for kind, side in PUBLISHED.items():
        log.info("timing the published package: %s, %d cycles", kind, options.reference_cycles)
        model, reason = published_or_reason(drafters[kind, False], target)
        if model is None:
            return {}, reason
        values = cycle_seconds(model, target, prompt.to(target.device), options.reference_cycles)
        found[kind] = {"side": side, "seconds": values, "cycle": Spread.of(values)}
    return found, None
