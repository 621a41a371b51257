"""Scores of tokens under their laws: against brute force, and by enumeration."""

import math

import numpy as np
import pytest
import torch
from laws import VOCAB, draw, emitted, parts, proposals, random_laws, scored

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.scoring import concat, residual_pit, score


def brute_pit(token, key, p):
    """F(x^-) from a sort of the vocabulary by (key descending, id ascending)."""
    ranked = sorted(range(len(p)), key=lambda x: (-key[x], x))
    return sum(p[x] for x in ranked[: ranked.index(token)]), ranked.index(token) + 1


def rank_cell(rank):
    return next(cell for cell, last in enumerate((1, 2, 3, 5, 9, math.inf)) if rank <= last)


def test_scores_are_those_of_a_sort_and_of_plain_sums():
    rng = np.random.default_rng(0)
    p = random_laws(rng, 40)
    p[:20] = np.round(8 * p[:20]) + np.eye(VOCAB)[0]  # exact ties
    p /= p.sum(axis=1, keepdims=True)
    q = proposals(rng, p)
    q[::4] = p[::4]
    tokens = rng.integers(0, VOCAB, 40)
    found = scored(tokens, p, q)
    for t, x in enumerate(tokens):
        w = [0.0 if a + b == 0 else (b - a) / (b + a) for a, b in zip(p[t], q[t], strict=True)]
        top = int(q[t].argmax())
        cells = [
            0 if v == top else 1 if q[t, v] > p[t, v] else 2 if q[t, v] > 0 else 3
            for v in range(VOCAB)
        ]
        logs = [math.log(a) if a else 0.0 for a in p[t]]
        for mean_of, *got in (
            (w, found.drafter_score, found.drafter_variance, found.drafter_third),
            (logs, found.heat_score, found.heat_variance, found.heat_third),
        ):
            away = mean_of - p[t] @ mean_of
            wanted = away[x] if p[t, x] > 0 else got[0][t], p[t] @ away**2, p[t] @ away**3
            np.testing.assert_allclose([part[t] for part in got], wanted, atol=1e-12)
        below, rank = brute_pit(x, p[t], p[t])
        assert found.below[t] == pytest.approx(below, abs=1e-12)
        assert found.below_drafter[t] == pytest.approx(brute_pit(x, w, p[t])[0], abs=1e-12)
        assert found.p[t] == found.mass[t] == found.mass_drafter[t] == p[t, x]
        ranks = [rank_cell(brute_pit(v, p[t], p[t])[1]) for v in range(VOCAB)]
        assert (found.rank_cell[t], found.drafter_cell[t]) == (rank_cell(rank), cells[x])
        by_rank = np.bincount(ranks, weights=p[t], minlength=6)
        by_cell = np.bincount(cells, weights=p[t], minlength=4)
        np.testing.assert_allclose(found.rank_cells[t], by_rank, atol=1e-12)
        np.testing.assert_allclose(found.drafter_cells[t], by_cell, atol=1e-12)


def test_the_pieces_of_the_transform_tile_the_unit_interval_in_every_order():
    rng = np.random.default_rng(1)
    p = random_laws(rng, 1).repeat(VOCAB, axis=0)
    q = proposals(rng, p[:1]).repeat(VOCAB, axis=0)
    every = np.arange(VOCAB)
    found = scored(every, p, q)
    residual = residual_pit(*map(torch.from_numpy, (every, p, q)))
    pieces = (found.below, found.mass), (found.below_drafter, found.mass_drafter), residual
    for below, mass in pieces:
        first = np.lexsort((mass, below))  # pieces of no length come before the one they touch
        np.testing.assert_allclose(below[first], mass[first].cumsum() - mass[first], atol=1e-12)
        assert mass.sum() == pytest.approx(1)
    law = np.clip(p[0] - q[0], 0, None)
    for x in every:
        assert residual[0][x] * law.sum() == pytest.approx(brute_pit(x, q[0], law)[0], abs=1e-12)


def test_a_residual_that_does_not_exist_scores_without_nan():
    p = torch.from_numpy(random_laws(np.random.default_rng(2), 3))
    below, mass = residual_pit(torch.zeros(3, dtype=torch.int64), p, p)
    assert (below == 0).all() and (mass == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, p, q: (x, p.float(), q), "p: found torch.float32"),
        (lambda x, p, q: (x[:2], p, q), r"tokens \(2,\)"),
        (lambda x, p, q: (x, p, torch.cat([q, 0 * q], -1)), "expected p's"),
        (lambda x, p, q: (x + VOCAB, p, q), "expected ids of the 12 tokens"),
        (lambda x, p, q: (x - VOCAB, p, q), "expected ids of the 12 tokens"),
        (lambda x, p, q: (x, 1.01 * p, q), "p: row 0 is no law, found sum 1.01"),
        (lambda x, p, q: (x, p, q * float("nan")), "q: row 0 is no law"),
        (lambda x, p, q: (x, p - 0.1 + 0.1 * VOCAB * torch.eye(VOCAB)[0], q), "least entry -"),
    ],
)
def test_what_is_no_law_is_refused(change, message):
    rng = np.random.default_rng(3)
    p = random_laws(rng, 4)
    given = (draw(p, rng.random(4)), p, proposals(rng, p))
    with pytest.raises(LabError, match=message):
        score(*change(*map(torch.from_numpy, given)))


def test_joining_scores_part_by_part_is_scoring_all():
    rng = np.random.default_rng(4)
    p = random_laws(rng, 64)
    whole = emitted(draw(p, rng.random(64)), p, proposals(rng, p))
    joined = concat(list(parts(whole, 16)))
    for got, wanted in zip((*joined.scores, *joined[1:]), (*whole.scores, *whole[1:]), strict=True):
        np.testing.assert_array_equal(got, wanted)
    without = scored(np.zeros(4, dtype=int), p[:4])
    assert concat([without, without]).drafter_cells is None
    with pytest.raises(LabError, match="below_drafter: found in some parts only"):
        concat([whole.scores, without])
    with pytest.raises(LabError, match="nothing to join"):
        concat([])
