"""Do two decodes accept drafts by one law? A two-sample test of their accepted counts.

Counted are verify steps that no stop token and no length limit cut. Steps of a conversation depend
on one another, so the chi-squared statistic of the two histograms is not read from a table: its law
is that of the same statistic when whole conversations change sides, within each prompt. If both
sides answer the prompts independently and by one law, every such exchange is as likely as what was
seen, so the p-value is exact, whatever the dependence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.optimize import brentq
from scipy.stats import chi2, chi2_contingency, ncx2

from dflash2_lab.errors import LabError
from dflash2_lab.intervals import cluster_draws, percentile_interval

ALPHA = 1e-3  # p-value below which two decodes are said to differ
POWER = 0.8
PERMUTATIONS = 2000
_RARE = 10  # steps of both sides together below which a cell is merged: expected counts are then 5
_SLICE = 2**22  # random numbers drawn at once


@dataclass(frozen=True)
class CountTest:
    """Two samples of accepted counts and how well they agree. Pairs are (first, second) sample.

    Attributes:
        counts: steps by number of accepted drafts, 0..num_draft.
        num_conversations, num_steps, num_cut: of each side; cut steps are left out of `counts`.
        statistic, df: chi-squared of the histograms, rare cells merged.
        p_value: by exchanging conversations; `smallest_p` is the least that so few can give.
        p_value_independent: as if all steps were independent.
        mean_accepted: drafts a step; `difference` first minus second, with its 95 % interval over
            prompts (NaN for a single prompt).
        detectable: difference of the means that is found in `POWER` of all cases, NaN when none is.
    """

    counts: tuple[tuple[int, ...], tuple[int, ...]]
    num_conversations: int
    num_steps: tuple[int, int]
    num_cut: tuple[int, int]
    statistic: float
    df: int
    p_value: float
    smallest_p: float
    p_value_independent: float
    mean_accepted: tuple[float, float]
    difference: float
    low: float
    high: float
    detectable: float

    @property
    def verdict(self) -> str:
        """ "differ", "agree", or "inconclusive" when nothing that small could tell."""
        if self.df == 0 or self.smallest_p >= ALPHA:
            return "inconclusive"
        return "differ" if self.p_value < ALPHA else "agree"


def compare_counts(
    first: pd.DataFrame,
    second: pd.DataFrame,
    prompt_ids: Sequence[str],
    samples: int,
    num_draft: int,
    seed: int = 0,
) -> CountTest:
    """Test two `steps` tables, each of `samples` conversations 0..samples-1 of every prompt.

    Raises:
        LabError: a table without a step that was not cut.
    """
    tables = first, second
    uncut = [table[table["terminal"] == ""] for table in tables]
    for name, table in zip(("first", "second"), uncut, strict=True):
        if table.empty:
            raise LabError(
                f"accepted counts: the {name} sample has no step that the end of its response "
                "does not cut; make longer responses"
            )
    histograms = [_histograms(table, prompt_ids, samples, num_draft) for table in uncut]
    counts = [part.sum(axis=(0, 1)) for part in histograms]
    cells = np.concatenate([_merged(part, counts[0] + counts[1]) for part in histograms], axis=1)
    df = cells.shape[2] - 1
    statistic = float(chi_squared(cells[:, :samples].sum(axis=(0, 1)), cells.sum(axis=(0, 1))))
    drawn = permuted(cells, seed)
    reached = int((drawn >= statistic * (1 - 1e-9)).sum())
    table = np.stack([cells[:, :samples].sum(axis=(0, 1)), cells[:, samples:].sum(axis=(0, 1))])
    means, difference, low, high = _means(histograms)
    steps = tuple(int(part.sum()) for part in counts)
    return CountTest(
        counts=tuple(tuple(map(int, part)) for part in counts),
        num_conversations=samples * len(prompt_ids),
        num_steps=steps,
        num_cut=tuple(len(whole) - len(part) for whole, part in zip(tables, uncut, strict=True)),
        statistic=statistic,
        df=df,
        p_value=(1 + reached) / (1 + len(drawn)),
        smallest_p=_smallest_p(len(prompt_ids), samples),
        p_value_independent=float(chi2_contingency(table, correction=False).pvalue) if df else 1.0,
        mean_accepted=means,
        difference=difference,
        low=low,
        high=high,
        detectable=_detectable(counts[0] + counts[1], steps, df, float(drawn.mean())),
    )


def _histograms(
    steps: pd.DataFrame, prompt_ids: Sequence[str], samples: int, num_draft: int
) -> Int[np.ndarray, "C S P1"]:
    """Accepted counts of every conversation; all zero for one without such a step."""
    rows = pd.Index(prompt_ids).get_indexer(steps["prompt_id"])
    shape = (len(prompt_ids), samples, num_draft + 1)
    flat = np.ravel_multi_index(
        (rows, steps["sample"].to_numpy(), steps["num_accepted"].to_numpy()), shape
    )
    return np.bincount(flat, minlength=math.prod(shape)).reshape(shape)


def _merged(
    histograms: Int[np.ndarray, "C S P1"], pooled: Int[np.ndarray, " P1"]
) -> Int[np.ndarray, "C S cells"]:
    """Neighbouring counts put together until every cell has `_RARE` pooled steps."""
    starts, held = [0], 0
    for count, num in enumerate(pooled):
        if held >= _RARE:
            starts.append(count)
            held = 0
        held += num
    if held < _RARE and len(starts) > 1:
        starts.pop()
    return np.add.reduceat(histograms, starts, axis=2)


def chi_squared(
    side: Float[np.ndarray, "*draws cells"], pooled: Float[np.ndarray, " cells"]
) -> Float[np.ndarray, "*draws"]:
    """Statistic of a two-sample table, from one side's counts and those of both together."""
    share = side.sum(axis=-1, keepdims=True) / pooled.sum()
    expected = share * pooled
    # The other side is as far off, on what it expects itself. A side without a step is no evidence.
    spread = expected * (1 - share)
    parts = np.divide((side - expected) ** 2, spread, np.zeros_like(expected), where=spread > 0)
    return parts.sum(axis=-1)


def permuted(cells: Int[np.ndarray, "C S2 cells"], seed: int) -> Float[np.ndarray, " draws"]:
    """The statistic when the conversations of each prompt are dealt to the sides anew."""
    num_prompts, both, width = cells.shape
    flat, pooled = cells.reshape(-1, width).astype(np.float64), cells.sum(axis=(0, 1))
    rng = np.random.default_rng(seed)
    step = max(1, _SLICE // len(flat))
    parts = []
    for start in range(0, PERMUTATIONS, step):
        num = min(step, PERMUTATIONS - start)
        order = rng.random((num, num_prompts, both)).argsort(axis=2)
        first = (order < both // 2).reshape(num, -1)
        parts.append(chi_squared(first @ flat, pooled))
    return np.concatenate(parts)


def _smallest_p(num_prompts: int, samples: int) -> float:
    """Of all ways to deal the conversations two, mirror images, are the most extreme ones."""
    ways = num_prompts * math.log(math.comb(2 * samples, samples))
    return max(1 / (1 + PERMUTATIONS), min(1.0, 2 * math.exp(-min(ways, 50.0))))


def _means(
    histograms: Sequence[Int[np.ndarray, "C S P1"]],
) -> tuple[tuple[float, float], float, float, float]:
    """Mean accepted drafts of both sides; their difference and its interval over prompts."""
    by_prompt = np.stack([part.sum(axis=1) for part in histograms], axis=1)
    accepted = by_prompt @ np.arange(by_prompt.shape[2])
    means, draws = cluster_draws(accepted, by_prompt.sum(axis=2))
    low, high = percentile_interval(draws[:, 0] - draws[:, 1])
    return tuple(map(float, means)), float(means[0] - means[1]), float(low), float(high)


def _detectable(
    pooled: Int[np.ndarray, " P1"], steps: tuple[int, int], df: int, inflation: float
) -> float:
    """Smallest difference of means seen at `ALPHA` with `POWER`, for a shift that tilts the law.

    Such a shift d gives the statistic the noncentrality d^2 / (var (1/n1 + 1/n2)); dependence of
    steps divides it by the factor by which it inflates the statistic, whose mean is `inflation`.
    """
    if df == 0 or inflation <= 0:
        return math.nan
    limit = chi2.isf(ALPHA, df)
    needed = brentq(lambda shift: ncx2.sf(limit, df, shift) - POWER, 1e-3, 1e3)
    counts = np.arange(len(pooled))
    mean = np.average(counts, weights=pooled)
    variance = np.average((counts - mean) ** 2, weights=pooled)
    return math.sqrt(needed * variance * (1 / steps[0] + 1 / steps[1]) * inflation / df)
