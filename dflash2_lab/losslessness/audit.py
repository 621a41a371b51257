"""White-box checks of a decode: no statistics, and one response is enough to fail them.

- Every draft is what its reported law gives with the number that was used, and every reported law
  sums to 1: q is the law drawn from (a q rounded to bfloat16 fails, which no sample of any size
  that one could draw would show).
- Every step accepts the drafts, and ends with the token, that the rule gives with the verifier's
  own p, the reported q and the numbers that were used.
- No random number is used twice, in whatever role.
- The rule with the verifier's own p and q gives that p, and that p is the independent one up to the
  target's rounding.
- The caches at the end are those of the committed tokens alone.
"""

from collections import Counter

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash2_lab.decoding.steps import Proposal, at_tokens, block_weights, residual
from dflash2_lab.losslessness.certificate import Check
from dflash2_lab.losslessness.weighing import Evidence
from dflash2_lab.losslessness.witness import Step, Testimony

_EDGE = 1e-6  # how far a number of a draw or test may be on the wrong side, by rounding
GATES = {
    "draws": (0, "drafts that are not what the reported q gives"),
    "q sums": (1e-6, "largest distance of a reported q's sum from 1"),
    "decisions": (0, "steps that accept other drafts than the rule"),
    "finals": (0, "steps that end with another token than the rule's"),
    "random numbers": (0, "random numbers used more than once"),
    "rule": (1e-6, "TV of the rule's law, verifier's p and q"),
    "target": (1e-3, "TV of the verifier's p, independent p"),  # float32: 1e-5 measured
    "state": (2e-4, "caches against the committed tokens alone"),  # float32: 1e-5 measured
}


class Audit:
    """The gates of a decode, filled response by response; what it has seen may be let go."""

    def __init__(self) -> None:
        self.found = dict.fromkeys(GATES, 0.0)
        self.used = Counter()

    def see(self, found: Testimony, evidence: Evidence) -> None:
        """Look at one response, while its laws are there."""
        self.used.update(found.keys)
        for step in found.steps:
            low, high = allowed_counts(step)
            self.found["draws"] += wrong_draws(step.proposal, step.uniform)
            self.found["decisions"] += not low <= step.num <= high
            self.found["finals"] += wrong_final(step)
            self._largest("q sums", law_error(step.proposal))
        self._largest("rule", *evidence.implied)
        self._largest("target", *evidence.moved)
        self._largest("state", evidence.state)

    def _largest(self, name: str, *values: float) -> None:
        self.found[name] = float(np.max([self.found[name], *values]))  # a NaN stays

    def checks(self) -> list[Check]:
        """All gates, over what was seen."""
        twice = sum(count - 1 for count in self.used.values())
        found = self.found | {"random numbers": twice}
        return [
            Check(name, found[name], limit, meaning) for name, (limit, meaning) in GATES.items()
        ]


def wrong_draws(proposal: Proposal, uniform: Float[Tensor, " T"]) -> int:
    """Drafted tokens that the reported law does not give with the numbers that drove them."""
    if proposal.law is None:
        return 0  # one-hot on what was drawn, however it was drawn
    law, choice = proposal.law, proposal.tokens
    if proposal.ids is not None:
        is_it = proposal.ids == choice[:, None]
        law, choice = law * is_it.any(-1, keepdim=True), is_it.int().argmax(-1)
    return int((~_given(law, choice, uniform[: len(choice)])).sum())


def _given(
    law: Float[Tensor, "n N"], choice: Int[Tensor, " n"], uniform: Float[Tensor, " n"]
) -> Bool[Tensor, " n"]:
    """Whether the inverse cdf gives each choice for its number, up to rounding."""
    cdf = law.double().cumsum(-1)
    cdf = cdf / cdf[:, -1:]
    upper = cdf.gather(-1, choice[:, None])[:, 0]
    mass = law.gather(-1, choice[:, None])[:, 0].double()
    lower = torch.where(choice > 0, cdf.gather(-1, (choice - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    return (mass > 0) & (lower - _EDGE <= uniform) & (uniform < upper + _EDGE)


def law_error(proposal: Proposal) -> float:
    """Largest distance of a slot's reported q from a sum of 1."""
    if proposal.law is None or not len(proposal.tokens):
        return 0.0
    return float((proposal.law.double().sum(-1) - 1).abs().max())


def allowed_counts(step: Step) -> tuple[int, int]:
    """The fewest and the most drafts that the rule accepts with the numbers that were used; two of
    them where a number is at the edge of a test."""
    if step.chances is not None:
        slots = torch.arange(1, len(step.chances) + 1, device=step.chances.device)
        passed = (step.tests < step.chances + shift for shift in (-_EDGE, _EDGE))
        low, high = (int((slots * flags).max()) for flags in passed)
        return low, high
    # A draft that was refused leaves no laws of the slots behind it.
    laws = torch.cat([step.laws, step.laws[-1:]])[: len(step.proposal.tokens) + 1]
    offered = step.proposal.first(len(laws) - 1)
    chances = at_tokens(laws, offered) / offered.mass()
    passed = (step.tests[: len(chances)] < chances + shift for shift in (-_EDGE, _EDGE))
    low, high = (int(flags.cumprod(-1).sum()) for flags in passed)
    return low, high


def wrong_final(step: Step) -> bool:
    """Whether a step ends with another token than its number gives, by the residual law or, after
    all drafts, by the law of the bonus. A step may end without a token of its own."""
    if len(step.laws) <= step.num:
        return False
    law = step.laws[step.num]
    if step.num < len(step.proposal.tokens):
        if step.chances is not None:
            weights, _ = block_weights(step.laws, step.proposal.first(step.num))
            law = weights[-1] * law
        law = residual(law, step.proposal.dense(step.num, len(law)))
    token = torch.tensor([step.token], device=law.device)
    return not bool(_given(law[None], token, step.final[None]))
