"""A monitor that may look after every token: a mixture e-process.

E_n is the mean over m of products of factors >= 0 whose mean given the prefix is exactly 1 under
the target's law. So P(E_n >= 1 / alpha for any n) <= alpha (Ville), at any stopping time, and the
E of independent runs multiply. Factors: f^{1[cell]} / (1 + p_cell (f - 1)) for the drafter's cells,
and 1 + lambda P_k(2 U - 1), P_k Legendre's polynomials (at most 1), for both orders.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.polynomial.legendre import legvander

from dflash2_lab.losslessness.statistics import randomised_pit

if TYPE_CHECKING:
    from dflash2_lab.losslessness.battery import Emitted
    from dflash2_lab.losslessness.scoring import Scores

_TILTS = np.array([0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.6])
_DEGREES = 3
_SLOPES = np.array([-0.5, -0.2, -0.08, 0.08, 0.2, 0.5])
_SPAN = 256  # factors are between 1/2 and 2, so that the product of as many is a float


def log_e_process(emitted: Emitted, noise: np.random.Generator) -> Float[np.ndarray, " n"]:
    """log E after each token, in the order of the arrays.

    Tokens may be of many streams in turn; those of one stream come in their order. A token with
    p(x) = 0 makes E infinite from there on. Without q only the order of p is used.

    Args:
        emitted: the tokens.
        noise: of the randomised transform; must share nothing with what drew the tokens. The same
            seed at every look, so that log E of the tokens already seen stays what it was.
    """
    factors = np.concatenate(factors_of(emitted.scores, noise), axis=1)
    log_e, logs = np.empty(len(factors)), np.zeros(factors.shape[1])
    for start in range(0, len(factors), _SPAN):
        products = factors[start : start + _SPAN].cumprod(axis=0)
        largest = logs.max()
        total = (products * np.exp(logs - largest)).sum(axis=1)
        log_e[start : start + _SPAN] = largest + np.log(total)
        logs += np.log(products[-1])
    log_e -= math.log(factors.shape[1])
    outside = (emitted.scores.p == 0).nonzero()[0]
    if len(outside):
        log_e[outside[0] :] = np.inf
    return log_e


def factors_of(scores: Scores, noise: np.random.Generator) -> list[Float[np.ndarray, "n m"]]:
    """The factors of each family: Legendre in p's order; with q in the drafter's, and cells."""
    v = noise.random((len(scores.p), 2))  # by token: more tokens leave those of the first alone
    found = [_slopes(randomised_pit(scores.below, scores.mass, v[:, 0]))]
    if scores.drafter_cells is not None:
        u = randomised_pit(scores.below_drafter, scores.mass_drafter, v[:, 1])
        found += [_slopes(u), _tilts(scores)]
    return found


def stops_at(log_e: Float[np.ndarray, " n"], alpha: float) -> int | None:
    """How many tokens were seen when E first reached 1 / alpha; None if it never did."""
    over = log_e >= -math.log(alpha)
    return int(over.argmax()) + 1 if over.any() else None


def _slopes(u: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n m"]:
    """1 + lambda P_k(2 u - 1) for all k and lambda."""
    shapes = legvander(2 * u - 1, _DEGREES)[:, 1:]
    return (1 + shapes[:, :, None] * _SLOPES).reshape(len(u), _DEGREES * len(_SLOPES))


def _tilts(scores: Scores) -> Float[np.ndarray, "n m"]:
    """f^{1[x in cell]} / (1 + p_cell (f - 1)) for all cells and f."""
    num, cells = scores.drafter_cells.shape
    inside = scores.drafter_cell[:, None] == np.arange(cells)
    factors = np.where(inside[:, :, None], _TILTS, 1.0)
    factors /= 1 + scores.drafter_cells[:, :, None] * (_TILTS - 1)
    return factors.reshape(num, cells * len(_TILTS))
