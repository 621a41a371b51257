"""Attention share by layer and slot, against the share that uniform attention would give.

within_block_share is the mass of a drafted slot's query on its own block, anchor + drafted; the
uniform baseline is visible block keys / visible keys under the layer's mask.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash2_lab.plots.parts import (
    as_runs,
    band,
    error_bars,
    frame,
    interval,
    key,
    label,
    numbers,
    panel_title,
    slot_ticks,
    source,
)
from dflash2_lab.plots.template import GRID, MUTED, PAPER, STRONG, style

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.tables import Run

COLUMNS = 5  # slot panels in a row
TOP, SMALL_PANEL = 230, 168  # px
GAP = 88  # px between rows of panels: ticks, axis title, panel titles
BAR = 0.8  # share of a layer's width that its bars take


def attention_share(runs: "Run | Mapping[str, Run]", title: str | None = None) -> "Figure":
    """Within-block share by layer (top) and by layer and slot (below), pooled over heads."""
    from dflash2_lab import stats

    named = as_runs(runs)
    tables = {name: stats.attention_by_layer(run) for name, run in named.items()}
    return draw_attention(tables, title, source(named))


def draw_attention(
    tables: "Mapping[str, DataFrame]", title: str | None = None, origin: str = ""
) -> "Figure":
    """The figure from {drafter: table of `stats.attention_by_layer`}; pure.

    `origin`, as of `parts.source`, ends the footnote.
    """
    from plotly.subplots import make_subplots

    layers = sorted({int(layer) for table in tables.values() for layer in table["layer"]})
    slots = sorted({int(s) for table in tables.values() for s in table["slot"] if s > 0})
    columns = min(COLUMNS, max(1, len(layers)))
    rows = math.ceil(len(layers) / columns)
    height = TOP + rows * (SMALL_PANEL + GAP)
    fig = make_subplots(
        rows=rows + 1,
        cols=columns,
        specs=[[{"colspan": columns}] + [None] * (columns - 1)] + [[{}] * columns] * rows,
        row_heights=[float(TOP)] + [float(SMALL_PANEL)] * rows,
        vertical_spacing=GAP / height,
        horizontal_spacing=0.025,
    )
    within = {name: table[table["group"] == "within_block"] for name, table in tables.items()}
    for position, (name, table) in enumerate(tables.items()):
        for trace in _bars(table[table["slot"] == 0], name, position, len(tables)):
            fig.add_trace(trace, row=1, col=1)
    for index, layer in enumerate(layers):
        row, col = index // columns + 2, index % columns + 1
        for position, (name, table) in enumerate(within.items()):
            panel = table[(table["layer"] == layer) & (table["slot"] > 0)]
            for trace in _slots(panel, name, position, legend=index == 0):
                fig.add_trace(trace, row=row, col=col)
        panel_title(fig, f"layer {layer}", index + 2)
        last_of_column = index + columns >= len(layers)
        fig.update_xaxes(
            title_text="draft slot" if last_of_column else None,
            tickvals=slot_ticks(slots, 8),
            range=[min(slots, default=1) - 0.5, max(slots, default=1) + 0.5],
            row=row,
            col=col,
        )
        fig.update_yaxes(
            title_text="within_block_share" if col == 1 else None,
            range=[0, _top(within, pooled=False)],
            showticklabels=col == 1,
            row=row,
            col=col,
        )
    fig.update_xaxes(
        title_text="layer",
        tickvals=layers,
        range=[min(layers, default=0) - 0.5, max(layers, default=0) + 0.5],
        showgrid=False,
        row=1,
        col=1,
    )
    fig.update_yaxes(
        title_text="attention share", range=[0, _top(within, pooled=True)], row=1, col=1
    )
    fig.update_yaxes(tickformat=".0%")
    panel_title(fig, "all slots", 1)
    _keys(fig)
    fig.update_layout(barmode="stack", bargap=0)
    frame(
        fig,
        title=title or "Attention inside the block, by layer and slot",
        name="attention_share",
        plot_height=height - GAP,
        head=20,
        note="Share of a drafted slot's attention that stays in its own block, anchor + drafted = "
        "within_block_share; the rest goes to the context. Mean over heads, with 95 % intervals, "
        "prompts resampled. Uniform baseline: visible block keys / visible keys of the layer. "
        + origin,
        caption=_caption(within),
    )
    return fig


def _caption(within: "Mapping[str, DataFrame]") -> str:
    parts = []
    for name, table in within.items():
        pooled = table[table["slot"] == 0].sort_values("layer")
        shares = [
            f"layer {int(row.layer)} {interval(row.value, row.low, row.high, 1, '%')} "
            f"(uniform {row.uniform:.1%})"
            for row in (pooled.iloc[0], pooled.iloc[-1])
        ]
        parts.append(f"{name}: {', '.join(shares)}")
    return f"Share of attention inside the block, first and last layer. {'; '.join(parts)}."


def _top(within: "Mapping[str, DataFrame]", *, pooled: bool) -> float:
    """Upper end of a share axis: the highest bound or baseline drawn on it, and some air."""
    values = [
        float(v)
        for table in within.values()
        for column in ("value", "high", "uniform")
        for v in table.loc[(table["slot"] == 0) == pooled, column]
        if math.isfinite(v)
    ]
    return min(1.02, max([*values, 0.01]) * 1.08)


def _bars(pooled: "DataFrame", name: str, position: int, count: int) -> list[dict]:
    """Stacked anchor and drafted shares with the interval of their sum, and the baseline."""
    look = style(position)
    width = BAR / count
    groups = {
        group: pooled[pooled["group"] == group].sort_values("layer")
        for group in ("anchor", "drafted", "within_block")
    }
    whole = groups["within_block"]
    traces: list[dict] = []
    for group, pattern in (("anchor", ""), ("drafted", "/")):
        rows = groups[group]
        centre = [int(layer) + (position - (count - 1) / 2) * width for layer in rows["layer"]]
        traces.append(
            {
                "type": "bar",
                "x": centre,
                "y": numbers(rows["value"]),
                "width": width * 0.9,
                "name": label(name),
                "legendgroup": name,
                "showlegend": False,
                "marker": {
                    "color": look.color,
                    "line": {"color": look.color, "width": 1},
                    "pattern": {
                        "shape": pattern,
                        "fgcolor": look.color,
                        "bgcolor": look.tint(0.2),
                        "size": 6,
                    },
                },
                "customdata": [int(layer) for layer in rows["layer"]],
                "hovertemplate": f"{label(name)}<br>layer %{{customdata}}, {group}: %{{y:.1%}}"
                "<extra></extra>",
            }
        )
    traces[-1]["error_y"] = error_bars(whole, MUTED)
    marks: list[float | None] = []
    levels: list[float | None] = []
    for layer, level in zip(whole["layer"], numbers(whole["uniform"]), strict=True):
        centre_x = int(layer) + (position - (count - 1) / 2) * width
        marks += [centre_x - width / 2, centre_x + width / 2, None]
        levels += [level, level, None]
    # white between the black dots, no wider: black alone would not show on a dark bar
    halo = {"line": {"color": PAPER, "width": 1.5}, "hoverinfo": "skip", "hovertemplate": None}
    where = {"type": "scatter", "x": marks, "y": levels, **_baseline(name)}
    traces += [where | halo, where]
    return traces


def _slots(panel: "DataFrame", name: str, position: int, *, legend: bool) -> list[dict]:
    look = style(position)
    rows = panel.sort_values("slot")
    x = [int(slot) for slot in rows["slot"]]
    line = {
        "type": "scatter",
        "x": x,
        "y": numbers(rows["value"]),
        "mode": "lines+markers",
        "name": label(name),
        "legendgroup": name,
        "showlegend": legend,
        "line": {"color": look.color, "width": 2},
        "marker": {"color": look.color, "symbol": look.symbol, "size": 6},
        "hovertemplate": f"{label(name)}<br>slot %{{x}}: %{{y:.1%}}<extra></extra>",
    }
    level = {"type": "scatter", "x": x, "y": numbers(rows["uniform"]), **_baseline(name)}
    return [band(x, list(rows["low"]), list(rows["high"]), look, name), line, level]


def _baseline(name: str) -> dict:
    return {
        "mode": "lines",
        "line": {"color": STRONG, "width": 1.5, "dash": "dot"},
        "legendgroup": name,
        "showlegend": False,
        "hovertemplate": "uniform: %{y:.1%}<extra></extra>",
    }


def _keys(fig: "Figure") -> None:
    for text, pattern in (("anchor", ""), ("drafted", "/")):
        marker = {
            "color": MUTED,
            "line": {"color": MUTED, "width": 1},
            "pattern": {"shape": pattern, "fgcolor": MUTED, "bgcolor": GRID, "size": 6},
        }
        bar = key(f"{text} share", marker=marker) | {"type": "bar"}
        del bar["mode"]
        fig.add_trace(bar)
    line = {"color": STRONG, "width": 1.5, "dash": "dot"}
    fig.add_trace(key("uniform baseline", mode="lines", line=line))
