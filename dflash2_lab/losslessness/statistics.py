"""The statistics of the battery, each a p-value from known null moments.

Under the null the U are independent uniform numbers, and a score of token t given its prefix has
mean 0 and the variance given with it: sums over tokens are martingales, whatever the contexts.
A statistic that has too little to go by returns 1 ("nothing against the null"), never NaN.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.polynomial.legendre import legvander
from scipy.special import chdtrc, fdtr, fdtrc, gammaincc, ndtr
from scipy.stats import kstwo

MIN_TOKENS = 10
_MIN_SMOOTH = 100  # tokens below which the sums of Legendre polynomials are too far from normal
_MIN_VARIANCE = 2.0
_MAX_SKEWNESS = 10**-0.5
_LAGS = 10
_DEGREES = 4


def randomised_pit(
    below: Float[np.ndarray, " n"], mass: Float[np.ndarray, " n"], v: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """U = F(x^-) + V p(x) for uniform V, kept inside (0, 1).

    Uniform and independent under the null (Rosenblatt; discrete laws: Saad et al. 2019).
    """
    return np.clip(below + v * mass, 2.0**-53, 1 - 2.0**-53)


def kolmogorov_smirnov(u: Float[np.ndarray, " n"]) -> float:
    """Two-sided Kolmogorov-Smirnov distance of sorted numbers from the uniform law."""
    n = len(u)
    if n < MIN_TOKENS:
        return 1.0
    steps = np.arange(n + 1) / n
    distance = max((steps[1:] - u).max(), (u - steps[:-1]).max())
    return float(kstwo.sf(distance, n))


def anderson_darling(u: Float[np.ndarray, " n"]) -> float:
    """Anderson-Darling of sorted numbers in (0, 1) against the uniform law, known in full."""
    n = len(u)
    if n < MIN_TOKENS:
        return 1.0
    weights = np.arange(1, 2 * n, 2)
    statistic = -n - weights @ (np.log(u) + np.log1p(-u[::-1])) / n
    return anderson_darling_tail(float(statistic))


def anderson_darling_tail(statistic: float) -> float:
    """P(A^2 > statistic) as n grows: A^2 = sum_j Z_j^2 / (j (j + 1)).

    Smirnov's formula for such sums: the tail is an alternating sum of integrals of
    exp(-y statistic / 2) between the poles y = j (j + 1) of the characteristic function, here by
    Gauss-Chebyshev nodes. It keeps its relative accuracy at any depth of the tail; the polynomials
    of Marsaglia & Marsaglia (2004) give half of it at 1e-5 and a hundredth of it at 2e-6.
    With 10 tokens levels of 1e-3 and 1e-4 reject 1.10 and 1.15 times as often, from 20 tokens on
    no more than 1.08 times (simulated).
    """
    if statistic < 0.1:
        return 1.0  # P(A^2 < 0.1) is 3e-5
    y, weights = _smirnov_nodes()
    return float(min(1.0, weights @ np.exp(-y * statistic / 2)))


@cache
def _smirnov_nodes(
    intervals: int = 16, nodes: int = 24
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """y and its weight over the intervals: y = (s^2 - 1) / 4 with s = 4 k + x, -1 < x < 1."""
    angle = (np.arange(nodes) + 0.5) * math.pi / nodes
    x = np.cos(angle)
    k = np.arange(1, intervals + 1)[:, None]
    s = 4 * k + x
    y = (s**2 - 1) / 4
    sign = np.where(k % 2 == 1, 1.0, -1.0)
    density = np.sqrt(math.pi / (y * np.cos(math.pi * x / 2))) * s / (2 * math.pi)
    weights = sign * density * np.sin(angle) * math.pi / nodes
    return y.ravel(), weights.ravel()


def neyman(u: Float[np.ndarray, " n"]) -> float:
    """Neyman's smooth test: squared sums of the Legendre polynomials of degree 1..4."""
    if len(u) < _MIN_SMOOTH:
        return 1.0
    sums = legvander(2 * u - 1, _DEGREES)[:, 1:].sum(axis=0)
    norms = 2 * np.arange(1, _DEGREES + 1) + 1
    return float(chdtrc(_DEGREES, (norms * sums**2).sum() / len(u)))


def standard_score(
    score: Float[np.ndarray, " n"],
    variance: Float[np.ndarray, " n"],
    third: Float[np.ndarray, " n"] | None = None,
) -> float:
    """Two-sided tail of Z = sum(score) / sqrt(sum(variance)), normal, corrected for skewness.

    At levels of 1e-5 the rare tokens of a peaked law make the normal tail several times too thin:
    the larger of it and that of the shifted gamma law (Pearson III) with the same third moment is
    taken. Less than about one rare event expected (skewness beyond 1) says nothing.
    """
    total = variance.sum()
    if len(score) < MIN_TOKENS or total <= _MIN_VARIANCE:
        return 1.0
    z = score.sum() / math.sqrt(total)
    tail = ndtr(-abs(z))
    skewness = 0.0 if third is None else third.sum() / total**1.5
    if abs(skewness) > 1:
        return 1.0
    if z * skewness > 1e-6:  # on the other side the normal tail is the larger one
        shape = 4 / skewness**2
        tail = max(tail, gammaincc(shape, shape + abs(z) * math.sqrt(shape)))
    return float(min(1.0, 2 * tail))


class CellTest(NamedTuple):
    """A chi-squared test of cells; `tv` is half the sum of |share seen - share expected|."""

    num: int
    tv: float
    statistic: float
    df: int
    p_value: float


def cell_chi_square(expected: Float[np.ndarray, "n k"], cell: Int[np.ndarray, " n"]) -> float:
    """The p-value of `cell_test`."""
    return cell_test(expected, cell).p_value


def cell_test(expected: Float[np.ndarray, "n k"], cell: Int[np.ndarray, " n"]) -> CellTest:
    """X = D' S^+ D, D = counts - sum of p, S = sum of (diag p - p p'): a law of its own per token.

    Rare cells are merged, and directions of variance at most 2 are left out with their degree of
    freedom. Where none is left the statistic is 0 and p 1.
    """
    num, total = len(cell), expected.sum(axis=0)
    difference = np.bincount(cell, minlength=len(total)) - total
    tv = float(abs(difference).sum() / (2 * max(num, 1)))
    nothing = CellTest(num, tv, 0.0, 0, 1.0)
    if num < MIN_TOKENS:
        return nothing
    merge = _merge_rare(expected)
    if merge.shape[1] == 2:  # one degree of freedom: the score test knows the skewness
        p, inside = expected @ merge[:, 0], merge[cell, 0]
        spread = p * (1 - p)
        p_value = standard_score(inside - p, spread, spread * (1 - 2 * p))
        away = float(difference @ merge[:, 0])
        return CellTest(num, tv, away**2 / float(spread.sum()), 1, p_value)
    spread = merge.T @ (np.diag(total) - expected.T @ expected) @ merge
    values, vectors = np.linalg.eigh(spread)
    wide = values > _MIN_VARIANCE
    if not wide.any():
        return nothing
    along = difference @ merge @ vectors[:, wide]
    statistic, df = float((along**2 / values[wide]).sum()), int(wide.sum())
    return CellTest(num, tv, statistic, df, float(chdtrc(df, statistic)))


def _merge_rare(expected: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "k g"]:
    """Which of g groups each cell joins, as columns of 0 and 1.

    A count of variance at most 2, or as skewed as a Poisson count of mean 10, has far more mass in
    its tail than chi-squared at levels of 1e-5: the rarest joins the next rarest until none is
    left, or a single group.
    """
    merge = np.eye(expected.shape[1])
    while merge.shape[1] > 1:
        p = expected @ merge
        spread = p * (1 - p)
        variance, third = spread.sum(axis=0), (spread * (1 - 2 * p)).sum(axis=0)
        rare = (variance <= _MIN_VARIANCE) | (abs(third) > _MAX_SKEWNESS * variance**1.5)
        if not rare.any():
            break
        first = np.where(rare, variance, np.inf).argmin()
        merge, joined = np.delete(merge, first, axis=1), merge[:, first]
        merge[:, np.delete(variance, first).argmin()] += joined
    return merge


def by_stream(
    values: Float[np.ndarray, " n"], stream: Int[np.ndarray, " n"], order: Int[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, "streams length"], Bool[np.ndarray, "streams length"]]:
    """Lay values out by stream and order, 0 where there is none; and where there is one."""
    rows, row = np.unique(stream, return_inverse=True)
    column = order - order.min() if len(order) else order
    grid = np.zeros((len(rows), column.max(initial=-1) + 1))
    present = np.zeros(grid.shape, dtype=bool)
    grid[row, column], present[row, column] = values, True
    return grid, present


def ljung_box(
    grid: Float[np.ndarray, "streams length"], present: Bool[np.ndarray, "streams length"]
) -> float:
    """Ljung-Box over 10 lags within streams, for standard normal values of known mean 0.

    n (n + 2) sum_k a_k^2 / n_k with n_k pairs at lag k and a_k the partial autocorrelations (Monti
    1994) of the autocovariances pooled over streams. To first order they are the autocorrelations,
    but those go together far out: at 512 tokens and a level of 1e-4 they reject twice as often.
    """
    n, power = present.sum(), (grid**2).sum()
    r, pairs = [], []
    for lag in range(1, min(_LAGS, grid.shape[1] - 1) + 1):
        pairs.append((present[:, lag:] & present[:, :-lag]).sum())
        if pairs[-1] < MIN_TOKENS:
            break
        r.append((grid[:, lag:] * grid[:, :-lag]).sum() / power)
    if not r:
        return 1.0
    a = _partial_autocorrelations(np.array(r))
    return float(chdtrc(len(r), n * (n + 2) * (a**2 / pairs[: len(r)]).sum()))


def _partial_autocorrelations(r: Float[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
    """Durbin-Levinson: the last coefficient of the autoregressions of order 1..m."""
    found, phi, left = np.empty(len(r)), np.zeros(0), 1.0
    for k in range(len(r)):
        found[k] = (r[k] - phi @ r[:k][::-1]) / left
        phi = np.append(phi - found[k] * phi[::-1], found[k])
        left *= 1 - found[k] ** 2
    return found


def between_streams(
    grid: Float[np.ndarray, "streams length"], present: Bool[np.ndarray, "streams length"]
) -> float:
    """Correlation between streams at equal order, two-sided: the intraclass F-test, mean 0.

    At an order with m values their mean, squared, times m has one degree of freedom, what is left
    of the squares m - 1. The law is exact for normal values, and orders of one value say nothing.
    """
    shared = present.sum(axis=0) >= 2
    values, m = grid[:, shared], present[:, shared].sum(axis=0)
    if m.sum() < MIN_TOKENS:
        return 1.0
    between = values.sum(axis=0) ** 2 / m
    orders, rest = len(m), m.sum() - len(m)
    within = (values**2).sum() - between.sum()
    ratio = (between.sum() / orders) / (within / rest) if within > 0 else math.inf
    return float(min(1.0, 2 * min(fdtr(orders, rest, ratio), fdtrc(orders, rest, ratio))))
