"""How many greedy choices may flip: the gate against plain sums and against simulated decodes."""

import numpy as np
import pytest
from scipy.stats import binom

from dflash2_lab.losslessness.flips import flip_chances, flip_tail, most_flips


def test_chances_are_shares_of_the_measured_law():
    law = np.array([-3.0, 1.0, 0.5, -0.5])
    chances = flip_chances(np.array([0.0, 0.5, 0.6, 2.0, 4.0, 4.1]), law, band=4.0)
    np.testing.assert_allclose(chances, np.array([5, 5, 3, 2, 1, 0]) / 5)


@pytest.mark.parametrize("alpha", [1e-3, 0.05])
def test_the_limit_is_that_of_a_binomial_for_equal_chances(alpha):
    chances = np.array([0.1] * 200 + [0.0] * 50)
    tails = binom(200, 0.1).sf(np.arange(-1, 200))
    assert most_flips(chances, alpha) == np.flatnonzero(tails >= alpha).max()
    for count in (0, 1, 20, 40):
        np.testing.assert_allclose(flip_tail(chances, count), tails[count], rtol=1e-9)
    assert flip_tail(chances, 201) == 0.0


def test_without_a_tie_in_the_band_no_flip_is_allowed():
    chances = flip_chances(np.array([1.0, 2.0]), np.array([0.1]), band=0.5)
    assert (most_flips(chances, 1e-3), flip_tail(chances, 0), flip_tail(chances, 1)) == (0, 1, 0)


def test_rounding_passes_and_a_fault_that_flips_all_near_ties_fails():
    rng = np.random.default_rng(0)
    law, gaps = rng.normal(0, 0.2, 2000), rng.exponential(2.0, 1000)
    chances = flip_chances(gaps, law, band=1.6)
    limit = most_flips(chances, 1e-3)
    flips = (rng.normal(0, 0.2, (5000, 1000)) < -gaps).sum(axis=1)
    assert 0 < flips.mean() < chances.sum()
    assert (flips > limit).mean() < 1e-3
    assert (gaps < 0.4).sum() > limit
