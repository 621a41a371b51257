"""Whole runs of a correct decoder: how often the battery, as the budget spends it, says otherwise.

A run is 256 tokens of the toy in 8 streams, with the log of their blocks: the tests of tokens, of
stages and the monitor, as `verify` holds them. Larger runs are nearer to the limit laws.
"""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import binomtest

from dflash2_lab.losslessness.battery import Budget
from dflash2_lab.losslessness.mutation import p_values, rejections
from dflash2_lab.losslessness.toy import ARMS, ToyConfig, make_toy
from dflash2_lab.losslessness.toy_decoding import Rules, decode
from dflash2_lab.losslessness.toy_observing import observe_runs

EXACT = {"ks", "ad", "neyman", "rank_cells", "ljung_box", "streams", "heat", "ad_drafter"}
EXACT |= {"drafter_cells", "draft_heat", "accept_flags", "draft_ad"}  # never short of numbers


def null_runs(runs_an_arm, seed, num_tokens=256, at_once=50):
    """The p-values of each run by tier, of every arm in turn."""
    found = []
    for number, arm in enumerate(ARMS):
        toy = make_toy(ToyConfig(arm=arm))
        for start in range(0, runs_an_arm, at_once):
            entropy = (seed, number, start)
            num_runs = min(at_once, runs_an_arm - start)
            decoded = decode(toy, Rules(), num_tokens, num_runs, seed=entropy)
            noise = np.random.default_rng((*entropy, 1))
            found += [p_values(*run, noise) for run in observe_runs(toy, decoded, num_tokens)]
    return found


def keeps_its_level(alarms, num_runs, level):
    """Exact: so many alarms are no reason to think that the chance of one is above the level."""
    return binomtest(alarms, num_runs, level, alternative="greater").pvalue > 1e-3


def count(runs, budget):
    return sum(bool(rejections(run, budget)) for run in runs)


def inflated(runs, tier, name, factor):
    """The runs, had one statistic a standard error so much too small."""
    for run in runs:
        p = 2 * ndtr(factor * ndtri(run[tier][name] / 2))
        yield run | {tier: run[tier] | {name: p}}


def test_a_few_hundred_runs_keep_a_high_level_and_one_inflated_statistic_does_not():
    runs = null_runs(40, seed=1)
    budget = Budget(alpha=0.05)
    assert keeps_its_level(count(runs, budget), 120, 0.05)
    assert not keeps_its_level(count(inflated(runs, "pit", "heat", 2.0), budget), 120, 0.05)


@pytest.fixture(scope="module")
def many_runs():
    return null_runs(3_334, seed=2)


@pytest.mark.slow
def test_ten_thousand_runs_keep_the_level_of_a_run(many_runs):
    assert len(many_runs) >= 10_000
    alarms = count(many_runs, Budget())
    assert keeps_its_level(alarms, len(many_runs), Budget().alpha)
    assert alarms > 0  # a battery that cannot reject would pass the line above


@pytest.mark.slow
def test_each_test_of_ten_thousand_runs_keeps_its_level(many_runs):
    for tier, tests in many_runs[0].items():
        for name in tests:
            found = np.array([run[tier][name] for run in many_runs])
            for level in (0.05, 0.01, 1e-3):
                assert keeps_its_level(int((found <= level).sum()), len(found), level), name
            if name in EXACT:
                assert binomtest(int((found <= 0.05).sum()), len(found), 0.05).pvalue > 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "name"),
    [("pit", "ks"), ("pit", "drafter_cells"), ("component", "residual_ad"), ("monitor", "monitor")],
)
def test_ten_thousand_runs_show_one_statistic_that_is_inflated_by_half(many_runs, tier, name):
    factor = 3 if name == "monitor" else 1.5  # whose level is a bound that is never reached
    alarms = count(inflated(many_runs, tier, name, factor), Budget())
    assert not keeps_its_level(alarms, len(many_runs), Budget().alpha)
