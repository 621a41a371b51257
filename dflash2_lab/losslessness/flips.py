"""How many greedy choices may flip by rounding: a Poisson-binomial gate.

A choice flips where rounding moves its two best tokens past each other, with the probability
P(|d| >= gap) by the law of d = delta_a - delta_b that a calibration gave. A fault that only flips
choices inside the noise band passes every gate on gaps; it flips too many of them.
"""

from bisect import bisect_left

import numpy as np
from jaxtyping import Float
from scipy.stats import poisson_binom


def flip_chances(
    gaps: Float[np.ndarray, " n"], law: Float[np.ndarray, " m"], band: float
) -> Float[np.ndarray, " n"]:
    """Probability of a flip at each gap between the two best tokens.

    Args:
        law: measured differences d.
        band: gap beyond which nothing flips; inside it the chance is never below 1 / (m + 1).
    """
    sizes = np.sort(np.abs(law))
    beyond = len(sizes) - np.searchsorted(sizes, gaps, side="left")
    return np.where(gaps <= band, (1 + beyond) / (1 + len(sizes)), 0.0)


def flip_tail(chances: Float[np.ndarray, " n"], count: int) -> float:
    """Probability of at least `count` flips."""
    possible = chances[chances > 0]
    if count > len(possible):
        return 0.0
    if count == 0:
        return 1.0
    return float(poisson_binom(possible).sf(count - 1))


def most_flips(chances: Float[np.ndarray, " n"], alpha: float) -> int:
    """The largest number of flips whose upper tail is at least `alpha`."""
    counts = range(int((chances > 0).sum()) + 1)
    return bisect_left(counts, True, key=lambda count: flip_tail(chances, count) < alpha) - 1
