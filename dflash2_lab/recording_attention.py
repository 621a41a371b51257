"""What each drafted slot of some blocks attends to, key by key: the table `block_attention`.

Every row is one softmax over a drafted slot's visible keys, in fp32, averaged over heads:

    [older context, one sum | NEAREST context positions before the anchor | rows of the own block]

The older context enters by its log-sum-exp, chunk by chunk, so memory does not grow with it.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.models.attention import block_visible, context_visible
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.schema import NEAREST, empty_frame

CHUNK = 4096  # older context positions whose scores exist at one time


def sampled_anchors(recorded: Int[np.ndarray, " n"], count: int) -> Int[np.ndarray, " k"]:
    """The middle ones of `count` equal parts of a trace's recorded anchors; all when fewer."""
    if count >= len(recorded):
        return recorded
    return recorded[(2 * np.arange(count) + 1) * len(recorded) // (2 * count)]


def block_weights(
    query: Float[Tensor, "H G D"],
    context: Float[Tensor, "KV S D"],
    block: Float[Tensor, "KV G D"],
    anchor: int,
    window: int | None,
    causal: bool,
) -> tuple[Float[Tensor, "H G"], Float[Tensor, "H G N"], Float[Tensor, "H G G"]]:
    """fp32 softmax weights of one block's rows, given keys: on the context before the NEAREST
    positions as one sum, on each of those positions (N = min(NEAREST, anchor)), on each block row.
    """
    rows, width = query.shape[1:]
    grouped = query.float().unflatten(0, (len(block), -1)).flatten(1, 2) * width**-0.5

    def scores(keys: Float[Tensor, "KV n D"], visible: Tensor) -> Float[Tensor, "H G n"]:
        found = (grouped @ keys.float().mT).unflatten(1, (-1, rows))
        return found.masked_fill(~visible, float("-inf")).flatten(0, 1)

    place = torch.tensor([[anchor]], device=query.device)
    seen = context_visible(place, rows, anchor, window)[0, 0]
    split = max(0, anchor - NEAREST)
    older = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
    for first in range(0, split, CHUNK):
        part = slice(first, min(first + CHUNK, split))
        older = torch.logaddexp(older, scores(context[:, part], seen[:, part]).logsumexp(-1))
    near = scores(context[:, split:anchor], seen[:, split:])
    own = scores(block, block_visible(rows, window, causal, query.device))
    weights = torch.cat([older[..., None], near, own], dim=-1).softmax(-1)
    older, near, own = weights.split([1, near.shape[-1], rows], dim=-1)
    return older[..., 0], near, own


class BlockAttention:
    """Keeps the rows of the blocks anchored at `positions` of one sequence; `frame` tells them."""

    def __init__(self, drafter: Drafter, positions: Iterable[int]) -> None:
        self.drafter = drafter
        self.wanted = {int(position) for position in positions}
        self.parts: list[tuple[int, int, Float[np.ndarray, "P N"], Float[np.ndarray, "P G"]]] = []

    def add(
        self,
        layer: int,
        query: Float[Tensor, "1 H A G D"],
        context: tuple[Float[Tensor, "1 KV S D"], Float[Tensor, "1 KV S D"]],
        block: tuple[Float[Tensor, "1 KV A G D"], Float[Tensor, "1 KV A G D"]],
        anchors: Int[Tensor, "1 A"],
        window: int | None,
        causal: bool,
    ) -> None:
        """Look at one layer's attention call; blocks that are not wanted cost nothing."""
        for place, position in enumerate(anchors[0].tolist()):
            if position in self.wanted:
                arguments = query[0, :, place], context[0][0], block[0][0, :, place]
                older, near, own = block_weights(*arguments, position, window, causal)
                parts = torch.cat([older[..., None], near], dim=-1), own
                rows = (self.drafter.slot_rows(part.mean(0)).cpu().numpy() for part in parts)
                self.parts.append((position, layer, *rows))

    def frame(self, key: Mapping[str, object], prompt_length: int) -> pd.DataFrame:
        """Rows of the `block_attention` table, by anchor, layer and slot."""
        if not self.parts:
            return empty_frame("block_attention")
        parts = sorted(self.parts, key=lambda part: part[:2])
        frames = [
            pd.DataFrame(
                dict(key)
                | {
                    "anchor": position - prompt_length,
                    "slot": np.arange(1, len(own) + 1),
                    "layer": layer,
                    "share_context": context.sum(1),
                    "share_anchor": own[:, 0],
                    "share_drafted": own[:, 1:].sum(1),
                    "older": context[:, 0],
                    "nearest": list(context[:, 1:]),
                    "block": list(own),
                }
            )
            for position, layer, context, own in parts
        ]
        return pd.concat(frames, ignore_index=True)
