"""The graph engine: a whole draft-verify cycle is one CUDA graph; the host looks now and then.

Places of the batch are given to requests as they fall free. The host queues a few cycles, and reads
how the sequences stand while the next few already run, so the GPU never waits for it. Without a GPU
the same cycle runs uncaptured.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.decoding.cycle import NUM_STOPS, Cycle, Side
from dflash2_lab.decoding.requests import Decoded, Request, check_request, verify_window
from dflash2_lab.decoding.steps import check_acceptance
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.commit import BROKEN, FULL, RUNNING, STOPPED
from dflash2_lab.kernels.draw import draw
from dflash2_lab.kernels.row_law import row_law
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.target import Target, layer_outputs

logger = logging.getLogger(__name__)

LOOK_EVERY = 2  # cycles between two looks
PREFILL_TOKENS = 16384  # padded tokens of one prefill pass


@dataclass
class _Place:
    """A place of the batch: the request in it and how much of its response was told."""

    request: int
    told: int


class GraphEngine:
    """Decodes requests on static memory, `batch_size` at a time, of at most `max_total` tokens.

    Dense Llama, Qwen2 and Qwen3 targets. Raises `LabError` for another architecture, a drafter,
    policy or window that does not fit, an unknown acceptance rule, and when the GPU's memory does
    not suffice; the memory is free again then.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: str | None,
        batch_size: int,
        max_total: int,
        num_draft: int | None = None,
        acceptance: str = "token",
    ):
        check_acceptance(acceptance)
        if batch_size < 1 or max_total < 2:
            raise LabError(
                f"graph engine: batch_size {batch_size} and max_total {max_total} found, expected "
                "at least 1 and 2"
            )
        self.num_draft = verify_window(target, drafter, policy, num_draft)
        self.target, self.drafter, self.policy = target, drafter, policy
        self.batch_size, self.max_total, self.acceptance = batch_size, max_total, acceptance
        block = 1 if drafter is None else drafter.settings.block_size
        capacity = max_total + max(block, self.num_draft + 1)
        with _memory_errors(batch_size, max_total):
            self.cycle = self._make_cycle(capacity, max_total + block)
            self.graph = self.reading = None
            if target.device.type == "cuda":
                self.reading = torch.cuda.Stream()
                self.graph = self._capture()

    def _make_cycle(self, capacity: int, max_tokens: int) -> Cycle:
        return Cycle(
            self.target, self.drafter, self.policy, self.num_draft, self.batch_size, capacity,
            max_tokens, self.acceptance,
        )  # fmt: skip

    def _capture(self) -> torch.cuda.CUDAGraph:
        started = time.perf_counter()
        logger.info("graph engine: compiling kernels (kept for the next time)")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.cycle.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        compiled = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.cycle.step()
        torch.cuda.synchronize()
        logger.info(
            "graph engine: ready, compiled in %.1f s, captured in %.1f s",
            compiled - started,
            time.perf_counter() - compiled,
        )
        return graph

    def step(self) -> None:
        """Queue one cycle."""
        if self.graph is None:
            self.cycle.step()
        else:
            self.graph.replay()

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[Decoded]:
        """Decode all requests; `on_tokens(index, tokens)` is told what a row has emitted since.

        Raises:
            LabError: a request that does not fit (before any is decoded), or logits that are not
                finite.
        """
        for request in requests:
            self._check(request)
        waiting = list(range(len(requests)))[::-1]
        places: list[_Place | None] = [None] * self.batch_size
        answers: dict[int, Decoded] = {}
        self.cycle.progress.status.fill_(FULL)
        self.cycle.laws.forced.fill_(-1)
        pending: list[_Look] = []
        while waiting or any(places):
            free = [row for row, place in enumerate(places) if place is None][: len(waiting)]
            if free:
                chosen = [waiting.pop() for _ in free]
                self.admit(free, [requests[index] for index in chosen])
                for row, index in zip(free, chosen, strict=True):
                    places[row] = _Place(index, 0)
            for _ in range(LOOK_EVERY):
                self.step()
            pending.append(self._look(places))
            # One look stays ahead: what it will see is computed while this one is read.
            if len(pending) > 1:
                self._read(pending.pop(0), places, requests, answers, on_tokens)
        return [answers[index] for index in range(len(requests))]

    def _check(self, request: Request) -> None:
        check_request(self.target, request, self.policy)
        total = len(request.prompt_ids) + request.max_new_tokens
        if total > self.max_total:
            raise LabError(
                f"graph engine: prompt of {len(request.prompt_ids)} tokens and max_new_tokens "
                f"{request.max_new_tokens} found, its cache has room for {self.max_total}"
            )
        if len(request.stop_ids) > NUM_STOPS:
            raise LabError(f"stop_ids: found {len(request.stop_ids)}, expected at most {NUM_STOPS}")

    def admit(self, places: Sequence[int], requests: Sequence[Request]) -> None:
        """Prefill requests into free places, a few together when their prompts are short."""
        size = max(1, PREFILL_TOKENS // max(len(request.prompt_ids) for request in requests))
        for first in range(0, len(places), size):
            chosen = slice(first, first + size)
            self._prefill(places[chosen], requests[chosen])

    def _prefill(self, places: Sequence[int], requests: Sequence[Request]) -> None:
        """Padded on the right: what stands behind a prompt is causally invisible to it, and stale
        in the caches until the blocks overwrite it."""
        target, cycle, device = self.target, self.cycle, self.target.device
        lengths = [len(request.prompt_ids) for request in requests]
        ids = torch.zeros(len(places), max(lengths), dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, : lengths[row]] = torch.tensor(request.prompt_ids)
        index = torch.tensor(places, device=device)
        ends = torch.tensor(lengths, device=device)
        layer_ids = () if self.drafter is None else self.drafter.settings.target_layer_ids
        with layer_outputs(target, layer_ids) as outputs:
            out = target.decoder(input_ids=ids.to(device), use_cache=True)
            features = [outputs[layer] for layer in layer_ids]
        pairs = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
        _store(cycle.large, index, pairs)
        if self.drafter is not None:
            stacked = torch.cat(features, dim=-1).to(self.drafter.dtype)
            _store(cycle.small, index, self.drafter.context_keys(stacked))
        last = out.last_hidden_state[torch.arange(len(places), device=device), ends - 1]
        self._start(index, ends, target.head(last), requests)

    def _start(
        self,
        index: Int[Tensor, " n"],
        ends: Int[Tensor, " n"],
        logits: Float[Tensor, "n V"],
        requests: Sequence[Request],
    ) -> None:
        """Draw the first tokens and set everything that the cycle knows of these places."""
        progress, laws, rows = self.cycle.progress, self.cycle.laws, self.cycle.rows

        def column(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(index.device)

        def keys(role: str | None) -> Tensor:
            return column([request.keys.get(role, 0) for request in requests], torch.int64)

        sampling = [request.sampling for request in requests]
        temperature = column([s.temperature for s in sampling], torch.float32)
        top_k = column([s.top_k for s in sampling], torch.int32)
        top_p = column([s.top_p for s in sampling], torch.float32)
        limit = column([request.max_new_tokens for request in requests], torch.int64)
        padded = [sorted(r.stop_ids) + [-1] * (NUM_STOPS - len(r.stop_ids)) for r in requests]
        stops = column(padded, torch.int64)
        law = row_law(logits, temperature, top_k, top_p)
        first = draw(logits, law, temperature, keys("prefill"), torch.zeros_like(ends))
        status = torch.full_like(first, RUNNING)
        status = status.masked_fill(limit == 1, FULL)
        status = status.masked_fill((first[:, None] == stops).any(1), STOPPED)
        status = status.masked_fill(~law.finite.bool(), BROKEN)
        offered = (limit - 1).clamp(max=self.num_draft).to(torch.int32)
        zero = torch.zeros_like(first)
        for tensor, value in (
            (progress.anchor, first), (progress.start, ends), (progress.length, zero + 1),
            (progress.limit, limit), (progress.steps, zero), (progress.offered, offered),
            (progress.draft_counter, zero), (progress.final_counter, zero),
            (progress.stops, stops), (progress.status, status),
            (laws.temperature, temperature), (laws.top_k, top_k), (laws.top_p, top_p),
            (laws.draft_key, keys(self.policy)), (laws.accept_key, keys("accept")),
            (laws.final_key, keys("final")),
        ):  # fmt: skip
            tensor[index] = value
        progress.tokens[index, 0] = first
        for tensor, value in ((laws.row_temperature, temperature), (laws.row_top_k, top_k),
                              (laws.row_top_p, top_p)):  # fmt: skip
            tensor.view(-1, rows)[index] = value[:, None]

    def _look(self, places: Sequence[_Place | None]) -> "_Look":
        progress = self.cycle.progress
        values = torch.stack([progress.status, progress.length, progress.steps])
        if self.graph is None:
            return _Look(values, None, tuple(places))
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Look(pinned, event, tuple(places))

    def _read(
        self,
        look: "_Look",
        places: list[_Place | None],
        requests: Sequence[Request],
        answers: dict[int, Decoded],
        on_tokens: Callable[[int, list[int]], None] | None,
    ) -> None:
        """Tell what is new, and take the answers of sequences that have ended."""
        if look.event is not None:
            look.event.synchronize()
        progress = self.cycle.progress
        for row, (status, length, steps) in enumerate(zip(*look.values.tolist(), strict=True)):
            place = look.places[row]
            # The place may have gone to another request since.
            if place is None or places[row] is not place:
                continue
            if status == BROKEN:
                raise LabError(
                    f"target {self.target.name}: logits that are not finite in "
                    f"{self.target.dtype} after {length} tokens of request {place.request}"
                )
            if on_tokens is not None and length > place.told:
                on_tokens(place.request, self._fetch(progress.tokens[row, place.told : length]))
                place.told = length
            if status != RUNNING:
                tokens = self._fetch(progress.tokens[row, :length])
                accepted = self._fetch(progress.accepted[row, :steps])
                finish = "eos" if status == STOPPED else "length"
                answers[place.request] = Decoded(tokens, accepted, finish)
                places[row] = None

    def _fetch(self, values: Tensor) -> list[int]:
        """Values that no queued cycle will change, read beside the cycles that are queued."""
        if self.graph is None:
            return values.tolist()
        with torch.cuda.stream(self.reading):
            return values.tolist()


@dataclass(frozen=True, eq=False)
class _Look:
    """Status, length and steps of every place as of an event, and who was in it then."""

    values: Tensor
    event: torch.cuda.Event | None
    places: tuple[_Place | None, ...]


def _store(side: Side, index: Int[Tensor, " n"], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Keys and values [n, KV, S, D] of every layer into the cache rows `index`."""
    for layer, (keys, values) in enumerate(pairs):
        side.keys[layer][index, :, : keys.shape[2]] = keys
        side.values[layer][index, :, : values.shape[2]] = values


@contextmanager
def _memory_errors(batch: int, max_total: int) -> Iterator[None]:
    """Out of memory becomes an error with a way out, and what was taken is given back."""
    try:
        yield
        return
    except torch.cuda.OutOfMemoryError as error:
        message = str(error).split(". ")[0]
    gc.collect()
    torch.cuda.empty_cache()
    raise LabError(
        f"graph engine: {message}; batch_size {batch} and max_total {max_total} found, expected "
        "less of either"
    )
