"""Recording against brute force: one block a drafter call, plain lists and loops."""

import functools
import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from drafters import tiny_drafter
from helpers import tiny_target
from profiling import peak_bytes

from dflash2_lab.errors import LabError
from dflash2_lab.models.attention import dense_attention
from dflash2_lab.models.layers import embed_rows
from dflash2_lab.policies import Block, candidates, propose
from dflash2_lab.record import RecordOptions, record, record_trace, token_groups
from dflash2_lab.replay import replay
from dflash2_lab.sampling import Sampling, filter_logits, uniforms
from dflash2_lab.tables import Run
from dflash2_lab.target import features

SLOT = ["prompt_id", "turn", "sample", "anchor", "slot"]
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
HOT = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
LENGTHS = ((5, 12), (9, 2), (1, 7), (20, 1), (4, 0), (3, 30))  # prompt, response


def some_traces(sampling=GREEDY, lengths=LENGTHS, vocab=264):
    """Traces of random tokens (what was traced does not matter to a recording)."""
    rng = np.random.default_rng(0)
    rows = []
    for number, (prompt, response) in enumerate(lengths):
        logprob = np.zeros(response) if sampling is GREEDY else -rng.random(response)
        rows.append(
            {
                "prompt_id": f"p{number}",
                "turn": 0,
                "sample": number % 2,
                "dataset": "set",
                "prompt_ids": rng.integers(4, vocab, prompt).tolist(),
                "response_ids": rng.integers(4, vocab, response).tolist(),
                "logprob": logprob.tolist(),
                "logprob_unfiltered": logprob.tolist(),
                "finish": "length",
                "on_policy": True,
            }
        )
    info = {"kind": "trace", "sampling": dict(sampling), "seed": 0, "prompt_set_hash": "abc"}
    return Run.in_memory(info, {"traces": pd.DataFrame(rows)})


def greedy_trace(target, tokens=24, prompts=3):
    """The target's own greedy continuations."""
    rows = some_traces(lengths=[(4 + 3 * n, 0) for n in range(prompts)]).traces
    responses = []
    for prompt in rows["prompt_ids"]:
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        responses.append(ids[len(prompt) :])
    frame = rows.assign(response_ids=responses)
    frame["logprob"] = frame["logprob_unfiltered"] = [[0.0] * tokens] * prompts
    info = {"kind": "trace", "sampling": dict(GREEDY), "seed": 0}
    return Run.in_memory(info, {"traces": frame})


@torch.no_grad()
def block_outputs(target, drafter, row, anchor):
    """Hidden states and logits [P, ...] of the one block at `anchor`, without any packing."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    at = len(row.prompt_ids) + anchor
    context, _ = features(target, ids[:, :at], drafter.settings.target_layer_ids)
    block = drafter.block_ids(ids[:, at : at + 1])
    table = drafter.input_embedding(target.embed_weight)
    embeds = embed_rows(table, block, drafter.settings.input_embedding_scale)
    hidden = drafter(embeds, drafter.context_keys(context), torch.tensor([[at]]))
    hidden = drafter.slot_rows(hidden)[0, 0]
    return hidden, drafter.logits(hidden, target.head).double()


def selector_score(drafter, hidden, logits, previous, token):
    selector = drafter.candidate_selector
    before = selector.predecessor_codebook[previous].double()
    gate = selector.hidden_projection(hidden).double()
    return float(logits[token] + (before * gate * selector.successor_codebook[token]).sum())


def softmax(scores, temperature):
    weights = np.exp((np.array(scores) - max(scores)) / temperature)
    return weights / weights.sum()


def law_of(drafter, policy, sampling, hidden, logits, previous):
    """{token: q} of one slot after the token `previous`, in float64."""
    ranked = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    greedy = sampling["temperature"] == 0 or policy.endswith("_greedy") or policy == "top1"
    temperature = 1.0 if greedy else sampling["temperature"]
    if policy in ("top1", "sampled"):
        tokens, scores = ranked, [float(logits[token]) for token in ranked]
    elif policy.startswith("selector"):
        tokens = ranked[: drafter.settings.selector_top_k]
        scores = [selector_score(drafter, hidden, logits, previous, token) for token in tokens]
    else:
        bias = drafter.to_target_vocab(drafter.markov_head(torch.tensor(previous))).double()
        tokens, scores = range(len(logits)), (logits + bias).tolist()
    if greedy:
        return {tokens[int(np.argmax(scores))]: 1.0}
    if policy == "sampled":
        law = filter_logits(logits, **sampling)
        return {token: float(law[token]) for token in tokens if law[token] > 0}
    return dict(zip(tokens, softmax(scores, temperature).tolist(), strict=True))


def brute_slots(target, drafter, traces, policies, sampling):
    """Every slot of every anchor: key -> (rank, {policy: (greedy path token, q of the target)})."""
    slots = {}
    for row in traces.traces.itertuples(index=False):
        response = list(row.response_ids)
        for anchor in range(len(response) - 1):
            hidden, logits = block_outputs(target, drafter, row, anchor)
            path = dict.fromkeys(policies, response[anchor])
            for slot in range(1, min(drafter.settings.num_draft, len(response) - 1 - anchor) + 1):
                token, before = response[anchor + slot], response[anchor + slot - 1]
                here = hidden[slot - 1], logits[slot - 1]
                rank = int((here[1] > here[1][token]).sum())
                rank = 264 if here[1][token] == -np.inf else rank  # no draft token: never found
                found = {}
                for policy in policies:
                    forced = law_of(drafter, policy, sampling, *here, before)
                    own = law_of(drafter, policy, sampling, *here, path[policy])
                    path[policy] = max(own, key=own.get)
                    found[policy] = path[policy], forced.get(token, 0.0)
                key = row.prompt_id, row.turn, row.sample, anchor, slot
                slots[key] = token, rank, found
    return slots


def path_of(run, policy):
    return run.paths[run.paths["policy"] == policy]


def same_tables(first, second, tables=("anchors", "slots", "paths", "attention"), exact=False):
    for name in tables:
        if exact:
            pd.testing.assert_frame_equal(first.table(name), second.table(name))
        else:
            pd.testing.assert_frame_equal(
                first.table(name), second.table(name), rtol=1e-4, atol=1e-5
            )


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

    monkeypatch.setattr("dflash2_lab.record.uniforms", spy)
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


# --- failures


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("fc.weight", "context projection"),
        ("layers.0.mlp.up_proj.weight", "layers.0"),
        ("layers.1.self_attn.v_proj.weight", "layers.1|context projection"),
        ("lm_head.weight", "output head"),
    ],
)
def test_a_drafter_with_nan_is_refused_by_the_layer_that_makes_it(target, broken, named):
    drafter = tiny_drafter("dflash", own_head=True)
    drafter.get_parameter(broken).fill_(float("nan"))
    with pytest.raises(LabError, match=named):
        record(target, drafter, some_traces())


def test_half_precision_overflow_is_an_error_that_names_the_layer():
    target = tiny_target()
    drafter = tiny_drafter("dflash")
    drafter.layers[1].mlp.down_proj.weight.fill_(6e4)
    drafter.half()
    with pytest.raises(LabError, match=r"layers\.1 gives values that are not finite"):
        record(target, drafter, some_traces())


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@pytest.mark.parametrize("form", ["free", "projected"])
def test_a_drafter_in_another_dtype_than_its_target_is_recorded(target, kind, form):
    changes = {"selector_parametrization": form} if kind == "dflash2" else {"own_head": True}
    drafter, traces = tiny_drafter(kind, **changes), some_traces()
    expected = record(target, drafter, traces).slots["target_rank"]
    found = record(target, drafter.bfloat16(), traces).slots["target_rank"]
    assert (abs(found - expected) < 80).mean() > 0.9


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (((5, 1), (5, 0)), "no response has two tokens"),
        (((5, 3), (0, 4)), "'p1'.*no token"),
    ],
)
def test_traces_without_anything_to_record_are_refused(target, lengths, message):
    with pytest.raises(LabError, match=message):
        record(target, tiny_drafter(), some_traces(lengths=lengths))


def test_traces_of_a_larger_vocabulary_are_refused(target):
    with pytest.raises(LabError, match="264 tokens"):
        record(target, tiny_drafter(), some_traces(vocab=5000))


def test_a_drafter_of_another_target_is_refused(target):
    with pytest.raises(LabError, match="wrong target"):
        record(target, tiny_drafter(hidden_size=64), some_traces())


@pytest.mark.parametrize(
    "options", [{"anchor_stride": 0}, {"batch_size": 0}, {"memory_gb": 0.0}, {"memory_gb": -1}]
)
def test_bad_options_are_named(target, options):
    with pytest.raises(LabError, match=next(iter(options))):
        record(target, tiny_drafter(), some_traces(), **options)


# --- folders


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


@pytest.mark.parametrize("lost", ["slots-00001", "attention-00000", "paths-00002"])
def test_a_run_that_lost_a_shard_ends_with_the_same_files(target, tmp_path, lost):
    drafter, traces, options = tiny_drafter(), some_traces(HOT), {"batch_size": 2, "out": tmp_path}
    whole = record(target, drafter, traces, **options)
    before = files(tmp_path)
    assert len(before) == 3 * 4
    (tmp_path / f"{lost}.parquet").unlink()
    again = record(target, drafter, traces, **options)
    assert files(tmp_path) == before
    same_tables(whole, again, exact=True)


def test_a_finished_run_is_read_and_not_made_again(target, tmp_path):
    drafter, traces = tiny_drafter(), some_traces()
    record(target, drafter, traces, out=tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.parquet")}
    record(target, drafter, traces, out=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.parquet")} == stamps


@pytest.mark.parametrize(
    "change",
    ["stride", "policies", "candidates", "attention", "seed", "weights", "kind", "traces"],
)
def test_another_run_in_the_same_folder_is_refused(target, tmp_path, change):
    drafter, traces, options = tiny_drafter(), some_traces(HOT), {"out": tmp_path}
    record(target, drafter, traces, **options)
    options |= {
        "stride": {"anchor_stride": 2},
        "policies": {"policies": ("top1",)},
        "candidates": {"keep_candidates": True},
        "attention": {"attention": False},
        "seed": {"seed": 5},
    }.get(change, {})
    if change == "weights":
        drafter = tiny_drafter(seed=9)
    elif change == "kind":
        drafter = tiny_drafter("dflash")
    elif change == "traces":
        traces = some_traces(HOT, lengths=(*LENGTHS[:-1], (3, 29)))
    with pytest.raises(LabError, match="another run"):
        record(target, drafter, traces, **options)


def test_run_information_names_what_the_numbers_depend_on(target):
    info = record(target, tiny_drafter(), some_traces(HOT)).info
    assert info["drafter"]["num_draft"] == 3
    assert info["drafter"]["dtype"] == "float32"
    assert info["target"]["name"] == "tiny-qwen3"
    assert info["sampling"] == HOT
    assert info["prompt_set_hash"] == "abc"
    assert info["environment"]["packages"]["torch"]


def test_traces_that_are_off_policy_are_recorded_and_marked(target):
    traces = some_traces()
    frame = traces.traces.assign(on_policy=[True] * 5 + [False])
    run = record(target, tiny_drafter(), Run.in_memory(traces.info, {"traces": frame}))
    assert run.info["on_policy"] is False


# --- pieces


def test_token_groups_are_neighbours_and_keep_the_padded_size():
    lengths = [5, 5, 9, 2, 30, 1, 1]
    groups = token_groups(lengths, 18)
    assert list(itertools.chain(*groups)) == list(range(7))
    for group in groups:
        padded = max(lengths[row] for row in group) * len(group)
        assert padded <= 18 or len(group) == 1
    assert len(groups) == 4


def test_memory_of_recording_attention_does_not_grow_with_the_context():
    target = tiny_target(max_position_embeddings=8256)
    drafter = tiny_drafter(max_position_embeddings=8256)
    peaks = {}
    for context in (512, 8192):
        row = next(some_traces(lengths=((context, 60),)).traces.itertuples(index=False))
        ids = torch.tensor([*row.prompt_ids, *row.response_ids])
        with torch.inference_mode():
            taps, _ = features(target, ids[None], drafter.settings.target_layer_ids)
            keys = drafter.context_keys(taps)
            for attention in (True, False):
                options = RecordOptions(("selector",), memory_gb=0.004, attention=attention)
                call = functools.partial(
                    record_trace, target, drafter, ids, keys, row, Sampling(), options
                )
                peaks[context, attention] = peak_bytes(call)
    # The weights of one layer alone would take 31 MB at the longer context.
    for context in (512, 8192):
        assert 0.0004e9 < peaks[context, True] < 0.004e9
        assert peaks[context, True] - peaks[context, False] < 100_000
