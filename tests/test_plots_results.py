"""Figures of benchmarks and of the battery, and the reading of their results."""

import json

import figure_frames as frames
import numpy as np
import pytest
from figure_frames import texts, traces_of

from dflash2_lab import plots, stats_results
from dflash2_lab.errors import LabError
from dflash2_lab.results import MONITOR_KIND, MONITOR_TABLE, Results, read_results

MADE = {"environment": {"device": "NVIDIA H200", "git": "0123456789abcdef-dirty"}}


def note(fig):
    return texts(fig)[-1].replace("<br>", " ")


# cycle_breakdown


def test_cycles_stand_beside_their_floor_and_overheads_on_a_log_axis():
    fig = plots.cycle_breakdown({"4B": Results(MADE, frames.cycle_result())})
    floor, measured = traces_of(fig, xaxis="x", type="scatter")
    np.testing.assert_allclose(measured.x, [2600, 3200])
    np.testing.assert_allclose(measured.error_x.array, [52, 64])
    np.testing.assert_allclose(floor.x, [2600 / 1.4, 3200 / 1.4])
    (added,) = traces_of(fig, xaxis="x2")
    np.testing.assert_allclose(added.x, [7, 70, 700])
    np.testing.assert_allclose(added.error_x.arrayminus, [0.07, 0.7, 7])
    assert fig.layout.xaxis2.type == "log"
    assert fig.layout.yaxis2.ticktext == ("selector", "selector and conv", "15 layers, not 5")
    assert texts(fig).count("1.40 x") == 2


def test_an_overhead_that_was_not_resolved_is_told_and_not_drawn_at_a_place_of_its_own():
    result = frames.cycle_result()
    result["cells"][0]["overheads"]["selector"]["extra"] = frames.spread(-2e-6)
    fig = plots.cycle_breakdown({"4B": Results(MADE, result)})
    (told,) = [one for one in fig.layout.annotations if "none resolved" in one.text]
    assert told.text == "-2.0 µs: none resolved" and told.x == 0


def test_a_cycle_says_its_shapes_batch_rounds_and_run():
    text = note(plots.cycle_breakdown({"4B": Results(MADE, frames.cycle_result())}))
    assert "4B: batch 1, context 512, 7 drafts, bfloat16, medians of 40 rounds of 8 cycles" in text
    assert "run on NVIDIA H200 at commit 0123456789ab and changes" in text


def test_two_shapes_have_a_row_each():
    result = Results({}, frames.cycle_result())
    fig = plots.cycle_breakdown({"4B": result, "135M": result})
    assert {t.xaxis for t in traces_of(fig)} == {"x", "x2", "x3", "x4"}
    assert {"<b>4B</b>", "<b>135M</b>"} <= set(texts(fig))


# throughput_by_concurrency


def test_throughput_has_a_panel_per_temperature_with_intervals():
    fig = plots.throughput_by_concurrency(Results(MADE, frames.throughput_result()))
    lines = traces_of(fig, xaxis="x2", name="zoo:dflash2")
    assert lines[0].x == (1, 8, 16)
    np.testing.assert_allclose(lines[0].y, [2700, 21600, 43200])
    np.testing.assert_allclose(lines[0].error_y.array, [54, 432, 864])
    assert {"<b>greedy (T = 0)</b>", "<b>T = 1</b>"} <= set(texts(fig))
    shown = [t.name for t in fig.data if t.showlegend is not False]
    assert shown == ["autoregressive", "dspark, random weights", "zoo:dflash2"]


def test_a_forced_acceptance_is_told_and_looks_different():
    fig = plots.throughput_by_concurrency(Results(MADE, frames.throughput_result()))
    forced, measured = (
        traces_of(fig, xaxis="x", name=name)[0]
        for name in ("dspark, random weights", "zoo:dflash2")
    )
    assert (forced.line.dash, measured.line.dash) == ("dash", "solid")
    assert forced.marker.symbol.endswith("-open")
    assert "forced to 3 drafts a cycle at T = 0" in note(fig)
    assert "dspark, random weights (forced acceptance)" in fig.layout.meta["caption"]
    plain = frames.throughput_result()
    for group in plain["groups"]:
        del group["sides"]["dspark, random weights"]
    assert "forced" not in note(plots.throughput_by_concurrency(Results(MADE, plain)))


# tokens_to_detection


def test_each_fault_has_a_row_and_its_test_and_one_that_passed_has_no_mark():
    fig = plots.tokens_to_detection(Results(MADE, frames.mutation_result()))
    rows = {name: row for row, name in enumerate(fig.layout.yaxis.ticktext)}
    assert len(rows) == 4
    found = {t.name: t for t in traces_of(fig, mode="markers") if t.name}
    assert set(found) == {"emitted tokens", "the verifier's log", "contract on values"}
    assert (found["emitted tokens"].x, found["emitted tokens"].y) == (
        (64,),
        (rows["rows-swapped"],),
    )
    assert found["the verifier's log"].customdata[0] == ["residual-is-p", "residual_ad"]
    beside = {a.y: a.text for a in fig.layout.annotations if a.xshift == 8}
    assert beside[rows["ratio-times-1.05"]] == "not found"
    assert beside[rows["residual-is-p"]] == "residual_ad"
    assert "3 of 4 faults found, 0 of 8 harmless decoders rejected" in note(fig)


def test_the_caption_of_the_score_names_the_last_one_found():
    caption = plots.tokens_to_detection(Results({}, frames.mutation_result())).layout.meta[
        "caption"
    ]
    assert "3 of 4 faults are found" in caption
    assert "the last (residual-is-p) at 128" in caption


def test_a_score_without_faults_is_an_error():
    with pytest.raises(LabError, match="found no fault"):
        stats_results.detections({"mutants": []})


# monitor_path


def test_the_monitor_shows_the_median_the_band_of_the_runs_and_the_level():
    frame = monitor = frames.monitor_frame()
    fig = plots.monitor_path(Results(MADE, monitor))
    right, broken = traces_of(fig, mode="lines")
    log10 = frame.assign(v=frame["log_e"] / np.log(10))
    median = log10[log10["decoder"] == "broken"].groupby("tokens")["v"].median()
    np.testing.assert_allclose(broken.y, median)
    assert broken.x == (8, 16, 32, 64, 128)
    assert fig.layout.shapes[0].y0 == pytest.approx(np.log10(5000))
    assert right.name == "correct: 0 of 10 stopped"
    assert broken.name == "broken: 10 of 10 stopped, median 48 tokens"
    assert len([t for t in fig.data if t.fill == "toself"]) == 2
    assert "at most 1 / 5,000" in note(fig)


def test_quantiles_and_stops_follow_the_runs():
    curves, stops = stats_results.monitor_quantiles(frames.monitor_frame())
    at = curves[(curves["decoder"] == "broken") & (curves["tokens"] == 64)].iloc[0]
    runs = 0.2 * 64 * (1 + np.arange(10) / 10) / np.log(10)
    assert (at["low"], at["high"]) == pytest.approx(tuple(np.quantile(runs, [0.1, 0.9])))
    assert stops["num_stopped"].tolist() == [0, 10]
    assert np.isnan(stops["stopped_at"][0])
    assert stops["highest"][0] == pytest.approx(-0.08 / np.log(10))


# wrong results


@pytest.mark.parametrize(
    "name", ["throughput_by_concurrency", "tokens_to_detection", "monitor_path"]
)
def test_one_result_is_asked_for(name):
    with pytest.raises(LabError, match="shows one result, found 2: a, b"):
        getattr(plots, name)({"a": Results({}, {}), "b": Results({}, {})})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cycle_breakdown", "bench cycle with 'cells'"),
        ("throughput_by_concurrency", "bench throughput with 'groups'"),
        ("tokens_to_detection", "mutation score with 'mutants'"),
        ("monitor_path", "monitor_paths with 'log_e'"),
    ],
)
def test_results_of_another_kind_are_refused(name, expected):
    with pytest.raises(LabError, match=f"results: found bars, rows, expected .*{expected}"):
        getattr(plots, name)({"a": Results({}, {"rows": 1, "bars": 2})})


def test_no_benchmark_at_all_is_an_error():
    with pytest.raises(LabError, match="at least one result"):
        plots.cycle_breakdown({})


# reading


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bench", "bench.json"),
        ("verify-decode", "certificate.json"),
        ("verify-mutants", "verify.json"),
    ],
)
def test_results_are_read_by_their_kind(tmp_path, kind, name):
    info = {"kind": kind, "schema_version": 1}
    (tmp_path / "run.json").write_text(json.dumps(info))
    with pytest.raises(LabError, match=f"{name}: not found"):
        read_results(tmp_path)
    (tmp_path / name).write_text('{"a": 1}')
    assert read_results(tmp_path, kind).values == {"a": 1}
    (tmp_path / name).write_text("{")
    with pytest.raises(LabError, match=f"{name}: malformed"):
        read_results(tmp_path)


def test_a_table_of_paths_is_read_as_a_frame_and_another_kind_is_refused(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"kind": MONITOR_KIND, "schema_version": 1}))
    frames.monitor_frame().to_parquet(tmp_path / MONITOR_TABLE)
    assert read_results(tmp_path).values.equals(frames.monitor_frame())
    with pytest.raises(LabError, match="found a run of kind 'monitor-paths', expected 'bench'"):
        read_results(tmp_path, "bench")
    (tmp_path / "run.json").write_text(json.dumps({"kind": "record", "schema_version": 1}))
    with pytest.raises(LabError, match="kind 'record', expected one of 'bench'"):
        read_results(tmp_path)
