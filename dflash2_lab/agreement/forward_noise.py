"""How far a target's logits move when it reads a block of tokens in one pass, not one by one.

    delta = block-forward logits minus one-token-forward logits, at every token of a response,

both after the same text, each on a cache of its own. The text is the target's own greedy one, so no
decode under test can widen the band. The ways to read blocks:

    blocks  one row alone
    batch   rows of unequal length together, padded
    graph   the static caches and kernels of the graph engine

Two tokens change places only where their gap is no more than the difference of their deltas, so at
most 2 max |delta|. eps is twice the largest |delta|; differences at gaps up to 2 eps are ties.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from dflash2_lab.agreement.margins import lead
from dflash2_lab.agreement.noise_band import most_explained
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.requests import Request
from dflash2_lab.decoding.steps import TargetRow, check_logits
from dflash2_lab.target import Target, positions_from_mask

WAYS = ("blocks", "batch", "graph")


class Choices(NamedTuple):
    """Greedy choices at the n tokens of a response: the best token (of equal ones the lowest id),
    its distance to the second best, and that to the response's own token."""

    tokens: list[int]
    best: Int[np.ndarray, " n"]
    gap: Float[np.ndarray, " n"]
    regret: Float[np.ndarray, " n"]


class Delta(NamedTuple):
    """delta at n tokens: its largest entry, its difference between the two best tokens, and whether
    the best one changes."""

    largest: Float[np.ndarray, " n"]
    pair: Float[np.ndarray, " n"]
    changed: Bool[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class ForwardNoise:
    """delta of one way over a whole calibration. `limit` is the most that rounding explains, and
    `batch` how many rows were read together."""

    way: str
    batch: int
    delta: Delta
    limit: float

    @property
    def largest(self) -> float:
        """Largest |delta| of any token of the vocabulary."""
        return float(self.delta.largest.max())


def one_by_one(
    target: Target, prompt_ids: Sequence[int], text: Sequence[int] | int
) -> tuple[list[int], Float[Tensor, "n V"]]:
    """Logits before every token of a response, one token a pass; of the target's own greedy
    response where `text` is a number of tokens. Raises `LabError` for logits that are not finite.
    """
    row, found, tokens = TargetRow(target, rolls_back=False), [], []
    given = range(text) if isinstance(text, int) else text
    for place, token in enumerate(given):
        logits = row.extend(tokens[-1:] if place else prompt_ids, 1)[0]
        check_logits(logits, f"target {target.name}: its logits are not finite in {target.dtype}")
        tokens.append(int(logits[0].argmax()) if isinstance(text, int) else int(token))
        found.append(logits)
    return tokens, torch.cat(found)


def in_blocks(
    target: Target,
    prompt_ids: Sequence[int],
    text: Sequence[int],
    width: int,
    anchors: Sequence[int] | None = None,
) -> Float[Tensor, "n V"]:
    """The same in blocks of `width` tokens from each of the anchors on, of which the next anchor
    takes back what it repeats (None: blocks that follow one another)."""
    row = TargetRow(target)
    found = [row.extend(prompt_ids, 1)[0]]
    row.roll_back(0)
    last = len(text) - 1
    places = range(0, last, width) if anchors is None else anchors
    for anchor, following in pairwise([*places, last]):
        span, kept = text[anchor : anchor + width], following - anchor
        found.append(row.extend(span)[0][:kept])
        row.roll_back(len(span) - kept)
    return torch.cat(found)


def in_padded_blocks(
    target: Target, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], width: int
) -> list[Float[Tensor, "n V"]]:
    """The same for several responses together: prompts are padded on the left, texts on the
    right."""
    device, rows = target.device, len(prompts)
    longest, last = max(map(len, prompts)), max(map(len, texts)) - 1
    ids = torch.zeros(rows, longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    text = torch.zeros(rows, last + 1, dtype=torch.long)
    for place, (prompt, response) in enumerate(zip(prompts, texts, strict=True)):
        ids[place, longest - len(prompt) :] = torch.tensor([*prompt])
        mask[place, longest - len(prompt) :] = 1
        text[place, : len(response)] = torch.tensor([*response])
    cache, mask = DynamicCache(config=target.model.config), mask.to(device)

    def extend(span: Int[Tensor, "B G"], keep: int) -> Float[Tensor, "B G V"]:
        return target.model(
            input_ids=span.to(device),
            attention_mask=mask,
            position_ids=positions_from_mask(mask)[:, -span.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits

    found = [extend(ids, 1)]
    for anchor in range(0, last, width):
        span = text[:, anchor : min(anchor + width, last)]
        mask = torch.cat([mask, mask.new_ones(span.shape)], dim=1)
        found.append(extend(span, 0))
    logits = torch.cat(found, dim=1)
    return [logits[place, : len(response)] for place, response in enumerate(texts)]


def in_graph_blocks(
    engine: GraphEngine, requests: Sequence[Request], texts: Sequence[Sequence[int]]
) -> list[Float[Tensor, "n V"]]:
    """The same by the verify passes of the graph engine, at most its batch; the first token's
    logits, which its prefill gives, are NaN."""
    cycle, width = engine.cycle, engine.num_draft + 1
    size = engine.batch_size, 1, engine.target.vocab_size
    found = [torch.full(size, torch.nan, device=engine.target.device)]
    for text in lead(engine, requests, texts):
        found.append(cycle.verify_pass(text[:, 1:width].contiguous()).unflatten(0, (-1, width)))
        cycle.extend_context()
    logits = torch.cat(found, dim=1)
    return [logits[place, : len(response)] for place, response in enumerate(texts)]


def choices(tokens: list[int], logits: Float[Tensor, "n V"]) -> Choices:
    """What the target would have chosen at each token of a response."""
    best, value, second = _two_best(logits)
    own = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    gap = value - logits.gather(-1, second[:, None])[:, 0]
    numbers = (x.double().cpu().numpy() for x in (gap, value - own))
    return Choices(tokens, best.cpu().numpy(), *numbers)


def _two_best(logits: Float[Tensor, "n V"]) -> tuple[Tensor, Tensor, Tensor]:
    """The best token, its logit and the second best token; of equal ones the lowest id first."""
    best = logits.argmax(-1)
    second = logits.scatter(-1, best[:, None], -torch.inf).argmax(-1)
    return best, logits.gather(-1, best[:, None])[:, 0], second


def delta(single: Float[Tensor, "n V"], block: Float[Tensor, "n V"]) -> Delta:
    """Block-forward minus one-token-forward logits; rows that are NaN are left out."""
    known = ~block[:, 0].isnan()
    single, block = (x[known] if x.dtype == torch.float64 else x[known].float()
                     for x in (single, block))  # fmt: skip
    best, _, second = _two_best(single)
    # A token that is ruled out by -inf on both sides does not move.
    moved = (block - single).masked_fill(single == block, 0.0)
    pair = moved.gather(-1, best[:, None]) - moved.gather(-1, second[:, None])
    largest = moved.abs().amax(-1)
    changed = block.argmax(-1) != best
    return Delta(*(x.cpu().numpy() for x in (largest.double(), pair[:, 0].double(), changed)))


def joined(
    found: dict[str, list[Delta]], batches: dict[str, int], size: float, dtype: torch.dtype
) -> tuple[ForwardNoise, ...]:
    """The noise of every way. `size` is the largest logit: rounding may take half of the digits of
    it from `blocks`, and from the ways after it four times what those before them lose."""
    eps, made = torch.finfo(dtype).eps, []
    for way in sorted(found, key=WAYS.index):
        parts = Delta(*(np.concatenate(column) for column in zip(*found[way], strict=True)))
        limit = size * eps**0.5
        if made:
            limit = most_explained([one.largest for one in made], size, eps)
        made.append(ForwardNoise(way, batches[way], parts, float(limit)))
    return tuple(made)
