"""Recall, acceptance and decay: what the figures draw from which table."""

import itertools
import json
import math

import figure_frames as frames
import numpy as np
import pandas as pd
import pytest
from figure_frames import panel, texts, traces_of
from recordings import Request, make_run

from dflash2_lab import plots, stats
from dflash2_lab.errors import LabError
from dflash2_lab.figures import figure_json
from dflash2_lab.plots import parts

DRAFTERS = ("dflash", "dflash2")


# recall_by_slot


@pytest.fixture(scope="module")
def recall():
    tables = {name: frames.recall_table(i) for i, name in enumerate(DRAFTERS)}
    return tables, plots.draw_recall(tables)


def test_recall_has_a_panel_for_each_metric_and_anchor_set_with_the_values_of_the_table(recall):
    tables, fig = recall
    cells = itertools.product(
        (("position_recall", 1), ("conditional_recall", 2)), (("all", 1), ("visited", 2))
    )
    for ((metric, row), (anchors, col)), (name, table) in itertools.product(cells, tables.items()):
        axis = panel(fig, row, 2)[col - 1]
        drawn = traces_of(fig, yaxis=f"y{axis}", legendgroup=name)
        for trace, k in zip(drawn, (1, 16), strict=True):
            wanted = table.query(f"anchors == '{anchors}' and metric == '{metric}' and k == {k}")
            assert trace.x == (1, 2, 3, 4, 5, 6, 7)
            np.testing.assert_allclose(trace.y, wanted["value"], atol=1e-12)
            np.testing.assert_allclose(trace.customdata, wanted[["low", "high"]], atol=1e-12)


def test_recall_draws_the_interval_around_each_line(recall):
    tables, fig = recall
    bands = [t for t in fig.data if getattr(t, "fill", None) == "toself"]
    assert len(bands) == 2 * 2 * 2 * 2
    low, high = (tables["dflash"][c].iloc[:7] for c in ("low", "high"))
    assert bands[0].x == (1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1)
    assert bands[0].y == (*low, *high[::-1])


def test_recall_axes_name_the_exact_metric_and_titles_the_blocks(recall):
    tables, fig = recall
    assert fig.layout.yaxis.title.text.startswith("position_recall@k")
    assert fig.layout.yaxis3.title.text.startswith("conditional_recall@k")
    assert fig.layout.xaxis3.title.text == fig.layout.xaxis4.title.text == "draft slot"
    counts = [
        sorted({int(t.loc[t["anchors"] == which, "num_blocks"].max()) for t in tables.values()})
        for which in ("all", "visited")
    ]
    words = ("all recorded anchors", "visited anchors")
    for name, count in zip(words, counts, strict=True):
        assert f"{name}, {' to '.join(f'{n:,}' for n in count)} blocks" in texts(fig)


def test_each_drafter_and_each_k_is_in_a_legend_once(recall):
    _, fig = recall
    shown = [t.name for t in fig.data if t.showlegend is not False]
    assert shown == ["dflash", "dflash2", "recall@1", "recall@16"]


def test_a_block_of_eight_has_seven_slots_on_the_axis_and_an_anchor_first_block_of_seven_too():
    for kind, policy in (("dflash2", "selector"), ("dspark", "markov")):
        request = Request(response_len=20, accept={policy: np.zeros(19, dtype=int)})
        run = make_run([request], num_draft=7, kind=kind)
        fig = plots.recall_by_slot(run)
        assert fig.layout.xaxis.tickvals == (1, 2, 3, 4, 5, 6, 7)


def test_recall_without_visited_anchors_has_one_column():
    table = frames.recall_table().query("anchors == 'all'")
    fig = plots.draw_recall({"dflash": table})
    assert "visited anchors" not in texts(fig)
    assert {t.yaxis for t in traces_of(fig)} == {"y", "y2"}


def test_a_slot_without_cases_is_a_gap():
    table = frames.recall_table()
    table.loc[table["slot"] == 7, ["value", "low", "high"]] = np.nan
    fig = plots.draw_recall({"dflash": table})
    line = traces_of(fig)[0]
    assert line.y[-1] is None
    assert "NaN" not in figure_json(fig)


# acceptance_by_policy


@pytest.fixture(scope="module")
def acceptance():
    tables = {"dflash": frames.acceptance_table(), "dflash2": frames.acceptance_table(0.2)}
    shares = {name: frames.headroom_shares() for name in tables}
    return tables, plots.draw_acceptance(tables, shares=shares)


def test_acceptance_axis_names_the_metric_and_that_the_bonus_counts(acceptance):
    _, fig = acceptance
    title = "acceptance length (tokens per verify step, bonus counted)"
    assert fig.layout.xaxis2.title.text == title


def test_acceptance_draws_both_aggregations_of_each_policy_with_intervals(acceptance):
    tables, fig = acceptance
    for number, (name, table) in enumerate(tables.items()):
        drawn = traces_of(fig, yaxis="y" if number == 0 else "y2")
        for trace, aggregation in zip(drawn, ("pooled", "per_request"), strict=True):
            wanted = table.query(f"terminal == 'with' and aggregation == '{aggregation}'")
            assert trace.name == f"{name}, {aggregation}"
            np.testing.assert_allclose(trace.x, wanted["value"], atol=1e-12)
            np.testing.assert_allclose(trace.error_x.array, wanted["high"] - wanted["value"])
            np.testing.assert_allclose(trace.error_x.arrayminus, wanted["value"] - wanted["low"])


def test_headroom_spans_top1_to_the_oracle_and_its_recovered_share_is_written(acceptance):
    _, fig = acceptance
    first, second = (s for s in fig.layout.shapes if s.type == "rect")
    assert (first.x0, first.x1) == (3.25, 6.47)
    assert (second.x0, second.x1) == pytest.approx((3.45, 6.67))
    assert texts(fig).count("11% [7%, 16%]") == 2
    assert "0% [0%, 0%]" not in texts(fig)  # top1 itself
    assert "<b>3.60</b> [3.46, 3.75]" in texts(fig)


def test_the_widest_oracle_bounds_the_headroom():
    table = frames.acceptance_table(policies=("top1", "oracle@4", "oracle@16"))
    fig = plots.draw_acceptance({"dflash": table})
    rect = next(s for s in fig.layout.shapes if s.type == "rect")
    assert rect.x1 == 6.47


@pytest.mark.parametrize("policies", [("top1", "selector"), ("selector", "oracle@16")])
def test_without_top1_or_oracle_no_headroom_is_claimed(policies):
    fig = plots.draw_acceptance({"dflash": frames.acceptance_table(policies=policies)})
    assert not fig.layout.shapes
    assert not [t for t in texts(fig) if "%" in t and t != "pooled [95 %]" and "95 % int" not in t]


def test_a_policy_that_loses_to_top1_has_a_negative_share():
    shares = {"dflash": frames.headroom_shares(-0.1)}
    fig = plots.draw_acceptance({"dflash": frames.acceptance_table()}, shares=shares)
    assert "-10% [-14%, -5%]".replace("-", parts.MINUS) in texts(fig)


def test_the_share_of_a_run_is_that_of_its_headroom_to_the_widest_oracle():
    run = frames.recorded_run("mine")
    fig = plots.acceptance_by_policy(run, oracle_ks=(2, 3))
    row = stats.headroom(run, oracle_k=3).set_index("policy").loc["selector"]
    assert parts.interval(row.value, row.low, row.high, 0, "%") in texts(fig)
    assert "headroom<br>recovered" in texts(fig)
    alone = texts(plots.acceptance_by_policy(run, oracle_ks=()))
    assert "headroom<br>recovered" not in alone


def test_one_prompt_has_values_without_intervals():
    table = frames.acceptance_table().assign(low=np.nan, high=np.nan)
    fig = plots.draw_acceptance({"dflash": table})
    assert "<b>3.25</b>" in texts(fig)
    assert "nan" not in figure_json(fig).lower()


# suffix_decay


def test_decay_writes_slope_and_drop_with_intervals_beside_each_drafter():
    decays = {"dflash": frames.decay_tables(0.83), "dflash2": frames.decay_tables(0.86)}
    fig = plots.draw_decay(decays)
    shown = [t.name for t in fig.data if t.showlegend is not False]
    assert shown[0] == (
        "dflash: slope \N{MINUS SIGN}0.186 [\N{MINUS SIGN}0.196, \N{MINUS SIGN}0.176] per slot, "
        "drop 0.552 [0.522, 0.582]"
    )
    assert shown[1].startswith("dflash2: slope \N{MINUS SIGN}0.151")


def test_the_drawn_line_is_the_least_squares_fit_of_the_log():
    curve, decay = frames.decay_tables()
    curve["value"] *= np.exp(np.random.default_rng(0).normal(0, 0.05, 7))
    slope, intercept = np.polyfit(curve["slot"], np.log(curve["value"]), 1)
    fig = plots.draw_decay({"dflash": (curve, type(decay)(slope, -1, 0, 0.5, 0.4, 0.6))})
    (fit,) = traces_of(fig, mode="lines")
    assert fit.x == (1, 7)
    np.testing.assert_allclose(fit.y, np.exp(intercept + slope * np.array([1, 7])))


def test_a_slot_of_recall_zero_is_left_out_of_the_log_panel_only():
    curve, decay = frames.decay_tables()
    curve.loc[6, ["value", "low", "high"]] = [0.0, 0.0, 0.01]
    undefined = type(decay)(math.nan, math.nan, math.nan, 0.82, 0.8, 0.84)
    fig = plots.draw_decay({"dflash": (curve, undefined)})
    linear, log, fit = traces_of(fig)
    assert linear.y[-1] == 0
    assert log.y[-1] is None
    assert fit.x == ()
    assert "slope undefined per slot, drop 0.820" in linear.name


def test_decay_names_metric_and_anchors():
    fig = plots.draw_decay({"d": frames.decay_tables()}, k=16, anchors="visited")
    assert fig.layout.yaxis.title.text == "position_recall@16"
    assert any("over visited anchors" in text for text in texts(fig))


# from a run


@pytest.mark.parametrize(
    "name", ["recall_by_slot", "acceptance_by_policy", "suffix_decay", "attention_share"]
)
def test_a_run_or_a_mapping_of_runs_gives_the_figure_twice_the_same(name):
    draw = getattr(plots, name)
    run = frames.recorded_run("mine")
    alone = draw(run)
    assert figure_json(alone) == figure_json(draw({"mine": run}))
    both = draw({"a": run, "b": frames.recorded_run(seed=1)}, title="Two & two")
    assert both.layout.title.text == "<b>Two &amp; two</b>"
    meta = json.loads(figure_json(alone))["layout"]["meta"]
    assert meta["figure"] == name
    assert "mine" in meta["caption"]


def test_a_figure_is_redrawn_from_stored_tables_with_the_same_bytes(tmp_path):
    run = frames.recorded_run("mine")
    table = stats.recall_by_slot(run)
    table.to_parquet(tmp_path / "recall.parquet")
    stored = pd.read_parquet(tmp_path / "recall.parquet")
    origin = parts.source({"mine": run})
    assert figure_json(plots.draw_recall({"mine": stored}, origin=origin)) == figure_json(
        plots.recall_by_slot(run)
    )


def test_visited_anchors_are_those_of_a_recorded_policy_when_the_own_one_was_left_out():
    request = Request(response_len=20, accept={"top1": np.zeros(19, dtype=int)})
    run = make_run([request], num_draft=3, kind="dflash2")
    fig = plots.recall_by_slot(run)
    assert figure_json(fig) == figure_json(plots.recall_by_slot(run, policy="top1"))
    plots.suffix_decay(run, anchors="visited")


def test_no_runs_is_an_error():
    with pytest.raises(LabError, match="at least one run"):
        plots.recall_by_slot({})


def test_runs_that_should_not_be_compared_are_logged(caplog):
    runs = {
        "a": frames.recorded_run(prompt_set_hash="1"),
        "b": frames.recorded_run(prompt_set_hash="2"),
    }
    plots.suffix_decay(runs)
    assert "prompt_set_hash" in caplog.text
