"""The battery: scores by brute force, p-values under the null, power against planted faults."""

import math

import numpy as np
import pytest
import torch
from laws import (
    SLOTS,
    STREAMS,
    VOCAB,
    draw,
    emitted,
    parts,
    proposals,
    pull_to_drafter,
    random_laws,
    scored,
    tempered,
)
from scipy.integrate import quad
from scipy.linalg import toeplitz
from scipy.stats import binom, binomtest, chi2, f, kstest, poisson

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.battery import (
    Budget,
    Drafted,
    component_tests,
    holm,
    pit_tests,
    smallest_tv,
)
from dflash2_lab.losslessness.scoring import residual_pit
from dflash2_lab.losslessness.statistics import (
    anderson_darling_tail,
    between_streams,
    by_stream,
    cell_chi_square,
    ljung_box,
    standard_score,
)

PIT_NAMES = {
    *("support", "ks", "ad", "ad_drafter", "neyman", "drafter_score", "rank_cells"),
    *("drafter_cells", "ljung_box", "slots", "streams", "heat"),
}
COMPONENT_NAMES = {"draft_heat", "draft_ad", "accept_flags", "residual_ad", "bonus_ad"}


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


@pytest.fixture(scope="module")
def null_p_values():
    """Every statistic over 300 runs of 512 tokens drawn from their laws."""
    rng = np.random.default_rng(7)
    p = random_laws(rng, 300 * 512)
    whole = emitted(draw(p, rng.random(len(p))), p, proposals(rng, p))
    runs = [pit_tests(run, rng) for run in parts(whole, 512)]
    return {name: np.array([run[name] for run in runs]) for name in runs[0]}


@pytest.mark.parametrize("name", sorted(PIT_NAMES - {"support", "slots"}))
def test_p_values_are_uniform_under_the_null(null_p_values, name):
    assert kstest(null_p_values[name], "uniform").pvalue > 1e-3


@pytest.mark.parametrize("level", [0.01, 0.05, 0.2])
def test_the_least_p_value_of_the_slots_rejects_no_more_than_its_level(null_p_values, level):
    rejected = int((null_p_values["slots"] <= level).sum())
    assert binomtest(rejected, 300, level, alternative="greater").pvalue > 1e-3
    assert rejected > 0 or level < 0.05


def test_all_statistics_are_there_and_support_holds_under_the_null(null_p_values):
    assert set(null_p_values) == PIT_NAMES
    assert (null_p_values["support"] == 1).all()


def swap_two_best(p, rng):
    law, best = p.copy(), np.argsort(-p, axis=1)[:, :2]
    rows = np.arange(len(p))
    share = 0.15 * p[rows, best[:, 0]]
    law[rows, best[:, 0]] -= share
    law[rows, best[:, 1]] += share
    return law


def ranked_draw(p, uniform):
    """Tokens by the inverse cdf over p descending: equal uniforms give ranks that go together."""
    ranked = np.argsort(-p, axis=1, kind="stable")
    return np.take_along_axis(ranked, draw(np.take_along_axis(p, ranked, 1), uniform)[:, None], 1)[
        :, 0
    ]


def faulty_tokens(fault, rng, p, q):
    num = len(p)
    uniform = rng.random(num)
    order = np.arange(num) // STREAMS
    if fault == "tempered":
        return draw(tempered(p, 0.7), uniform)
    if fault == "pulled to the drafter":
        law = pull_to_drafter(p, q)
        return draw(law / law.sum(axis=1, keepdims=True), uniform)
    if fault == "best two mixed up":
        return draw(swap_two_best(p, rng), uniform)
    if fault == "reseeded every block":
        first = rng.random((STREAMS, SLOTS))
        return ranked_draw(p, first[np.arange(num) % STREAMS, order % SLOTS])
    if fault == "streams share their numbers":
        return ranked_draw(p, rng.random(num)[order])
    if fault == "one slot at fault":
        return np.where(order % SLOTS == 3, draw(tempered(p, 0.35), uniform), draw(p, uniform))
    raise AssertionError(fault)


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("tempered", {"ks", "ad", "neyman", "heat", "rank_cells"}),
        ("pulled to the drafter", {"ad_drafter", "drafter_score", "drafter_cells"}),
        ("best two mixed up", {"rank_cells"}),
        ("reseeded every block", {"ljung_box"}),
        ("streams share their numbers", {"streams"}),
        ("one slot at fault", {"slots"}),
    ],
)
def test_each_statistic_sees_a_fault_of_its_kind(fault, names):
    rng = np.random.default_rng(8)
    p = random_laws(rng, 4096)
    q = proposals(rng, p)
    found = pit_tests(emitted(faulty_tokens(fault, rng, p, q), p, q), rng)
    assert names <= {name for name, value in found.items() if value < 1e-5}, found


def test_a_fault_of_one_slot_is_clearer_there_than_in_all_tokens():
    rng = np.random.default_rng(9)
    p = random_laws(rng, 1500)
    found = pit_tests(emitted(faulty_tokens("one slot at fault", rng, p, p), p), rng)
    assert found["slots"] < 0.1 * found["ad"]


def test_one_token_outside_the_support_decides_and_hurts_no_other_statistic():
    rng = np.random.default_rng(10)
    p = random_laws(rng, 512)
    p[7] = np.eye(VOCAB)[3]
    tokens = draw(p, rng.random(512))
    tokens[7] = 5
    found = pit_tests(emitted(tokens, p, proposals(rng, p)), rng)
    assert found["support"] == 0.0 and holm(found, 1e-3) == ["support"]
    assert np.isfinite(list(found.values())).all()


@pytest.mark.parametrize("num", [0, 1, 5, 9, 10, 40])
@pytest.mark.parametrize("with_q", [True, False])
@pytest.mark.parametrize("kind", ["random", "certain", "nearly certain"])
@pytest.mark.parametrize("streams", [1, 8])
def test_too_little_to_go_by_is_never_nan_and_never_a_finding(num, with_q, kind, streams):
    rng = np.random.default_rng(11)
    p = random_laws(rng, num)
    if kind != "random":
        p = (0.0 if kind == "certain" else 1e-7) * p + np.eye(VOCAB)[rng.integers(0, VOCAB, num)]
        p /= p.sum(axis=1, keepdims=True)
    q = p.copy() if with_q else None
    found = pit_tests(emitted(draw(p, rng.random(num)), p, q, streams), rng)
    drafter = {"ad_drafter", "drafter_score", "drafter_cells"}
    assert set(found) == (PIT_NAMES if with_q else PIT_NAMES - drafter)
    assert all(1e-4 < value <= 1 for value in found.values()), found
    if num < 10:
        assert set(found.values()) <= {1.0}


def test_places_taken_twice_and_columns_of_other_lengths_are_refused():
    rng = np.random.default_rng(12)
    p = random_laws(rng, 32)
    good = emitted(draw(p, rng.random(32)), p)
    with pytest.raises(LabError, match="found 31 tokens at a place"):
        pit_tests(good._replace(order=0 * good.order, stream=0 * good.stream), rng)
    with pytest.raises(LabError, match="found 32 scores"):
        pit_tests(good._replace(slot=good.slot[:5]), rng)


def drafts(rng, num, fault=None):
    """One draft a block and what a verifier does with it; `fault` names the stage that is wrong."""
    p = random_laws(rng, num)
    q = proposals(rng, p)
    drawn = draw(tempered(q, 0.7) if fault == "draft" else q, rng.random(num))
    rows = np.arange(num)
    chance = np.minimum(1, p[rows, drawn] / q[rows, drawn])
    bar = 1.2 * chance if fault == "accept" else chance
    accepted = rng.random(num) < bar
    residual = np.clip(p - q, 0, None)[~accepted]
    residual /= residual.sum(axis=1, keepdims=True)
    law = p[~accepted] if fault == "residual" else residual
    next_token = draw(law, rng.random(len(law)))
    bonus_law = random_laws(rng, int(accepted.sum()))
    off = np.roll(bonus_law, 1, axis=0) if fault == "bonus" else bonus_law
    bonus = scored(draw(off, rng.random(len(off))), bonus_law)
    of_q = scored(drawn, q)
    pieces = residual_pit(*map(torch.from_numpy, (next_token, p[~accepted], q[~accepted])))
    return Drafted(
        *(of_q.heat_score, of_q.heat_variance, of_q.below, of_q.mass),
        *(np.ones(num, dtype=bool), accepted, chance, *pieces, bonus.below, bonus.mass),
        heat_third=of_q.heat_third,
    )


def draft_parts(whole, size):
    """Cut what happened into runs of `size` blocks of one draft."""
    refused = np.concatenate([[0], (~whole.accepted).cumsum()])
    for start in range(0, len(whole.accepted), size):
        rows = slice(start, start + size)
        ends = refused[start], refused[start + size]
        residual, bonus = slice(*ends), slice(start - ends[0], start + size - ends[1])
        cuts = (*[rows] * 7, residual, residual, bonus, bonus, rows)
        yield Drafted(*(x[cut] for x, cut in zip(whole, cuts, strict=True)))


def test_component_p_values_are_uniform_under_the_null():
    rng = np.random.default_rng(13)
    runs = [component_tests(run, rng) for run in draft_parts(drafts(rng, 200 * 400), 400)]
    assert set(runs[0]) == COMPONENT_NAMES
    for name in COMPONENT_NAMES:
        assert kstest([run[name] for run in runs], "uniform").pvalue > 1e-3, name


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("draft", {"draft_heat", "draft_ad"}),
        ("accept", {"accept_flags"}),
        ("residual", {"residual_ad"}),
        ("bonus", {"bonus_ad"}),
    ],
)
def test_component_tests_name_the_stage_at_fault_and_no_other(fault, names):
    rng = np.random.default_rng(14)
    found = component_tests(drafts(rng, 3000, fault), rng)
    assert {name for name, value in found.items() if value < 1e-4} == names, found


def test_stages_that_never_ran_say_nothing():
    none, flags = np.zeros(0), np.zeros(0, dtype=bool)
    empty = Drafted(none, none, none, none, flags, flags, none, none, none, none, none, none)
    found = component_tests(empty, np.random.default_rng(15))
    assert found == dict.fromkeys(COMPONENT_NAMES, 1.0)
    many = drafts(np.random.default_rng(16), 200)
    unreached = many._replace(reached=np.zeros(200, dtype=bool), accepted=~many.accepted)
    assert component_tests(unreached, np.random.default_rng(17))["accept_flags"] == 1.0


def test_holm_steps_down_from_the_smallest():
    p_values = {"a": 0.011, "b": 0.04, "c": 0.001, "d": 0.02}
    assert holm(p_values, 0.05) == ["c", "a", "d", "b"]
    assert holm(p_values, 0.04) == ["c", "a", "d", "b"]
    assert holm(p_values, 0.039) == ["c", "a"]  # 0.02 > 0.039 / 2, whatever comes after
    assert holm(p_values, 0.003) == []
    assert holm({}, 0.05) == []


def test_the_budget_spends_alpha_once():
    budget = Budget(alpha=1e-3, configurations=2, arms=3)
    spent = 6 * sum(budget.level(tier) for tier in ("pit", "component", "monitor"))
    assert spent == pytest.approx(1e-3)
    assert Budget().level("pit") == pytest.approx(0.5e-3)
    assert 1 / Budget().level("monitor") == pytest.approx(5000)


@pytest.mark.parametrize(
    "options", [{"alpha": 0.0}, {"alpha": 1.5}, {"pit": 0.9}, {"pit": -0.5, "monitor": 1.2}]
)
def test_a_budget_that_does_not_add_up_is_refused(options):
    with pytest.raises(LabError, match="found"):
        Budget(**options)
    with pytest.raises(LabError, match="found 0 configurations"):
        Budget(configurations=0)


@pytest.mark.parametrize(
    ("num", "distance"), [(242, 0.2), (4108, 0.0485), (96_626, 0.01), (1, 1.0), (0, 1.0)]
)
def test_the_smallest_total_variation_is_that_of_the_tables(num, distance):
    assert smallest_tv(num, 1e-4) == pytest.approx(distance, rel=2e-3)


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


def test_tokens_of_no_known_slot_are_at_no_slot():
    rng = np.random.default_rng(23)
    p = random_laws(rng, 400)
    fair = emitted(draw(p, rng.random(400)), p)
    unknown = np.full(400, -1)
    assert pit_tests(fair._replace(slot=unknown), rng)["slots"] == 1.0
    beside = np.where(np.arange(400) < 200, fair.slot, unknown)
    found = [
        pit_tests(part._replace(slot=slot), np.random.default_rng(24))["slots"]
        for part, slot in ((fair, beside), (next(parts(fair, 200)), fair.slot[:200]))
    ]
    assert found[0] == pytest.approx(found[1])


def test_flags_of_drafts_that_were_not_reached_do_not_count():
    rng = np.random.default_rng(25)
    fair = drafts(rng, 2000)
    reached = rng.random(2000) < 0.5
    found = component_tests(fair._replace(reached=reached, accepted=fair.accepted & reached), rng)
    assert found["accept_flags"] > 1e-3
    late = fair._replace(reached=reached, accepted=fair.accepted | reached)
    assert component_tests(late, rng)["accept_flags"] < 1e-9


@pytest.mark.slow
def test_the_family_rejects_one_run_in_a_thousand():
    rng = np.random.default_rng(19)
    size, runs, at_once, alarms = 512, 10_000, 200, 0
    p = random_laws(rng, at_once * size)
    q = proposals(rng, p)
    for _ in range(runs // at_once):
        whole = emitted(draw(p, rng.random(len(p))), p, q)
        alarms += sum(bool(holm(pit_tests(run, rng), 1e-3)) for run in parts(whole, size))
    assert binomtest(alarms, runs, 1e-3, alternative="greater").pvalue > 0.01
    assert alarms > 0  # a battery that cannot reject would pass the line above
