"""Measured draft-verify cycles against their bandwidth floor, and what each part adds.

From the tables of `stats_results.cycle_times`: microseconds, with intervals of the rounds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dflash2_lab.errors import LabError
from dflash2_lab.plots.parts import (
    error_bars,
    frame,
    interval,
    key,
    label,
    numbers,
    panel_title,
    run_text,
)
from dflash2_lab.plots.template import INK, MUTED, SMALL, style

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.results import Results

ROW, GAP = 32, 84  # px per cycle; between the panels of two shapes
SPACING = 0.27  # of the width, between cycles and overheads: the labels of both


def cycle_breakdown(benches: "Mapping[str, Results]", title: str | None = None) -> "Figure":
    """One row of panels per `bench cycle` result: the cycle of each kind of drafter beside its
    floor, and the overheads on the dflash cycle. Batch and context are those of the first cell."""
    from dflash2_lab import stats_results

    if not benches:
        raise LabError("a figure needs at least one result, found an empty mapping")
    tables = {name: stats_results.cycle_times(bench.values) for name, bench in benches.items()}
    said = {}
    for name, bench in benches.items():
        values, cell = bench.values, bench.values["cells"][0]
        text = (
            f"batch {cell['batch']}, context {cell['context']}, {cell['num_draft']} drafts, "
            f"{values['dtype']}, medians of {values['repeats']} rounds of {values['inner']} cycles"
        )
        said[name] = text + run_text(bench.info.get("environment", {}))
    origin = "; ".join(f"{name}: {text}" for name, text in said.items()) + "."
    return draw_cycle(tables, title, origin)


def draw_cycle(
    tables: "Mapping[str, tuple[DataFrame, DataFrame]]", title: str | None = None, origin: str = ""
) -> "Figure":
    """The figure from {shapes: tables of `stats_results.cycle_times`}; pure.

    `origin` ends the footnote.
    """
    from plotly.subplots import make_subplots

    heights = [ROW * max(len(cycles), len(parts)) for cycles, parts in tables.values()]
    height = sum(heights) + GAP * (len(tables) - 1)
    fig = make_subplots(
        rows=len(tables),
        cols=2,
        row_heights=[float(value) for value in heights],
        column_widths=[0.55, 0.45],
        horizontal_spacing=SPACING,
        vertical_spacing=GAP / height if len(tables) > 1 else 0.0,
    )
    for position, (name, (cycles, overheads)) in enumerate(tables.items()):
        row = position + 1
        for trace in _cycles(cycles, position):
            fig.add_trace(trace, row=row, col=1)
        fig.add_trace(_overheads(overheads, position), row=row, col=2)
        _texts(
            fig,
            cycles["value"],
            [f"{v / f:.2f} x" for v, f in zip(cycles["value"], cycles["floor"], strict=True)],
            2 * row - 1,
        )
        _texts(
            fig,
            overheads["value"],
            [
                # A log axis has no place for what a noisy run measures at 0 or below.
                f"{share:.1%}" if value > 0 else f"{value:.1f} µs: none resolved"
                for share, value in zip(overheads["share"], overheads["value"], strict=True)
            ],
            2 * row,
            log=True,
        )
        for col, names in ((1, cycles["cycle"]), (2, overheads["part"])):
            fig.update_yaxes(
                tickvals=list(range(len(names))),
                ticktext=[label(text) for text in names],
                range=[len(names) - 0.5, -0.5],
                showgrid=False,
                row=row,
                col=col,
            )
        top = float(max(cycles["high"].max(), cycles["floor"].max()))
        fig.update_xaxes(range=[0, top * 1.2], nticks=6, title_text="µs per cycle", row=row, col=1)
        fig.update_xaxes(
            type="log",
            title_text="µs added (log scale)",
            dtick=1,
            range=[0, 3.9],
            row=row,
            col=2,
        )
        panel_title(fig, label(name).replace("<br>", " "), 2 * row - 1, bold=True)
        panel_title(fig, "added to the dflash cycle", 2 * row)
    marker = {"color": MUTED, "symbol": "circle", "size": 9}
    fig.add_trace(key("measured, times its floor", mode="markers", marker=marker))
    tick = {"color": INK, "symbol": "line-ns-open", "size": 16, "line": {"width": 2}}
    fig.add_trace(key("floor: weight bytes / bandwidth", mode="markers", marker=tick))
    frame(
        fig,
        title=title or "A draft-verify cycle against its floor",
        name="cycle_breakdown",
        plot_height=height,
        head=26,
        left=150,
        note="Random weights of the named shapes. Floor: bytes of all weights that a cycle reads "
        "over the measured copy bandwidth of the device. Percentages: of the dflash cycle. "
        "Intervals, distribution-free for the median and at least 95 %, are drawn and mostly "
        f"narrower than the marks. {origin}",
        caption=_caption(tables),
    )
    return fig


def _cycles(cycles: "DataFrame", position: int) -> list[dict]:
    look = style(position)
    rows = list(range(len(cycles)))
    floor = {
        "type": "scatter",
        "x": numbers(cycles["floor"]),
        "y": rows,
        "mode": "markers",
        "marker": {"color": INK, "symbol": "line-ns-open", "size": 16, "line": {"width": 2}},
        "showlegend": False,
        "hovertemplate": "floor: %{x:.1f} µs<extra></extra>",
    }
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": numbers(cycles["value"]),
        "y": rows,
        "width": 0.5,
        "marker": {"color": look.tint(0.25), "line": {"width": 0}},
        "showlegend": False,
        "hoverinfo": "skip",
    }
    measured = {
        "type": "scatter",
        "x": numbers(cycles["value"]),
        "y": rows,
        "error_x": error_bars(cycles, look.color),
        "mode": "markers",
        "marker": {"color": look.color, "symbol": look.symbol, "size": 9},
        "showlegend": False,
        "customdata": [interval(r.value, r.low, r.high, 1, " µs") for r in cycles.itertuples()],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    return [bars, floor, measured]


def _overheads(overheads: "DataFrame", position: int) -> dict:
    look = style(position)
    return {
        "type": "scatter",
        "x": numbers(overheads["value"]),
        "y": list(range(len(overheads))),
        "error_x": error_bars(overheads, look.color),
        "mode": "markers",
        "marker": {"color": look.color, "symbol": look.symbol, "size": 9},
        "showlegend": False,
        "customdata": [interval(r.value, r.low, r.high, 1, " µs") for r in overheads.itertuples()],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _texts(
    fig: "Figure", values: Sequence[float], texts: Sequence[str], axis: int, *, log: bool = False
) -> None:
    suffix = "" if axis == 1 else str(axis)
    for row, (value, text) in enumerate(zip(values, texts, strict=True)):
        fig.add_annotation(
            text=text,
            x=math.log10(max(value, 1.0)) if log else float(value),
            y=row,
            xref=f"x{suffix}",
            yref=f"y{suffix}",
            xanchor="left",
            xshift=10,
            showarrow=False,
            font={"size": SMALL},
        )


def _caption(tables: "Mapping[str, tuple[DataFrame, DataFrame]]") -> str:
    parts = []
    for name, (cycles, overheads) in tables.items():
        times = [
            f"{r.cycle} {r.value:,.0f} µs ({r.value / r.floor:.2f} x its floor)"
            for r in cycles.itertuples()
        ]
        added = [
            f"{r.part} {interval(r.value, r.low, r.high, 1)} µs" for r in overheads.itertuples()
        ]
        parts.append(f"{name}: {', '.join(times)}; added to the dflash cycle: {', '.join(added)}")
    return ". ".join(parts) + "."
