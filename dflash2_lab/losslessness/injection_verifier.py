"""Faults of the verifier in the reference engine: laws it tests with, and laws it draws from.

p are its laws at the P slots and after them; n is the number of accepted drafts.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dflash2_lab.decoding.requests import Request
from dflash2_lab.decoding.steps import Proposal, at_tokens, excess
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.sampling import Sampling, filter_logits

Rows = Float[Tensor, "P1 V"]
_SWAPPED = 20  # one verify step in so many gets its neighbour's laws


class Pass(NamedTuple):
    """A target pass: its laws and logits, where it is, and the laws of another request's pass."""

    p: Rows
    logits: Rows
    request: Request
    anchor: int
    neighbour: Rows | None

    @property
    def sampling(self) -> Sampling:
        """Of the request."""
        return self.request.sampling


def later_rows(seen: Pass) -> Rows:
    """p of a slot read from the row after."""
    return torch.cat([seen.p[1:], seen.p[-1:]])


def untempered(seen: Pass) -> Rows:
    """p at T = 1."""
    return filter_logits(seen.logits, 1.0, seen.sampling.top_p, seen.sampling.top_k)


def unfiltered(seen: Pass) -> Rows:
    """p without top-k and top-p."""
    return filter_logits(seen.logits, seen.sampling.temperature)


def swapped(seen: Pass) -> Rows:
    """5 % of the steps see the laws of another request; which, a hash of the place says."""
    place = seen.request.keys["final"] + seen.anchor
    if seen.neighbour is None or (place * 2654435761 >> 7) % _SWAPPED:
        return seen.p
    return torch.cat([seen.neighbour[: len(seen.p)], seen.p[len(seen.neighbour) :]])


def ratio(p: Rows, x: Proposal) -> Float[Tensor, " P"]:
    """p / q of the drafts; a number below it accepts."""
    return at_tokens(p, x) / x.mass()


def is_top(p: Rows, x: Proposal) -> Float[Tensor, " P"]:
    """1 where the draft is the target's best token."""
    return (x.tokens == p[:-1].argmax(-1)).double()


def first_unverified(p: Rows, x: Proposal) -> Float[Tensor, " P"]:
    """The first draft always passes."""
    chance = ratio(p, x)
    chance[:1] = 1.0
    return chance


def typical(p: Rows, x: Proposal) -> Float[Tensor, " P"]:
    """Medusa's rule: p(x) > min(0.09, 0.3 exp(-H(p)))."""
    entropy = -torch.special.xlogy(p[:-1], p[:-1]).sum(-1).double()
    return (at_tokens(p, x) > (0.3 * (-entropy).exp()).clamp_max(0.09)).double()


def q_at(p: Rows, x: Proposal, slot: int) -> Float[Tensor, " V"]:
    """q of a slot over the vocabulary; past the last one, the last one's."""
    return x.dense(min(slot, len(x.tokens) - 1), p.shape[-1])


def left_over(p: Rows, x: Proposal, num: int) -> Float[Tensor, " V"]:
    """(p - q)+, not normalised."""
    return excess(p[num], q_at(p, x, num))


def left_of_next(p: Rows, x: Proposal, num: int) -> Float[Tensor, " V"]:
    """(p_{n+1} - q_n)+."""
    return excess(p[num + 1], q_at(p, x, num))


def left_by_wrong_q(p: Rows, x: Proposal, num: int) -> Float[Tensor, " V"]:
    """(p_n - q_{n+1})+; at the last slot q of the one before."""
    other = num + 1 if num + 1 < len(x.tokens) else max(num - 1, 0)
    return excess(p[num], q_at(p, x, other))


def runs_off(p: Rows, x: Proposal, num: int) -> Float[Tensor, " V"]:
    """(p - q)+ as it is: what is missing to 1 goes to the last token."""
    law = left_over(p, x, num)
    law[-1] += (1 - law.sum()).clamp_min(0.0)
    return law


def on_candidates(p: Rows, x: Proposal, num: int) -> Float[Tensor, " V"]:
    """(p - q)+ where q > 0."""
    return left_over(p, x, num) * (q_at(p, x, num) > 0)


def best_left(p: Rows, x: Proposal, num: int) -> Float[Tensor, " V"]:
    """One-hot on argmax (p - q)+."""
    law = left_over(p, x, num)
    return torch.zeros_like(law).index_fill_(0, law.argmax(), 1.0)


def without_draft(p: Rows, x: Proposal, num: int) -> Float[Tensor, " V"]:
    """p without x."""
    return p[num].double().index_fill(0, x.tokens[num], 0.0)


class Matched(NamedTuple):
    """Token matching told as the rule "token": accepted drafts, the numbers that its tests would
    have had, and the one of the final draw."""

    num: int
    tests: Float[Tensor, " P"]
    final: Float[Tensor, ""]


def match(p: Rows, x: Proposal, uniform: Float[Tensor, " P"], final: Float[Tensor, ""]) -> Matched:
    """Draw the target's own token y at every slot, and keep the draft while it is y.

    For a one-hot q this is the rule "token" with other numbers: y = x is (u - F(x^-)) mod 1 < p(x),
    and otherwise y has, under p without x, the place u (less p(x) behind x) over 1 - p(x).
    """
    laws = p[:-1].double()
    laws = laws / laws.sum(-1, keepdim=True)
    own = inverse_cdf(laws, uniform)
    mass = laws.gather(-1, x.tokens[:, None])[:, 0]
    below = laws.cumsum(-1).gather(-1, x.tokens[:, None])[:, 0] - mass
    num = int((own == x.tokens).cumprod(-1).sum())
    if num < len(own):
        behind = mass[num] if own[num] > x.tokens[num] else 0.0
        final = (uniform[num] - behind) / (1 - mass[num])
    return Matched(num, (uniform - below) % 1.0, final)
