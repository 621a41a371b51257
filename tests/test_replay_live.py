"""A greedy replay is the published package's decode, block by block, and recall measured on a trace
is recall in the decode (case F8). A sampled one has the joint law of a live decode."""

import itertools
from collections import Counter
from math import prod

import numpy as np
import pandas as pd
import pytest
import torch
from decode_helpers import request as decode_request
from drafters import tiny_drafter
from helpers import END_ID, MASK_ID, tiny_target
from reference import assert_replay_is_the_decode, live_ranks, whole

from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.losslessness.enumeration import Choices, Oracle, float64
from dflash2_lab.models.io import load_drafter
from dflash2_lab.prompts import Prompt, load_prompts
from dflash2_lab.published import PublishedDecoder, published_model
from dflash2_lab.recording import record
from dflash2_lab.replaying import expected_walk
from dflash2_lab.sampling import Sampling, filter_logits
from dflash2_lab.stats import recall_by_slot
from dflash2_lab.tables import Run
from dflash2_lab.tracing import trace
from dflash2_lab.training.data import Corpus
from dflash2_lab.training.loop import TrainConfig, train
from dflash2_lab.training.setup import new_drafter

POLICY = {"dflash": "top1", "dflash2": "selector"}
LIMIT = 24
SLOW_LIMIT = 64


@pytest.fixture(scope="module")
def tiny():
    """A target whose answers end at different lengths, and traces of sixteen prompts."""
    ends = [END_ID, *range(100, 106)]
    target = tiny_target(num_hidden_layers=6, eos_token_id=ends)
    prompts = [Prompt(f"p{i:02}", (f"question {i * 37 % 101}",), "set") for i in range(16)]
    return target, trace(target, prompts, max_new_tokens=LIMIT)


@pytest.fixture(scope="module", params=sorted(POLICY))
def trained(request, tiny, tmp_path_factory):
    """A drafter that is often right, having learned a part of the very traces."""
    target, traces = tiny
    tokens = tuple(whole(row).numpy() for row in traces.traces.itertuples())
    lengths = np.array([len(row.prompt_ids) for row in traces.traces.itertuples()])
    corpus = Corpus(tokens, lengths)
    shape = {"num_layers": 2, "block_size": 5, "selector_rank": 8}
    drafter = new_drafter(target, request.param, MASK_ID, **shape)
    config = TrainConfig(
        steps=100, batch_size=10, num_anchors=16, learning_rate=5e-3, soft_labels=0.0
    )
    train(target, drafter, corpus, corpus, config, tmp_path_factory.mktemp("train"))
    return drafter.requires_grad_(False).eval()


def test_replay_is_the_decode_of_a_drafter_that_is_often_right(tiny, trained):
    target, traces = tiny
    assert set(traces.traces["finish"]) == {"eos", "length"}
    run = record(target, trained, traces)
    policy = POLICY[trained.settings.kind]
    compared, accepted = assert_replay_is_the_decode(target, trained, traces, run, policy, LIMIT)
    assert compared > 60
    assert 0.2 < accepted / compared < 1.0


def test_replay_of_other_weights_is_not_the_decode(tiny, trained):
    target, traces = tiny
    run = record(target, trained, traces)
    weight = trained.layers[0].self_attn.v_proj.weight
    kept = weight.clone()
    weight.neg_()
    with pytest.raises(AssertionError):
        policy = POLICY[trained.settings.kind]
        assert_replay_is_the_decode(target, trained, traces, run, policy, LIMIT)
    weight.copy_(kept)


def test_recall_on_the_trace_is_recall_in_the_decode(tiny, trained):
    target, traces = tiny
    run = record(target, trained, traces)
    policy = POLICY[trained.settings.kind]
    model = published_model(trained, target.embed_weight)
    recorded = run.slots.set_index(["prompt_id", "anchor", "slot"])["target_rank"]
    live = {
        (row.prompt_id, *block): rank
        for row in traces.traces.itertuples()
        for block, rank in live_ranks(model, target, row, run.num_draft).items()
    }
    assert recorded.loc[list(live)].tolist() == list(live.values())
    frame = recall_by_slot(run, ks=(1, 16), policy=policy)
    frame = frame[(frame["anchors"] == "visited") & (frame["metric"] == "position_recall")]
    assert len(frame) == 2 * run.num_draft
    for row in frame.itertuples():
        ranks = np.array([rank for (*_, slot), rank in live.items() if slot == row.slot])
        assert row.value == pytest.approx((ranks < row.k).mean(), abs=1e-12)


def test_a_trace_is_followed_also_where_the_drafts_leave_it(tiny, trained):
    # Every anchor, not only those that a decode visits: the package is walked along the trace.
    target, traces = tiny
    run = record(target, trained, traces)
    paths = run.paths[run.paths["policy"] == POLICY[trained.settings.kind]]
    row = next(traces.traces.itertuples())
    model = published_model(trained, target.embed_weight)
    decoder = PublishedDecoder(model, target, whole(row), len(row.prompt_ids))
    own = paths[paths["prompt_id"] == row.prompt_id].sort_values(["anchor", "slot"])
    for _, tokens in own.groupby("anchor")["token"]:
        assert tokens.tolist() == decoder.cycle().tokens[: len(tokens)].tolist()


PAIR = Sampling(1.5, top_k=2)
PROMPT, LENGTH, VOCAB = (3, 1), 3, 4


def live_law(target, drafter, policy, acceptance, monkeypatch):
    """Law of (tokens, accepted counts) of the reference engine: every branch of a whole decode."""
    asked = decode_request(policy, PROMPT, LENGTH, PAIR)
    oracle = Oracle([(0.0, 1.0)] * 40)
    places = {}  # of a key and counter: the engine's own random numbers, each once

    def draws(key, first, num, _device):
        at = [places.setdefault((key, first + i), len(places)) for i in range(num)]
        return Choices(oracle, torch.tensor(at), torch.ones(num, dtype=torch.float64))

    monkeypatch.setattr("dflash2_lab.decoding.eager.draws", draws)
    engine, law = EagerEngine(target, drafter, policy, acceptance=acceptance), Counter()
    with float64():
        while True:
            oracle.begin()
            decoded = engine.run([asked])[0]
            tokens, counts = tuple(decoded.response_ids), tuple(decoded.accepted_raw)
            law[tokens, counts] += prod(high - low for low, high in oracle.intervals)
            if not oracle.advance():
                return law


def replayed_law(target, drafter, policy, acceptance):
    """The same from a recording of every response that the target can give."""
    rows, chances = [], {}
    for number, response in enumerate(itertools.product(range(VOCAB), repeat=LENGTH)):
        logits = target.model(torch.tensor([[*PROMPT, *response]])).logits[0, len(PROMPT) - 1 : -1]
        p = filter_logits(logits, PAIR.temperature, PAIR.top_p, PAIR.top_k)
        logprob = p.gather(-1, torch.tensor(response)[:, None])[:, 0].log()
        if logprob.isfinite().all():
            name, given = f"p{number:03}", {"logprob": logprob.tolist(), "dataset": "set"}
            chances[name] = response, float(logprob.sum().exp())
            given |= {"prompt_id": name, "turn": 0, "sample": 0, "finish": "length"}
            given |= {"prompt_ids": list(PROMPT), "response_ids": list(response)}
            rows.append(given | {"logprob_unfiltered": given["logprob"], "on_policy": True})
    sampling = {"temperature": PAIR.temperature, "top_p": PAIR.top_p, "top_k": PAIR.top_k}
    traces = Run.in_memory({"kind": "trace", "sampling": sampling}, {"traces": pd.DataFrame(rows)})
    walk = expected_walk(record(target, drafter, traces, (policy,)), policy, acceptance=acceptance)
    law, first = Counter(), walk.blocks.first

    def go(tokens, row, anchor, counts, chance):
        if anchor == LENGTH - 1:
            law[tokens, counts] += chance
            return
        for num, step in enumerate(walk.law[row + anchor]):
            if step > 0:
                after = min(anchor + num + 1, LENGTH - 1)
                go(tokens, row, after, (*counts, num), chance * step)

    for name, row in zip(walk.blocks.requests["prompt_id"], first, strict=True):
        go(chances[name][0], row, 0, (), chances[name][1])
    return law


def distance(law, other):
    return max(abs(law[key] - other[key]) for key in {*law, *other})


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize(
    ("kind", "policy", "shape"),
    [
        ("dflash", "sampled", {"block_size": 3, "seed": 1}),
        ("dflash2", "selector", {"block_size": 3, "seed": 4, "selector_top_k": 2}),
        # A vocabulary of its own of two tokens keeps the branches few.
        ("dspark", "markov", {"block_size": 2, "seed": 5, "draft_vocab_size": 2, "own_head": True}),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_live_decode_has_the_joint_law_of_its_replay(
    kind, policy, shape, acceptance, monkeypatch
):
    shape = shape | {"vocab_size": VOCAB, "mask_token_id": 3}
    target, drafter = tiny_target(vocab_size=VOCAB), tiny_drafter(kind, **shape).double()
    target.model.double()
    live = live_law(target, drafter, policy, acceptance, monkeypatch)
    replayed = {rule: replayed_law(target, drafter, policy, rule) for rule in ("token", "block")}
    assert sum(live.values()) == pytest.approx(1.0, abs=1e-12)
    assert len({counts for _, counts in live}) > 3
    assert distance(live, replayed.pop(acceptance)) < 1e-6  # a recording holds float32
    (other,) = replayed.values()
    assert distance(live, other) > 1e-3


@pytest.fixture(scope="module")
def smollm2_traces(smollm2):
    return trace(smollm2, load_prompts("default", limit=16), max_new_tokens=SLOW_LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zoo:dflash", "zoo:dflash2"])
def test_replay_is_the_decode_of_smollm2(smollm2, smollm2_traces, name):
    drafter = load_drafter(name, target=smollm2)
    run = record(smollm2, drafter, smollm2_traces)
    policy = POLICY[drafter.settings.kind]
    compared, accepted = assert_replay_is_the_decode(
        smollm2, drafter, smollm2_traces, run, policy, SLOW_LIMIT
    )
    assert compared > 100
    assert accepted > compared / 2
