"""The graph engine decodes what the eager engine decodes, on static memory."""

import logging

import pytest
import torch
from decode_helpers import ALL_POLICIES, HOT, OWN_POLICY, two_word_target
from drafters import tiny_drafter
from helpers import END_ID, tiny_target

from dflash2_lab.decoding import graph
from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.requests import Request, request_keys
from dflash2_lab.errors import LabError
from dflash2_lab.policies import POLICIES
from dflash2_lab.sampling import Sampling

GREEDY = Sampling()
STOPS = [END_ID, *range(100, 106)]


@pytest.fixture(scope="module")
def target(device):
    found = tiny_target("qwen3", eos_token_id=STOPS)
    found.model.to(device)
    return found


@pytest.fixture(scope="module")
def words(device):
    """A target that is easy to draft for."""
    found = two_word_target()
    found.model.to(device)
    return found


def requests(policy, sampling, count=6, limit=20, stops=STOPS):
    """Prompts of unequal length, limits of their own."""
    generator = torch.Generator().manual_seed(1)
    return [
        Request(
            tuple(torch.randint(4, 264, (5 + 3 * index,), generator=generator).tolist()),
            limit - index,
            sampling,
            request_keys(0, f"p{index}", 0, 0, policy),
            frozenset(stops),
        )
        for index in range(count)
    ]


def drafter_for(target, kind, **changes):
    return None if kind is None else tiny_drafter(kind, **changes).to(target.device)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), HOT], ids=["greedy", "T=1", "hot"])
@pytest.mark.parametrize(("kind", "policy"), [*ALL_POLICIES, (None, None)])
def test_both_engines_make_the_same_steps(target, kind, policy, sampling):
    drafter, wanted = drafter_for(target, kind), requests(policy, sampling)
    eager = EagerEngine(target, drafter, policy).run(wanted)
    # Fewer places than requests: places are given away while others still decode.
    assert GraphEngine(target, drafter, policy, 3, 64).run(wanted) == eager
    assert len({answer.finish for answer in eager}) == 2


BLOCK_CASES = [  # every policy, and every policy that samples its drafts with every law
    *((kind, policy, GREEDY) for kind, policy in OWN_POLICY.items()),
    *((kind, policy, Sampling(1.0)) for kind, policy in ALL_POLICIES),
    *(("dflash2", policy, HOT) for policy in POLICIES["dflash2"]),
    ("dspark", "markov", HOT),
]


@pytest.mark.parametrize(("kind", "policy", "sampling"), BLOCK_CASES)
def test_both_engines_make_the_same_steps_by_block_verification(words, kind, policy, sampling):
    drafter, wanted = drafter_for(words, kind), requests(policy, sampling, count=3)
    eager = EagerEngine(words, drafter, policy, acceptance="block").run(wanted)
    found = GraphEngine(words, drafter, policy, 3, 64, acceptance="block").run(wanted)
    assert found == eager
    if (kind, policy) == ("dflash2", "sampled") and sampling.temperature == 1:
        assert found != GraphEngine(words, drafter, policy, 3, 64).run(wanted)


def test_a_shorter_window_is_verified_as_a_block_of_its_own(words):
    drafter, wanted = drafter_for(words, "dflash2"), requests("sampled", Sampling(1.0), count=3)
    eager = EagerEngine(words, drafter, "sampled", 2, "block").run(wanted)
    assert GraphEngine(words, drafter, "sampled", 2, 64, 2, "block").run(wanted) == eager


@pytest.mark.parametrize("num_draft", [1, 2])
@pytest.mark.parametrize("kind", OWN_POLICY)
def test_a_shorter_window_is_verified_and_the_whole_block_drafted(target, kind, num_draft):
    policy, drafter = OWN_POLICY[kind], drafter_for(target, kind)
    wanted = requests(policy, Sampling(1.0))
    eager = EagerEngine(target, drafter, policy, num_draft).run(wanted)
    assert GraphEngine(target, drafter, policy, 2, 64, num_draft).run(wanted) == eager


def test_requests_that_sample_differently_share_a_batch(target):
    drafter = drafter_for(target, "dflash2")
    mixed = [
        requests("selector", sampling)[index]
        for index, sampling in enumerate([GREEDY, HOT, Sampling(1.0), GREEDY, Sampling(0.5), HOT])
    ]
    eager = EagerEngine(target, drafter, "selector").run(mixed)
    assert GraphEngine(target, drafter, "selector", 6, 64).run(mixed) == eager


@pytest.mark.parametrize(
    "changes",
    [
        {"selector_parametrization": "projected"},
        {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 2.0},
        {"own_embedding": True, "own_head": True},
        {"attention_bias": True},
        {"own_head": True, "draft_vocab_size": 250},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_option_of_a_checkpoint_counts(target, changes):
    kind = "dspark" if "draft_vocab_size" in changes else "dflash2"
    drafter, policy = drafter_for(target, kind, **changes), OWN_POLICY[kind]
    wanted = requests(policy, Sampling(1.0), count=3)
    eager = EagerEngine(target, drafter, policy).run(wanted)
    assert GraphEngine(target, drafter, policy, 2, 64).run(wanted) == eager


def test_what_memory_held_before_does_not_matter(target):
    drafter, wanted = drafter_for(target, "dflash2"), requests("selector", HOT)
    engine = GraphEngine(target, drafter, "selector", 3, 64)
    first = engine.run(wanted)
    for side in (engine.cycle.large, engine.cycle.small):
        side.keys.fill_(float("nan"))
        side.values.fill_(float("nan"))
    engine.cycle.features.fill_(float("nan"))
    assert engine.run(wanted) == first


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 9])
def test_every_length_limit_is_met_exactly(target, limit):
    drafter = drafter_for(target, "dflash2")
    wanted = requests("selector", GREEDY, limit=limit + 5, stops=(7,))
    answers = GraphEngine(target, drafter, "selector", 2, 64).run(wanted)
    for request, answer in zip(wanted, answers, strict=True):
        assert len(answer.response_ids) == request.max_new_tokens
        assert answer.finish == "length"


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5])
def test_prompts_up_to_the_targets_last_position(device, room):
    target = tiny_target("qwen3", max_position_embeddings=32)
    target.model.to(device)
    drafter = drafter_for(target, "dflash2")
    request = requests("selector", GREEDY, count=1, stops=(7,))[0]
    prompt = (request.prompt_ids * 10)[: 32 - room]
    full = Request(prompt, room, GREEDY, request.keys, request.stop_ids)
    engine = GraphEngine(target, drafter, "selector", 1, 32)
    assert engine.run([full]) == EagerEngine(target, drafter, "selector").run([full])
    longer = Request(prompt, room + 1, GREEDY, request.keys, request.stop_ids)
    with pytest.raises(LabError, match="32 positions"):
        engine.run([longer])


def test_tokens_are_told_while_they_come_and_each_once(target):
    drafter, wanted = drafter_for(target, "dflash2"), requests("selector", GREEDY)
    told = {index: [] for index in range(len(wanted))}
    calls = []

    def hear(index, tokens):
        told[index] += tokens
        calls.append(index)

    answers = GraphEngine(target, drafter, "selector", 2, 64).run(wanted, hear)
    assert list(told.values()) == [answer.response_ids for answer in answers]
    assert len(calls) > len(wanted)


def test_forced_acceptance_moves_by_as_much(target):
    engine = GraphEngine(target, drafter_for(target, "dflash"), "top1", 2, 64)
    progress = engine.cycle.progress
    for name, value in {"status": 0, "start": 9, "length": 1, "limit": 50, "offered": 3}.items():
        getattr(progress, name).fill_(value)
    engine.cycle.laws.forced.copy_(torch.tensor([2, 0]))
    for _ in range(3):
        engine.step()
    assert progress.start.tolist() == [18, 12] and progress.length.tolist() == [10, 4]


@pytest.mark.parametrize(
    ("size", "message"),
    [((0, 64), "batch_size 0"), ((1, 1), "max_total 1"), ((2, 24), "room for 24")],
)
def test_sizes_that_do_not_fit_are_told(target, size, message):
    with pytest.raises(LabError, match=message):
        GraphEngine(target, None, None, *size).run(requests(None, GREEDY))


def test_too_many_stop_tokens_are_told(target):
    with pytest.raises(LabError, match="stop_ids: found 30, expected at most 16"):
        GraphEngine(target, None, None, 1, 64).run(requests(None, GREEDY, stops=range(30)))


def test_drafters_that_do_not_fit_are_refused(target):
    with pytest.raises(LabError, match="hidden_size"):
        GraphEngine(target, drafter_for(target, "dflash", hidden_size=48), "top1", 1, 64)
    with pytest.raises(LabError, match="num_draft: found 9"):
        GraphEngine(target, drafter_for(target, "dflash"), "top1", 1, 64, num_draft=9)
    with pytest.raises(LabError, match="policies"):
        GraphEngine(target, drafter_for(target, "dflash"), "selector", 1, 64)


def test_too_little_memory_is_one_error_and_the_process_goes_on(target, monkeypatch):
    def full(*_args):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    drafter, wanted = drafter_for(target, "dflash2"), requests("selector", GREEDY, count=2)
    with monkeypatch.context() as patch:
        patch.setattr(graph, "Cycle", full)
        with pytest.raises(LabError, match="out of memory; batch_size 4096 and max_total 64"):
            GraphEngine(target, drafter, "selector", 4096, 64)
    engine = GraphEngine(target, drafter, "selector", 1, 64)
    assert engine.run(wanted) == EagerEngine(target, drafter, "selector").run(wanted)


def test_logits_that_are_not_finite_are_one_error_and_the_engine_goes_on(target):
    drafter, wanted = drafter_for(target, "dflash2"), requests("selector", GREEDY, count=3)
    engine = GraphEngine(target, drafter, "selector", 2, 64)
    expected = engine.run(wanted)
    weight = target.layers[2].mlp.down_proj.weight
    kept = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(LabError, match=r"not finite in torch\.float32"):
        engine.run(wanted)
    weight.copy_(kept)
    assert engine.run(wanted) == expected


def test_an_engine_leaves_no_hook_on_the_target(target):
    GraphEngine(target, drafter_for(target, "dflash2"), "selector", 1, 64).run(
        requests("selector", GREEDY, count=1)
    )
    assert not any(module._forward_hooks for module in target.model.modules())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_cycle_is_the_plain_one(target, caplog):
    caplog.set_level(logging.INFO)
    drafter, wanted = drafter_for(target, "dflash2"), requests("selector", HOT)
    engine = GraphEngine(target, drafter, "selector", 3, 64)
    assert "captured in" in caplog.text
    captured = engine.run(wanted)
    engine.graph = None
    assert engine.run(wanted) == captured
