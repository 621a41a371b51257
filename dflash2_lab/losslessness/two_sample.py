"""Two-sample tests, where no law is known: do two engines answer the same prompts by one law?

Outputs of a prompt are compared place by place, an output that has ended having a value of its own
there. The statistic is the maximum mean discrepancy with the Hamming string kernel k(x, y) = places
at which x and y agree (Gao et al. 2024, arXiv 2410.20247), averaged over prompts. (The energy
distance of the Hamming distance is the same number.) Its law is that of the same statistic when
outputs change sides within each prompt: if both sides are samples of one law, every such exchange
is as likely as what was seen, and p = (1 + count) / (1 + draws) is exact, whatever the dependence
within an output. The second test is a G-test of first tokens, pooled over prompts.

A known law tells far more: simulated with speculative decoders, these tests needed 25 to 125 times
the tokens of the tests in `battery`.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import chi2

from dflash2_lab.errors import LabError

PERMUTATIONS = 9_999
_MIN_EXPECTED = 5.0  # first tokens of either side below which a cell is merged
_SLICE = 2**22  # random numbers drawn at once

Outputs = Sequence[Sequence[Hashable]]  # of one prompt, one side: tokens or characters


@dataclass(frozen=True)
class TwoSample:
    """Two sets of outputs and how well they agree. Pairs are (first, second) side.

    Attributes:
        num_prompts, num_outputs, num_tokens: what was compared, places beyond `horizon` left out.
        horizon: places compared: the longest output of the side whose longest one is shorter.
        mmd: mean squared discrepancy over prompts, in places.
        p_mmd: by exchange; `smallest_p` is the least that so few outputs can give.
        statistic, df, p_first_token: the G-test; df 0 when no prompt has two cells to compare.
    """

    num_prompts: int
    num_outputs: tuple[int, int]
    num_tokens: tuple[int, int]
    horizon: int
    mmd: float
    p_mmd: float
    smallest_p: float
    statistic: float
    df: int
    p_first_token: float

    def verdict(self, alpha: float) -> str:
        """ "differ", "no difference", or "inconclusive" when nothing that small could tell.

        Each of the two tests has alpha / 2.
        """
        if min(self.p_mmd, self.p_first_token) <= alpha / 2:
            return "differ"
        tells = self.smallest_p <= alpha / 2 or self.df > 0
        return "no difference" if tells else "inconclusive"


def compare_outputs(
    first: Mapping[Hashable, Outputs],
    second: Mapping[Hashable, Outputs],
    seed: int = 0,
    permutations: int = PERMUTATIONS,
) -> TwoSample:
    """Test outputs of two sides, by prompt; outputs of one side and prompt must be independent.

    Raises:
        LabError: nothing to compare, or prompts that only one side has.
    """
    if not first or first.keys() != second.keys():
        raise LabError(
            f"found {len(first)} and {len(second)} prompts, {len(first.keys() & second.keys())} of "
            "them shared; expected the same ones on both sides, at least one"
        )
    longest = [max(map(len, chain(*side.values()))) for side in (first, second)]
    horizon = min(longest)
    rng = np.random.default_rng(seed)
    observed, drawn, ways, statistic, df = 0.0, np.zeros(permutations), 0.0, 0.0, 0
    for prompt in first:
        sides = first[prompt], second[prompt]
        codes = _codes([*sides[0], *sides[1]], horizon)
        num = len(sides[0])
        seen, dealt = _exchange(hamming_kernel(codes), num, permutations, rng)
        observed, drawn = observed + seen, drawn + dealt
        ways += _log_ways(num, len(sides[1]))
        g, cells = _first_tokens(codes[:num, 0], codes[num:, 0])
        statistic, df = statistic + g, df + cells
    # Sums of the same numbers in another order differ by rounding.
    reached = int((drawn >= observed * (1 - 1e-9) - 1e-12).sum())
    return TwoSample(
        num_prompts=len(first),
        num_outputs=tuple(sum(map(len, side.values())) for side in (first, second)),
        num_tokens=tuple(
            sum(min(len(output), horizon) for output in chain(*side.values()))
            for side in (first, second)
        ),
        horizon=horizon,
        mmd=observed / len(first),
        p_mmd=(1 + reached) / (1 + permutations),
        smallest_p=max(1 / (1 + permutations), math.exp(-min(ways, 50.0))),
        statistic=statistic,
        df=df,
        p_first_token=float(chi2.sf(statistic, df)) if df else 1.0,
    )


def _codes(outputs: Outputs, horizon: int) -> Int[np.ndarray, "n L"]:
    """Outputs as numbers, cut to the horizon; -1 behind the end of one."""
    numbers: dict[Hashable, int] = {}
    codes = np.full((len(outputs), horizon), -1)
    for row, output in zip(codes, outputs, strict=True):
        row[: len(output)] = [numbers.setdefault(token, len(numbers)) for token in output[:horizon]]
    return codes


def hamming_kernel(codes: Int[np.ndarray, "n L"]) -> Int[np.ndarray, "n n"]:
    """Places at which two outputs agree."""
    kernel = np.zeros((len(codes), len(codes)), dtype=np.int64)
    for column in codes.T:
        kernel += column[:, None] == column
    return kernel


def _exchange(
    kernel: Int[np.ndarray, "n n"], num: int, permutations: int, rng: np.random.Generator
) -> tuple[float, Float[np.ndarray, " draws"]]:
    """w' K w with w = 1 / size on the first side and -1 / size on the second: as seen, and when
    the outputs are dealt to the sides anew."""
    total = len(kernel)
    weights = np.full(total, -1.0 / (total - num))
    weights[:num] = 1.0 / num
    step, parts = max(1, _SLICE // total), []
    for start in range(0, permutations, step):
        order = rng.random((min(step, permutations - start), total)).argsort(axis=1)
        dealt = weights[order]
        parts.append(np.einsum("ij,ij->i", dealt @ kernel, dealt))
    return float(weights @ kernel @ weights), np.concatenate(parts)


def _log_ways(first: int, second: int) -> float:
    """Ways to deal the outputs of a prompt that can differ: mirror images of equal sides do not."""
    mirror = math.log(2) if first == second else 0.0
    return math.log(math.comb(first + second, first)) - mirror


def _first_tokens(first: Int[np.ndarray, " n"], second: Int[np.ndarray, " m"]) -> tuple[float, int]:
    """G and degrees of freedom of one prompt: cells of too few on either side are merged, and what
    they are together is left out when it is too few still."""
    width = int(max(first.max(), second.max())) + 1
    counts = np.stack([np.bincount(side, minlength=width) for side in (first, second)])
    share = counts.sum(axis=1, keepdims=True) / counts.sum()
    large = (share * counts.sum(axis=0)).min(axis=0) >= _MIN_EXPECTED
    cells = np.column_stack([counts[:, large], counts[:, ~large].sum(axis=1)])
    cells = cells[:, (share * cells.sum(axis=0)).min(axis=0) >= _MIN_EXPECTED]
    if cells.shape[1] < 2:
        return 0.0, 0
    expected = cells.sum(axis=1, keepdims=True) * cells.sum(axis=0) / cells.sum()
    parts = np.where(cells > 0, cells * np.log(np.maximum(cells, 1) / expected), 0.0)
    return float(2 * parts.sum()), cells.shape[1] - 1
