"""The report: keys of the design, separate series, warnings, and an aligned table."""

import json

import figure_frames as frames
import numpy as np
import pandas as pd
import pytest
from recordings import Request, make_run

from dflash2_lab import report, stats
from dflash2_lab.errors import LabError
from dflash2_lab.replaying import replay
from dflash2_lab.tables import Run


@pytest.fixture(scope="module")
def run():
    return frames.recorded_run("dflash2")


@pytest.fixture(scope="module")
def summary(run):
    return report.summarise(run)


def with_traces(run, responses):
    rows = [
        {
            "prompt_id": prompt,
            "turn": 0,
            "sample": 0,
            "dataset": "gsm8k",
            "prompt_ids": [1],
            "response_ids": ids,
            "logprob": [0.0] * len(ids),
            "logprob_unfiltered": [0.0] * len(ids),
            "finish": "eos",
            "on_policy": True,
        }
        for prompt, ids in responses.items()
    ]
    return Run.in_memory(run.info, {**run.frames, "traces": pd.DataFrame(rows)})


def test_each_policy_carries_the_keys_of_the_design(summary):
    assert list(summary["policies"]) == ["top1", "selector", "oracle@16"]
    for policy, entry in summary["policies"].items():
        assert entry["policy"] == policy
        assert entry["num_draft"] == 4
        for aggregation in ("pooled", "per_request"):
            length = entry["acceptance_length"][aggregation]
            low, high = length["interval"]
            assert 1 <= low <= length["value"] <= high <= 5
        series = ("position_recall@1", "position_recall@16", "survival", "conditional_acceptance")
        assert {len(entry[name]) for name in series} == {4}
        assert len(entry["within_block_share"]) == 3


def test_the_summary_is_strict_json(summary):
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_values_are_those_of_replay_and_stats(run, summary):
    entry = summary["policies"]["selector"]
    result = replay(run, "selector")
    assert entry["acceptance_length"]["pooled"]["value"] == result.pooled.value
    assert (
        entry["acceptance_length"]["per_request_uncut"]["value"] == result.per_request_uncut.value
    )
    assert entry["survival"] == [slot.value for slot in result.survival]
    table = stats.headroom(run, ["selector"])
    assert entry["headroom_recovered"] == pytest.approx(table["value"].iloc[0])
    recall = stats.recall_by_slot(run, ks=(1,)).query("anchors == 'all'")
    wanted = recall.query("metric == 'position_recall'")["value"]
    assert entry["position_recall@1"] == list(wanted)
    shares = stats.attention_by_layer(run).query("slot == 0 and group == 'within_block'")
    assert entry["within_block_share"] == list(shares["value"])
    assert summary["within_block_share_uniform"] == pytest.approx([0.05] * 3)


def test_accepted_and_emitted_tokens_per_step_are_both_given_and_differ_by_the_bonus():
    accepted = np.array([3, 2, 1, 0] * 10)
    run = make_run([Request(response_len=41, accept={"top1": accepted})], num_draft=3)
    entry = report.summarise(run, ["top1"])["policies"]["top1"]
    steps = replay(run, "top1").steps
    assert entry["accepted_drafts_per_step"] == pytest.approx(steps["num_accepted"].mean())
    assert entry["tokens_per_step"] == pytest.approx(steps["num_emitted"].mean())
    uncut = steps[steps["terminal"] == ""]
    assert (uncut["num_emitted"] == uncut["num_accepted"] + 1).all()


def test_unary_recall_and_path_survival_are_two_series():
    # the selector always overrides a wrong unary choice: recall 0, survival 1
    request = Request(response_len=12, accept={"selector": np.full(11, 3)}, rank=1)
    entry = report.summarise(make_run([request], num_draft=3))["policies"]["selector"]
    assert entry["position_recall@1"] == [0.0, 0.0, 0.0]
    assert entry["survival"] == [1.0, 1.0, 1.0]


def test_a_shorter_window_is_reported_as_such(run):
    entry = report.summarise(run, ["selector"], num_draft=2)["policies"]["selector"]
    assert entry["num_draft"] == 2
    assert len(entry["survival"]) == 2
    assert entry["acceptance_length"]["pooled"]["value"] <= 3


def test_one_prompt_has_no_interval():
    run = frames.recorded_run(num_prompts=1)
    entry = report.summarise(run, ["top1"])["policies"]["top1"]
    assert entry["acceptance_length"]["pooled"]["interval"] == [None, None]
    assert "nan" not in report.compare({"d": run}).lower()


def test_without_attention_or_top1_nothing_is_made_up():
    request = Request(response_len=12, accept={"selector": np.full(11, 3)})
    run = make_run([request], num_draft=3)
    summary = report.summarise(run)
    assert summary["policies"]["selector"]["within_block_share"] == []
    assert summary["policies"]["selector"]["headroom_recovered"] is None
    assert "within_block_share" not in report.text_report({"d": summary})


def test_a_policy_that_was_not_recorded_and_no_policy_are_errors(run):
    with pytest.raises(LabError, match="markov"):
        report.summarise(run, ["markov"])
    with pytest.raises(LabError, match="at least one"):
        report.summarise(run, [])


def test_repetition_is_flagged_beside_the_numbers(run):
    good = list(range(40))
    responses = {f"p{i}": good for i in range(4)} | {"p4": [7] * 40}
    text = report.compare({"d": with_traces(run, responses)})
    assert "degenerate_output: 1 of 5 prompts" in text
    clean = report.compare({"d": with_traces(run, {f"p{i}": good for i in range(5)})})
    assert "degenerate_output" not in clean


def test_requests_without_a_step_are_counted(run):
    traced = with_traces(run, {f"p{i}": list(range(40)) for i in range(7)})
    summary = report.summarise(traced)
    assert summary["policies"]["top1"]["num_requests_dropped"] == 2
    assert summary["warnings"] == ["2 requests without a verify step were dropped"]


def test_several_datasets_are_never_pooled_without_their_table():
    run = frames.recorded_run(datasets=("gsm8k", "math500"))
    entry = report.summarise(run)["policies"]["top1"]
    assert list(entry["by_dataset"]) == ["gsm8k", "math500"]
    text = report.compare({"d": run})
    assert "acceptance length by dataset" in text
    assert "math500" in text
    assert "by dataset" not in report.compare({"d": frames.recorded_run()})


def test_runs_over_other_prompts_are_marked():
    runs = {
        "a": frames.recorded_run(prompt_set_hash="1"),
        "b": frames.recorded_run(prompt_set_hash="2"),
    }
    assert "warning: runs 'a' and 'b' differ in prompt_set_hash" in report.compare(runs)


def test_a_comparison_needs_a_run():
    with pytest.raises(LabError, match="at least one run"):
        report.compare({})


@pytest.mark.parametrize("num_draft", [4, 15, 31])
def test_the_table_fits_a_hundred_columns(num_draft):
    runs = {
        "dflash": frames.recorded_run(num_draft=num_draft),
        "zoo:dflash2-with-quite-a-long-name": frames.recorded_run(
            seed=1, num_draft=num_draft, datasets=("gsm8k", "a-data-set-of-a-long-name")
        ),
    }
    text = report.compare(runs)
    assert max(map(len, text.splitlines())) <= 100
    assert text.endswith("\n")
    for slot in range(1, num_draft + 1):
        assert f" {slot}" in text


def test_columns_are_aligned_and_a_wide_table_goes_on_below_with_its_keys():
    header = ["name", *(f"column{i:02d}" for i in range(12))]
    text = report.text_table(header, [["a", *["1.0"] * 12], ["bb", *["22.0"] * 12]])
    blocks = text.split("\n\n")
    assert len(blocks) == 2
    for block in blocks:
        first, rule, *rows = block.splitlines()
        assert {len(line) for line in (first, rule, *rows)} == {len(rule)}
        assert [row.split()[0] for row in rows] == ["a", "bb"]


def test_the_text_is_a_function_of_the_summaries(run, summary):
    stored = json.loads(json.dumps(summary))
    assert report.text_report({"d": stored}) == report.compare({"d": run})
