"""Paired differences: against brute force, against independent samples, and calibrated."""

import subprocess
import sys

import figure_frames as frames
import numpy as np
import pandas as pd
import pytest
from recordings import Request, make_run

from dflash2_lab import stats, stats_paired
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import DRAWS, Estimate
from dflash2_lab.replaying import replay
from dflash2_lab.tables import Run

PAIRS = [("top1", "selector"), ("top1", "top1"), ("oracle@16", "oracle@16")]


@pytest.fixture(scope="module")
def runs():
    return frames.recorded_run("a", seed=1), frames.recorded_run("b", seed=2)


@pytest.fixture(scope="module")
def table(runs):
    return stats_paired.paired_differences(*runs, PAIRS)


def rows_of(table, quantity, policy="", dataset=""):
    rows = table[(table["quantity"] == quantity) & (table["dataset"] == dataset)]
    return rows[rows["policy"] == policy].sort_values("position")


def brute_interval(differences):
    return np.quantile(differences, [0.025, 0.975])


def picks_of(num):
    """The prompts of every draw, as the bootstrap of the library takes them."""
    return np.random.default_rng(0).integers(0, num, size=(DRAWS, num))


def test_the_difference_of_lengths_is_that_of_a_bootstrap_written_as_a_loop(runs, table):
    a, b = (replay(run, name).requests for run, name in zip(runs, PAIRS[0], strict=True))
    prompts = sorted(a["prompt_id"])
    assert prompts == sorted(b["prompt_id"])
    sums = [side.set_index("prompt_id")[["tokens", "steps"]].to_dict() for side in (a, b)]
    differences = []
    for picks in picks_of(len(prompts)):
        chosen = [prompts[pick] for pick in picks]
        lengths = [
            sum(side["tokens"][p] for p in chosen) / sum(side["steps"][p] for p in chosen)
            for side in sums
        ]
        differences.append(lengths[1] - lengths[0])
    row = rows_of(table, "acceptance_length pooled", "top1/selector").iloc[0]
    assert [row.low, row.high] == pytest.approx(brute_interval(differences))
    assert row.difference == pytest.approx(row.b - row.a)
    assert row.num_prompts == 5


def test_the_difference_of_recall_and_its_decay_is_that_of_a_bootstrap_written_as_a_loop(
    runs, table
):
    hits, cases = np.zeros((2, 2, 5, 4))  # side, prompt, slot
    for side, run in enumerate(runs):
        for row in run.slots.itertuples():
            cases[side, int(row.prompt_id[1:]), row.slot - 1] += 1
            hits[side, int(row.prompt_id[1:]), row.slot - 1] += row.target_rank < 1
    recalls, slopes = [], []
    for picks in picks_of(5):
        recall = [hits[s][picks].sum(axis=0) / cases[s][picks].sum(axis=0) for s in (0, 1)]
        recalls.append(recall[1] - recall[0])
        fits = [np.polyfit(range(4), np.log(values), 1)[0] for values in recall]
        slopes.append(fits[1] - fits[0])
    rows = rows_of(table, "position_recall@1")
    assert list(rows["position"]) == [1, 2, 3, 4]
    found = rows[["low", "high"]].to_numpy().transpose()
    assert found == pytest.approx(np.quantile(recalls, [0.025, 0.975], axis=0))
    slope = rows_of(table, "suffix_decay slope").iloc[0]
    assert [slope.low, slope.high] == pytest.approx(brute_interval(slopes))


def test_each_side_has_the_value_and_interval_that_it_has_alone(runs, table):
    for side, at in (("a", 0), ("b", 1)):
        run = runs[at]
        columns = [side, f"{side}_low", f"{side}_high"]
        for pair in PAIRS:
            result, label = replay(run, pair[at]), stats_paired.pair_label(pair)
            for name in ("pooled", "per_request"):
                alone = getattr(result, name)
                found = rows_of(table, f"acceptance_length {name}", label)[columns].to_numpy()[0]
                assert found == pytest.approx([alone.value, alone.low, alone.high])
            survival = rows_of(table, "survival", label)[columns].to_numpy()
            wanted = [(one.value, one.low, one.high) for one in result.survival]
            assert survival == pytest.approx(np.array(wanted))
        recall = stats.recall_by_slot(run, ks=(16,)).query(
            "anchors == 'all' and metric == 'position_recall'"
        )
        found = rows_of(table, "position_recall@16")[columns].to_numpy()
        assert found == pytest.approx(recall[["value", "low", "high"]].to_numpy())
        decay = stats.suffix_decay(run)[1]
        found = rows_of(table, "suffix_decay drop")[columns].to_numpy()[0]
        assert found == pytest.approx([decay.drop, decay.drop_low, decay.drop_high])
        shares = stats.attention_by_layer(run).query("slot == 0 and group == 'within_block'")
        found = rows_of(table, "within_block_share")[columns].to_numpy()
        assert found == pytest.approx(shares[["value", "low", "high"]].to_numpy())
        share = stats.headroom(run, [PAIRS[0][at]]).iloc[0]
        found = rows_of(table, "headroom_recovered", "top1/selector")[columns].to_numpy()[0]
        assert found == pytest.approx([share.value, share.low, share.high])


def test_sampled_recordings_give_the_lengths_of_their_replay():
    rng = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        requests = [
            Request(
                response_len=15,
                q={"sampled": rng.uniform(0.1, 0.9, (14, 3))},
                p=rng.uniform(0.3, 1.0, (14, 3)),
                prompt_id=f"p{index}",
            )
            for index in range(4)
        ]
        sides.append(make_run(requests, num_draft=3, temperature=1.0))
    table = stats_paired.paired_differences(*sides, [("sampled", "sampled")])
    row = rows_of(table, "acceptance_length pooled", "sampled").iloc[0]
    assert row.a == pytest.approx(replay(sides[0], "sampled").pooled.value)
    assert row.b == pytest.approx(replay(sides[1], "sampled").pooled.value)


def test_a_run_does_not_differ_from_itself(runs):
    table = stats_paired.paired_differences(runs[0], runs[0], [("top1", "top1")])
    assert (table[["difference", "low", "high"]] == 0).all(axis=None)


def test_prompts_of_one_run_alone_change_nothing(runs):
    a = frames.recorded_run("a", seed=1, num_prompts=5)
    more = {
        name: pd.concat([frame, frame.assign(prompt_id="other-" + frame["prompt_id"])])
        for name, frame in a.frames.items()
    }
    longer = Run.in_memory(a.info, more)
    one = stats_paired.paired_differences(a, runs[1], PAIRS)
    two = stats_paired.paired_differences(longer, runs[1], PAIRS)
    pd.testing.assert_frame_equal(one, two)


def correlated(rng, num=40, effect=0.0):
    """Tokens and steps of two drafters over prompts whose difficulty differs widely."""
    ease = rng.normal(3.0, 0.8, num)
    steps = rng.integers(20, 60, num).astype(float)
    sides = [ease + shift + rng.normal(0, 0.15, num) for shift in (0.0, effect)]
    return [(steps * side, steps) for side in sides]


def difference_of(sides):
    a, b = (stats_paired.samples_of(tokens[:, None], steps[:, None]) for tokens, steps in sides)
    return stats_paired.estimate((b - a)[:, 0], 40)


def test_a_paired_interval_is_narrower_than_that_of_independent_samples():
    sides = correlated(np.random.default_rng(3))
    paired = difference_of(sides)
    alone = [
        stats_paired.estimate(stats_paired.samples_of(t[:, None], s[:, None])[:, 0], 40)
        for t, s in sides
    ]
    independent = stats_paired.independent_difference(*alone)
    assert paired.value == pytest.approx(independent.value)
    assert paired.high - paired.low < 0.3 * (independent.high - independent.low)


def test_without_a_difference_about_one_interval_in_twenty_excludes_it():
    rng = np.random.default_rng(0)
    misses = [0.0, 0.0]
    for _ in range(300):
        found = difference_of(correlated(rng))
        misses[0] += found.low > 0
        misses[1] += found.high < 0
    # a percentile bootstrap over 40 prompts is a little too narrow; 300 runs show +-1.3 %
    assert 0.02 < sum(misses) / 300 < 0.10
    assert min(misses) / 300 > 0.005


def test_a_small_difference_that_pairing_can_show_is_shown():
    found = difference_of(correlated(np.random.default_rng(5), effect=0.12))
    assert found.low > 0


def test_independent_intervals_combine_as_those_of_means_do():
    a, b = Estimate(3.0, 2.8, 3.3, 20), Estimate(3.5, 3.4, 3.9, 12)
    found = stats_paired.independent_difference(a, b)
    wanted = [0.5, 0.5 - np.hypot(0.1, 0.3), 0.5 + np.hypot(0.4, 0.2)]
    assert [found.value, found.low, found.high] == pytest.approx(wanted)
    assert found.num == 12
    swapped = stats_paired.independent_difference(b, a)
    assert [swapped.low, swapped.high] == pytest.approx([-found.high, -found.low])


def test_independent_intervals_cover_the_difference_of_normal_means():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(2000):
        means = rng.normal([1.0, 1.5], [0.2, 0.1])
        sides = [
            Estimate(mean, mean - 1.96 * sd, mean + 1.96 * sd, 9)
            for mean, sd in zip(means, (0.2, 0.1), strict=True)
        ]
        found = stats_paired.independent_difference(*sides)
        covered += found.low <= 0.5 <= found.high
    assert 0.935 < covered / 2000 < 0.965


def test_datasets_are_also_compared_each_alone():
    sides = [frames.recorded_run(seed=seed, datasets=("gsm8k", "mbpp")) for seed in (1, 2)]
    table = stats_paired.paired_differences(*sides, [("top1", "top1")])
    assert list(table["dataset"].unique()) == ["", "gsm8k", "mbpp"]
    row = rows_of(table, "acceptance_length pooled", "top1", "mbpp").iloc[0]
    alone = replay(sides[0], "top1").by_dataset
    wanted = alone.query("dataset == 'mbpp' and aggregation == 'pooled' and terminal == 'with'")
    assert row.a == pytest.approx(wanted["value"].iloc[0])
    assert row.num_prompts == 2


def test_series_end_with_the_shorter_window(runs):
    longer = frames.recorded_run(seed=2, num_draft=6)
    table = stats_paired.paired_differences(runs[0], longer, [("top1", "top1")])
    assert list(rows_of(table, "survival", "top1")["position"]) == [1, 2, 3, 4]
    drop = rows_of(table, "suffix_decay drop").iloc[0]
    recall = rows_of(table, "position_recall@1")["b"].to_numpy()
    assert drop.b == pytest.approx(recall[0] - recall[3])


def test_one_shared_prompt_has_values_but_no_interval(runs):
    single = frames.recorded_run(seed=2, num_prompts=1)
    table = stats_paired.paired_differences(runs[0], single, [("top1", "top1")])
    assert table["difference"].notna().any()
    assert table[["low", "high"]].isna().all(axis=None)


def test_what_cannot_be_compared_is_refused(runs):
    a, b = runs
    foreign = Run.in_memory(
        b.info, {n: f.assign(prompt_id="x" + f["prompt_id"]) for n, f in b.frames.items()}
    )
    with pytest.raises(LabError, match="at least one that both runs have"):
        stats_paired.paired_differences(a, foreign, PAIRS)
    other = Run.in_memory(b.info, b.frames | {"anchors": b.anchors.assign(dataset="mbpp")})
    with pytest.raises(LabError, match="found in two datasets"):
        stats_paired.paired_differences(a, other, PAIRS)
    with pytest.raises(LabError, match="markov"):
        stats_paired.paired_differences(a, b, [("top1", "markov")])


def test_without_top1_in_both_no_headroom_is_made_up(runs):
    accept = {"selector": np.full(11, 3)}
    request = Request(response_len=12, accept=accept, prompt_id="p0", dataset="gsm8k")
    lone = make_run([request], num_draft=3)
    table = stats_paired.paired_differences(runs[0], lone, [("selector", "selector")])
    assert "headroom_recovered" not in set(table["quantity"])
    assert "within_block_share" not in set(table["quantity"])


def test_statistics_comparisons_and_pages_import_neither_torch_nor_plotly():
    program = (
        "import sys, dflash2_lab.stats_paired, dflash2_lab.report_commands\n"
        "print([m for m in ('torch', 'transformers', 'plotly') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
