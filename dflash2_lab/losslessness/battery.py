"""The battery on emitted tokens (end to end, p alone is needed) and on what the verifier did.

Formulas are those of the randomised probability-integral transform: every test is exact or a
martingale limit under the null, one p-value each, joined by Holm at the level of `Budget`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import ndtri

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.statistics import (
    MIN_TOKENS,
    anderson_darling,
    between_streams,
    by_stream,
    cell_chi_square,
    kolmogorov_smirnov,
    ljung_box,
    neyman,
    randomised_pit,
    standard_score,
)

if TYPE_CHECKING:
    from dflash2_lab.losslessness.scoring import Scores


class Emitted(NamedTuple):
    """Emitted tokens with their scores under the target's law.

    Attributes:
        scores: of each token.
        stream: which request it belongs to.
        order: its place in its stream; equal orders of two streams were emitted alike.
        slot: its place in its block from 0, -1 where it is not known or there is no block.
    """

    scores: Scores
    stream: Int[np.ndarray, " n"]
    order: Int[np.ndarray, " n"]
    slot: Int[np.ndarray, " n"]


class Drafted(NamedTuple):
    """What the proposer drew and what the verifier did, for acceptance token by token.

    Attributes:
        heat_score, heat_variance: log q(x) + H(q) and Var_q log q of all m drafts, accepted or not.
        below, mass: their F(x^-) and q(x), the vocabulary by q descending.
        reached: the verifier looked at the draft (all before it in its block were accepted).
        accepted: it took it.
        accept_probability: min(1, p(x) / q(x)).
        residual_below, residual_mass: of the r tokens drawn after a refusal, under the recomputed
            (p - q)+, the vocabulary by q descending.
        bonus_below, bonus_mass: of the b tokens drawn after a block accepted in full, under p.
        heat_third: third central moment of log q under q.
    """

    heat_score: Float[np.ndarray, " m"]
    heat_variance: Float[np.ndarray, " m"]
    below: Float[np.ndarray, " m"]
    mass: Float[np.ndarray, " m"]
    reached: Bool[np.ndarray, " m"]
    accepted: Bool[np.ndarray, " m"]
    accept_probability: Float[np.ndarray, " m"]
    residual_below: Float[np.ndarray, " r"]
    residual_mass: Float[np.ndarray, " r"]
    bonus_below: Float[np.ndarray, " b"]
    bonus_mass: Float[np.ndarray, " b"]
    heat_third: Float[np.ndarray, " m"]


@dataclass(frozen=True)
class Budget:
    """One chance of a false alarm for a whole run, divided over tiers, then equally.

    Attributes:
        alpha: of the run.
        pit, component, monitor: shares of the tiers; they sum to 1.
        configurations, arms: sampling configurations, and drafters each is run with.
    """

    alpha: float = 1e-3
    pit: float = 0.5
    component: float = 0.3
    monitor: float = 0.2
    configurations: int = 1
    arms: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise LabError(f"alpha: found {self.alpha}, expected a number between 0 and 1")
        shares = self.pit, self.component, self.monitor
        if min(shares) < 0 or not math.isclose(sum(shares), 1):
            raise LabError(f"shares: found {shares}, expected none below 0 and a sum of 1")
        if self.configurations < 1 or self.arms < 1:
            raise LabError(
                f"found {self.configurations} configurations and {self.arms} arms, expected 1 or "
                "more of each"
            )

    def level(self, tier: str) -> float:
        """Level of one family of a tier ("pit", "component" or "monitor"): one configuration, one
        arm. Holm divides it further over the tests of the family; the monitor stops at its inverse.
        """
        shares = {"pit": self.pit, "component": self.component, "monitor": self.monitor}
        return self.alpha * shares[tier] / (self.configurations * self.arms)


def pit_tests(emitted: Emitted, noise: np.random.Generator) -> dict[str, float]:
    """The p-values of the emitted tokens, by name.

    Needs p alone, except for `ad_drafter`, `drafter_score` and `drafter_cells`, which are left out
    where there is no q. A test with too little to go by (fewer than 10 tokens, laws with next to no
    variance, one stream) says 1. `support` is 0 when a token has p(x) = 0 exactly, else 1.

    Args:
        emitted: a number of tokens fixed in advance, none after an end of sequence.
        noise: of the randomised transform; must share nothing with what drew the tokens.

    Raises:
        LabError: columns of different lengths, or a place in a stream taken twice.
    """
    scores = emitted.scores
    _check_columns(emitted)
    u = randomised_pit(scores.below, scores.mass, noise.random(len(scores.p)))
    ranked = np.sort(u)
    grid, present = by_stream(ndtri(u), emitted.stream, emitted.order)
    if present.sum() != len(u):
        raise LabError(
            f"order: found {len(u) - present.sum()} tokens at a place of their stream that another "
            "one has, expected one token a place"
        )
    tests = {
        "support": 0.0 if (scores.p == 0).any() else 1.0,
        "ks": kolmogorov_smirnov(ranked),
        "ad": anderson_darling(ranked),
        "neyman": neyman(u),
        "rank_cells": cell_chi_square(scores.rank_cells, scores.rank_cell),
        "ljung_box": ljung_box(grid, present),
        "slots": _slots(u, emitted.slot),
        "streams": between_streams(grid, present),
        "heat": standard_score(scores.heat_score, scores.heat_variance, scores.heat_third),
    }
    if scores.drafter_cells is not None:
        v = noise.random(len(scores.p))
        u = randomised_pit(scores.below_drafter, scores.mass_drafter, v)
        tests |= {
            "ad_drafter": anderson_darling(np.sort(u)),
            "drafter_score": standard_score(
                scores.drafter_score, scores.drafter_variance, scores.drafter_third
            ),
            "drafter_cells": cell_chi_square(scores.drafter_cells, scores.drafter_cell),
        }
    return tests


def component_tests(drafted: Drafted, noise: np.random.Generator) -> dict[str, float]:
    """The p-values of the stages, by name: which one is at fault.

    `draft_heat`, `draft_ad`: drafts are drawn from the reported q; `accept_flags`: tests pass with
    their probability; `residual_ad`, `bonus_ad`: the token that ends the block. 1 where there is
    too little to go by (no refusal, one-hot q, ...).
    """
    reached = drafted.reached
    chance = drafted.accept_probability[reached]
    pits = {
        "draft_ad": (drafted.below, drafted.mass),
        "residual_ad": (drafted.residual_below, drafted.residual_mass),
        "bonus_ad": (drafted.bonus_below, drafted.bonus_mass),
    }
    spread = chance * (1 - chance)
    tests = {
        "draft_heat": standard_score(drafted.heat_score, drafted.heat_variance, drafted.heat_third),
        "accept_flags": standard_score(
            drafted.accepted[reached] - chance, spread, spread * (1 - 2 * chance)
        ),
    }
    for name, (below, mass) in pits.items():
        u = randomised_pit(below, mass, noise.random(len(below)))
        tests[name] = anderson_darling(np.sort(u))
    return tests


def holm(p_values: Mapping[str, float], alpha: float) -> list[str]:
    """Names rejected by Holm's step-down at family-wise level alpha, smallest p-value first."""
    levels = holm_levels(p_values, alpha)
    return list(takewhile(lambda name: not p_values[name] > levels[name], levels))


def holm_levels(p_values: Mapping[str, float], alpha: float) -> dict[str, float]:
    """What Holm holds each p-value against, smallest p-value first: alpha over the number of those
    that are not smaller. It rejects up to the first that is above its level."""
    ranked = sorted(p_values, key=p_values.get)
    return {name: alpha / (len(ranked) - done) for done, name in enumerate(ranked)}


def smallest_tv(num_tokens: int, alpha: float, power: float = 0.99) -> float:
    """The smallest total variation that a test of the best cell could have seen with this power.

    Two-sided z-test of one cell, variance of a token at most 1/4: d = (z_alpha/2 + z_power) / (2
    sqrt(n)), at most 1. A lower bound: the cell is known and every token has the shift d.
    """
    if num_tokens < 1:
        return 1.0
    z = ndtri(1 - alpha / 2) + ndtri(power)
    return float(min(1.0, z / (2 * math.sqrt(num_tokens))))


def _slots(u: Float[np.ndarray, " n"], slot: Int[np.ndarray, " n"]) -> float:
    """Anderson-Darling at each place of the block, the least p-value times their number."""
    parts = [u[slot == place] for place in np.unique(slot[slot >= 0])]
    tests = [anderson_darling(np.sort(part)) for part in parts if len(part) >= MIN_TOKENS]
    return min(1.0, len(tests) * min(tests)) if tests else 1.0


def _check_columns(emitted: Emitted) -> None:
    lengths = {name: len(getattr(emitted, name)) for name in ("stream", "order", "slot")}
    if set(lengths.values()) != {len(emitted.scores.p)}:
        raise LabError(f"found {len(emitted.scores.p)} scores for {lengths}, expected as many")
