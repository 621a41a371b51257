"""Batched generation with a key-value cache: the target's continuations of rendered prompts.

Rows are padded on the left, so that they end together; a row leaves the batch soon after it has
finished. What a row draws depends on its key and position alone, never on its batch. The host looks
at the device every `_CHECK` tokens only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from dflash2_lab.errors import LabError
from dflash2_lab.sampling import Sampling, choose, uniforms
from dflash2_lab.target import Target, positions_from_mask

_CHECK = 16  # decoding steps between two looks at which rows have finished
_KEEP_SHARE = 0.75  # rows are dropped from the batch when fewer than this share are alive
_ATTENTION = "dflash2_grouped_sdpa"


@dataclass(frozen=True)
class Request:
    """One continuation to make: prompt ids, the key of its random numbers, its token limit."""

    prompt_ids: Sequence[int]
    key: int
    max_new_tokens: int


@dataclass(frozen=True)
class Continuation:
    """Response ids (an end token included), their log-probabilities, and why it ended."""

    response_ids: list[int]
    logprob: list[float]
    logprob_unfiltered: list[float]
    finish: str  # "eos" | "length"


def generate(
    target: Target,
    requests: Sequence[Request],
    sampling: Sampling,
    batch_size: int,
    progress: Callable[[int], Any] = lambda _count: None,
) -> list[Continuation]:
    """Continue every request; the order of the answers is that of the requests.

    Requests of like prompt length share a batch. `progress` is told how much of the work is done,
    in tokens; a request counts for `max_new_tokens` of them, also when it ends earlier.
    """
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
    answers: dict[int, Continuation] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = [requests[index] for index in chosen]
        answers.update(zip(chosen, _generate_batch(target, batch, sampling, progress), strict=True))
    return [answers[index] for index in range(len(requests))]


def pad_left(
    rows: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
    """Rows of ids as one tensor, padded on the left, and the mask of true tokens."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(width) >= width - lengths[:, None]
    return ids.to(device), mask.to(device)


@torch.no_grad()
def _generate_batch(
    target: Target, batch: Sequence[Request], sampling: Sampling, progress: Callable[[int], Any]
) -> list[Continuation]:
    device = target.device
    eos = torch.tensor(sorted(target.eos_token_ids), device=device)
    ids, prompt_mask = pad_left([r.prompt_ids for r in batch], int(eos[0]), device)
    limits = torch.tensor([r.max_new_tokens for r in batch], device=device)
    keys = torch.tensor([r.key for r in batch], device=device)
    rows, width, steps = len(batch), ids.shape[1], max(r.max_new_tokens for r in batch)
    remaining = sum(r.max_new_tokens for r in batch)

    tokens = torch.zeros(rows, steps, dtype=torch.long, device=device)
    logprob = torch.zeros(2, rows, steps, dtype=torch.float64, device=device)
    ends = torch.zeros(rows, dtype=torch.long, device=device)  # response length, 0 = not finished
    alive = torch.arange(rows, device=device)  # batch row -> row of the tensors above

    mask = torch.ones(rows, width + steps, dtype=torch.bool, device=device)
    mask[:, :width] = prompt_mask
    lengths = prompt_mask.sum(dim=1)  # position of the next token
    with _decoding(target) as (cache, fast):
        cache = cache(width + steps)
        logits = _forward(target, ids, prompt_mask, positions_from_mask(prompt_mask), cache)
        for step in range(steps):
            position = torch.full_like(keys, step)
            token, filtered, plain = choose(logits, sampling, uniforms(keys, position))
            tokens[alive, step] = token
            logprob[0, alive, step] = filtered
            logprob[1, alive, step] = plain
            done = torch.isin(token, eos) | (limits == step + 1)
            ends[alive] = torch.where(done & (ends[alive] == 0), step + 1, ends[alive])
            if step + 1 == steps:
                break
            if (step + 1) % _CHECK == 0:
                left = (ends[alive] == 0).nonzero().squeeze(1)
                if len(left) == 0:
                    break
                done_tokens = min(_CHECK * len(left), remaining)
                remaining -= done_tokens
                progress(done_tokens)
                if len(left) <= _KEEP_SHARE * len(alive):
                    cache.batch_select_indices(left)
                    alive, keys, limits = alive[left], keys[left], limits[left]
                    mask, lengths, token = mask[left], lengths[left], token[left]
            seen = mask[:, : width + step + 1]
            seen = seen[:, None, None] if fast else seen
            logits = _forward(target, token[:, None], seen, lengths[:, None] + step, cache)
    progress(remaining)
    check_logprobs(target, logprob[1])
    return _answers(tokens, logprob, ends, eos)


def check_logprobs(target: Target, logprob: Tensor) -> None:
    """Raise LabError when log-probabilities before the filters say that the logits are broken."""
    if torch.isnan(logprob).any():
        raise LabError(
            f"target {target.name}: its logits are not finite in {target.dtype} (NaN weights, or "
            "values beyond the range of the dtype)"
        )


def _answers(tokens: Tensor, logprob: Tensor, ends: Tensor, eos: Tensor) -> list[Continuation]:
    stops = set(eos.tolist())
    ids, filtered, plain = tokens.cpu().tolist(), *logprob.cpu().tolist()
    answers = []
    for row, end in enumerate(ends.tolist()):
        response = ids[row][:end]
        finish = "eos" if response[-1] in stops else "length"
        answers.append(Continuation(response, filtered[row][:end], plain[row][:end], finish))
    return answers


def _forward(target: Target, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
    """Logits [B, V] after the last of `ids`, whose keys and values join the cache."""
    return target.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


class _SlabLayer(DynamicLayer):
    """A cache layer that writes into memory taken once, instead of copying itself every token."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        shape = (*key_states.shape[:2], self.capacity)
        self.key_slab = key_states.new_empty(*shape, key_states.shape[-1])
        self.value_slab = value_states.new_empty(*shape, value_states.shape[-1])
        self._show()
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.key_slab[:, :, self.length : end] = key_states
        self.value_slab[:, :, self.length : end] = value_states
        self.length = end
        self._show()
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.key_slab = self.key_slab[indices]
        self.value_slab = self.value_slab[indices]
        self._show()

    def _show(self) -> None:
        self.keys = self.key_slab[:, :, : self.length]
        self.values = self.value_slab[:, :, : self.length]


def _grouped_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention that does not copy the key-value heads for one-token queries.

    The query heads of a group become rows of one key-value head, which the one-row mask allows.
    """
    B, H, G, D = query.shape
    if G > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    grouped = query.reshape(B, key.shape[1], H // key.shape[1], D)
    out = F.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=scaling)
    return out.reshape(B, 1, H, D), None


@contextlib.contextmanager
def _decoding(target: Target) -> Iterator[tuple[Callable[[int], Cache], bool]]:
    """Yield how to make a cache of a capacity, and whether masks may be prepared ones.

    Layers with a window (or another state) need transformers' own caches and masks, which look at
    the device in every step; where all layers see everything, neither is needed.
    """
    config = target.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None
    if not plain or config._attn_implementation != "sdpa":
        yield lambda _capacity: DynamicCache(config=config), False
        return
    AttentionInterface.register(_ATTENTION, _grouped_sdpa)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    config._attn_implementation = _ATTENTION
    try:
        yield lambda capacity: Cache([_SlabLayer(capacity) for _ in range(target.num_layers)]), True
    finally:
        config._attn_implementation = "sdpa"
