"""Recording against brute force: one block a drafter call, plain lists and loops."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from brute import (
    GREEDY,
    HOT,
    LENGTHS,
    SLOT,
    block_outputs,
    brute_slots,
    greedy_trace,
    law_of,
    path_of,
    same_tables,
    some_traces,
)
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.errors import LabError
from dflash2_lab.models.attention import dense_attention
from dflash2_lab.models.layers import embed_rows
from dflash2_lab.policies import Block, candidates, propose
from dflash2_lab.recording import record
from dflash2_lab.replaying import replay
from dflash2_lab.sampling import Sampling, uniforms
from dflash2_lab.tables import Run
from dflash2_lab.target import features


@pytest.fixture(scope="module")
def target():
    return tiny_target()


CASES = [
    ("dflash", ("top1",), {}),
    ("dflash2", ("top1", "selector"), {}),
    ("dflash2", ("selector",), {"block_size": 2}),
    ("dflash2", ("selector",), {"output_multiplier": 0.7, "final_logit_softcapping": 4.0}),
    ("dspark", ("top1", "markov"), {}),
    ("dspark", ("markov",), {"own_head": True, "draft_vocab_size": 40}),
    ("dflash", ("top1",), {"input_embedding_scale": 3.0, "own_embedding": True}),
]


@pytest.mark.parametrize(("kind", "policies", "changes"), CASES)
def test_greedy_tables_equal_brute_force(target, kind, policies, changes):
    drafter, traces = tiny_drafter(kind, **changes), some_traces()
    if "draft_vocab_size" in changes:
        drafter.d2t.fill_(10)
    run = record(target, drafter, traces, policies=policies)
    expected = brute_slots(target, drafter, traces, policies, GREEDY)
    slots = run.slots.set_index(SLOT)
    assert set(slots.index) == set(expected)
    assert len(slots) == len(expected)
    for key, (token, rank, _) in expected.items():
        assert slots.loc[key, "target_token"] == token
        assert slots.loc[key, "target_rank"] == rank
    assert (slots["p_target"] == 1.0).all()
    for policy in policies:
        paths = path_of(run, policy).set_index(SLOT)
        assert len(paths) == len(expected)
        for key, (token, _, found) in expected.items():
            path, q_target = found[policy]
            assert paths.loc[key, "token"] == path
            assert paths.loc[key, "hit"] == (path == token)
            assert paths.loc[key, "q_target"] == q_target


@pytest.mark.parametrize(
    ("kind", "policies"),
    [
        ("dflash", ("top1", "sampled")),
        ("dflash2", ("top1", "sampled", "selector", "selector_greedy")),
        ("dspark", ("sampled", "markov", "markov_greedy")),
    ],
)
def test_q_of_the_target_equals_brute_force_when_sampling(target, kind, policies):
    drafter, traces = tiny_drafter(kind), some_traces(HOT)
    run = record(target, drafter, traces, policies=policies)
    expected = brute_slots(target, drafter, traces, policies, HOT)
    logprob = {row.prompt_id: row.logprob for row in traces.traces.itertuples()}
    for row in run.slots.itertuples():
        p = np.exp(logprob[row.prompt_id][row.anchor + row.slot])
        assert row.p_target == pytest.approx(p)
    assert len(run.paths) == len(policies) * len(expected)
    for row in run.paths.itertuples():
        key = row.prompt_id, row.turn, row.sample, row.anchor, row.slot
        path, q_target = expected[key][2][row.policy]
        assert row.q_target == pytest.approx(q_target, abs=1e-5)
        assert 0 <= row.q_target <= 1
        if row.policy == "top1" or row.policy.endswith("_greedy"):
            assert row.token == path


def test_sampled_paths_follow_the_seed_and_the_request_only(target):
    drafter, traces = tiny_drafter(), some_traces(HOT)
    first, again, other = (record(target, drafter, traces, seed=seed) for seed in (1, 1, 2))
    same_tables(first, again, exact=True)
    tokens = {
        policy: [path_of(run, policy)["token"].to_numpy() for run in (first, other)]
        for policy in first.policies
    }
    assert set(tokens) == {"top1", "sampled", "selector", "selector_greedy"}
    for policy, (one, two) in tokens.items():
        drawn = policy in ("sampled", "selector")
        assert (one != two).any() == drawn
    frame = traces.traces.iloc[[5]]
    alone = record(target, drafter, Run.in_memory(traces.info, {"traces": frame}), seed=1)
    expected = first.paths.query("prompt_id == 'p5'").reset_index(drop=True)
    assert alone.paths["token"].tolist() == expected["token"].tolist()


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("dflash", "sampled"), ("dflash2", "selector"), ("dspark", "markov")],
)
def test_drawn_paths_have_the_law_of_their_policy(target, kind, policy):
    drafter, sampling, num = (
        tiny_drafter(kind),
        {"temperature": 2.0, "top_p": 0.9, "top_k": 9},
        4000,
    )
    row = next(some_traces(HOT, lengths=[(5, 9)]).traces.itertuples(index=False))
    hidden, logits = block_outputs(target, drafter, row, 0)
    ids = torch.tensor(row.response_ids)[: len(hidden) + 1]
    block = Block(
        drafter=drafter,
        embedding=target.embed_weight,
        hidden=hidden.expand(num, -1, -1),
        logits=logits.float().expand(num, -1, -1),
        before=ids[:-1].expand(num, -1),
        targets=ids[1:].expand(num, -1),
        sampling=Sampling(**sampling),
        uniforms={policy: torch.rand(num, len(hidden), dtype=torch.float64)},
    )
    tokens = propose(block, candidates(block), policy).tokens.numpy()
    law = law_of(drafter, policy, sampling, hidden[0], logits[0], int(ids[0]))
    best = max(law, key=law.get)
    then = law_of(drafter, policy, sampling, hidden[1], logits[1], best)
    for drawn, expected in ((tokens[:, 0], law), (tokens[tokens[:, 0] == best, 1], then)):
        assert set(drawn) <= {token for token, q in expected.items() if q > 0}
        for token, q in expected.items():
            allowed = 5 * (q * (1 - q) / len(drawn)) ** 0.5 + 1 / len(drawn)
            assert (drawn == token).mean() == pytest.approx(q, abs=allowed)


def test_anchor_rows_have_context_slots_and_ends(target):
    traces = some_traces()
    ends = {"dataset": list("aabbcc"), "finish": ["eos", "length"] * 3}
    traces = Run.in_memory(traces.info, {"traces": traces.traces.assign(**ends)})
    run = record(target, tiny_drafter(), traces)
    of = {name: dict(zip(traces.traces["prompt_id"], ends[name], strict=True)) for name in ends}
    for name, values in of.items():
        assert (run.anchors[name] == run.anchors["prompt_id"].map(values)).all()
    expected = [
        (f"p{number}", anchor, prompt + anchor, min(3, response - 1 - anchor), response)
        for number, (prompt, response) in enumerate(LENGTHS)
        for anchor in range(response - 1)
    ]
    columns = ["prompt_id", "anchor", "context_len", "num_slots", "response_len"]
    assert list(run.anchors[columns].itertuples(index=False, name=None)) == expected
    assert len(run.slots) == run.anchors["num_slots"].sum()
    assert run.num_draft == 3
    assert run.info["complete"]


def test_both_layouts_of_one_width_offer_as_many_slots(target):
    traces = some_traces()
    for drafter in (tiny_drafter("dflash"), tiny_drafter("dspark", block_size=3)):
        run = record(target, drafter, traces)
        assert run.num_draft == 3
        assert sorted(run.slots["slot"].unique()) == [1, 2, 3]


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 1}, {"batch_size": 4}, {"memory_gb": 1e-9}, {"memory_gb": 2e-4}],
)
def test_batching_and_tiling_do_not_change_the_numbers(target, options):
    for kind in ("dflash2", "dspark"):
        drafter, traces = tiny_drafter(kind), some_traces(HOT)
        same_tables(record(target, drafter, traces, **options), record(target, drafter, traces))


@pytest.mark.parametrize("stride", [2, 5])
def test_a_stride_leaves_anchors_out_and_changes_nothing_else(target, stride):
    drafter, traces = tiny_drafter(), some_traces(HOT)
    dense = record(target, drafter, traces, keep_candidates=True)
    sparse = record(target, drafter, traces, anchor_stride=stride, keep_candidates=True)
    for name in ("anchors", "slots", "paths", "candidates"):
        expected = dense.table(name)
        expected = expected[expected["anchor"] % stride == 0].reset_index(drop=True)
        pd.testing.assert_frame_equal(sparse.table(name), expected, rtol=1e-4, atol=1e-5)
    assert sparse.attention["count"].sum() < dense.attention["count"].sum()


def test_without_attention_everything_else_is_the_same(target):
    drafter, traces = tiny_drafter(), some_traces()
    plain, full = record(target, drafter, traces, attention=False), record(target, drafter, traces)
    same_tables(plain, full, ("anchors", "slots", "paths"), exact=True)
    assert not plain.has_table("attention")


def eager_sums(drafter, sums):
    """An `attend` that adds softmax(q k) of one block by layer, head, slot and key group."""
    shift = 0 if drafter.settings.sample_from_anchor else 1  # row of slot 1

    def attend(layer, query, context, block, anchors, window, causal):
        at = int(anchors)
        for head, slot in itertools.product(range(4), range(drafter.settings.num_draft)):
            row = slot + shift
            near = [s for s in range(at) if window is None or at + row - s < window]
            own = range(row + 1 if causal else 4)
            keys = [context[0][0, head // 2, s] for s in near]
            keys += [block[0][0, head // 2, 0, r] for r in own]
            scores = torch.stack(keys).double() @ query[0, head, 0, row].double() / 8**0.5
            weights, n = scores.softmax(0), len(near)
            groups = weights[:n], weights[n], weights[n + 1 :]
            sums[layer, head, slot, :3] += [float(part.sum()) for part in groups]
            sums[layer, head, slot, 3] += float(weights[n:].sum()) ** 2
            sums[layer, head, slot, 4] += len(own) / len(keys)
        return dense_attention(query, context, block, anchors, window, causal)

    return attend


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@pytest.mark.parametrize("causal", [(False, False), (True, False)])
def test_attention_equals_the_weights_of_a_plain_softmax(target, kind, causal):
    drafter, traces = tiny_drafter(kind, causal=causal), some_traces(lengths=((5, 9),))
    run = record(target, drafter, traces)
    row = next(traces.traces.itertuples(index=False))
    num_draft = drafter.settings.num_draft
    sums = np.zeros((2, 4, num_draft, 5))
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    with torch.no_grad():
        context, _ = features(target, ids, drafter.settings.target_layer_ids)
        for at in range(5, 13):
            keys = drafter.context_keys(context[:, :at])
            block = drafter.block_ids(ids[:, at : at + 1])
            embeds = embed_rows(target.embed_weight, block, 1.0)
            drafter(embeds, keys, torch.tensor([[at]]), eager_sums(drafter, sums))
    columns = ["sum_context", "sum_anchor", "sum_drafted", "sumsq_within", "sum_uniform"]
    assert len(run.attention) == 2 * 4 * num_draft
    for line in run.attention.itertuples():
        found = [getattr(line, name) for name in columns]
        np.testing.assert_allclose(found, sums[line.layer, line.head, line.slot - 1], atol=1e-5)
        assert sum(found[:3]) == pytest.approx(line.count)
        assert line.count == 8


def test_no_random_number_is_used_twice(target, monkeypatch):
    drawn = []

    def spy(keys, positions):
        drawn.append(uniforms(keys, positions))
        return drawn[-1]

    monkeypatch.setattr("dflash2_lab.recording.uniforms", spy)
    run = record(target, tiny_drafter(), some_traces(HOT), memory_gb=1e-9)
    numbers = torch.cat([part.flatten() for part in drawn])
    assert len(numbers) == len(run.policies) * 3 * len(run.anchors)
    assert len(numbers.unique()) == len(numbers)


def test_kept_candidates_allow_the_greedy_path_to_be_walked_again(target):
    drafter, traces = tiny_drafter(), some_traces()
    run = record(target, drafter, traces, keep_candidates=True)
    paths = path_of(run, "selector").set_index(SLOT)["token"]
    ranks = run.slots.set_index(SLOT)
    for _, rows in run.candidates.groupby(SLOT[:4]):
        previous = 0
        for row in rows.sort_values("slot").itertuples(index=False):
            key = row.prompt_id, row.turn, row.sample, row.anchor, row.slot
            pairwise = np.array(row.pairwise).reshape(1 if row.slot == 1 else 5, 5)
            scores = np.array(row.unary) + pairwise[previous]
            previous = int(scores.argmax())
            assert row.ids[previous] == paths[key]
            assert (np.diff(row.unary) <= 0).all()
            rank, token = ranks.loc[key, "target_rank"], ranks.loc[key, "target_token"]
            assert (token in row.ids) == (rank < 5)
            if rank < 5:
                assert row.ids[rank] == token


def test_candidates_without_a_selector_are_sixteen_and_have_no_pairs(target):
    run = record(target, tiny_drafter("dspark"), some_traces(), keep_candidates=True)
    assert set(run.candidates["ids"].map(len)) == {16}
    assert set(run.candidates["pairwise"].map(len)) == {0}


def test_a_selector_that_overrides_the_argmax_shows_in_the_path_and_not_in_recall(target):
    # Case C1: two series, unary recall and path hits; an idle selector makes them one.
    drafter, traces = tiny_drafter(), some_traces()
    successor = drafter.candidate_selector.successor_codebook
    for scale, differs in ((50.0, True), (0.0, False)):
        drafter.candidate_selector.successor_codebook.data = successor * scale
        run = record(target, drafter, traces, policies=("top1", "selector"))
        wide = run.paths.pivot(index=SLOT, columns="policy", values="token")
        first = run.slots.set_index(SLOT)["target_rank"] == 0
        hits = path_of(run, "top1").set_index(SLOT)["hit"]
        assert (hits == first).all()
        assert (wide["top1"] != wide["selector"]).any() == differs


def test_oracle_bounds_hold_for_every_policy(target):
    # Case C8: gold outside the candidates is a miss, oracle@1 = top1, oracle@V = everything.
    traces = greedy_trace(target)
    run = record(target, tiny_drafter(), traces)
    lengths = {
        name: replay(run, policy=name).pooled.value
        for name in ("top1", "selector", "oracle@1", "oracle@5", "oracle@264")
    }
    assert lengths["oracle@1"] == lengths["top1"] >= 1.0
    assert lengths["oracle@5"] >= lengths["selector"] >= 1.0
    steps = replay(run, policy="oracle@264").steps
    assert (steps["num_accepted"] == steps["num_offered"]).all()


def test_only_policies_of_the_drafter_are_recorded(target):
    traces = some_traces()
    for policies in (("markov",), ("top1", "top1"), ("oracle@5",)):
        with pytest.raises(LabError, match="policies"):
            record(target, tiny_drafter(), traces, policies=policies)


def test_greedy_traces_have_no_double_policies(target):
    run = record(target, tiny_drafter("dspark"), some_traces())
    assert run.policies == ("top1", "markov")
