"""The verify steps of one response side by side, so that one operation looks at all of them.

A step is small and a response has hundreds: looked at one by one, launches would take most of the
time on a GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.decoding.steps import Proposal
from dflash2_lab.losslessness.witness import Step

ROWS = 256  # laws over the vocabulary that are looked at together; bounds the memory for them


class StepLog(NamedTuple):
    """S steps, their M drafts and their R laws.

    Attributes:
        anchor, num, token, final: of each step, as in `Step`.
        slots, kept: how many drafts and laws each step has.
        drafts: of all steps.
        step, slot: whose draft each of them is, and the slot that it was drafted for.
        uniform, tests, chances: of each draft; chances None but for block verification.
        laws: of all steps.
        owner, place: whose law each of them is, and the slot that it is the law of.
    """

    anchor: Int[Tensor, " S"]
    num: Int[Tensor, " S"]
    token: Int[Tensor, " S"]
    final: Float[Tensor, " S"]
    slots: Int[Tensor, " S"]
    kept: Int[Tensor, " S"]
    drafts: Proposal
    step: Int[Tensor, " M"]
    slot: Int[Tensor, " M"]
    uniform: Float[Tensor, " M"]
    tests: Float[Tensor, " M"]
    chances: Float[Tensor, " M"] | None
    laws: Float[Tensor, "R V"]
    owner: Int[Tensor, " R"]
    place: Int[Tensor, " R"]

    def draft_at(self, step: Int[Tensor, " n"], slot: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Which draft is that of a slot of a step."""
        return (self.slots.cumsum(0) - self.slots)[step] + slot

    def law_at(self, step: Int[Tensor, " n"], slot: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Which law is that of a slot of a step; the last one of the step for a slot beyond."""
        last = self.kept.cumsum(0) - 1
        return torch.minimum(last[step] - self.kept[step] + 1 + slot, last[step])


def side_by_side(steps: Sequence[Step]) -> StepLog:
    """Steps of one response, whose proposals all have the same kind of q."""
    offered = [step.proposal for step in steps]
    some = next((x for x in offered if len(x.tokens)), offered[0])
    drafts = Proposal(
        torch.cat([x.tokens for x in offered]),
        None if some.law is None else torch.cat([x.law for x in offered if len(x.tokens)]),
        None if some.ids is None else torch.cat([x.ids for x in offered if len(x.tokens)]),
    )
    device = drafts.tokens.device

    def column(values: list[int]) -> Int[Tensor, " S"]:
        return torch.tensor(values, device=device)

    slots = column([len(x.tokens) for x in offered])
    kept = column([len(step.laws) for step in steps])
    step, slot = _numbered(slots)
    return StepLog(
        column([step.anchor for step in steps]),
        column([step.num for step in steps]),
        column([step.token for step in steps]),
        torch.stack([step.final for step in steps]),
        slots,
        kept,
        drafts,
        step,
        slot,
        torch.cat([one.uniform[: len(x.tokens)] for one, x in zip(steps, offered, strict=True)]),
        torch.cat([step.tests for step in steps]),
        None if steps[0].chances is None else torch.cat([step.chances for step in steps]),
        torch.cat([step.laws for step in steps]),
        *_numbered(kept),
    )


def _numbered(counts: Int[Tensor, " S"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Of counts[0] + counts[1] + ... things: whose each one is, and its number there."""
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    number = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    return owner, number


def final_weights(log: StepLog, ratios: Float[Tensor, " M"]) -> Float[Tensor, " S"]:
    """w_n of block verification after the n accepted drafts of each step, from all p(x) / q(x)."""
    grid = torch.ones(len(log.num), int(log.slots.max()), dtype=torch.float64, device=ratios.device)
    grid[log.step, log.slot] = torch.where(log.slot < log.num[log.step], ratios.double(), 1.0)
    weight = torch.ones_like(grid[:, 0])
    for column in grid.unbind(1):
        weight = (weight * column).clamp_max(1.0)
    return weight
