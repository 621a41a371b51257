"""Figures of the selection headroom: oracle@k for every k, and what the selector recovers."""

import figure_frames as frames
import numpy as np
import pytest
from figure_frames import texts, traces_of

from dflash2_lab import plots, stats
from dflash2_lab.errors import LabError


def test_the_oracle_is_drawn_for_every_k_with_its_interval_and_the_policies_as_levels():
    tables = {"dflash": frames.headroom_tables(), "dflash2": frames.headroom_tables(32)}
    fig = plots.draw_headroom(tables)
    for name, axis in (("dflash", "x"), ("dflash2", "x2")):
        oracle, top1, selector = traces_of(fig, xaxis=axis)
        curve = tables[name][0]
        assert oracle.x == tuple(curve["k"])
        np.testing.assert_allclose(oracle.y, curve["value"])
        assert (top1.x, top1.y) == ((1, curve["k"].max()), (3.25, 3.25))
        assert selector.y == (3.6, 3.6)
        bands = [t for t in fig.data if t.fill == "toself" and t.xaxis == axis]
        assert len(bands) == 3
        np.testing.assert_allclose(bands[1].y, [3.11, 3.11, 3.40, 3.40])
    assert fig.layout.xaxis.type == "log"
    assert fig.layout.xaxis.tickvals == (1, 2, 4, 8, 16, 32, 64)
    assert [t.name for t in fig.data if t.legend == "legend2"] == ["top1", "selector", "oracle@k"]


def test_the_number_of_candidates_is_marked_in_each_panel():
    curve, levels, _ = frames.headroom_tables()
    fig = plots.draw_headroom({"a": (curve, levels, 4), "b": (curve, levels, 16)})
    assert [shape.x0 for shape in fig.layout.shapes] == [4, 16]
    assert {"k = 4", "k = 16"} <= set(texts(fig))


def test_many_drafters_go_on_in_the_next_row():
    fig = plots.draw_headroom({name: frames.headroom_tables(8) for name in "abcde"})
    assert {t.xaxis for t in traces_of(fig)} == {"x", *(f"x{n}" for n in range(2, 6))}
    plot = fig.layout.height - fig.layout.margin.t - fig.layout.margin.b
    assert plot > 2 * 300


def test_helps_is_drawn_up_and_hurts_down_with_their_own_intervals():
    table = frames.recovery_table()
    fig = plots.draw_recovery({"dflash2": table})
    helped, hurt = (t for t in fig.data if t.type == "bar" and t.legend != "legend2")
    rows = table[table["quantity"] == "hurt"]
    np.testing.assert_allclose(helped.y, table[table["quantity"] == "helped"]["value"])
    np.testing.assert_allclose(hurt.y, -rows["value"])
    np.testing.assert_allclose(hurt.error_y.arrayminus, rows["high"] - rows["value"])
    np.testing.assert_allclose(hurt.error_y.array, rows["value"] - rows["low"])
    (net,) = traces_of(fig, name="dflash2, net")
    np.testing.assert_allclose(net.y, table[table["quantity"] == "net"]["value"])
    assert min(net.x[0] - helped.x[0] - helped.width / 2, 1) > 0.05  # beside the bar, not on it


def test_the_slots_carry_the_number_of_blocks_that_reach_them():
    fig = plots.draw_recovery({"dflash2": frames.recovery_table()})
    assert fig.layout.xaxis2.ticktext == ("1<br>1,000", "2<br>500", "3<br>333", "4<br>250")


def test_many_slots_and_drafters_leave_room_for_the_numbers():
    tables = {name: frames.recovery_table(15) for name in "abc"}
    fig = plots.draw_recovery(tables)
    axes = [fig.layout[name] for name in fig.layout if name.startswith("xaxis")]
    shown = [axis for axis in axes if axis.ticktext]
    assert len(shown) == 3
    assert all(len(axis.ticktext) <= 8 and axis.tickangle == 0 for axis in shown)
    tops = [a.y for a in fig.layout.annotations if a.text in ("<b>a</b>", "<b>b</b>", "<b>c</b>")]
    assert len(tops) == 3
    assert fig.layout.yaxis.range == fig.layout.yaxis2.range  # comparable between drafters


def test_all_intervals_of_the_selector_lie_inside_its_axes():
    table = frames.recovery_table().assign(high=0.4)
    fig = plots.draw_recovery({"dflash2": table})
    assert fig.layout.yaxis.range[1] > 0.4
    assert fig.layout.yaxis.range[0] < -0.4
    assert fig.layout.yaxis2.range[1] > 0.4
    assert fig.layout.yaxis2.range[0] == 0


def test_runs_without_the_policy_are_left_out_and_none_at_all_is_an_error():
    run = frames.recorded_run()
    bare = frames.recorded_run("plain")
    bare.info["policies"] = ["top1"]
    fig = plots.selector_recovery({"mine": run, "plain": bare})
    names = [text for text in texts(fig) if text.startswith("<b>")]
    assert names == ["<b>mine</b>"]
    with pytest.raises(LabError, match="'selector': found in none of the runs"):
        plots.selector_recovery({"plain": bare})


def test_the_captions_state_the_numbers_of_the_tables():
    run = frames.recorded_run("mine")
    fig = plots.headroom_by_k({"mine": run}, max_k=8)
    best = stats.oracle_by_k(run, [8]).iloc[0]
    assert f"oracle@8 {best['value']:.2f} [" in fig.layout.meta["caption"]
    fig = plots.selector_recovery({"mine": run})
    table = stats.selector_recovery(run)
    helped = table[(table["slot"] == 1) & (table["quantity"] == "helped")]["value"].item()
    assert f"at slot 1 the selector helps in {helped:.1%} [" in fig.layout.meta["caption"]
