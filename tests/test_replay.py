"""Replay on hand-worked recordings: walks, cuts at the end, metrics, refusals, speed."""

import logging
import math
import time

import numpy as np
import pandas as pd
import pytest
from recordings import Request, make_run, repeat_prompt

from dflash2_lab.errors import LabError
from dflash2_lab.replaying import expected_walk, replay
from dflash2_lab.tables import Run, shard_done, write_run_info, write_shard


def steps_of(run, policy="selector", **options):
    frame = replay(run, policy, **options).steps
    columns = ["anchor", "num_offered", "num_accepted", "num_emitted", "terminal"]
    return [tuple(row) for row in frame[columns].itertuples(index=False)]


def walk_request(counts, num_draft, prompt_id="a", **changes):
    """Return a request whose greedy walk accepts exactly `counts`, every step uncut."""
    anchors = np.cumsum([0, *(n + 1 for n in counts)])
    accept = np.zeros(anchors[-1], dtype=int)
    accept[anchors[:-1]] = counts
    assert all(anchors[-1] - a >= num_draft for a in anchors[:-1]), "a step would be cut"
    return Request(
        int(anchors[-1]) + 1, accept={"selector": accept}, prompt_id=prompt_id, **changes
    )


def test_greedy_walk_jumps_past_the_accepted_slots_and_the_bonus():
    run = make_run([walk_request([0, 1, 3, 3], 3)], 3)
    assert steps_of(run) == [
        (0, 3, 0, 1, ""),
        (1, 3, 1, 2, ""),
        (3, 3, 3, 4, ""),
        (7, 3, 3, 4, ""),
    ]
    frame = replay(run, "selector").steps
    assert frame["step"].tolist() == [0, 1, 2, 3]
    assert frame["context_len"].tolist() == [10, 11, 13, 17]
    assert set(frame["num_accepted_raw"]) == {-1} and set(frame["weight"]) == {1.0}


def test_hits_after_the_first_miss_do_not_count():
    hits = {"selector": np.array([[True, False, True]] * 6)}
    run = make_run([Request(7, hits=hits)], 3)
    assert [row[2] for row in steps_of(run)] == [1, 1, 1]


def test_the_vectorised_walk_is_the_plain_loop_on_ragged_requests():
    rng = np.random.default_rng(4)
    requests, expected = [], []
    for number, response_len in enumerate(rng.permutation(np.arange(2, 40))):
        accept = rng.integers(0, 5, response_len - 1)
        name = {"prompt_id": f"{number % 7}", "turn": number // 7}
        requests.append(Request(int(response_len), accept={"selector": accept}, **name))
        anchor = 0
        while anchor < response_len - 1:
            offered = min(4, response_len - 1 - anchor)
            accepted = min(accept[anchor], offered)
            emitted = min(accepted + 1, response_len - 1 - anchor)
            expected.append((*name.values(), anchor, offered, accepted, emitted))
            anchor += emitted
    result = replay(make_run(requests, 4))
    columns = ["prompt_id", "turn", "anchor", "num_offered", "num_accepted", "num_emitted"]
    walked = [tuple(row) for row in result.steps[columns].itertuples(index=False)]
    assert walked == sorted(expected)
    assert result.pooled.value == pytest.approx(sum(row[-1] for row in expected) / len(expected))


@pytest.mark.parametrize("finish", ["eos", "length"])
@pytest.mark.parametrize(
    ("response_len", "accepted", "expected"),
    [
        # Two slots left of a window of three: cut whether or not they are accepted.
        (3, 0, [(0, 2, 0, 1, True), (1, 1, 0, 1, True)]),
        (3, 1, [(0, 2, 1, 2, True)]),
        (3, 2, [(0, 2, 2, 2, True)]),
        # Exactly the window is left: only accepting all of it drops the bonus token.
        (4, 2, [(0, 3, 2, 3, False)]),
        (4, 3, [(0, 3, 3, 3, True)]),
        # One more: the bonus token is the last token.
        (5, 3, [(0, 3, 3, 4, False)]),
        # One slot.
        (2, 1, [(0, 1, 1, 1, True)]),
        (2, 0, [(0, 1, 0, 1, True)]),
    ],
)
def test_the_end_of_the_response_cuts_counts(response_len, accepted, expected, finish):
    run = make_run([Request(response_len, accept={"selector": accepted}, finish=finish)], 3)
    assert steps_of(run) == [(*row[:4], finish if row[4] else "") for row in expected]


def test_eos_inside_the_accepted_prefix_stops_the_counts():
    """Case C7: [t, t, EOS, t, t] + bonus verified with five slots: emitted 3, not 6."""
    ends = Request(4, accept={"selector": 5}, finish="eos", prompt_id="ends")
    result = replay(make_run([ends], 5), "selector")
    step = result.steps.iloc[0]
    assert (step["num_offered"], step["num_accepted"], step["num_emitted"]) == (3, 3, 3)
    assert step["num_accepted_raw"] == -1 and step["terminal"] == "eos"
    assert result.pooled.value == 3.0 and math.isnan(result.pooled_uncut.value)

    both = replay(make_run([ends, walk_request([4, 4], 5, "long")], 5), "selector")
    assert both.pooled.value == pytest.approx((3 + 5 + 5) / 3)
    assert both.pooled_uncut.value == 5.0 and both.pooled_uncut.num == 2
    assert both.per_request.value == pytest.approx((3 + 5) / 2)
    assert both.per_request_uncut.value == 5.0 and both.per_request_uncut.num == 1


def test_acceptance_length_is_not_built_from_marginals():
    """Case C2: counts 3, 2, 1, 0 give 2.5 tokens per step in any order and any split."""
    whole = replay(make_run([walk_request([0, 1, 2, 3], 3)], 3), "selector")
    split = make_run([walk_request([1, 3], 3, "x"), walk_request([0, 2], 3, "y")], 3)
    assert whole.pooled.value == replay(split, "selector").pooled.value == 2.5
    assert whole.pooled.num == 4


def test_survival_and_conditional_acceptance_are_two_series():
    """Case C5: counts 0, 1, 3, 3 of three slots."""
    result = replay(make_run([walk_request([0, 1, 3, 3], 3)], 3), "selector")
    survival = [e.value for e in result.survival]
    conditional = [e.value for e in result.conditional_acceptance]
    assert survival == pytest.approx([0.75, 0.5, 0.5])
    assert conditional == pytest.approx([0.75, 2 / 3, 1.0])
    # The identity of DESIGN 2, for visited uncut steps.
    assert result.pooled_uncut.value == pytest.approx(1 + np.cumprod(conditional).sum())


def test_a_slot_that_was_not_offered_is_unobserved_not_rejected():
    """Case C5: a step with two slots adds nothing to the denominator of slot 3."""
    requests = [walk_request([0, 1, 3, 3], 3), Request(3, accept={"selector": 2}, prompt_id="b")]
    result = replay(make_run(requests, 3), "selector")
    assert [e.num for e in result.survival] == [5, 5, 4]
    assert [e.value for e in result.survival] == pytest.approx([4 / 5, 3 / 5, 2 / 4])
    assert [e.num for e in result.conditional_acceptance] == [5, 4, 2]
    assert result.conditional_acceptance[2].value == 1.0


def test_per_request_is_the_mean_of_request_means():
    requests = [walk_request([3, 3], 3, "a"), walk_request([0, 0, 0, 0, 0, 2], 3, "b")]
    result = replay(make_run(requests, 3), "selector")
    assert result.pooled.value == pytest.approx((8 + 8) / (2 + 6))
    assert result.per_request.value == pytest.approx((4 + 8 / 6) / 2)
    assert result.per_request.num == result.num_requests == 2
    assert result.requests["tokens"].tolist() == [8, 8]
    assert result.requests["steps"].tolist() == [2, 6]


def test_requests_without_a_step_are_dropped_and_counted():
    requests = [walk_request([3], 3), Request(1, prompt_id="b"), Request(1, prompt_id="c")]
    result = replay(make_run(requests, 3, num_requests=3), "selector")
    assert (result.num_requests, result.num_requests_dropped) == (1, 2)
    assert result.per_request.value == 4.0
    assert replay(make_run(requests, 3), "selector").num_requests_dropped is None


def test_turns_and_samples_are_requests_of_one_prompt():
    requests = [
        walk_request([3], 3, "a", turn=turn, sample=sample) for turn in (0, 1) for sample in (0, 2)
    ]
    result = replay(make_run([*requests, walk_request([0, 2], 3, "b")], 3), "selector")
    assert result.num_requests == 5
    assert result.steps.groupby(["prompt_id", "turn", "sample"]).ngroups == 5
    assert result.pooled.value == pytest.approx((16 + 4) / 6)


def test_one_prompt_has_no_interval():
    result = replay(make_run([walk_request([3, 1, 3], 3)], 3), "selector")
    assert math.isnan(result.pooled.low) and math.isnan(result.pooled.high)


def test_row_order_and_other_policies_do_not_matter():
    rng = np.random.default_rng(0)
    accept = {"selector": rng.integers(0, 4, 39), "top1": rng.integers(0, 4, 39)}
    run = make_run([Request(40, accept=accept, prompt_id=p) for p in ("x", "é", "b")], 3)
    shuffled = {n: f.sample(frac=1, random_state=1) for n, f in run.frames.items()}
    first, second = replay(run), replay(Run.in_memory(run.info, shuffled))
    pd.testing.assert_frame_equal(first.steps, second.steps)
    pd.testing.assert_frame_equal(first.visits, second.visits)
    assert first.pooled == second.pooled
    assert replay(run, "top1").pooled != first.pooled


def random_ranks(num_requests=6, response_len=40, num_draft=4, seed=0):
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(num_requests):
        rank = rng.geometric(0.4, size=(response_len - 1, num_draft)) - 1
        # top1 hits where the target token is first; the selector finds it in rank 0 to 2.
        hits = {"top1": rank == 0, "selector": rank < rng.integers(1, 4, rank.shape)}
        requests.append(Request(response_len, hits=hits, rank=rank, prompt_id=f"p{number}"))
    return make_run(requests, num_draft)


def test_oracle_of_one_is_the_unary_argmax_and_oracle_of_everything_takes_all():
    """Case C8."""
    run = random_ranks()
    one, top1 = replay(run, "oracle@1"), replay(run, "top1")
    pd.testing.assert_frame_equal(
        one.steps.drop(columns="policy"), top1.steps.drop(columns="policy")
    )
    everything = replay(run, "oracle@49152").steps
    assert (everything["num_accepted"] == everything["num_offered"]).all()
    lengths = [replay(run, policy).pooled.value for policy in ("top1", "selector", "oracle@3")]
    assert lengths == sorted(lengths) and lengths[0] > 1


def test_target_outside_the_candidates_is_a_miss_of_the_oracle():
    """Case C8: rank 16 is outside the best 16."""
    rank = np.array([[0, 16, 0]] * 5)
    run = make_run([Request(6, accept={"selector": 3}, rank=rank)], 3)
    assert [row[2] for row in steps_of(run, "oracle@16")] == [1, 1, 1]
    assert [row[2] for row in steps_of(run, "oracle@17")] == [3, 1]


def test_oracle_is_at_least_the_path_at_every_block():
    run = random_ranks(seed=3)
    mean = {
        policy: expected_walk(run, policy).law @ np.arange(5)
        for policy in ("top1", "selector", "oracle@3")
    }
    assert (mean["oracle@3"] >= mean["selector"]).all()
    assert (mean["selector"] >= mean["top1"]).all()


def test_a_smaller_verify_window_is_replayed_and_a_larger_one_refused():
    request = walk_request([3, 3, 3, 3], 3)
    run = make_run([request], 3)
    assert steps_of(run, num_draft=1)[:2] == [(0, 1, 1, 2, ""), (2, 1, 0, 1, "")]
    assert replay(run, num_draft=2).num_draft == 2
    assert len(replay(run, num_draft=2).survival) == 2
    for window in (0, 4):
        with pytest.raises(LabError, match=f"num_draft: found {window}, expected 1 to 3"):
            replay(run, num_draft=window)


def test_expected_lengths_at_temperature_by_hand():
    """Two tokens after the first, one slot: ratio 1/2 at anchor 0, 1 at anchor 1."""
    p, q = np.array([[0.8], [0.25]]), np.array([[0.4], [0.5]])
    run = make_run([Request(3, p=p, q={"selector": q})], 1, temperature=1.0)
    result = replay(run)
    # Accept (1/2): one step, 2 tokens. Refuse (1/2): one token, then a step at anchor 1, 1 token.
    assert result.requests.loc[0, ["tokens", "steps"]].tolist() == [2.0, 1.5]
    assert result.pooled.value == pytest.approx(2 / 1.5)
    assert result.visits["weight"].tolist() == [1.0, 0.5]
    # Uncut: anchor 0 with either count (it has a bonus token); anchor 1 accepts 1 of 1: cut.
    assert result.pooled_uncut.value == pytest.approx(1.5)
    assert result.survival[0].value == pytest.approx((0.5 + 0.5) / 1.5)


def test_drawn_walks_average_to_the_exact_length():
    rng = np.random.default_rng(1)
    p, q = rng.uniform(0.2, 1, (19, 3)), rng.uniform(0, 1, (19, 3))
    run = make_run([Request(20, p=p, q={"sampled": q})], 3, temperature=0.7)
    run = repeat_prompt(run, 300)
    result = replay(run, "sampled", seed=1)
    steps = result.steps
    assert steps["num_emitted"].sum() == 300 * 19
    drawn = 300 * 19 / len(steps)
    assert drawn == pytest.approx(result.pooled.value, rel=0.02)
    assert set(steps["temperature"]) == {0.7}
    again, other = replay(run, "sampled", seed=1), replay(run, "sampled", seed=2)
    pd.testing.assert_frame_equal(steps, again.steps)
    assert len(other.steps) != len(steps) or not other.steps.equals(steps)
    assert other.pooled == result.pooled


def test_block_acceptance_is_never_shorter_and_equal_when_greedy():
    rng = np.random.default_rng(2)
    requests = [
        Request(
            30,
            p=rng.uniform(0.1, 1, (29, 4)),
            q={"sampled": rng.uniform(0, 1, (29, 4))},
            prompt_id=f"{n}",
        )
        for n in range(5)
    ]
    run = make_run(requests, 4, temperature=1.0)
    token, block = (replay(run, "sampled", acceptance=rule) for rule in ("token", "block"))
    assert block.pooled.value > token.pooled.value
    greedy = random_ranks()
    assert replay(greedy, acceptance="block").pooled == replay(greedy).pooled
    with pytest.raises(LabError, match="acceptance: found 'blok'"):
        replay(greedy, acceptance="blok")


def test_datasets_are_reported_apart():
    """Case C13."""
    requests = [
        walk_request([3, 3], 3, "a", dataset="code"),
        walk_request([0, 0, 2], 3, "b", dataset="chat"),
    ]
    table = replay(make_run(requests, 3)).by_dataset
    assert len(table) == 8
    rows = table[(table["aggregation"] == "pooled") & (table["terminal"] == "with")]
    assert dict(zip(rows["dataset"], rows["value"], strict=True)) == {
        "chat": pytest.approx(5 / 3),
        "code": 4.0,
    }


def test_a_policy_that_offers_nothing_is_an_error_not_a_length_of_one():
    """Case C15."""
    run = make_run([walk_request([3], 3)], 3)
    listed = Run.in_memory(run.info | {"policies": ["selector", "markov"]}, run.frames)
    with pytest.raises(LabError, match="'markov': no drafts proposed in 4 blocks"):
        replay(listed, "markov")
    with pytest.raises(LabError, match="'top1': not recorded, found selector"):
        replay(run, "top1")
    empty = Run.in_memory(run.info, {**run.frames, "anchors": run.anchors.iloc[:0]})
    with pytest.raises(LabError, match="no verify step"):
        replay(empty)


def without(frame, **where):
    keep = np.zeros(len(frame), dtype=bool)
    for name, value in where.items():
        keep |= (frame[name] != value).to_numpy()
    return frame[keep]


@pytest.mark.parametrize(
    ("info", "tables", "message"),
    [
        ({"anchor_stride": 2}, {}, "anchor_stride: found 2, expected 1"),
        ({"on_policy": False}, {}, "on_policy: found false"),
        ({}, {"anchors": lambda f: without(f, anchor=1)}, "anchors are missing"),
        ({}, {"anchors": lambda f: f[f["anchor"] < 3]}, "anchors are missing"),
        ({}, {"anchors": lambda f: pd.concat([f, f.iloc[2:3]])}, "anchor 2 found twice"),
        ({}, {"anchors": lambda f: f.assign(num_slots=3)}, "found num_slots 3"),
        ({}, {"paths": lambda f: without(f, anchor=1, slot=2)}, "0 rows for prompt 'a'.*slot 2"),
        ({}, {"paths": lambda f: pd.concat([f, f.iloc[:1]])}, "'selector': found 2 rows"),
        ({}, {"paths": lambda f: f.assign(anchor=f["anchor"] + 1)}, "not in the anchors table"),
        ({}, {"paths": lambda f: f.assign(turn=1)}, "turn 1.*not in the anchors table"),
        ({}, {"paths": lambda f: f.assign(prompt_id="z")}, "'z'.*not in the anchors table"),
        ({}, {"paths": lambda f: f.assign(slot=f["slot"] - 1)}, "slot outside 1..num_slots"),
    ],
)
def test_a_recording_that_cannot_be_replayed_is_refused(info, tables, message):
    run = make_run([walk_request([3], 3)], 3)
    frames = {name: tables.get(name, lambda f: f)(frame) for name, frame in run.frames.items()}
    with pytest.raises(LabError, match=message):
        replay(Run.in_memory(run.info | info, frames))


def test_a_row_of_an_unknown_turn_is_not_taken_for_the_next_prompt():
    run = make_run([walk_request([3], 3, "a"), walk_request([3], 3, "b")], 3)
    paths = run.paths
    moved = paths.assign(turn=np.where(paths["prompt_id"] == "a", 1, 0))
    first_only = moved[(moved["turn"] == 1).to_numpy()]
    with pytest.raises(LabError, match=r"'a', turn 1.*not in the anchors table"):
        replay(Run.in_memory(run.info, {**run.frames, "paths": first_only}))


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        (0.0, 0.5, "'slots', column 'p_target': found 0.0 for prompt 'a'.*slot 1.*above 0"),
        (1.5, 0.5, "'p_target': found 1.5"),
        (0.5, -0.1, "'paths', column 'q_target': found -0.1"),
        (0.5, 1.5, "'q_target': found 1.5"),
    ],
)
def test_columns_that_are_no_probabilities_are_refused(p, q, message):
    run = make_run([Request(4, p=p, q={"selector": q})], 3, temperature=1.0)
    with pytest.raises(LabError, match=message):
        replay(run)


def test_a_run_folder_replays_like_the_run_in_memory(tmp_path, caplog):
    run = random_ranks()
    write_run_info(tmp_path, run.info)
    for name, frame in run.frames.items():
        for index, part in enumerate(np.array_split(np.arange(len(frame)), 3)):
            write_shard(tmp_path, name, index, frame.iloc[part])
    assert shard_done(tmp_path, list(run.frames), 2)
    with caplog.at_level(logging.WARNING):
        opened = replay(Run.open(tmp_path))
    pd.testing.assert_frame_equal(opened.steps, replay(run).steps)
    assert caplog.records == []


def test_two_hundred_thousand_anchors_replay_in_seconds():
    rng = np.random.default_rng(0)
    p, q = rng.uniform(0.2, 1, (399, 7)), rng.uniform(0, 1, (399, 7))
    run = make_run([Request(400, p=p, q={"selector": q})], 7, temperature=1.0)
    run = repeat_prompt(run, 501)
    assert len(run.anchors) == 199_899
    # Processor time: other work on the machine must not fail the test.
    start = time.process_time()
    result = replay(run)
    assert time.process_time() - start < 6
    assert result.requests["tokens"].to_numpy() == pytest.approx(399)
