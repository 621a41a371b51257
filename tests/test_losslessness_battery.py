"""The battery of emitted tokens: p-values under the null, power against planted faults, levels."""

import numpy as np
import pytest
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
    tempered,
)
from scipy.stats import binomtest, kstest

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.battery import Budget, holm, pit_tests, smallest_tv

PIT_NAMES = {
    *("support", "ks", "ad", "ad_drafter", "neyman", "drafter_score", "rank_cells"),
    *("drafter_cells", "ljung_box", "slots", "streams", "heat"),
}


@pytest.fixture(scope="module")
def null_p_values():
    """Every statistic over 300 runs of 256 tokens drawn from their laws."""
    rng = np.random.default_rng(7)
    p = random_laws(rng, 300 * 256)
    whole = emitted(draw(p, rng.random(len(p))), p, proposals(rng, p))
    runs = [pit_tests(run, rng) for run in parts(whole, 256)]
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
