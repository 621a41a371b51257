"""The statistics one by one: against tables, independent formulas and exact tails."""

import math

import numpy as np
import pytest
from laws import draw
from scipy.integrate import quad
from scipy.linalg import toeplitz
from scipy.stats import binom, chi2, chisquare, f, poisson

from dflash2_lab.losslessness.statistics import (
    anderson_darling_tail,
    between_streams,
    by_stream,
    cell_chi_square,
    cell_test,
    ljung_box,
    standard_score,
)


def test_the_tail_of_anderson_darling_matches_tables_and_an_independent_integral():
    for statistic, tail in ((1.9329578, 0.1), (2.492367, 0.05), (3.878125, 0.01)):
        assert anderson_darling_tail(statistic) == pytest.approx(tail, rel=1e-4)
    weights = 1 / (np.arange(1, 400) * np.arange(2, 401))
    left = 1 / 400  # the mean of the terms that the product below leaves out

    def imhof(u, x):
        angle = 0.5 * np.arctan(weights * u).sum() - 0.5 * (x - left) * u
        return np.sin(angle) / (u * np.prod((1 + (weights * u) ** 2) ** 0.25))

    for x in (0.5, 1.5, 6.0, 9.0):
        integral = quad(imhof, 0, 3000, args=(x,), limit=2000, epsabs=1e-11)[0]
        assert anderson_darling_tail(x) == pytest.approx(0.5 + integral / math.pi, abs=2e-8)
    # Zolotarev: the largest weight leads, prod over j >= 2 of (1 - w_j / w_1) = 1 / 3
    assert anderson_darling_tail(60.0) == pytest.approx(math.sqrt(3) * chi2.sf(120, 1), rel=0.02)


def test_ljung_box_pools_streams_and_never_pairs_across_them():
    rng = np.random.default_rng(5)
    stream = np.repeat([3, 7, 9], [40, 25, 60])
    order = np.concatenate([np.arange(num) + 100 for num in (40, 25, 60)])
    values = rng.standard_normal(125)
    r, pairs = [], []
    for lag in range(1, 11):
        products = [
            values[i] * values[j]
            for i in range(125)
            for j in range(125)
            if stream[i] == stream[j] and order[j] - order[i] == lag
        ]
        r.append(sum(products) / (values @ values))
        pairs.append(len(products))
    fits = [np.linalg.solve(toeplitz([1, *r[:k]]), r[: k + 1])[-1] for k in range(10)]
    total = 125 * 127 * sum(a**2 / num for a, num in zip(fits, pairs, strict=True))
    shuffled = rng.permutation(125)
    grid = by_stream(values[shuffled], stream[shuffled], order[shuffled])
    assert ljung_box(*grid) == pytest.approx(chi2.sf(total, 10), rel=1e-9)


def test_ljung_box_leaves_out_gaps_and_lags_with_hardly_a_pair():
    rng = np.random.default_rng(21)
    values = rng.standard_normal(40)
    whole = by_stream(values, np.repeat([0, 1], 20), np.tile(np.arange(20), 2))
    apart = by_stream(values, np.repeat([0, 1], 20), np.tile(np.arange(20) * 11, 2))
    assert ljung_box(*whole) < 1
    assert ljung_box(*apart) == 1.0
    # two streams of four: 6 pairs at lag 1
    assert ljung_box(*by_stream(values[:8], np.repeat([0, 1], 4), np.tile(np.arange(4), 2))) == 1.0


def test_rare_cells_are_merged_and_take_their_degree_of_freedom_along():
    rng = np.random.default_rng(6)
    laws = rng.dirichlet((5, 5, 5), 400)
    rare = np.full((400, 1), 1e-3)
    cell = draw(laws, rng.random(400))
    plain = cell_chi_square(laws, cell)
    padded = np.hstack([laws * (1 - rare), rare])
    joined = padded[:, :3] + np.eye(3)[padded.sum(axis=0)[:3].argmin()] * rare
    assert cell_chi_square(padded, cell) == pytest.approx(cell_chi_square(joined, cell), rel=1e-9)
    assert cell_chi_square(padded, cell) == pytest.approx(plain, rel=0.1)
    # two events of a cell of mean 0.4 are no evidence, whatever their standardised size
    assert cell_chi_square(padded, np.where(np.arange(400) < 2, 3, cell)) > 0.1
    # nor are thirteen of mean 3 (a Poisson tail of 2e-5) what chi-squared takes them for
    shares = np.array([0.5, 0.3, 0.19, 0.01])
    events = np.repeat(np.arange(4), [146, 87, 54, 13])
    found = cell_chi_square(np.tile(shares, (300, 1)), events)
    plain = chi2.sf(sum((np.bincount(events) - 300 * shares) ** 2 / (300 * shares)), 3)
    assert plain < poisson.sf(12, 3) < found


def test_two_cells_keep_the_tail_of_their_count():
    num, chance, count = 1000, 0.015, 36
    cell = (np.arange(num) < count).astype(int)
    found = cell_chi_square(np.tile([1 - chance, chance], (num, 1)), cell)
    assert found / 2 == pytest.approx(binom.sf(count - 1, num, chance), rel=0.3)


def test_a_skewed_score_has_the_tail_of_its_rare_events():
    num, chance = 400, 0.02
    variance = np.full(num, chance * (1 - chance))
    score, third = np.zeros(num), variance * (1 - 2 * chance)
    for count in (17, 20, 22, 24):  # tails of 3e-3 to 3e-6
        score[0] = count - num * chance
        found = standard_score(score, variance, third) / 2
        assert found == pytest.approx(binom.sf(count - 1, num, chance), rel=0.3)
    assert standard_score(-score, variance, -third) / 2 == pytest.approx(found)
    assert standard_score(score, variance) < 0.01 * found


def test_scores_without_variance_say_nothing():
    assert standard_score(np.full(50, 1e-9), np.full(50, 1e-18)) == 1.0
    assert standard_score(np.full(50, 3.0), np.ones(50)) < 1e-50


def test_identical_streams_are_as_far_from_independent_as_can_be():
    values = np.tile(np.random.default_rng(18).standard_normal(50), (4, 1))
    assert between_streams(values, np.ones((4, 50), dtype=bool)) == 0.0
    assert between_streams(values[:1], np.ones((1, 50), dtype=bool)) == 1.0


def test_streams_of_unequal_length_share_the_orders_they_have():
    rng = np.random.default_rng(22)
    columns = [rng.standard_normal(m) for m in (4, 4, 3, 3, 3, 2, 1, 1)]
    grid, present = np.zeros((4, 8)), np.zeros((4, 8), dtype=bool)
    for order, column in enumerate(columns):
        grid[: len(column), order], present[: len(column), order] = column, True
    shared = columns[:6]
    between = sum(len(column) * column.mean() ** 2 for column in shared)
    within = sum(((column - column.mean()) ** 2).sum() for column in shared)
    ratio = (between / 6) / (within / (19 - 6))
    wanted = 2 * min(f.cdf(ratio, 6, 13), f.sf(ratio, 6, 13))
    assert between_streams(grid, present) == pytest.approx(wanted, rel=1e-9)


def test_cells_of_one_law_have_the_statistic_of_pearson_and_their_distance():
    law = np.array([0.4, 0.3, 0.2, 0.1])
    counts = np.array([180, 90, 80, 50])
    found = cell_test(np.tile(law, (400, 1)), np.repeat(np.arange(4), counts))
    statistic, p_value = chisquare(counts, 400 * law)
    assert found == pytest.approx((400, (20 + 10) / 400, statistic, 3, p_value))
    assert found.p_value == cell_chi_square(np.tile(law, (400, 1)), np.repeat(np.arange(4), counts))
    two = cell_test(np.tile([0.5, 0.5], (400, 1)), np.repeat([0, 1], [230, 170]))
    assert two == pytest.approx((400, 0.075, 9.0, 1, chi2.sf(9, 1)))
    few = cell_test(np.tile(law, (9, 1)), np.zeros(9, dtype=int))
    assert few == pytest.approx((9, 0.6, 0.0, 0, 1.0))
