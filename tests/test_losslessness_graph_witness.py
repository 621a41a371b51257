"""The graph engine's testimony is the reference engine's: the same tokens, numbers and laws."""

import pytest
import torch
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.graph_witness import GraphWitness
from dflash2_lab.losslessness.step_log import side_by_side
from dflash2_lab.losslessness.trial import Trial
from dflash2_lab.losslessness.verifying import lengths, requests_of
from dflash2_lab.losslessness.weighing import weigh
from dflash2_lab.losslessness.witness import Witness
from dflash2_lab.prompts import Prompt
from dflash2_lab.sampling import Sampling

PROMPTS = [Prompt(f"p{index}", ("go on" + "!" * index,), "set") for index in range(9)]
KINDS = [("dflash2", "selector"), ("dflash", "sampled"), ("dflash", "top1"), ("dspark", "markov")]
CASES = [
    (kind, policy, arm)
    for kind, policy in KINDS
    for arm in ("realistic", "opposite", "near-perfect")
    if (policy, arm) != ("markov", "opposite")
]


@pytest.fixture(scope="module")
def target(device):
    found = tiny_target()
    found.model.to(device)
    return found


def drafter_for(target):
    return tiny_drafter("dflash2").to(target.device)


def requests(target, arm, policy, sampling, sizes):
    return requests_of(target, PROMPTS, sizes, sampling, 0, arm, policy)


def forget_after_use(engine):
    """Let every cycle write over what the one before it kept, as a captured one does."""
    step = engine.step

    def over():
        for tensor in leaves(engine.cycle.seen):
            tensor.fill_(0)
        step()

    engine.step = over


def leaves(found):
    if isinstance(found, torch.Tensor):
        return [found]
    return [tensor for part in found or () for tensor in leaves(part)]


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, 0.95, 50)], ids=["hot", "cut"])
@pytest.mark.parametrize(("kind", "policy", "arm"), CASES)
def test_both_engines_testify_alike(target, kind, policy, arm, sampling):
    drafter = tiny_drafter(kind).to(target.device)
    asked = requests(target, arm, policy, sampling, [8, 12, 10])
    eager = Witness(target, drafter, policy, arm)
    graph = GraphWitness(target, drafter, policy, arm, 2, 60)
    forget_after_use(graph)
    one, other = (dict(engine.testimonies(asked)) for engine in (eager, graph))
    assert sorted(other) == [0, 1, 2]
    for index, found in one.items():
        again = other[index]
        assert again.response == found.response
        assert sorted(again.keys) == sorted(found.keys)
        for step, same in zip(found.steps, again.steps, strict=True):
            assert (same.anchor, same.num, same.token) == (step.anchor, step.num, step.token)
            # Rounding may keep one more token behind a cut, of 50 at most.
            away = (same.laws - step.laws).abs().sum(-1).max() / 2
            assert away < (1e-4 if sampling.top_k == 0 else 0.02)
            for name in ("uniform", "tests", "final"):
                assert torch.equal(getattr(same, name), getattr(step, name))
            assert torch.equal(same.proposal.tokens, step.proposal.tokens)
            mass = same.proposal.mass(), step.proposal.mass()
            torch.testing.assert_close(*mass, atol=1e-4, rtol=0)
        evidence = [
            weigh(graph, x, side_by_side(x.steps), index).drafted.heat_score for x in (found, again)
        ]
        torch.testing.assert_close(*map(torch.from_numpy, evidence), atol=1e-3, rtol=0)


@pytest.mark.parametrize("arm", ["realistic", "opposite", "near-perfect"])
def test_the_gates_hold_for_both_rules(target, arm):
    for acceptance in ("token", "block"):
        engine = GraphWitness(target, drafter_for(target), "selector", arm, 4, 120, acceptance)
        trial = Trial(engine, arm, "T = 1")
        for index, found in engine.testimonies(
            requests(target, arm, "selector", Sampling(1.0), lengths(60, 5))
        ):
            trial.hear(index, found)
        assert [check.name for check in trial.audit.checks() if not check.passed] == []


@pytest.mark.parametrize("side", ["large", "small"])
def test_a_cache_entry_of_another_token_is_seen(target, side):
    engine = GraphWitness(target, drafter_for(target), "selector", "realistic", 2, 120)
    step, cache = engine.step, getattr(engine.cycle, side)

    def spoil():
        step()
        cache.keys[0, :, :, 3] = cache.keys[0, :, :, 2].clone()

    engine.step = spoil
    trial = Trial(engine, "realistic", "T = 1")
    for index, found in engine.testimonies(
        requests(target, "realistic", "selector", Sampling(1.0), [12, 14])
    ):
        trial.hear(index, found)
    failed = [check.name for check in trial.audit.checks() if not check.passed]
    assert "state" in failed and ("target" in failed) == (side == "large")


def test_a_drafter_that_proposes_nothing_is_an_error(target):
    engine = GraphWitness(target, drafter_for(target), "selector", "realistic", 2, 120)
    ask = requests(target, "realistic", "selector", Sampling(1.0), [1])
    with pytest.raises(LabError, match="no drafts proposed in 0 steps"):
        list(engine.testimonies(ask))
