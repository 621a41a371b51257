"""The reference engine takes the steps of its replay; its tokens have the target law (A7, C7)."""

import itertools

import pytest
import torch
from decode_helpers import (
    ALL_POLICIES,
    OWN_POLICY,
    request,
    two_word_target,
)
from drafters import tiny_drafter
from helpers import tiny_target
from reference import live_steps
from scipy.stats import chisquare

from dflash2_lab.decoding import steps
from dflash2_lab.decoding.api import decode
from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.decoding.steps import ACCEPTANCES, accept
from dflash2_lab.prompts import Prompt
from dflash2_lab.published import published_model
from dflash2_lab.recording import record
from dflash2_lab.replaying import replay
from dflash2_lab.sampling import Sampling, filter_logits
from dflash2_lab.tables import Run
from dflash2_lab.tracing import trace

PROMPTS = [Prompt(f"p{i}", (f"question {i * 37 % 101}",), "set") for i in range(5)]


@pytest.fixture(scope="module")
def two_words():
    """A target, its traces, and each kind of drafter with its greedy decode of the same prompts."""
    target = two_word_target()
    drafters = {kind: tiny_drafter(kind) for kind in OWN_POLICY}
    outputs = {
        kind: decode(target, drafter, PROMPTS, max_new_tokens=20)
        for kind, drafter in drafters.items()
    }
    return target, trace(target, PROMPTS, max_new_tokens=20), drafters, outputs


def without_raw(steps_table):
    return steps_table.drop(columns="num_accepted_raw").reset_index(drop=True)


@pytest.mark.parametrize("kind", OWN_POLICY)
def test_greedy_decode_and_replay_take_the_same_steps(two_words, kind):
    target, traces, drafters, outputs = two_words
    drafter, decoded = drafters[kind], outputs[kind]
    assert decoded.tokens == [list(map(int, ids)) for ids in traces.traces["response_ids"]]
    result = replay(record(target, drafter, traces, attention=False), OWN_POLICY[kind])
    assert without_raw(decoded.steps).equals(without_raw(result.steps))
    assert set(decoded.steps["terminal"]) == {"", "eos", "length"}
    assert decoded.steps["num_accepted"].nunique() > 2
    assert (decoded.steps["num_accepted_raw"] >= decoded.steps["num_accepted"]).all()
    for name in ("pooled", "per_request", "pooled_uncut", "per_request_uncut", "survival"):
        assert getattr(decoded.acceptance, name) == getattr(result, name)


def test_a_shorter_verify_window_takes_the_steps_of_its_replay(two_words):
    target, traces, drafters, _ = two_words
    drafter = drafters["dflash2"]
    decoded = decode(target, drafter, PROMPTS, max_new_tokens=20, num_draft=2)
    run = record(target, drafter, traces, attention=False)
    assert without_raw(decoded.steps).equals(without_raw(replay(run, num_draft=2).steps))


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_greedy_steps_are_those_of_the_published_package(two_words, kind):
    target, traces, drafters, outputs = two_words
    steps_table = outputs[kind].steps
    model = published_model(drafters[kind], target.embed_weight)
    compared = 0
    for row in traces.traces.itertuples():
        response, live = live_steps(model, target, row, 20)
        assert response == list(row.response_ids)
        # There the last block shrinks at the limit; here it is drafted whole and its window cut.
        full = [(step.anchor, step.num_emitted) for step in live if step.anchor + 4 <= 20]
        own = steps_table[steps_table["prompt_id"] == row.prompt_id]
        ours = list(zip(own["anchor"], own["num_emitted"], strict=True))
        assert ours[: len(full)] == full
        compared += len(full)
    assert compared > 20


@pytest.mark.parametrize(("kind", "policy"), [("dflash2", "selector"), ("dspark", "markov")])
def test_sampled_drafts_are_those_of_a_recording_of_the_response(kind, policy, monkeypatch):
    # The same keys and counters: at an anchor that both visit, the same draws.
    target, drafter = tiny_target(), tiny_drafter(kind)
    drafted = []
    draft = steps.DrafterRow.draft
    monkeypatch.setattr(
        steps.DrafterRow, "draft", lambda *args: drafted.append(draft(*args)) or drafted[-1]
    )
    decoded = decode(target, drafter, PROMPTS[:2], 12, temperature=0.8, seed=3, policy=policy)
    frame = trace(target, PROMPTS[:2], max_new_tokens=12, temperature=0.8).traces
    frame = frame.assign(response_ids=decoded.tokens)
    frame["logprob"] = frame["logprob_unfiltered"] = [[-1.0] * len(r) for r in decoded.tokens]
    info = {"sampling": {"temperature": 0.8, "top_p": 1.0, "top_k": 0}}
    run = record(target, drafter, Run.in_memory(info, {"traces": frame}), (policy,), seed=3)
    paths = run.paths.set_index(["prompt_id", "anchor"])["token"]
    assert len(drafted) == len(decoded.steps) > 10
    for step, proposal in zip(decoded.steps.itertuples(), drafted, strict=True):
        path = paths.loc[[(step.prompt_id, step.anchor)]].tolist()
        assert proposal.tokens[: len(path)].tolist() == path


def law_pvalue(kind, policy, acceptance="token", num=300):
    """Chi-square of the second and third token of many responses against their exact law, on a
    vocabulary of six."""
    law = Sampling(1.0, top_k=4)
    target = tiny_target(vocab_size=6)
    drafter = tiny_drafter(kind, vocab_size=6, mask_token_id=5)
    requests = [request(policy, (3, 1, 4), 3, law, seed=seed) for seed in range(num)]
    decoded = EagerEngine(target, drafter, policy, acceptance=acceptance).run(requests)
    accepted = [found.accepted_raw[0] > 0 for found in decoded]
    assert sum(accepted) > num / 50

    def after(*response):
        logits = target.model(torch.tensor([[3, 1, 4, *response]])).logits[0, -1]
        return filter_logits(logits.double(), law.temperature, law.top_p, law.top_k)

    expected = torch.zeros(6, 6, dtype=torch.float64)
    for first, second in itertools.product(range(6), range(6)):
        expected[second] += after()[first] * after(first)[second] * after(first, second)
    found = torch.zeros(6, 6, dtype=torch.float64)
    for _, second, third in (one.response_ids for one in decoded):
        found[second, third] += 1
    common = num * expected >= 5
    assert (found[expected == 0] == 0).all()
    observed, wanted = (
        torch.cat([counts[common], counts[~common].sum()[None]])
        for counts in (found, num * expected)
    )
    return chisquare(observed.numpy(), wanted.numpy()).pvalue


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "policy"), ALL_POLICIES)
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_sampled_decode_has_the_law_of_the_target(kind, policy, acceptance):
    # Case A7: under every policy.
    assert law_pvalue(kind, policy, acceptance) > 1e-4


@pytest.mark.slow
def test_a_decode_that_accepts_too_often_is_noticed(monkeypatch):
    def lenient(p, proposal, uniform, *rest):
        return accept(p, proposal, uniform / 2, *rest)

    monkeypatch.setattr("dflash2_lab.decoding.eager.accept", lenient)
    assert law_pvalue("dflash", "sampled") < 1e-6
