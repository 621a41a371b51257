"""White-box checks of a decode: no statistics, and one response is enough to fail them.

- Every draft is what its reported law gives with the number that was used, and every reported law
  sums to 1: q is the law drawn from (a q rounded to bfloat16 fails, which no sample of any size
  that one could draw would show).
- Every step accepts the drafts, and ends with the token, that the rule gives with the verifier's
  own p, the reported q and the numbers that were used.
- The response is the tokens that its steps gave, and its first token what the independent p gives.
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

from dflash2_lab.decoding.steps import Proposal, residual
from dflash2_lab.losslessness.certificate import Check
from dflash2_lab.losslessness.step_log import ROWS, StepLog, final_weights
from dflash2_lab.losslessness.weighing import Evidence
from dflash2_lab.losslessness.witness import Testimony

_EDGE = 1e-6  # how far a number of a draw or test may be on the wrong side, by rounding
GATES = {
    "draws": (0, "drafts that are not what the reported q gives"),
    "q sums": (1e-6, "largest distance of a reported q's sum from 1"),
    "decisions": (0, "steps that accept other drafts than the rule"),
    "finals": (0, "steps that end with another token than the rule's"),
    "response": (0, "tokens of the response that no step gave"),
    "first token": (1e-3, "distance of its number from what independent p gives"),
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
        self.has_rule = False

    def see(self, found: Testimony, log: StepLog, evidence: Evidence) -> None:
        """Look at one response, while its laws are there."""
        self.used.update(found.keys)
        low, high = allowed_counts(log)
        self.found["draws"] += wrong_draws(log.drafts, log.uniform)
        self.found["decisions"] += int(((log.num < low) | (log.num > high)).sum())
        self.found["finals"] += int(wrong_finals(log).sum())
        self.found["response"] += foreign_tokens(found, log)
        self._largest("q sums", law_error(log.drafts))
        self._largest("first token", evidence.first)
        self._largest("rule", *evidence.implied)
        self.has_rule |= len(evidence.implied) > 0
        self._largest("target", *evidence.moved)
        self._largest("state", evidence.state)

    def _largest(self, name: str, *values: float) -> None:
        self.found[name] = float(np.max([self.found[name], *values]))  # a NaN stays

    def checks(self) -> list[Check]:
        """All gates, over what was seen; "rule" only where it looked at something."""
        twice = sum(count - 1 for count in self.used.values())
        found = self.found | {"random numbers": twice}
        return [
            Check(name, found[name], limit, meaning)
            for name, (limit, meaning) in GATES.items()
            if name != "rule" or self.has_rule
        ]


def wrong_draws(proposal: Proposal, uniform: Float[Tensor, " T"]) -> int:
    """Drafted tokens that the reported law does not give with the numbers that drove them."""
    if proposal.law is None:
        return 0  # one-hot on what was drawn, however it was drawn
    law, drafted, wrong = proposal.law, proposal.tokens[:, None], 0
    ids = drafted if proposal.ids is None else proposal.ids  # where an id may stand twice
    places = drafted if proposal.ids is None else torch.arange(ids.shape[-1], device=ids.device)
    columns = law, places.expand_as(ids), ids == drafted, uniform[: len(law)]
    for own, place, is_it, number in zip(*(x.split(ROWS) for x in columns), strict=True):
        wrong += int((~(_given(own, place, number) & is_it).any(-1)).sum())
    return wrong


def _given(
    law: Float[Tensor, "n N"], choice: Int[Tensor, "n k"], uniform: Float[Tensor, " n"]
) -> Bool[Tensor, "n k"]:
    """Whether the inverse cdf gives each choice for its row's number, up to rounding."""
    cdf = law.double().cumsum(-1)
    cdf = cdf / cdf[:, -1:]
    upper, number = cdf.gather(-1, choice), uniform[:, None]
    lower = torch.where(choice > 0, cdf.gather(-1, (choice - 1).clamp_min(0)), 0.0)
    has_mass = law.gather(-1, choice) > 0
    return has_mass & (lower - _EDGE <= number) & (number < upper + _EDGE)


def law_error(proposal: Proposal) -> float:
    """Largest distance of a slot's reported q from a sum of 1."""
    if proposal.law is None or not len(proposal.tokens):
        return 0.0
    sums = torch.cat([law.double().sum(-1) for law in proposal.law.split(ROWS)])
    return float((sums - 1).abs().max())


def allowed_counts(log: StepLog) -> tuple[Int[Tensor, " S"], Int[Tensor, " S"]]:
    """The fewest and the most drafts that the rule accepts in each step with the numbers that were
    used; they differ where a number is at the edge of a test."""
    if log.chances is not None:
        low, high = (_last(log, log.tests < log.chances + shift) for shift in (-_EDGE, _EDGE))
        return low, high
    chances = _ratios(log)
    low, high = (_leading(log, log.tests < chances + shift) for shift in (-_EDGE, _EDGE))
    return low, high


def _ratios(log: StepLog) -> Float[Tensor, " M"]:
    """The verifier's own p(x) / q(x) of the drafts that it has laws of."""
    return log.laws[log.law_at(log.step, log.slot), log.drafts.tokens].double() / log.drafts.mass()


def foreign_tokens(found: Testimony, log: StepLog) -> int:
    """Tokens of a response that are not those its steps gave, or that are missing. The first one is
    no step's."""
    asked, response = found.request, torch.tensor(found.response)
    ended = found.response[-1] in asked.stop_ids
    size = len(response) if ended else asked.max_new_tokens
    given = torch.full((max(size, len(response)),), -1)
    for places, tokens in (
        (log.anchor[log.step] + 1 + log.slot, log.drafts.tokens.where(_taken(log), -1)),
        (log.anchor + 1 + log.num, log.token.where(log.kept > log.num, -1)),
    ):
        inside = (tokens >= 0) & (places < size)
        given[places[inside].cpu()] = tokens[inside].cpu()
    given[0] = response[0]
    return len(given) - int((given[: len(response)] == response).sum())


def _taken(log: StepLog) -> Bool[Tensor, " M"]:
    """Which drafts were accepted."""
    return log.slot < log.num[log.step]


def _last(log: StepLog, passed: Bool[Tensor, " M"]) -> Int[Tensor, " S"]:
    """Slots up to the last one that passed."""
    number = (log.slot + 1) * passed
    return torch.zeros_like(log.num).scatter_reduce(0, log.step, number, "amax")


def _leading(log: StepLog, passed: Bool[Tensor, " M"]) -> Int[Tensor, " S"]:
    """Slots before the first one that failed; a draft that was refused leaves no laws of the slots
    behind it."""
    looked = torch.minimum(log.slots, log.kept)
    until = torch.where(passed, looked[log.step], log.slot)
    return looked.scatter_reduce(0, log.step, until, "amin")


def wrong_finals(log: StepLog) -> Bool[Tensor, " S"]:
    """Which steps end with another token than their number gives, by the residual law or, after all
    drafts, by the law of the bonus. A step may end without a token of its own."""
    wrong = torch.zeros_like(log.num, dtype=torch.bool)
    weights = torch.ones_like(log.num, dtype=torch.float64)
    if log.chances is not None:
        weights = final_weights(log, _ratios(log))
    for steps in (log.kept > log.num).nonzero()[:, 0].split(ROWS):
        num = log.num[steps]
        law = log.laws[log.law_at(steps, num)].double()
        refused = num < log.slots[steps]
        at = steps[refused]
        q = log.drafts.dense(log.draft_at(at, num[refused]), law.shape[-1])
        law[refused] = residual(weights[at, None] * law[refused], q)
        wrong[steps] = ~_given(law, log.token[steps, None], log.final[steps])[:, 0]
    return wrong
