"""Repeated timings: fair turns, and intervals that hold what they promise."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from dflash2_lab.bench import timing
from dflash2_lab.bench.timing import (
    COPY_BYTES,
    WARM_UP,
    Spread,
    Timed,
    bandwidths,
    coverage,
    differences,
    interleaved,
    order,
    order_statistic,
    ratios,
)

CPU = torch.device("cpu")


def covered(num, k):
    """Share of all ways in which `num` values lie around a median that it is enclosed."""
    below = [sum(signs) for signs in itertools.product((0, 1), repeat=num)]
    return sum(k <= count <= num - k for count in below) / len(below)


@pytest.mark.parametrize(("num", "k"), [(1, 1), (2, 1), (5, 2), (6, 1), (9, 2), (12, 3)])
def test_coverage_is_the_share_of_all_sign_patterns(num, k):
    assert coverage(num, k) == pytest.approx(covered(num, k), abs=1e-12)


@pytest.mark.parametrize("num", range(1, 15))
def test_the_interval_is_the_tightest_that_reaches_its_level(num):
    good = [k for k in range(1, num // 2 + 1) if covered(num, k) >= 0.95]
    assert order_statistic(num) == max(good, default=1)


def test_an_interval_holds_the_median_of_skewed_noise_as_often_as_it_says():
    noise = torch.empty(2000, 20).exponential_()
    spreads = [Spread.of(row.tolist()) for row in noise]
    true = 0.6931471805599453  # ln 2, the exponential law's median
    share = sum(spread.low <= true <= spread.high for spread in spreads) / len(spreads)
    assert share == pytest.approx(coverage(20, order_statistic(20)), abs=0.02)


def test_spread_of_many_values_leaves_out_the_ends():
    values = [float(value) for value in range(100)]
    spread = Spread.of(values[::-1])
    assert spread == Spread(49.5, 39.0, 60.0)  # 40th smallest and largest: 96.5 %
    assert spread.half_width == 10.5
    assert spread.scaled(2.0) == Spread(99.0, 78.0, 120.0)


def test_pairs_are_formed_within_rounds():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert differences([2.0, 9.0], [1.0, 3.0]) == [1.0, 6.0]


def test_every_side_is_in_every_place_equally_often():
    names = ["a", "b", "c"]
    rounds = [order(names, turn) for turn in range(6)]
    for place in range(3):
        assert sorted(found[place] for found in rounds) == sorted(names * 2)


def test_a_turn_is_a_reset_an_uncounted_step_and_the_counted_ones():
    calls = []
    sides = {
        name: Timed(
            lambda name=name: calls.append(name), lambda name=name: calls.append(f"<{name}")
        )
        for name in ("a", "b")
    }
    samples = interleaved(sides, 2, 3, CPU)
    assert {name: len(values) for name, values in samples.items()} == {"a": 2, "b": 2}
    turns = "".join(calls).split("<")[1:]
    assert set(turns) == {"aaaaa", "bbbbb"}  # its reset, one to settle, three
    assert [turn[0] for turn in turns[:4]] == ["a", "b", "b", "a"]
    assert len(turns) == 2 * (2 + WARM_UP)


def test_seconds_are_those_of_one_step_and_what_rounds_share_cancels(monkeypatch):
    clock = {"now": 0.0, "turns": 0}

    def enter():
        clock["turns"] += 1
        clock["now"] += 100.0  # of no side's time

    def step(extra):
        # both sides are slow in every other round
        slow = 3.0 if (clock["turns"] - 1) // 2 % 2 else 1.0
        clock["now"] += slow + extra

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock["now"]))
    sides = {"short": Timed(lambda: step(0.0), enter), "long": Timed(lambda: step(0.5), enter)}
    samples = interleaved(sides, 4, 8, CPU)
    assert samples["short"] == [1.0, 3.0, 1.0, 3.0]
    assert differences(samples["long"], samples["short"]) == [0.5] * 4


def test_bandwidths_of_this_machine(monkeypatch, device):
    monkeypatch.setitem(COPY_BYTES, device.type, 2**20)
    found = bandwidths(device, repeats=2)
    assert set(found) == {"copy", "read"}
    assert all(spread.low > 0 for spread in found.values())
