"""Figures of attention: shares by layer, the map of heads, share against recall."""

import figure_frames as frames
import numpy as np
import pytest
from figure_frames import texts, traces_of

from dflash2_lab import plots

DRAFTERS = ("dflash", "dflash2")


# attention_share


@pytest.fixture(scope="module")
def attention():
    tables = {"dflash": frames.attention_table(), "dflash2": frames.attention_table((0.1, 0.02))}
    return tables, plots.draw_attention(tables)


def test_anchor_and_drafted_stack_to_the_within_block_share(attention):
    tables, fig = attention
    anchor, drafted = (t for t in fig.data if t.type == "bar" and t.legendgroup == "dflash")
    whole = tables["dflash"].query("slot == 0 and group == 'within_block'")
    np.testing.assert_allclose(np.add(anchor.y, drafted.y), whole["value"])
    np.testing.assert_allclose(drafted.error_y.array, whole["high"] - whole["value"])
    assert anchor.customdata == (0, 1, 2, 3, 4)


def test_bars_of_two_drafters_do_not_cover_each_other(attention):
    _, fig = attention
    first, second = (
        next(t for t in fig.data if t.type == "bar" and t.legendgroup == name) for name in DRAFTERS
    )
    assert second.x[0] - first.x[0] >= first.width


def test_each_layer_has_a_panel_by_slot_with_the_uniform_baseline(attention):
    tables, fig = attention
    assert [t for t in texts(fig) if t.startswith("layer")] == [f"layer {n}" for n in range(5)]
    lines = traces_of(fig, yaxis="y3", legendgroup="dflash")
    share, baseline = lines
    wanted = tables["dflash"].query("layer == 1 and slot > 0 and group == 'within_block'")
    assert share.x == (1, 2, 3, 4, 5, 6, 7)
    np.testing.assert_allclose(share.y, wanted["value"], atol=1e-12)
    assert set(baseline.y) == {0.047}
    assert baseline.line.dash == "dot"
    shown = [t.name for t in fig.data if t.showlegend is not False]
    assert shown == ["dflash", "dflash2", "anchor share", "drafted share", "uniform baseline"]


def test_nothing_drawn_on_a_share_axis_is_above_its_end(attention):
    _, fig = attention
    ends = {"y": fig.layout.yaxis.range[1], "y2": fig.layout.yaxis2.range[1]}
    for axis, end in ends.items():
        tops = [t.y for t in fig.data if t.yaxis == axis and t.type == "scatter"]
        assert max(y for values in tops for y in values if y is not None) < end


def test_one_layer_and_many_layers_both_have_a_panel_each():
    for count in (1, 12):
        fig = plots.draw_attention({"d": frames.attention_table((0.1,) * count)})
        assert len([t for t in texts(fig) if t.startswith("layer")]) == count


# attention_map


@pytest.fixture(scope="module")
def heads():
    tables = {"dflash": frames.attention_map_table(), "dflash2": frames.attention_map_table(7)}
    return tables, plots.draw_attention_map(tables)


def test_the_map_has_a_panel_per_layer_with_heads_down_and_slots_across(heads):
    tables, fig = heads
    drawn = [trace for trace in fig.data if trace.type == "heatmap"]
    assert [trace.name for trace in drawn[:3]] == [
        "dflash, layer 0",
        "dflash, layer 1",
        "dflash2, layer 0",
    ]
    assert len(drawn) == 2 + 7
    wanted = tables["dflash2"].query("layer == 6").pivot(index="head", columns="slot")
    np.testing.assert_allclose(drawn[-1].z, wanted["value"])
    np.testing.assert_allclose(np.array(drawn[-1].customdata)[..., 0], wanted["low"])
    assert drawn[-1].x == (1, 2, 3, 4)


def test_a_drafter_with_more_layers_than_columns_goes_on_in_the_next_row(heads):
    _, fig = heads
    places = [(trace.xaxis, trace.yaxis) for trace in fig.data]
    assert len(set(places)) == 9
    named = [text for text in texts(fig) if "<b>" in text]
    assert named == ["<b>dflash</b><br>layer 0", "<b>dflash2</b><br>layer 0"]
    assert "layer 6" in texts(fig)


def test_the_map_says_baseline_and_widest_interval_and_takes_no_room_for_a_legend(heads):
    tables, fig = heads
    note = texts(fig)[-1].replace("<br>", " ")
    assert "Uniform attention would give 8.0%." in note
    assert "± 1.5%" in note
    assert fig.layout.margin.t < 110  # title, drafter, layer
    tables = {"a": tables["dflash"].assign(uniform=tables["dflash"]["layer"] / 10 + 0.1)}
    note = texts(plots.draw_attention_map(tables))[-1].replace("<br>", " ")
    assert "10.0% to 20.0%, depending on the layer's window" in note


def test_all_panels_share_one_colour_scale(heads):
    tables, fig = heads
    assert {trace.coloraxis for trace in fig.data} == {"coloraxis"}
    assert fig.layout.coloraxis.cmin == 0
    assert fig.layout.coloraxis.cmax >= tables["dflash2"]["value"].max()


# share_against_recall


def test_share_and_recall_have_a_panel_per_context_and_bars_both_ways():
    table = frames.share_recall_table()
    fig = plots.draw_share_recall({"dflash": table}, k=16)
    for axis, name in (("", "all"), ("2", "0-127"), ("3", "128-255")):
        _, points = traces_of(fig, xaxis=f"x{axis}")
        wanted = table[table["context_bin"] == name]
        np.testing.assert_allclose(points.x, wanted["share"])
        np.testing.assert_allclose(points.y, wanted["recall"])
        np.testing.assert_allclose(points.error_x.array, wanted["share_high"] - wanted["share"])
        np.testing.assert_allclose(
            points.error_y.arrayminus, wanted["recall"] - wanted["recall_low"]
        )
    assert "all anchors, 300 blocks" in texts(fig)
    assert "context 128-255, 100 blocks" in texts(fig)
    assert fig.layout.yaxis.title.text == "position_recall@16"


def test_only_the_first_and_the_last_slot_are_numbered():
    fig = plots.draw_share_recall({"dflash": frames.share_recall_table()})
    points = traces_of(fig, mode="lines+markers+text")
    assert points[0].text == ("1", "", "", "", "5")
    assert points[0].customdata == (1, 2, 3, 4, 5)


def test_everything_of_share_against_recall_lies_inside_its_axes():
    fig = plots.draw_share_recall({"dflash": frames.share_recall_table()})
    (left, right), (low, high) = fig.layout.xaxis.range, fig.layout.yaxis.range
    for trace in traces_of(fig):
        assert left <= min(trace.x) <= max(trace.x) <= right
        assert low <= min(trace.y) <= max(trace.y) <= high
