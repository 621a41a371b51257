"""Tests of the stages of a verifier: p-values under the null, and the stage that they name."""

import numpy as np
import pytest
import torch
from laws import draw, proposals, random_laws, scored, tempered
from scipy.stats import kstest

from dflash2_lab.losslessness.battery import Drafted, component_tests
from dflash2_lab.losslessness.scoring import residual_pit

COMPONENT_NAMES = {"draft_heat", "draft_ad", "accept_flags", "residual_ad", "bonus_ad"}


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


def test_flags_of_drafts_that_were_not_reached_do_not_count():
    rng = np.random.default_rng(25)
    fair = drafts(rng, 2000)
    reached = rng.random(2000) < 0.5
    found = component_tests(fair._replace(reached=reached, accepted=fair.accepted & reached), rng)
    assert found["accept_flags"] > 1e-3
    late = fair._replace(reached=reached, accepted=fair.accepted | reached)
    assert component_tests(late, rng)["accept_flags"] < 1e-9
