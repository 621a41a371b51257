"""Ratios of sums with cluster-bootstrap intervals; the cluster is the prompt.

Blocks of one prompt are not independent, so whole prompts are resampled: 2,000 draws of as many
prompts as there are, with replacement, percentile 95 %. A ratio is formed once per draw, from the
draw's sums. The same seed gives every statistic the same draws, so differences are paired.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

DRAWS = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value, its 95 % interval and the total weight (number of cases) behind it.

    `low` and `high` are NaN when there are fewer than two prompts: nothing is known then.
    """

    value: float
    low: float
    high: float
    num: float


def sum_by(
    codes: Int[np.ndarray, " N"], values: Float[np.ndarray, "N ..."], num: int
) -> Float[np.ndarray, "num ..."]:
    """Sum the rows of `values` that share a code in 0..num-1."""
    values = np.asarray(values, dtype=np.float64)
    flat = values.reshape(len(values), -1)
    sums = np.empty((num, flat.shape[1]))
    for column in range(flat.shape[1]):
        sums[:, column] = np.bincount(codes, weights=flat[:, column], minlength=num)
    return sums.reshape(num, *values.shape[1:])


def ratio(numerator: Float[np.ndarray, "..."], denominator: Float[np.ndarray, "..."]):
    """Divide, with NaN where the denominator is 0 (nothing was observed there)."""
    numerator, denominator = np.broadcast_arrays(
        np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    )
    missing = np.full(numerator.shape, np.nan)
    return np.divide(numerator, denominator, out=missing, where=denominator != 0)


def cluster_draws(
    numerator: Float[np.ndarray, "C ..."],
    denominator: Float[np.ndarray, "C ..."],
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "draws ..."]]:
    """Return the ratio of sums over clusters and its bootstrap draws (NaN for C < 2)."""
    numerator, denominator = np.broadcast_arrays(
        np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    )
    num_clusters, shape = len(numerator), numerator.shape[1:]
    value = ratio(numerator.sum(axis=0), denominator.sum(axis=0))
    if num_clusters < 2:
        return value, np.full((draws, *shape), np.nan)
    picks = np.random.default_rng(seed).integers(0, num_clusters, size=(draws, num_clusters))
    picks += num_clusters * np.arange(draws)[:, None]
    counts = np.bincount(picks.ravel(), minlength=draws * num_clusters)
    counts = counts.reshape(draws, num_clusters).astype(np.float64)
    sums = [counts @ part.reshape(num_clusters, -1) for part in (numerator, denominator)]
    return value, ratio(*sums).reshape(draws, *shape)


def percentile_interval(
    samples: Float[np.ndarray, "draws ..."],
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Return the 2.5 % and 97.5 % points over the draws.

    Draws that are NaN (a draw without any case of its kind) are left out; all NaN gives NaN.
    """
    tail = (1 - LEVEL) / 2
    known = np.isfinite(samples).any(axis=0)
    filled = np.where(known, samples, 0.0)
    bounds = np.nanquantile(filled, [tail, 1 - tail], axis=0)
    low, high = np.where(known, bounds, np.nan)
    return low, high


def cluster_ratio(
    numerator: Float[np.ndarray, "C ..."],
    denominator: Float[np.ndarray, "C ..."],
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Return value, low, high of a ratio of sums over C clusters, per trailing entry."""
    value, samples = cluster_draws(numerator, denominator, draws, seed)
    return value, *percentile_interval(samples)


def cluster_estimates(
    numerator: Float[np.ndarray, "C M"], denominator: Float[np.ndarray, "C M"]
) -> tuple[Estimate, ...]:
    """Return one `Estimate` per column; `num` is the sum of its denominator."""
    value, low, high = cluster_ratio(numerator, denominator)
    num = np.broadcast_to(denominator, numerator.shape).sum(axis=0)
    return tuple(Estimate(*map(float, row)) for row in zip(value, low, high, num, strict=True))
