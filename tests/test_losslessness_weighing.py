"""The verifier's log as the stage tests take it, and laws at the edge of a filter."""

import numpy as np
import pytest
import torch

from dflash2_lab.decoding.steps import Proposal
from dflash2_lab.losslessness.edges import law_of
from dflash2_lab.losslessness.scoring import residual_pit
from dflash2_lab.losslessness.weighing import _block_tests, _token_tests
from dflash2_lab.losslessness.witness import Step
from dflash2_lab.sampling import Sampling

SLOTS, STEPS = 4, 3000


def logged(chances, num):
    """A step of which only the tests matter."""
    nothing = torch.zeros(0)
    proposal = Proposal(torch.zeros(len(chances), dtype=torch.int64))
    return Step(0, proposal, nothing, num, 0, nothing, nothing, nothing, chances)


def score(tests, shift=0):
    """z of the flags against their chances, over reached slots; `shift` moves the chances."""
    flags, expected = [], []
    for reached, passed, chance in tests:
        flags += passed[reached].double().tolist()
        expected += chance.roll(shift)[reached].tolist()
    flags, expected = np.array(flags), np.array(expected)
    return (flags - expected).sum() / np.sqrt((expected * (1 - expected)).sum())


def test_tests_of_a_block_are_read_from_its_last_slot():
    generator = torch.Generator().manual_seed(0)
    tests = []
    for _ in range(STEPS):
        h = torch.rand(SLOTS, generator=generator, dtype=torch.float64) * torch.arange(1, 5) / 4
        passed = torch.rand(SLOTS, generator=generator, dtype=torch.float64) < h
        num = int((passed * torch.arange(1, SLOTS + 1)).max())
        tests.append(_block_tests(logged(h, num)))
    assert abs(score(tests)) < 4
    assert abs(score(tests, shift=1)) > 8
    reached, passed, _ = _block_tests(logged(torch.full((4,), 0.5), 2))
    assert reached.tolist() == [False, True, True, True]
    assert passed.tolist() == [False, True, False, False]
    assert _block_tests(logged(torch.full((4,), 0.5), 0))[0].all()


def test_tests_of_tokens_are_read_up_to_the_first_refusal():
    step = logged(torch.zeros(3), 1)._replace(chances=None)
    reached, passed, chance = _token_tests(step, torch.tensor([0.5, 2.0, 0.3]).double())
    assert reached.tolist() == [True, True, False] and passed.tolist() == [True, False, False]
    assert chance.tolist() == [0.5, 1.0, 0.0]


def test_the_residual_of_a_block_is_that_of_the_weighted_law():
    p = torch.tensor([[0.5, 0.3, 0.2]]).double()
    q = torch.tensor([[0.1, 0.2, 0.7]]).double()
    token, weight = torch.tensor([0]), torch.tensor([0.8]).double()
    below, mass = residual_pit(token, p, q, weight)
    assert mass[0] == pytest.approx(0.3 / 0.34)  # (0.4 - 0.1, 0.24 - 0.2, 0)
    assert below[0] == pytest.approx(0.04 / 0.34)
    assert residual_pit(token, p, q)[1][0] == pytest.approx(0.4 / 0.5)


@pytest.mark.parametrize("sampling", [Sampling(1.0, 1.0, 3), Sampling(1.0, 0.75, 0)])
def test_a_cut_that_rounding_moved_is_followed_and_another_one_is_not(sampling):
    # The third and fourth are alike up to rounding, and the mass before the third is 0.75.
    p = torch.tensor([0.5, 0.25 - 1e-7, 0.1 + 1e-7, 0.1, 0.05], dtype=torch.float64)
    logits = p.log()
    own = law_of(torch.tensor([1, 1, 1, 0, 0]).bool(), logits, sampling, 1e-5)
    moved = torch.tensor([1, 1, 0, 1, 0] if sampling.top_k else [1, 1, 0, 0, 0]).bool()
    near = law_of(moved, logits, sampling, 1e-5)
    assert ((near > 0) == moved).all() and near.sum() == pytest.approx(1.0)
    assert near[0] / near[1] == pytest.approx(float((logits[0] - logits[1]).exp()))
    far = law_of(torch.tensor([1, 0, 0, 0, 0]).bool(), logits, sampling, 1e-5)
    torch.testing.assert_close(far, own)
