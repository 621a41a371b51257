"""The monitor: factors of mean 1 by enumeration, Ville's bound, and how soon it stops."""

import math

import numpy as np
import pytest
from laws import (
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
from numpy.polynomial.legendre import leggauss
from scipy.stats import binomtest

from dflash2_lab.losslessness.monitor import factors_of, log_e_process, stops_at


class Given:
    """A source of noise that gives the numbers it was told."""

    def __init__(self, v):
        self.v = v

    def random(self, shape):
        return np.broadcast_to(self.v[:, None], shape)


def conditional_means(laws_scored, laws_drawn, q):
    """Mean of every factor by enumeration of x and quadrature over V, [laws, factors]."""
    nodes, weights = leggauss(4)  # exact to degree 7; the factors are of degree 3 in V
    means = []
    for p, law, other in zip(laws_scored, laws_drawn, q, strict=True):
        every = np.repeat(np.arange(VOCAB), len(nodes))
        scores = scored(every, np.tile(p, (len(every), 1)), np.tile(other, (len(every), 1)))
        v = np.tile((nodes + 1) / 2, VOCAB)
        factors = np.concatenate(factors_of(scores, Given(v)), axis=1)
        chance = np.repeat(law, len(nodes)) * np.tile(weights / 2, VOCAB)
        means.append(chance @ factors)
    return np.array(means)


def test_every_factor_has_mean_one_under_its_law():
    rng = np.random.default_rng(0)
    p = random_laws(rng, 30)
    q = proposals(rng, p)
    p[0], q[1] = np.eye(VOCAB)[4], np.eye(VOCAB)[2]  # a certain token; a one-hot proposal
    means = conditional_means(p, p, q)
    assert means.shape == (30, 2 * 3 * 6 + 4 * 8)
    np.testing.assert_allclose(means, 1, atol=1e-12)


def test_the_mean_is_another_when_tokens_follow_another_law():
    rng = np.random.default_rng(1)
    p = random_laws(rng, 5)
    means = conditional_means(p, tempered(p, 0.5), proposals(rng, p))
    assert (abs(means - 1).max(axis=1) > 0.01).all()


@pytest.mark.parametrize("with_q", [True, False])
def test_log_e_is_the_log_of_the_mean_of_products(with_q):
    rng = np.random.default_rng(2)
    p = random_laws(rng, 600)  # more than are multiplied at once
    run = emitted(draw(p, rng.random(600)), p, proposals(rng, p) if with_q else None)
    factors = np.concatenate(factors_of(run.scores, np.random.default_rng(3)), axis=1)
    assert factors.shape[1] == (68 if with_q else 18)
    naive = np.log(np.cumprod(factors, axis=0).mean(axis=1))
    np.testing.assert_allclose(log_e_process(run, np.random.default_rng(3)), naive, atol=1e-12)


def test_more_tokens_leave_the_past_as_it_was():
    rng = np.random.default_rng(4)
    p = random_laws(rng, 96)
    whole = emitted(draw(p, rng.random(96)), p, proposals(rng, p))
    early = next(parts(whole, 32))
    first, later = (log_e_process(run, np.random.default_rng(5)) for run in (early, whole))
    np.testing.assert_array_equal(first, later[:32])


def test_a_token_outside_the_support_stops_it_for_good():
    rng = np.random.default_rng(6)
    p = random_laws(rng, 20)
    p[12] = np.eye(VOCAB)[3]
    tokens = draw(p, rng.random(20))
    tokens[12] = 5
    log_e = log_e_process(emitted(tokens, p, proposals(rng, p)), rng)
    assert np.isfinite(log_e[:12]).all() and (log_e[12:] == math.inf).all()
    assert stops_at(log_e, 1e-3) == 13


def test_the_stop_is_the_first_crossing_and_nothing_is_no_stop():
    log_e = np.log([1.0, 5.0, 20.0, 3.0, 100.0])
    assert stops_at(log_e, 1 / 20) == 3
    assert stops_at(log_e, 1 / 50) == 5
    assert stops_at(log_e, 1e-3) is None
    empty = emitted(np.zeros(0, dtype=int), np.zeros((0, VOCAB)))
    assert stops_at(log_e_process(empty, np.random.default_rng(7)), 1e-3) is None


def test_looking_after_every_token_keeps_the_level():
    rng = np.random.default_rng(8)
    p = random_laws(rng, 200 * 512)
    whole = emitted(draw(p, rng.random(len(p))), p, proposals(rng, p))
    stops = [stops_at(log_e_process(run, rng), 0.05) for run in parts(whole, 512)]
    stopped = sum(stop is not None for stop in stops)
    assert binomtest(stopped, 200, 0.05, alternative="greater").pvalue > 1e-3


@pytest.mark.parametrize("fault", ["tempered", "pulled to the drafter"])
def test_it_stops_on_a_fault_within_the_tokens_of_a_short_run(fault):
    rng = np.random.default_rng(9)
    p = random_laws(rng, 8 * 4096)
    q = proposals(rng, p)
    law = tempered(p, 0.6) if fault == "tempered" else pull_to_drafter(p, q)
    law /= law.sum(axis=1, keepdims=True)
    whole = emitted(draw(law, rng.random(len(p))), p, q)
    stops = [stops_at(log_e_process(run, rng), 2e-4) for run in parts(whole, 4096)]
    assert None not in stops and max(stops) > 20
