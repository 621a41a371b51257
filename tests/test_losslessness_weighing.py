"""The verifier's log as the stage tests take it, and laws at the edge of a filter."""

import numpy as np
import pytest
import torch

from dflash2_lab.decoding.steps import Proposal
from dflash2_lab.losslessness.edges import law_of
from dflash2_lab.losslessness.scoring import residual_pit
from dflash2_lab.losslessness.step_log import final_weights, side_by_side
from dflash2_lab.losslessness.weighing import _block_tests, _token_tests
from dflash2_lab.losslessness.witness import Step
from dflash2_lab.sampling import Sampling

SLOTS, STEPS = 4, 3000


def logged(chances, nums, block=True):
    """Steps of which only the tests matter: chances [steps, slots]."""
    slots = chances.shape[1]
    proposal = Proposal(torch.zeros(slots, dtype=torch.int64))
    nothing, laws = torch.zeros(slots), torch.zeros(1, 1)
    return side_by_side(
        [
            Step(0, proposal, laws, num, 0, nothing, nothing, nothing[0], h if block else None)
            for h, num in zip(chances, nums, strict=True)
        ]
    )


def score(tests, shift=0):
    """z of the flags against their chances, over reached slots; `shift` moves the chances."""
    reached, passed, chance = (part.view(-1, SLOTS) for part in tests)
    flags, expected = passed[reached].double().numpy(), chance.roll(shift, 1)[reached].numpy()
    return (flags - expected).sum() / np.sqrt((expected * (1 - expected)).sum())


def test_tests_of_a_block_are_read_from_its_last_slot():
    generator = torch.Generator().manual_seed(0)
    shape = STEPS, SLOTS
    h = torch.rand(shape, generator=generator, dtype=torch.float64) * torch.arange(1, 5) / 4
    passed = torch.rand(shape, generator=generator, dtype=torch.float64) < h
    nums = (passed * torch.arange(1, SLOTS + 1)).amax(1).tolist()
    tests = _block_tests(logged(h, nums))
    assert abs(score(tests)) < 4
    assert abs(score(tests, shift=1)) > 8
    reached, passed, _ = _block_tests(logged(torch.full((2, 4), 0.5), [2, 0]))
    assert reached.tolist() == [False, True, True, True] + [True] * 4
    assert passed.tolist() == [False, True, False, False] + [False] * 4


def test_tests_of_tokens_are_read_up_to_the_first_refusal():
    log = logged(torch.zeros(2, 3), [1, 3], block=False)
    ratio = torch.tensor([0.5, 2.0, 0.3, 1.5, 0.25, 0.75]).double()
    reached, passed, chance = _token_tests(log, ratio, 4)
    assert reached.tolist() == [True, True, False, True, True, True]
    assert _token_tests(log, ratio, 3)[0].tolist() == [True, True, False, True, True, False]
    assert passed.tolist() == [True, False, False, True, True, True]
    assert chance.tolist() == [0.5, 1.0, 0.0, 1.0, 0.25, 0.75]


def test_steps_of_unequal_size_keep_their_own_drafts_laws_and_weights():
    generator = torch.Generator().manual_seed(0)
    steps = []
    for anchor, (slots, num) in enumerate([(3, 1), (0, 0), (2, 2), (3, 3), (1, 0)]):
        law = torch.rand(slots, 5, generator=generator).softmax(-1)
        tokens = torch.randint(0, 5, (slots,), generator=generator)
        numbers = torch.rand(4, generator=generator, dtype=torch.float64)
        laws = torch.rand(num + 1, 5, generator=generator).softmax(-1)
        one = Step(
            anchor, Proposal(tokens, law), laws, num, 4, numbers, numbers[:slots], numbers[3], None
        )
        steps.append(one)
    log = side_by_side(steps)
    ratios = torch.rand(9, generator=generator, dtype=torch.float64) * 2
    found = final_weights(log, ratios)
    start = 0
    for index, one in enumerate(steps):
        slots = len(one.proposal.tokens)
        mine = slice(start, start + slots)
        assert log.slot[mine].tolist() == list(range(slots))
        assert log.step[mine].tolist() == [index] * slots
        assert torch.equal(log.drafts.law[mine], one.proposal.law)
        assert torch.equal(log.uniform[mine], one.uniform[:slots])
        for slot in range(slots):
            at = torch.tensor([index]), torch.tensor([slot])
            assert log.draft_at(*at).item() == start + slot
            assert torch.equal(log.laws[log.law_at(*at)][0], one.laws[min(slot, one.num)])
        weight = 1.0
        for ratio in ratios[mine][: one.num].tolist():
            weight = min(weight * ratio, 1.0)
        assert found[index].item() == pytest.approx(weight)
        start += slots
    assert start == len(log.drafts.tokens) and torch.equal(
        log.laws, torch.cat([x.laws for x in steps])
    )


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
