"""Statistics on hand-worked recordings, and the bootstrap against what theory says."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from recordings import Request, make_run

from dflash2_lab import stats
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import cluster_draws, cluster_estimates, percentile_interval, sum_by
from dflash2_lab.replaying import replay
from dflash2_lab.tables import Run

ROOT = Path(__file__).resolve().parents[1]


def values(table, column="value", **where):
    for name, value in where.items():
        table = table[table[name] == value]
    return table[column].tolist()


def test_cluster_ratio_is_a_ratio_of_sums():
    value, low, high = stats.cluster_ratio(np.array([3.0, 1.0]), np.array([4.0, 1.0]), 2000, 0)
    assert value == pytest.approx(4 / 5)
    # A draw of two prompts gives 3/4, 4/5 or 1; each end has probability 1/4.
    assert (low, high) == (0.75, 1.0)


def test_the_interval_has_the_width_of_the_normal_theory():
    rng = np.random.default_rng(0)
    hits = rng.binomial(20, 0.3, size=400).astype(float)
    value, low, high = stats.cluster_ratio(hits, np.full(400, 20.0), 2000, 0)
    half = 1.96 * hits.std(ddof=1) / 20 / np.sqrt(400)
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)
    assert low < value < high


def test_clusters_not_blocks_are_resampled():
    """Blocks of a prompt that all agree count as one observation; a block bootstrap covers less."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        rates = rng.uniform(0.2, 0.8, size=60)
        hits = rng.binomial(50, rates).astype(float)
        _, low, high = stats.cluster_ratio(hits, np.full(60, 50.0), 400, 0)
        covered += low <= 0.5 <= high
    assert 180 <= covered <= 199


def test_draws_are_repeatable_and_paired_between_statistics():
    part = np.arange(12.0).reshape(6, 2)
    first, again = (cluster_draws(part, np.ones(6)[:, None])[1] for _ in range(2))
    assert np.array_equal(first, again)
    other = cluster_draws(part, np.ones(6)[:, None], seed=1)[1]
    assert not np.array_equal(first, other)
    assert first[:, 1] - first[:, 0] == pytest.approx(1.0)


def test_nothing_observed_is_nan_without_a_warning_and_one_prompt_has_no_interval():
    value, low, high = stats.cluster_ratio(np.zeros((3, 2)), np.array([[0, 1.0]] * 3), 100, 0)
    assert np.isnan([value[0], low[0], high[0]]).all() and value[1] == low[1] == 0
    estimate = cluster_estimates(np.array([[1.0]]), np.array([[2.0]]))[0]
    assert (estimate.value, estimate.num) == (0.5, 2) and np.isnan(estimate.low)
    # A draw that misses the only prompt with cases is left out of the interval.
    _, low, high = stats.cluster_ratio(np.array([1.0, 0.0]), np.array([2.0, 0.0]), 100, 0)
    assert low == high == 0.5
    assert np.isnan(percentile_interval(np.full((5, 1), np.nan))).all()


def test_sum_by_sums_rows_of_a_code():
    sums = sum_by(np.array([1, 0, 1]), np.array([[1, 2], [3, 4], [5, 6]]), 3)
    assert sums.tolist() == [[3, 4], [6, 8], [0, 0]]


# Four anchors, two slots; anchor 3 has one slot only.
RANKS = np.array([[0, 0], [0, 1], [2, 0], [1, 9]])


def test_position_and_conditional_recall_by_hand():
    run = make_run([Request(5, rank=RANKS, accept={"selector": [0, 1, 0, 0]})], 2)
    table = stats.recall_by_slot(run, ks=(1, 2))
    every = {"anchors": "all", "k": 1}
    assert values(table, metric="position_recall", **every) == pytest.approx([2 / 4, 2 / 3])
    assert values(table, metric="conditional_recall", **every) == pytest.approx([2 / 4, 1 / 2])
    assert values(table, "num_blocks", metric="position_recall", **every) == [4, 3]
    assert values(table, "num_blocks", metric="conditional_recall", **every) == [4, 2]
    two = {"anchors": "all", "k": 2}
    assert values(table, metric="position_recall", **two) == pytest.approx([3 / 4, 1])
    assert values(table, metric="conditional_recall", **two) == pytest.approx([3 / 4, 1])
    # The selector visits anchors 0, 1 and 3.
    seen = {"anchors": "visited", "k": 1}
    assert values(table, metric="position_recall", **seen) == pytest.approx([2 / 3, 1 / 2])
    assert values(table, metric="conditional_recall", **seen) == pytest.approx([2 / 3, 1 / 2])
    assert values(table, "num_blocks", metric="position_recall", **seen) == [3, 2]
    assert list(table) == [
        "anchors", "metric", "k", "slot", "value", "low", "high", "num_blocks",
    ]  # fmt: skip


def test_conditional_recall_needs_every_earlier_slot():
    """Of three slots the first misses in block 0: its third slot is no case, whatever slot 2 is."""
    rank = np.array([[5, 0, 0], [0, 0, 5], [0, 5, 0]])
    run = make_run([Request(6, rank=np.repeat(rank, [1, 1, 3], axis=0), accept={"selector": 0})], 3)
    frames = {name: frame[frame["anchor"] < 3] for name, frame in run.frames.items()}
    run = Run.in_memory(run.info | {"anchor_stride": 2}, frames)
    table = stats.recall_by_slot(run, ks=(1,))
    assert values(table, metric="conditional_recall") == pytest.approx([2 / 3, 1 / 2, 0 / 1])
    assert values(table, "num_blocks", metric="conditional_recall") == [3, 2, 1]
    assert values(table, metric="position_recall") == pytest.approx([2 / 3, 2 / 3, 2 / 3])


def test_visited_recall_is_weighted_by_expected_visits():
    p, q = np.array([[0.8], [0.25], [0.5]]), np.array([[0.4], [0.5], [0.5]])
    rank = np.array([[0], [3], [0]])
    run = make_run([Request(4, p=p, q={"selector": q}, rank=rank)], 1, temperature=1.0)
    table = stats.recall_by_slot(run, ks=(1,))
    # v = 1, 1/2, 1/2: anchor 0 jumps to 1 or 2, anchor 1 (ratio 2 -> 1) leaves past the end.
    assert replay(run).visits["weight"].tolist() == [1.0, 0.5, 0.5]
    where = {"anchors": "visited", "metric": "position_recall"}
    assert values(table, **where) == pytest.approx([1.5 / 2])
    assert values(table, "num_blocks", **where) == pytest.approx([2.0])


def test_recall_reads_the_unary_candidates_and_survival_the_path():
    """Case C1: the selector always overrides a wrong first choice."""
    rank = np.full((9, 3), 1)
    run = make_run([Request(10, rank=rank, accept={"selector": 3, "top1": 0})], 3)
    table = stats.recall_by_slot(run, ks=(1,))
    assert values(table, anchors="all", metric="position_recall") == [0, 0, 0]
    assert values(stats.path_by_slot(run), metric="survival") == [1, 1, 1]
    assert values(stats.path_by_slot(run, "top1"), metric="survival")[0] == 0
    # With an identity selector the two coincide on the path.
    same = make_run([Request(10, rank=0, accept={"selector": 3})], 3)
    assert values(stats.recall_by_slot(same, ks=(1,)), metric="position_recall") == [1] * 6


def test_both_block_layouts_have_as_many_positions_as_drafted_slots():
    """Case C3: an all-correct block of seven drafts gives eight tokens."""
    run = make_run([Request(9, accept={"markov": 7}, rank=0)], 7, kind="dspark")
    table = stats.recall_by_slot(run, ks=(1,))
    assert values(table, "slot", anchors="all", metric="position_recall") == [1, 2, 3, 4, 5, 6, 7]
    assert replay(run, "markov").steps["num_emitted"].tolist() == [8]


def test_a_run_with_a_stride_has_recall_over_all_anchors_only(caplog):
    run = make_run([Request(5, rank=RANKS, accept={"selector": 0})], 2, anchor_stride=2)
    frames = {name: frame[frame["anchor"] % 2 == 0] for name, frame in run.frames.items()}
    with caplog.at_level(logging.WARNING):
        table = stats.recall_by_slot(Run.in_memory(run.info, frames), ks=(1,))
    assert set(table["anchors"]) == {"all"}
    assert "visited anchors is left out: anchor_stride: found 2" in caplog.text
    # Anchors 0 and 2: ranks (0, 0) and (2, 0).
    assert values(table, metric="position_recall") == [0.5, 1.0]


def test_an_off_policy_run_has_recall_over_all_anchors_only(caplog):
    run = make_run([Request(5, rank=RANKS, accept={"selector": 0})], 2, on_policy=False)
    with caplog.at_level(logging.WARNING):
        table = stats.recall_by_slot(run, ks=(1,))
    assert set(table["anchors"]) == {"all"} and "on_policy: found false" in caplog.text


def test_default_policy_is_the_drafters_own():
    kinds = {"dflash": "top1", "dflash2": "selector", "dspark": "markov"}
    run = make_run([Request(3, accept={"top1": 0})], 1)
    for kind, policy in kinds.items():
        assert stats.default_policy(Run.in_memory({"drafter": {"kind": kind}}, {})) == policy
    with pytest.raises(LabError, match="'selector': not recorded, found top1"):
        stats.recall_by_slot(run)
    with pytest.raises(LabError, match=r"drafter\.kind: found 'eagle'"):
        stats.default_policy(Run.in_memory({"drafter": {"kind": "eagle"}}, {}))


def halving_run():
    """Return two prompts of nine blocks with recall 8/8, 4/8, 2/8, 1/8 at slots 1..4."""
    rank = np.zeros((11, 4), dtype=int)
    rank[4:8, 1] = rank[2:8, 2] = rank[1:8, 3] = 5
    # The last blocks lack slots; take them out of the counts of slots 2..4.
    keep = np.arange(11) < 8
    run = make_run([Request(12, rank=rank, accept={"selector": 0}, prompt_id=p) for p in "ab"], 4)
    frames = {name: f[keep[f["anchor"].to_numpy()]] for name, f in run.frames.items()}
    return Run.in_memory(run.info, frames)


def test_suffix_decay_is_the_log_slope_and_the_drop():
    curve, decay = stats.suffix_decay(halving_run())
    assert curve["value"].tolist() == [1.0, 0.5, 0.25, 0.125]
    assert list(curve) == ["slot", "value", "low", "high"]
    assert decay.slope == pytest.approx(np.log(0.5)) == decay.slope_low
    assert decay.drop == pytest.approx(0.875)
    flat, none = stats.suffix_decay(halving_run(), k=6)
    assert flat["value"].tolist() == [1.0] * 4 and none.slope == none.drop == 0.0


def test_suffix_decay_intervals_follow_the_prompts():
    rng = np.random.default_rng(0)
    chance = 0.8 * 0.8 ** np.arange(4)
    requests = [
        Request(
            60,
            rank=(rng.random((59, 4)) > chance).astype(int),
            accept={"selector": 0},
            prompt_id=f"{n}",
        )
        for n in range(40)
    ]
    run = make_run(requests, 4)
    curve, decay = stats.suffix_decay(run)
    assert decay.slope_low < np.log(0.8) < decay.slope_high
    assert decay.slope_high - decay.slope_low < 0.1
    assert decay.drop_low < decay.drop < decay.drop_high
    assert ((curve["low"] < curve["value"]) & (curve["value"] < curve["high"])).all()
    recall = stats.recall_by_slot(run, ks=(1,))
    for anchors in ("all", "visited"):
        where = {"anchors": anchors, "metric": "position_recall"}
        other, _ = stats.suffix_decay(run, anchors=anchors)
        for column in ("value", "low", "high"):
            assert other[column].tolist() == values(recall, column, **where)
    with pytest.raises(LabError, match="anchors: found 'some'"):
        stats.suffix_decay(run, anchors="some")


def test_the_slope_is_that_of_least_squares_over_all_slots():
    rng = np.random.default_rng(3)
    requests = [
        Request(30, rank=rng.integers(0, 3, (29, 5)), accept={"selector": 0}, prompt_id=f"{n}")
        for n in range(3)
    ]
    curve, decay = stats.suffix_decay(make_run(requests, 5))
    expected = np.polyfit(curve["slot"], np.log(curve["value"]), 1)[0]
    assert decay.slope == pytest.approx(expected)


def test_suffix_decay_of_a_slot_without_any_hit_has_no_slope():
    requests = [
        Request(5, rank=[[0, 3]], accept={"selector": 0}, prompt_id=prompt) for prompt in "ab"
    ]
    run = make_run(requests, 2)
    _, decay = stats.suffix_decay(run)
    assert np.isnan(decay.slope) and decay.drop == 1.0


def policies_run(seed=0):
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(8):
        rank = rng.geometric(0.4, size=(30, 4)) - 1
        hits = {"top1": rank == 0, "selector": rank < rng.integers(1, 4, rank.shape)}
        dataset = "code" if number % 2 else "chat"
        requests.append(Request(31, hits=hits, rank=rank, prompt_id=f"{number}", dataset=dataset))
    return make_run(requests, 4)


def test_acceptance_by_policy_is_what_replay_says():
    run = policies_run()
    table = stats.acceptance_by_policy(run, oracle_ks=(1, 3))
    columns = ["policy", "aggregation", "terminal", "value", "low", "high", "num_steps"]
    assert list(table) == columns and len(table) == 16
    assert table["policy"].unique().tolist() == ["top1", "selector", "oracle@1", "oracle@3"]
    for policy in ("selector", "oracle@3"):
        result = replay(run, policy)
        for aggregation in ("pooled", "per_request"):
            for terminal, suffix in (("with", ""), ("without", "_uncut")):
                estimate = getattr(result, aggregation + suffix)
                where = {"policy": policy, "aggregation": aggregation, "terminal": terminal}
                row = [values(table, column, **where)[0] for column in ("value", "low", "high")]
                assert row == [estimate.value, estimate.low, estimate.high]
    steps = replay(run, "top1").steps
    where = {"policy": "top1", "aggregation": "pooled"}
    assert values(table, "num_steps", terminal="with", **where) == [len(steps)]
    uncut = steps[steps["terminal"] == ""]
    assert values(table, "num_steps", terminal="without", **where) == [len(uncut)]
    assert values(table, terminal="without", **where) == [uncut["num_emitted"].mean()]
    only = stats.acceptance_by_policy(run, policies=["top1"], oracle_ks=())
    assert only["policy"].unique().tolist() == ["top1"]


def test_path_by_slot_is_what_replay_says():
    run = policies_run()
    table = stats.path_by_slot(run)
    result = replay(run, "selector")
    assert values(table, metric="survival") == [e.value for e in result.survival]
    conditional = [e.value for e in result.conditional_acceptance]
    assert values(table, metric="conditional_acceptance") == conditional
    assert values(table, "num_blocks", metric="survival") == [e.num for e in result.survival]


def test_headroom_is_the_share_of_the_way_to_the_oracle():
    run = policies_run()
    table = stats.headroom(run, oracle_k=3)
    base, own, oracle = (replay(run, p).pooled.value for p in ("top1", "selector", "oracle@3"))
    assert values(table, policy="top1") == [0.0]
    assert values(table, policy="selector") == pytest.approx([(own - base) / (oracle - base)])
    row = table[table["policy"] == "selector"].iloc[0]
    assert 0 < row["low"] < row["value"] < row["high"] < 1
    # Paired draws: a policy equal to the oracle recovers all of it in every draw.
    everything = stats.headroom(run, policies=["oracle@3"], oracle_k=3).iloc[0]
    assert (everything["low"], everything["value"], everything["high"]) == (1, 1, 1)
    nothing = stats.headroom(run, policies=["selector"], oracle_k=1)
    assert np.isnan(nothing["value"]).all()


def test_by_dataset_gives_each_dataset_alone():
    """Case C13."""
    run = policies_run()
    table = stats.by_dataset(run, lambda part: stats.acceptance_by_policy(part, ["top1"], ()))
    assert table.columns[0] == "dataset"
    result = replay(run, "top1").by_dataset
    for dataset in ("chat", "code"):
        where = {"dataset": dataset, "aggregation": "pooled", "terminal": "with"}
        for column in ("value", "low", "high"):
            assert values(table, column, **where) == values(result, column, **where)
    recall = stats.by_dataset(run, stats.recall_by_slot)
    assert len(recall) == 2 * len(stats.recall_by_slot(run))
    mixed = run.anchors.assign(dataset=np.where(run.anchors["anchor"] == 0, "x", "y"))
    with pytest.raises(LabError, match="prompt '0': found in two datasets"):
        stats.by_dataset(Run.in_memory(run.info, {"anchors": mixed}), stats.recall_by_slot)


def test_repetition_is_flagged_and_logged(caplog):
    """Case C9."""
    responses = [list(range(40)), [7] * 40, [1, 2, 3], [1, 2, 3, 4] * 10]
    traces = pd.DataFrame(
        {"prompt_id": list("abcd"), "turn": 0, "sample": 0, "response_ids": responses}
    )
    with caplog.at_level(logging.WARNING):
        table = stats.degenerate_output(traces)
    assert table["distinct_4gram_ratio"].tolist() == pytest.approx([1, 1 / 37, 1, 4 / 37])
    assert table["degenerate"].tolist() == [False, True, False, True]
    assert "degenerate_output: 2 of 4" in caplog.text
    caplog.clear()
    stats.degenerate_output(traces.iloc[:1])
    assert caplog.records == []


def test_statistics_import_neither_torch_nor_transformers():
    code = (
        "import sys, dflash2_lab.stats, dflash2_lab.replaying, dflash2_lab.tables;"
        "print(sorted({'torch', 'transformers', 'plotly', 'scipy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == "[]\n"
