"""The reference engine: greedy is the target's greedy, ends and limits, rows alone, replay equals
decode (cases B1, B4, C7, D1-D4, D7, H1, H3)."""

import pytest
import torch
from decode_helpers import (
    ALL_POLICIES,
    HOT,
    OWN_POLICY,
    hybrid_target,
    oracle,
    plain_greedy,
    request,
    two_word_target,
)
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.decoding import steps
from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.decoding.requests import Decoded, steps_frame
from dflash2_lab.decoding.steps import ACCEPTANCES, accept
from dflash2_lab.errors import LabError
from dflash2_lab.sampling import Sampling

PROMPT = (23, 24, 25, 26)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def greedy(target):
    """20 tokens after `PROMPT`; the first eight are all different."""
    response = plain_greedy(target, PROMPT, 20)
    assert len(set(response[:8])) == 8
    return response


@pytest.mark.parametrize(("kind", "policy"), ALL_POLICIES)
def test_greedy_decode_is_the_targets_own(target, greedy, kind, policy):
    # Case B4, a drafter that is hardly ever right.
    for num_draft in (1, 3):
        engine = EagerEngine(target, tiny_drafter(kind), policy, num_draft)
        decoded = engine.run([request(policy, limit=8)])[0]
        assert decoded.response_ids == greedy[:8]
        assert decoded.finish == "length"


@pytest.mark.parametrize("kind", OWN_POLICY)
def test_greedy_decode_is_the_same_by_both_rules(kind):
    target, drafter, policy = two_word_target(), tiny_drafter(kind), OWN_POLICY[kind]
    found = [
        EagerEngine(target, drafter, policy, acceptance=rule).run([request(policy, limit=24)])
        for rule in ACCEPTANCES
    ]
    assert found[0] == found[1]
    assert len(set(found[0][0].accepted_raw)) > 1


def test_the_engine_verifies_by_the_rule_it_was_given(target, monkeypatch):
    rules = []
    monkeypatch.setattr(
        "dflash2_lab.decoding.eager.accept", lambda *args: rules.append(args[-1]) or accept(*args)
    )
    for rule in ACCEPTANCES:
        engine = EagerEngine(target, tiny_drafter(), "selector", acceptance=rule)
        engine.run([request("selector", limit=3, sampling=HOT)])
        assert set(rules) == {rule}
        rules.clear()
    with pytest.raises(LabError, match="acceptance: found 'tree', expected 'token' or 'block'"):
        EagerEngine(target, tiny_drafter(), "selector", acceptance="tree")


@pytest.mark.parametrize(("kind", "policy"), ALL_POLICIES)
@pytest.mark.parametrize("num_draft", [1, 3])
def test_an_oracle_is_always_accepted(target, greedy, kind, policy, num_draft):
    drafter = oracle(tiny_drafter(kind), [*PROMPT, *greedy])
    limit = 1 + 4 * (num_draft + 1)
    decoded = EagerEngine(target, drafter, policy, num_draft).run([request(policy, limit=limit)])
    assert decoded == [Decoded(greedy[:limit], [num_draft] * 4, "length")]


def assert_greedy(target, num_draft, prompts, limit):
    """Decode with blocks of `num_draft` slots; returns how many drafts were accepted."""
    drafter = tiny_drafter("dflash2", block_size=num_draft + 1)
    requests = [request("selector", prompt, limit) for prompt in prompts]
    decoded = EagerEngine(target, drafter, "selector").run(requests)
    for prompt, found in zip(prompts, decoded, strict=True):
        assert found.response_ids == plain_greedy(target, prompt, limit)
    return sum(sum(found.accepted_raw) for found in decoded)


@pytest.mark.parametrize("num_draft", [1, 3, 7, 15])
def test_every_block_size_gives_the_greedy_tokens(num_draft):
    # Acceptance between none and all.
    assert assert_greedy(two_word_target(), num_draft, [(40, 41, 42, 43), (100, 101)], 16) > 2


@pytest.mark.slow
@pytest.mark.parametrize("num_draft", [1, 3, 7, 15])
def test_every_block_size_gives_the_greedy_tokens_of_ten_prompts(num_draft):
    # Case B1.
    prompts = [tuple(range(first, first + 5)) for first in range(20, 220, 20)]
    assert assert_greedy(two_word_target(), num_draft, prompts, 64) > 20


FAMILIES = {
    "llama": lambda: tiny_target("llama"),
    "mistral": lambda: tiny_target("mistral", sliding_window=8),
    "gemma3": lambda: hybrid_target("gemma3"),
    "lfm2": lambda: hybrid_target("lfm2"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_and_convolutions_are_rolled_back(family):
    # Cases H1 and H3: beyond the window, drafts of which the first 0, 1 or 2 are right.
    target = FAMILIES[family]()
    expected = plain_greedy(target, PROMPT, 18)
    for right in range(3):
        drafts = [
            token if at % 3 < right else (token + 1) % 264
            for at, token in enumerate([*PROMPT, *expected])
        ]
        drafter = oracle(tiny_drafter("dflash"), drafts)
        engine = EagerEngine(target, drafter, "top1")
        decoded = engine.run([request("top1", limit=18)])[0]
        assert decoded.response_ids == expected
        assert sum(decoded.accepted_raw) >= 3 * right


@pytest.mark.parametrize("place", range(6))
def test_a_stop_token_anywhere_in_a_block_ends_the_response(target, greedy, place):
    # Case D1: 0 is the prefill's token, 1, 2, 3 the slots, 4 the bonus token, 5 the next block.
    drafter = oracle(tiny_drafter("dflash"), [*PROMPT, *greedy])
    decoded = EagerEngine(target, drafter, "top1").run([request("top1", stop_ids={greedy[place]})])
    raw = [] if place == 0 else [3] * (1 + (place > 4))
    assert decoded == [Decoded(greedy[: place + 1], raw, "eos")]


def test_acceptance_beyond_a_stop_token_is_kept_but_not_counted(target, greedy):
    # Case C7: five drafts accepted, the third one a stop token.
    drafter = oracle(tiny_drafter("dflash", block_size=6), [*PROMPT, *greedy])
    decoded = EagerEngine(target, drafter, "top1").run([request("top1", stop_ids={greedy[3]})])[0]
    assert decoded == Decoded(greedy[:4], [5], "eos")
    key = {"prompt_id": "p", "turn": 0, "sample": 0}
    step = steps_frame([(key, 4, decoded)], 5, "top1", 0.0).iloc[0]
    names = ["num_offered", "num_accepted", "num_accepted_raw", "num_emitted", "terminal"]
    assert step[names].tolist() == [3, 3, 5, 3, "eos"]


@pytest.mark.parametrize("counts", [[1], [3, 0], [2, 2, 0], [0]])
def test_counts_that_do_not_lead_through_the_response_are_an_error(counts):
    key = {"prompt_id": "p", "turn": 0, "sample": 0}
    if counts == [1]:  # the right one
        assert len(steps_frame([(key, 4, Decoded([7, 8, 9], counts, "length"))], 3, "top1", 0)) == 1
        return
    with pytest.raises(LabError, match="do not lead through a response of 3 tokens"):
        steps_frame([(key, 4, Decoded([7, 8, 9], counts, "length"))], 3, "top1", 0)


@pytest.mark.parametrize("limit", [3, 4, 5, 6])
def test_a_stop_token_and_the_limit_in_one_block(target, greedy, limit, monkeypatch):
    # Case D2: drafts [a, b, stop, c, d]. The cache ends one token before the response does.
    rows = []
    init = steps.TargetRow.__init__
    monkeypatch.setattr(
        steps.TargetRow,
        "__init__",
        lambda self, *args, **kw: (rows.append(self), init(self, *args, **kw))[1],
    )
    drafter = oracle(tiny_drafter("dflash", block_size=6), [*PROMPT, *greedy])
    engine = EagerEngine(target, drafter, "top1")
    decoded = engine.run([request("top1", limit=limit, stop_ids={greedy[3]})])[0]
    assert decoded.response_ids == greedy[: min(limit, 4)]
    assert decoded.finish == ("length" if limit == 3 else "eos")
    assert rows[-1].cache.get_seq_length() == len(PROMPT) + len(decoded.response_ids) - 1


@pytest.mark.parametrize("right", [True, False])
def test_every_limit_is_met_exactly(target, greedy, right):
    # Case D3: no stop token, limits up to two blocks and one more.
    drafter = tiny_drafter("dspark")
    if right:
        oracle(drafter, [*PROMPT, *greedy])
    engine = EagerEngine(target, drafter, "markov")
    requests = [request("markov", limit=limit) for limit in range(1, 12)]
    for limit, decoded in enumerate(engine.run(requests), start=1):
        assert decoded.response_ids == greedy[:limit]
        assert decoded.finish == "length"


def test_the_verify_window_is_cut_and_the_drafted_block_is_not(target, greedy, monkeypatch):
    drafted, verified = [], []
    draft, verify = steps.DrafterRow.draft, steps.accept
    monkeypatch.setattr(
        steps.DrafterRow, "draft", lambda *args: drafted.append(draft(*args)) or drafted[-1]
    )
    monkeypatch.setattr(
        "dflash2_lab.decoding.eager.accept",
        lambda p, proposal, *args: (
            verified.append(len(proposal.tokens)) or verify(p, proposal, *args)
        ),
    )
    drafter = oracle(tiny_drafter("dflash", block_size=8), [*PROMPT, *greedy])
    EagerEngine(target, drafter, "top1", 3).run([request("top1", limit=7)])
    assert verified == [3, 2]
    assert [len(proposal.tokens) for proposal in drafted] == [7, 7]


def test_a_mask_token_in_the_output_stays(target, greedy):
    # Case D4.
    for drafter in (
        tiny_drafter("dflash", mask_token_id=greedy[5]),
        oracle(tiny_drafter("dflash", mask_token_id=greedy[5]), [*PROMPT, *greedy]),
    ):
        decoded = EagerEngine(target, drafter, "top1").run([request("top1")])[0]
        assert decoded.response_ids == greedy[:16]


def test_more_slots_than_trained_are_refused(target):
    # Case D7.
    for num_draft in (0, 4):
        with pytest.raises(LabError, match=f"num_draft: found {num_draft}, expected 1 to 3"):
            EagerEngine(target, tiny_drafter(), "selector", num_draft)


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5])
def test_prompts_up_to_the_last_position(room):
    target = tiny_target(max_position_embeddings=24)
    prompt = tuple(range(30, 54 - room))
    positions = []
    target.decoder.rotary_emb.register_forward_hook(
        lambda _m, args, _o: positions.append(int(args[1].max()))
    )
    engine = EagerEngine(target, tiny_drafter(), "selector")
    decoded = engine.run([request("selector", prompt, limit=room)])[0]
    assert max(positions) < 24
    assert decoded.response_ids == plain_greedy(target, prompt, room)
    with pytest.raises(LabError, match="24 positions"):
        engine.run([request("selector", prompt, limit=room + 1)])


BAD_REQUESTS = {
    "no token": (request("selector", ()), "no token"),
    "a token that does not exist": (request("selector", (5, 264)), "264 found, .* 0 to 263"),
    "no room": (request("selector", limit=0), "max_new_tokens: found 0"),
    "no keys of the policy": (request("top1"), "no key of random numbers for selector"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_told_before_any_is_decoded(target, name):
    bad, message = BAD_REQUESTS[name]
    told = []
    engine = EagerEngine(target, tiny_drafter(), "selector")
    with pytest.raises(LabError, match=message):
        engine.run([request("selector"), bad], lambda *tokens: told.append(tokens))
    assert told == []


def test_drafters_that_do_not_fit_are_refused(target):
    with pytest.raises(LabError, match="policies: found"):
        EagerEngine(target, tiny_drafter(), "markov")
    with pytest.raises(LabError, match="hidden_size 64 does not fit"):
        EagerEngine(target, tiny_drafter(hidden_size=64), "selector")
    with pytest.raises(LabError, match="drafter dflash2 is on meta, its target on cpu"):
        EagerEngine(target, tiny_drafter().to("meta"), "selector")
    with pytest.raises(LabError, match="cannot roll back"):
        EagerEngine(hybrid_target("qwen3_next"), tiny_drafter(), "selector")
    with pytest.raises(LabError, match="without a drafter"):
        EagerEngine(target, None, "selector")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_without_a_drafter_it_goes_token_by_token(family):
    target = tiny_target() if family == "qwen3" else hybrid_target(family)
    told = []
    decoded = EagerEngine(target, None, None).run(
        [request(None, limit=12)], lambda row, tokens: told.append((row, tokens))
    )[0]
    assert decoded.response_ids == plain_greedy(target, PROMPT, 12)
    assert decoded.accepted_raw == [0] * 11
    assert told == [(0, [token]) for token in decoded.response_ids]


@pytest.mark.parametrize(
    ("kind", "policy", "sampling"),
    [
        ("dflash", "sampled", HOT),
        ("dflash2", "selector", Sampling()),
        ("dflash2", "selector", Sampling(1.5)),
        ("dspark", "markov", HOT),
    ],
)
def test_rows_of_a_batch_are_those_of_each_alone(kind, policy, sampling):
    engine = EagerEngine(two_word_target(), tiny_drafter(kind), policy)
    requests = [
        request(policy, range(20, 20 + size), 3 + size, sampling, {90}, prompt_id=str(size))
        for size in (2, 9, 5)
    ]
    told = {row: [] for row in range(3)}
    together = engine.run(requests, lambda row, tokens: told[row].extend(tokens))
    assert together == [engine.run([one])[0] for one in requests]
    assert [told[row] for row in range(3)] == [decoded.response_ids for decoded in together]


def test_an_error_leaves_the_engine_usable(target, greedy):
    drafter = tiny_drafter()
    engine = EagerEngine(target, drafter, "selector")
    weight = drafter.fc.weight
    kept = weight.clone()
    weight.fill_(torch.nan)
    with pytest.raises(LabError, match="context projection"):
        engine.run([request("selector")])
    weight.copy_(kept)
    assert engine.run([request("selector")])[0].response_ids == greedy[:16]


def test_no_random_number_is_used_twice(monkeypatch):
    numbers = []
    real = steps.uniforms

    def spy(keys, positions):
        numbers.append(real(keys, positions))
        return numbers[-1]

    monkeypatch.setattr(steps, "uniforms", spy)
    engine = EagerEngine(two_word_target(), tiny_drafter("dspark"), "markov")
    decoded = engine.run([request("markov", limit=30, sampling=Sampling(1.0))])[0]
    drawn = torch.cat(numbers)
    assert len(drawn) == 1 + len(decoded.accepted_raw) * (4 + 4 + 1)
    assert len(drawn.unique()) == len(drawn)
