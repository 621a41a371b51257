"""Rows of a decode that remember their last pass, and may keep what should be rolled back.

`injection` plants the faults that need the one or the other.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dflash2_lab.decoding.steps import DrafterRow, TargetRow
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.policies import Block
from dflash2_lab.sampling import Sampling
from dflash2_lab.target import Target


class TargetContext(TargetRow):
    """A target row with the tokens in its cache and the logits and features of its last pass.

    `stale` (place, token) stays in the cache: the token that comes to that place is not seen.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int]):
        super().__init__(target, layer_ids)
        self.ids: list[int] = []
        self.stale: tuple[int, int] | None = None

    def extend(
        self, span: Sequence[int], logits_to_keep: int = 0
    ) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n NH"] | None]:
        span = list(span)
        if self.stale is not None and self.stale[0] == self.length:
            span[0] = self.stale[1]
        self.ids += span
        self.logits, self.features = super().extend(span, logits_to_keep)
        return self.logits, self.features

    def roll_back(self, num: int) -> None:
        super().roll_back(num)
        del self.ids[self.length :]


class DrafterContext(DrafterRow):
    """A drafter's row with its last block; `stale` ends each commit with the feature of the draft
    that was refused, in place of the last committed token's."""

    def __init__(self, drafter: Drafter, target: Target, row: TargetContext, stale: bool):
        super().__init__(drafter, target)
        self.row, self.stale = row, stale

    def commit(self, features: Float[Tensor, "n NH"]) -> None:
        refused = len(features)
        if self.stale and refused < len(self.row.features):
            features = torch.cat([features[:-1], self.row.features[refused : refused + 1]])
        super().commit(features)

    def block(
        self, anchor_id: int, policy: str, sampling: Sampling, uniform: Float[Tensor, " P"]
    ) -> Block:
        self.last = super().block(anchor_id, policy, sampling, uniform)
        return self.last
