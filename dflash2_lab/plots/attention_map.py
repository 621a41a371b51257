"""Attention inside the block, head by head: a layer x head x slot map of within_block_share."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash2_lab.plots.parts import (
    as_runs,
    frame,
    label,
    numbers,
    panel_title,
    slot_ticks,
    source,
)
from dflash2_lab.plots.template import SMALL, colour_scale

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.tables import Run

COLUMNS = 5  # layers in a row of panels
CELL, LEAST, MOST = 18, 120, 360  # px of a head, of a panel
GAP = 80  # px between rows of panels: ticks and the next titles


def attention_map(runs: "Run | Mapping[str, Run]", title: str | None = None) -> "Figure":
    """within_block_share of every layer, head and slot: a row of panels per drafter, one per layer.

    Colour cannot show an interval; hovering does, and the footnote gives the widest.
    """
    from dflash2_lab import stats

    named = as_runs(runs)
    tables = {name: stats.attention_map(run) for name, run in named.items()}
    return draw_attention_map(tables, title, source(named))


def draw_attention_map(
    tables: "Mapping[str, DataFrame]", title: str | None = None, origin: str = ""
) -> "Figure":
    """The figure from {drafter: table of `stats.attention_map`}; pure.

    `origin`, as of `parts.source`, ends the footnote.
    """
    from plotly.subplots import make_subplots

    panels = [
        (name, int(layer), table[table["layer"] == layer])
        for name, table in tables.items()
        for layer in sorted(table["layer"].unique())
    ]
    columns = min(COLUMNS, max(table["layer"].nunique() for table in tables.values()))
    places, row = [], 0
    for name in tables:
        count = sum(panel[0] == name for panel in panels)
        places += [(row + index // columns + 1, index % columns + 1) for index in range(count)]
        row += math.ceil(count / columns)
    heads = max(int(table["head"].max()) + 1 for table in tables.values())
    panel_height = max(LEAST, min(CELL * heads, MOST))
    height = row * panel_height + (row - 1) * GAP
    fig = make_subplots(
        rows=row,
        cols=columns,
        horizontal_spacing=0.03,
        vertical_spacing=GAP / height if row > 1 else 0.0,
    )
    for (name, layer, table), (at_row, col) in zip(panels, places, strict=True):
        fig.add_trace(_cells(table, name, layer), row=at_row, col=col)
        number = (at_row - 1) * columns + col
        shown = label(name).replace("<br>", " ")
        # on its own line, where a long name may run on above the next panels
        drafter = f"<b>{shown}</b><br>" if layer == 0 and name else ""
        panel_title(fig, f"{drafter}layer {layer}", number)
        fig.update_yaxes(
            title_text="head" if col == 1 else None,
            showticklabels=col == 1,
            row=at_row,
            col=col,
        )
        fig.update_xaxes(title_text="draft slot" if at_row == row else None, row=at_row, col=col)
    slots = sorted({int(s) for table in tables.values() for s in table["slot"]})
    ticks = slot_ticks(slots, 8 if len(slots) <= 8 else 4)
    fig.update_xaxes(tickvals=ticks, tickangle=0, showgrid=False, constrain="domain")
    fig.update_yaxes(
        tickvals=slot_ticks(range(heads), 9), range=[heads - 0.5, -0.5], showgrid=False
    )
    top = max(float(table["value"].max()) for table in tables.values())
    fig.update_layout(
        coloraxis={
            "colorscale": colour_scale(),
            "cmin": 0,
            "cmax": math.ceil(top * 20) / 20,
            "colorbar": {
                "title": {"text": "within_block_share", "side": "right"},
                "tickformat": ".0%",
                "tickfont": {"size": SMALL},
                "thickness": 14,
                "len": min(1.0, 360 / height),
                "x": 1.0,
                "xpad": 10,
                "outlinewidth": 0,
            },
        }
    )
    frame(
        fig,
        title=title or "Attention inside the block, by layer, head and slot",
        name="attention_map",
        plot_height=height,
        head=50,
        right=112,
        note="within_block_share: share of a drafted slot's attention that stays in its own block, "
        "anchor + drafted; the rest goes to the context. Uniform attention would give "
        f"{_uniform(tables)}. Widest 95 % interval of a cell, prompts resampled: ± "
        f"{_widest(tables):.1%}. {origin}",
        caption=_caption(tables),
    )
    return fig


def _cells(table: "DataFrame", name: str, layer: int) -> dict:
    value, low, high = (
        table.pivot(index="head", columns="slot", values=column)
        for column in ("value", "low", "high")
    )
    return {
        "type": "heatmap",
        "x": [int(slot) for slot in value.columns],
        "y": [int(head) for head in value.index],
        "z": [numbers(row) for row in value.to_numpy()],
        "customdata": [
            [list(pair) for pair in zip(numbers(a), numbers(b), strict=True)]
            for a, b in zip(low.to_numpy(), high.to_numpy(), strict=True)
        ],
        "coloraxis": "coloraxis",
        "showlegend": False,
        "name": f"{label(name)}, layer {layer}",
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": f"{label(name)}, layer {layer}<br>head %{{y}}, slot %{{x}}: %{{z:.1%}} "
        "[%{customdata[0]:.1%}, %{customdata[1]:.1%}]<extra></extra>",
    }


def _uniform(tables: "Mapping[str, DataFrame]") -> str:
    """The baseline, once when it is the same in all layers of all drafters."""
    values = {
        (name, int(layer)): f"{rows['uniform'].iloc[0]:.1%}"
        for name, table in tables.items()
        for layer, rows in table.groupby("layer")
    }
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    low = min(float(table["uniform"].min()) for table in tables.values())
    high = max(float(table["uniform"].max()) for table in tables.values())
    return f"{low:.1%} to {high:.1%}, depending on the layer's window"


def _widest(tables: "Mapping[str, DataFrame]") -> float:
    return max(float(((table["high"] - table["low"]) / 2).max()) for table in tables.values())


def _caption(tables: "Mapping[str, DataFrame]") -> str:
    parts = []
    for name, table in tables.items():
        most = table.loc[table["value"].idxmax()]
        above = (table["low"] > table["uniform"]).mean()
        parts.append(
            f"{name}: the most inward head is head {most['head']:.0f} of layer {most['layer']:.0f} "
            f"at slot {most['slot']:.0f} ({most['value']:.0%}); {above:.0%} of the cells lie above "
            "uniform attention with their whole interval"
        )
    return f"Attention inside the block by layer, head and slot. {'; '.join(parts)}."
