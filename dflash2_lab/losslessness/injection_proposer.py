"""Faults of the proposer in the reference engine: each takes a proposal and gives another one."""

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.decoding.steps import Proposal, propose
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.losslessness.arms import opposite
from dflash2_lab.policies import Block, candidates

PAIRWISE = ("selector", "markov")  # policies whose q depends on the token before the slot
_TOP_P = 0.9


class Draft(NamedTuple):
    """A right proposal and what it was made from. `before` is the token before the anchor."""

    proposal: Proposal
    block: Block
    arm: str
    policy: str
    before: int

    @property
    def temperature(self) -> float:
        """T of the request."""
        return self.block.sampling.temperature

    @property
    def uniform(self) -> Float[Tensor, " T"]:
        """The numbers that drove the draws."""
        return self.block.uniforms[self.policy][0]


def q_uniform(draft: Draft) -> Proposal:
    """q reported as 1/K."""
    law = draft.proposal.law
    return replace(draft.proposal, law=torch.full_like(law, 1 / law.shape[-1]))


def q_unary(draft: Draft) -> Proposal:
    """q reported without the term of the token before."""
    scores = draft.block.logits[0].float()
    if draft.policy == "selector":
        scores = candidates(draft.block).unary[0]
    if draft.arm == "opposite":
        scores = -scores
    return replace(draft.proposal, law=(scores / draft.temperature).softmax(-1))


def q_tempered_twice(draft: Draft) -> Proposal:
    """q reported as softmax(scores), x drawn at T."""
    law = _powered(draft.proposal.law, draft.temperature)
    return replace(draft.proposal, law=law)


def q_bfloat16(draft: Draft) -> Proposal:
    """q reported in bfloat16."""
    return replace(draft.proposal, law=draft.proposal.law.bfloat16().float())


def one_hot(draft: Draft) -> Proposal:
    """q reported one-hot on what was drawn."""
    return Proposal(draft.proposal.tokens)


def draws_best(draft: Draft) -> Proposal:
    """x = argmax q."""
    return _with_choice(draft.proposal, draft.proposal.law.argmax(-1))


def draws_at_1(draft: Draft) -> Proposal:
    """x drawn from softmax(scores), q reported at T."""
    return _drawn_from(draft, _powered(draft.proposal.law, draft.temperature))


def draws_filtered(draft: Draft) -> Proposal:
    """x drawn from q cut to top-p 0.9, q reported whole."""
    return _drawn_from(draft, _cut(draft.proposal.law))


def filtered(draft: Draft) -> Proposal:
    """q cut to top-p 0.9, drawn from and reported."""
    law = _cut(draft.proposal.law)
    return replace(_drawn_from(draft, law), law=law)


def walks_astray(draft: Draft) -> Proposal:
    """The walk starts after the token before the anchor, and says so."""
    before = draft.block.before.clone()
    before[:, 0] = draft.before
    block = replace(draft.block, before=before, targets=before)
    propose_as = opposite if draft.arm == "opposite" else propose
    return propose_as(block, draft.policy)


def draws_astray(draft: Draft) -> Proposal:
    """The walk starts after the token before the anchor, q is reported after the anchor."""
    astray = walks_astray(draft)
    # Only the first slot has the anchor before it; the later ones follow the path that was drawn.
    return replace(astray, law=torch.cat([draft.proposal.law[:1], astray.law[1:]]))


def _powered(law: Float[Tensor, "P N"], power: float) -> Float[Tensor, "P N"]:
    return (law.double().log() * power).softmax(-1)


def _cut(law: Float[Tensor, "P N"]) -> Float[Tensor, "P N"]:
    values, order = law.double().sort(dim=-1, descending=True, stable=True)
    kept = values.masked_fill(values.cumsum(-1) - values >= _TOP_P, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def _drawn_from(draft: Draft, law: Float[Tensor, "P N"]) -> Proposal:
    return _with_choice(draft.proposal, inverse_cdf(law, draft.uniform[: len(law)]))


def _with_choice(proposal: Proposal, choice: Int[Tensor, " P"]) -> Proposal:
    if proposal.ids is not None:
        choice = proposal.ids.gather(-1, choice[:, None])[:, 0]
    return replace(proposal, tokens=choice)
