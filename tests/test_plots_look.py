"""The look of the figures: legible, safe for the colour-blind, light and dark, with captions."""

import itertools
import json
import math
import re

import figure_frames as frames
import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest
from figure_frames import luminance, texts, traces_of
from recordings import repeat_prompt

from dflash2_lab import plots
from dflash2_lab.figures import figure_html, figure_json, themed
from dflash2_lab.plots import parts, template
from dflash2_lab.plots.template import DARK, PALETTE, SCALE
from dflash2_lab.results import Results

# Machado, Oliveira and Fernandes (2009), severity 1: what the eye without L, M or S cones gets of
# linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(color):
    part = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE L*a*b* of linear RGB, D65."""
    matrix = [[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]]
    x, y, z = np.array(matrix) @ np.clip(rgb, 0, 1) / (0.9505, 1.0, 1.0888)
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def every_figure():
    """All figures of `plots`, from small runs and results."""
    runs = {"dflash": frames.recorded_run("a"), "dflash2": frames.recorded_run("b", seed=1)}
    of_runs = ("recall_by_slot", "acceptance_by_policy", "suffix_decay", "attention_share")
    of_runs += ("selector_recovery", "attention_map")
    figures = {name: getattr(plots, name)(runs) for name in of_runs}
    figures["headroom_by_k"] = plots.headroom_by_k(runs, max_k=4)
    figures["share_against_recall"] = plots.draw_share_recall({"a": frames.share_recall_table()})
    figures["cycle_breakdown"] = plots.cycle_breakdown({"4B": Results({}, frames.cycle_result())})
    for name, values in (
        ("throughput_by_concurrency", frames.throughput_result()),
        ("tokens_to_detection", frames.mutation_result()),
        ("monitor_path", frames.monitor_frame()),
    ):
        figures[name] = getattr(plots, name)(Results({}, values))
    return figures


@pytest.fixture(scope="module")
def drawn():
    return every_figure()


def colours(value, key=""):
    """All colours of plain plotly data."""
    if isinstance(value, dict):
        return [found for name, item in value.items() for found in colours(item, name)]
    if isinstance(value, list):
        return [found for item in value for found in colours(item, key)]
    is_colour = isinstance(value, str) and key.endswith(("color", "colorway", "colorscale"))
    return [value] if is_colour else []


# colours


@pytest.mark.parametrize("kind", DEFICIENCIES)
@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_colours_of_drafters_stay_apart_for_every_eye(look, kind):
    palette = [color if look == "light" else DARK[color] for color in PALETTE]
    seen = [lab(np.array(DEFICIENCIES[kind]) @ linear(color)) for color in palette]
    apart = [math.dist(a, b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(apart) > 15
    assert min(math.dist(a, b) for a, b in itertools.pairwise(seen)) > 20


@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_scale_of_shares_is_one_way_in_grey(look):
    scale = [color if look == "light" else DARK[color] for color in SCALE]
    steps = np.diff([lab(linear(color))[0] for color in scale])
    assert (steps < -8).all() if look == "light" else (steps > 8).all()


def test_drafters_can_be_told_from_the_paper():
    for look in ({}, DARK):
        paper, *palette = (look.get(c, c) for c in (template.PAPER, *PALETTE))
        ground = luminance_of(paper)
        for color in palette:
            low, high = sorted((ground, luminance_of(color)))
            assert (high + 0.05) / (low + 0.05) > 2.4


def luminance_of(color):
    return float(linear(color) @ (0.2126, 0.7152, 0.0722))


# dark


def test_every_colour_of_every_figure_has_its_dark_one(drawn):
    for name, figure in drawn.items():
        plain = json.loads(figure_json(figure))
        light = set(colours(plain))
        hexes = {c for c in light if c.startswith("#")}
        assert hexes <= set(DARK), name
        assert light - hexes == {c for c in light if c.startswith("rgba(")}, name
        dark = set(colours(template.recolour(plain)))
        assert not dark & (set(DARK) - set(DARK.values())), name


def test_the_dark_look_changes_colours_and_nothing_else(drawn):
    figure = drawn["selector_recovery"]
    light, dark = figure_json(figure), figure_json(themed(figure))
    bare = [re.sub(r"#[0-9A-F]{6}|rgba\([\d,.]+\)", "", text) for text in (light, dark)]
    assert dark != light
    assert bare[0] == bare[1]
    assert figure_json(themed(light)) == dark  # from the stored JSON too
    assert figure_json(themed(figure, dark=False)) == light


def test_a_name_that_looks_like_a_colour_stays_a_name():
    hostile = "#004488"
    figure = themed(plots.draw_recall({hostile: frames.recall_table()}))
    assert traces_of(figure)[0].name == hostile
    assert traces_of(figure)[0].line.color == DARK[hostile]


def test_the_page_around_a_dark_figure_is_dark(drawn):
    figure = drawn["suffix_decay"]
    assert f"background: {DARK[template.PAPER]};" in figure_html(themed(figure))
    assert f"background: {template.PAPER};" in figure_html(figure)


def test_both_looks_are_registered_with_plotly_and_its_default_stays(drawn):
    assert set(template.NAMES) <= set(pio.templates)
    assert pio.templates.default == "plotly"
    plots.register_templates()
    light, dark = (go.Figure(layout={"template": name}) for name in template.NAMES)
    assert light.layout.template.layout.paper_bgcolor == template.PAPER
    assert dark.layout.template.layout.paper_bgcolor == DARK[template.PAPER]
    assert dark.layout.template.layout.colorway[0] == DARK[PALETTE[0]]


# captions and footnotes


def test_every_figure_has_its_name_and_a_caption_with_numbers(drawn):
    for name, figure in drawn.items():
        meta = figure.layout.meta
        assert meta["figure"] == name
        assert re.search(r"\d", meta["caption"]), name
        assert meta["caption"].endswith("."), name
        assert "nan" not in meta["caption"], name
        page = figure_html(figure)
        assert f'role="img" aria-label="{meta["caption"][:20]}' in page.replace("&#x27;", "'"), name


def test_every_public_figure_is_among_those_looked_at(drawn):
    public = {n for n in plots.__all__ if not n.startswith("draw_")} - {"register_templates"}
    assert set(drawn) == public


def test_the_footnote_says_n_law_target_and_run():
    run = frames.recorded_run("mine")
    run.info["environment"] = {"device": "cpu", "git": "0123456789abcdef"}
    run.info["target"]["dtype"] = "float32"
    text = texts(plots.suffix_decay(run))[-1].replace("<br>", " ")
    num = len(run.anchors)
    assert text.endswith(
        f"5 prompts, {num} blocks, T = 0, smollm2-135m, float32; run on cpu at commit 0123456789ab."
    )


def test_runs_of_other_sizes_are_told_apart_in_the_footnote():
    small = frames.recorded_run("a", num_prompts=3)
    big = repeat_prompt(frames.recorded_run("b", num_prompts=1), 4)
    text = parts.source({"a": small, "b": big})
    assert text.startswith("a: 3 prompts, ")
    assert "; b: 4 prompts, " in text


def test_what_is_left_of_a_difference_of_equal_numbers_is_zero():
    assert parts.numbers([1e-17, -3e-16, 0.1 + 0.2, math.nan, math.inf]) == [0, 0, 0.3, None, None]


def test_intervals_are_written_with_a_minus_sign_and_left_out_when_unknown():
    assert parts.interval(-0.5, -1, 0.25) == "\N{MINUS SIGN}0.50 [\N{MINUS SIGN}1.00, 0.25]"
    assert parts.interval(0.126, 0.1, 0.2, 1, "%") == "12.6% [10.0%, 20.0%]"
    assert parts.interval(1234.5, 1200, 1300, 0, " us") == "1,234 us [1,200 us, 1,300 us]"
    assert parts.interval(2, math.nan, math.nan) == "2.00"
    assert parts.interval(math.nan, 0, 1) == "undefined"


# legibility


def test_styles_differ_in_colour_marker_and_grey():
    styles = [template.style(index) for index in range(56)]
    assert len(set(styles)) == 56
    first, second = styles[:2]
    assert abs(luminance(first.color) - luminance(second.color)) > 0.15
    assert first.symbol != second.symbol
    assert len({s.symbol for s in styles[:8]}) == 8


def test_recall_at_another_k_has_another_dash_and_marker():
    fig = plots.draw_recall({"dflash": frames.recall_table()})
    one, sixteen = traces_of(fig, legendgroup="dflash", yaxis="y")
    assert (one.line.dash, sixteen.line.dash) == ("solid", "dash")
    assert sixteen.marker.symbol == one.marker.symbol + "-open"


@pytest.mark.parametrize("count", [1, 2, 5, 14])
@pytest.mark.parametrize("length", [6, 60])
def test_legends_end_above_the_panels_however_many_drafters(count, length):
    names = [f"{index}{'n' * (length - 2)}" for index in range(10, 10 + count)]
    fig = plots.draw_recall({name: frames.recall_table() for name in names})
    layout = fig.layout
    rows = parts.legend_rows([parts.label(name) for name in names], 900 - parts.LEFT - parts.RIGHT)
    start = (1 - layout.legend.y) * layout.height
    second = (1 - layout.legend2.y) * layout.height
    assert start + rows * parts.ROW <= second + 0.01
    assert second + parts.ROW < layout.margin.t - 20  # 20 px of panel titles
    plot = layout.height - layout.margin.t - layout.margin.b
    assert plot == pytest.approx(500)
    assert layout.width == 900


def test_legend_rows_follow_the_width():
    assert parts.legend_rows([], 800) == 0
    assert parts.legend_rows(["a", "b"], 800) == 1
    assert parts.legend_rows(["n" * 28] * 4, 800) == 2
    assert parts.legend_rows(["one<br>two", "b"], 800) == 2


def test_names_cannot_act_as_markup_and_long_ones_are_broken():
    assert parts.label("<b>x</b> & y") == "&lt;b&gt;x&lt;/b&gt; &amp; y"
    lines = parts.label("z-lab/Qwen3-4B-DFlash-b16-with-a-very-long-suffix").split("<br>")
    assert len(lines) == 2
    assert max(map(len, lines)) <= 28


def test_ticks_thin_out_when_slots_are_many():
    assert parts.slot_ticks(list(range(1, 8)), 16) == [1, 2, 3, 4, 5, 6, 7]
    assert parts.slot_ticks(list(range(1, 32)), 16) == list(range(1, 32, 2))


@pytest.mark.parametrize("name", ["draw_recall", "draw_attention"])
def test_intervals_unknown_for_one_prompt_leave_no_nan(name):
    table = frames.recall_table() if name == "draw_recall" else frames.attention_table()
    text = figure_json(getattr(plots, name)({"d": table.assign(low=np.nan, high=np.nan)}))
    assert "nan" not in text.lower()
