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
from scipy.special import logsumexp

from dflash2_lab.losslessness.statistics import randomised_pit

if TYPE_CHECKING:
    from dflash2_lab.losslessness.battery import Emitted
    from dflash2_lab.losslessness.scoring import Scores

_TILTS = np.array([0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.6])
_DEGREES = 3
_SLOPES = np.array([-0.5, -0.2, -0.08, 0.08, 0.2, 0.5])


def log_e_process(emitted: Emitted, noise: np.random.Generator) -> Float[np.ndarray, " n"]:
    """log E after each token, in the order of the arrays.

    Tokens may be of many streams in turn; those of one stream come in their order. A token with
    p(x) = 0 makes E infinite from there on. Without q only the order of p is used.

    Args:
        emitted: the tokens.
        noise: of the randomised transform; must share nothing with what drew the tokens. The same
            seed at every look, so that log E of the tokens already seen stays what it was.
    """
    logs = np.concatenate(log_factors(emitted.scores, noise), axis=1)
    logs[emitted.scores.p == 0] = np.inf
    running = logs.cumsum(axis=0)
    return logsumexp(running, axis=1) - math.log(running.shape[1])


def log_factors(scores: Scores, noise: np.random.Generator) -> list[Float[np.ndarray, "n m"]]:
    """The log factors of each family: Legendre in p's order; with q in the drafter's, and cells."""
    v = noise.random((len(scores.p), 2))  # by token: more tokens leave those of the first alone
    logs = [_slopes(randomised_pit(scores.below, scores.mass, v[:, 0]))]
    if scores.drafter_cells is not None:
        u = randomised_pit(scores.below_drafter, scores.mass_drafter, v[:, 1])
        logs += [_slopes(u), _tilts(scores)]
    return logs


def stops_at(log_e: Float[np.ndarray, " n"], alpha: float) -> int | None:
    """How many tokens were seen when E first reached 1 / alpha; None if it never did."""
    over = log_e >= -math.log(alpha)
    return int(over.argmax()) + 1 if over.any() else None


def _slopes(u: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n m"]:
    """log(1 + lambda P_k(2 u - 1)) for all k and lambda."""
    shapes = legvander(2 * u - 1, _DEGREES)[:, 1:]
    return np.log1p(shapes[:, :, None] * _SLOPES).reshape(len(u), _DEGREES * len(_SLOPES))


def _tilts(scores: Scores) -> Float[np.ndarray, "n m"]:
    """1[x in cell] log f - log(1 + p_cell (f - 1)) for all cells and f."""
    num, cells = scores.drafter_cells.shape
    inside = scores.drafter_cell[:, None] == np.arange(cells)
    logs = inside[:, :, None] * np.log(_TILTS)
    logs -= np.log1p(scores.drafter_cells[:, :, None] * (_TILTS - 1))
    return logs.reshape(num, cells * len(_TILTS))
