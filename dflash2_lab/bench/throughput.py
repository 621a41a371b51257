"""`bench throughput`: tokens a second of a real target with trained drafters, by concurrency.

Continuous batching: a place whose response has ended goes to the next prompt. Acceptance is real,
except for DSpark: no trained one ships, so a random one is timed that accepts as many drafts a
cycle as the DFlash 2 pass did on average (rounded), over responses of the same lengths. Rates over
decode leave prefills out (see `metered.Pass`). Sides take turns; a rate is the median over the
rounds with its interval.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dflash2_lab.bench.metered import MeteredEngine, Pass
from dflash2_lab.bench.reference import decode_prompts, published_or_reason
from dflash2_lab.bench.report import check_counts, finish, with_interval
from dflash2_lab.bench.sampler import bench_sampler
from dflash2_lab.bench.shapes import random_drafter, shape_of
from dflash2_lab.bench.throughput_table import table
from dflash2_lab.bench.timing import Spread, order, ratios
from dflash2_lab.decoding.requests import Decoded, Request, request_keys
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import cluster_ratio
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.models.io import drafter_identity, load_drafter
from dflash2_lab.prompts import Prompt, prompt_set_hash, render
from dflash2_lab.sampling import Sampling
from dflash2_lab.stats import own_policy
from dflash2_lab.target import Target

log = logging.getLogger(__name__)

PLAIN = "autoregressive"
DSPARK = "dspark, random weights"


@dataclass(frozen=True)
class ThroughputOptions:
    """`sampler_batch`: also time plain sampling at T = 1 at this batch size (0: not)."""

    max_new_tokens: int = 256
    concurrency: Sequence[int] = (1, 8, 16)
    temperatures: Sequence[float] = (0.0, 1.0)
    repeats: int = 5
    sampler_batch: int = 0
    reference: bool = True

    def __post_init__(self) -> None:
        check_counts(max_new_tokens=self.max_new_tokens, concurrency=self.concurrency)
        check_counts(repeats=self.repeats)
        if self.max_new_tokens < 2:
            raise LabError(
                f"max_new_tokens: found {self.max_new_tokens}, expected 2 or more: the first token "
                "is the prefill's"
            )
        for temperature in self.temperatures:
            Sampling(temperature)
        if self.sampler_batch < 0:
            raise LabError(f"sampler_batch: found {self.sampler_batch}, expected 0 or more")


@dataclass(frozen=True)
class SideOf:
    """A drafter with its own policy; neither for plain decoding."""

    drafter: Drafter | None
    policy: str | None


def bench_throughput(
    target: Target,
    drafter_names: Sequence[str],
    prompts: Sequence[Prompt],
    options: ThroughputOptions,
    out: Path,
) -> dict[str, Any]:
    """Measure, write the run folder `out`; {"text", "json"}.

    Of prompts with several turns the first is used. Raises `LabError` for drafters that do not fit,
    a target without a graph engine, prompts that are too long, and too little memory.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    ids = [render(target, prompt) for prompt in prompts]
    sides = {PLAIN: SideOf(None, None)}
    for name in drafter_names:
        drafter = load_drafter(name, target=target, dtype=dtype, device=target.device)
        policy = own_policy(drafter.settings.kind)
        sides[name] = SideOf(drafter, policy)
    shape = shape_of(target)
    if len(sides) > 1:
        dspark = random_drafter(shape, "dspark", target.device, dtype=target.dtype)
        sides[DSPARK] = SideOf(dspark, "markov")
    references, skipped = _references(target, sides, ids, options)
    work = _Work(target, sides, prompts, ids, options)
    groups = [group for concurrency in options.concurrency for group in work.measure(concurrency)]
    sampler = None
    if options.sampler_batch:
        size, limit = options.sampler_batch, options.max_new_tokens
        sampler = bench_sampler(target, ids, size, limit, options.repeats)
    result = {
        "target": target.name,
        "dtype": dtype,
        "device": _device_name(target),
        "drafters": {name: drafter_identity(name) for name in drafter_names},
        "num_prompts": len(prompts),
        "datasets": sorted({prompt.dataset for prompt in prompts}),
        "prompt_set_hash": prompt_set_hash(target, prompts),
        "prompt_tokens": [len(row) for row in ids],
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "groups": groups,
        "published": references,
        "sampler": sampler,
        "skipped": skipped,
    }
    return finish(out, "throughput", target.device, target.identity, result, table(result))


class _Work:
    """All sides over all prompts."""

    def __init__(
        self,
        target: Target,
        sides: Mapping[str, SideOf],
        prompts: Sequence[Prompt],
        ids: Sequence[Sequence[int]],
        options: ThroughputOptions,
    ):
        self.target, self.sides, self.options = target, sides, options
        self.names, self.ids = [prompt.id for prompt in prompts], ids
        trained = [n for n, side in sides.items() if side.drafter is not None and n != DSPARK]
        second = [n for n in trained if sides[n].drafter.settings.kind == "dflash2"]
        self.leader = (second or trained or [None])[0]

    def measure(self, concurrency: int) -> list[dict[str, Any]]:
        """One group of rows for each temperature, on the same engines."""
        log.info("concurrency %d: starting %d engines", concurrency, len(self.sides))
        longest = max(map(len, self.ids)) + self.options.max_new_tokens
        engines = {
            name: MeteredEngine(self.target, side.drafter, side.policy, concurrency, longest)
            for name, side in self.sides.items()
        }
        return [
            self._group(engines, concurrency, temperature)
            for temperature in self.options.temperatures
        ]

    def _group(
        self, engines: Mapping[str, MeteredEngine], concurrency: int, temperature: float
    ) -> dict[str, Any]:
        requests, passes = {}, {name: list[Pass]() for name in engines}
        # The first pass is not counted, but says what DSpark is to imitate; it comes last therein.
        for name, engine in engines.items():
            if name != DSPARK:
                requests[name] = self._requests(name, temperature)
            answers, _ = engine.metered(requests[name])
            if name == self.leader:
                engines[DSPARK].forced = _mean_accepted(answers)
                requests[DSPARK] = self._imitated(answers, temperature)
        for turn in range(self.options.repeats):
            log.info("concurrency %d, T = %g: round %d", concurrency, temperature, turn + 1)
            for name in order(list(engines), turn):
                passes[name].append(engines[name].metered(requests[name])[1])
        rows = {name: _row(values, passes[PLAIN]) for name, values in passes.items()}
        for name, engine in engines.items():
            rows[name] |= {"policy": self.sides[name].policy}
            rows[name] |= {"forced": engine.forced if engine.forced >= 0 else None}
        return {"concurrency": concurrency, "temperature": temperature, "sides": rows}

    def _requests(self, name: str, temperature: float) -> list[Request]:
        policy, limit = self.sides[name].policy, self.options.max_new_tokens
        return [
            Request(
                tuple(ids),
                limit,
                Sampling(temperature),
                request_keys(0, prompt_id, 0, 0, policy),
                self.target.eos_token_ids,
            )
            for prompt_id, ids in zip(self.names, self.ids, strict=True)
        ]

    def _imitated(self, answers: Sequence[Decoded], temperature: float) -> list[Request]:
        """DSpark's requests: as long as the leader's answers, whatever tokens come."""
        return [
            replace(request, max_new_tokens=len(answer.response_ids), stop_ids=frozenset())
            for request, answer in zip(self._requests(DSPARK, temperature), answers, strict=True)
        ]


def _mean_accepted(answers: Sequence[Decoded]) -> int:
    """Accepted drafts a verify step, rounded."""
    counts = [count for answer in answers for count in answer.accepted_raw]
    return round(sum(counts) / max(1, len(counts)))


def _row(passes: Sequence[Pass], plain: Sequence[Pass]) -> dict[str, Any]:
    decode = [one.decode_rate for one in passes]
    return {
        "passes": [asdict(one) for one in passes],
        "decode_tokens_per_second": Spread.of(decode),
        "end_to_end_tokens_per_second": Spread.of([one.end_to_end_rate for one in passes]),
        "seconds_per_cycle": Spread.of([one.cycle_seconds for one in passes]),
        "times_autoregressive": Spread.of(ratios(decode, [one.decode_rate for one in plain])),
        "acceptance_length": passes[0].num_later / max(1, passes[0].num_steps),
    }


def _references(
    target: Target,
    sides: Mapping[str, SideOf],
    ids: Sequence[Sequence[int]],
    options: ThroughputOptions,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The package's own speculative decode of the same prompts, one at a time."""
    if not options.reference:
        return [], []
    if target.device.type != "cuda":
        return [], ["skipped: the published package (its clock needs a CUDA device)"]
    found, skipped = [], []
    for name, side in sides.items():
        if side.drafter is None or name == DSPARK:
            continue
        model, reason = published_or_reason(side.drafter, target)
        if model is None:
            skipped.append(f"skipped: the published package, {name} ({reason})")
            continue
        found += [_reference(model, target, name, ids, t, options) for t in options.temperatures]
    return found, skipped


def _reference(
    model: nn.Module,
    target: Target,
    name: str,
    ids: Sequence[Sequence[int]],
    temperature: float,
    options: ThroughputOptions,
) -> dict[str, Any]:
    log.info("published package: %s, T = %g, %d prompts", name, temperature, len(ids))
    found = decode_prompts(model, target, ids, options.max_new_tokens, temperature)
    tokens = np.array([[one.num_tokens] for one in found])
    time = np.array([[one.seconds] for one in found])
    value, low, high = (float(part[0]) for part in cluster_ratio(tokens, time))
    return {
        "drafter": name,
        "temperature": temperature,
        "prompts": [asdict(one) for one in found],
        "tokens_per_second": with_interval(value, low, high),
    }


def _device_name(target: Target) -> str:
    cuda = target.device.type == "cuda"
    return torch.cuda.get_device_name(target.device) if cuda else "cpu"
