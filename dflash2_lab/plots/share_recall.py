"""Attention inside the block against recall, slot by slot, in short and long contexts.

From the table of `stats.share_against_recall`, a panel for each bin of context length.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash2_lab.plots.parts import (
    as_runs,
    error_bars,
    frame,
    interval,
    key,
    label,
    numbers,
    panel_title,
    source,
)
from dflash2_lab.plots.template import INK, MUTED, SMALL, style

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.tables import Run

COLUMNS = 3  # contexts in a row
PANEL, GAP = 330, 96  # px


def share_against_recall(
    runs: "Run | Mapping[str, Run]", title: str | None = None, k: int = 1
) -> "Figure":
    """within_block_share (mean over layers and heads) against position_recall@k of each slot.

    A panel for all anchors and one for each bin of context length.
    """
    from dflash2_lab import stats

    named = as_runs(runs)
    tables = {name: stats.share_against_recall(run, k) for name, run in named.items()}
    return draw_share_recall(tables, title, source(named), k=k)


def draw_share_recall(
    tables: "Mapping[str, DataFrame]", title: str | None = None, origin: str = "", *, k: int = 1
) -> "Figure":
    """The figure from {drafter: table of `stats.share_against_recall`}; pure.

    `origin`, as of `parts.source`, ends the footnote.
    """
    from plotly.subplots import make_subplots

    bins = list(dict.fromkeys(b for table in tables.values() for b in table["context_bin"]))
    columns = min(COLUMNS, len(bins))
    rows = math.ceil(len(bins) / columns)
    height = rows * PANEL + (rows - 1) * GAP
    fig = make_subplots(
        rows=rows,
        cols=columns,
        shared_xaxes="all",
        shared_yaxes="all",
        horizontal_spacing=0.03,
        vertical_spacing=GAP / height if rows > 1 else 0.0,
    )
    for index, name in enumerate(bins):
        row, col = index // columns + 1, index % columns + 1
        blocks = []
        for position, (drafter, table) in enumerate(tables.items()):
            panel = table[table["context_bin"] == name].sort_values("slot")
            for trace in _points(panel, drafter, position, k, legend=index == 0):
                fig.add_trace(trace, row=row, col=col)
            blocks += [int(panel["num_blocks"].max())] if len(panel) else []
        title_text = "all anchors" if name == "all" else f"context {name}"
        panel_title(fig, f"{title_text}, {max(blocks):,} blocks", index + 1)
        fig.update_xaxes(title_text="within_block_share", row=row, col=col)
    level = {"mode": "lines", "line": {"color": INK, "width": 1.5, "dash": "dot"}}
    fig.add_trace(key("uniform attention", **level))
    most = max(float(table[["share", "share_high"]].max().max()) for table in tables.values())
    fig.update_xaxes(tickformat=".0%", showticklabels=True, nticks=5, range=[0, most * 1.12])
    top = max(float(table[["recall", "recall_high"]].max().max()) for table in tables.values())
    fig.update_yaxes(range=[0, top * 1.1])
    fig.update_yaxes(title_text=f"position_recall@{k}", col=1)
    frame(
        fig,
        title=title or "Attention inside the block against recall",
        name="share_against_recall",
        plot_height=height,
        head=24,
        note="One point per draft slot, joined in their order, the first and the last numbered: "
        "the share of its attention that stays in its own block, mean over layers and heads, and "
        f"recall@{k}, the share of blocks whose target token is {_among(k)}. Dotted: the "
        "share under uniform attention over the visible keys. Bars: 95 % intervals, prompts "
        f"resampled; all recorded anchors; contexts in tokens. {origin}",
        caption=_caption(tables, k),
    )
    return fig


def _points(panel: "DataFrame", name: str, position: int, k: int, *, legend: bool) -> list[dict]:
    if panel.empty:
        return []
    look = style(position)
    uniform = float(panel["uniform"].mean())
    bounds = [float(panel[column].min()) for column in ("recall_low", "recall")]
    tops = [float(panel[column].max()) for column in ("recall_high", "recall")]
    low = min(value for value in bounds if math.isfinite(value))
    high = max(value for value in tops if math.isfinite(value))
    return [
        {
            "type": "scatter",
            "x": numbers([uniform] * 2),
            "y": numbers([low, high]),
            "mode": "lines",
            "line": {"color": INK, "width": 1.5, "dash": "dot"},
            "legendgroup": name,
            "showlegend": False,
            "hovertemplate": "uniform: %{x:.1%}<extra></extra>",
        },
        {
            "type": "scatter",
            "x": numbers(panel["share"]),
            "y": numbers(panel["recall"]),
            "error_x": error_bars(panel, look.color, ("share", "share_low", "share_high")),
            "error_y": error_bars(panel, look.color, ("recall", "recall_low", "recall_high")),
            "mode": "lines+markers+text",
            "text": _ends([str(int(slot)) for slot in panel["slot"]]),
            # a curve runs down: its first number goes above it, its last one below
            "textposition": ["top right"] * (len(panel) - 1) + ["bottom right"],
            "textfont": {"size": SMALL, "color": MUTED},
            "name": label(name),
            "legendgroup": name,
            "showlegend": legend,
            "line": {"color": look.color, "width": 1.5},
            "marker": {"color": look.color, "symbol": look.symbol, "size": 8},
            "customdata": [int(slot) for slot in panel["slot"]],
            "hovertemplate": f"{label(name)}<br>slot %{{customdata}}: share %{{x:.1%}}, recall@{k} "
            "%{y:.3f}<extra></extra>",
        },
    ]


def _among(k: int) -> str:
    return "the first choice" if k == 1 else f"among the {k} best"


def _ends(texts: list[str]) -> list[str]:
    """The first and the last text; those between would cover each other."""
    return [text if index in (0, len(texts) - 1) else "" for index, text in enumerate(texts)]


def _caption(tables: "Mapping[str, DataFrame]", k: int) -> str:
    parts = []
    for name, table in tables.items():
        rows = table[table["context_bin"] == "all"].sort_values("slot")
        first, last = rows.iloc[0], rows.iloc[-1]
        shares, recalls = (
            [
                interval(*(r[f"{c}{end}"] for end in ("", "_low", "_high")), digits, unit)
                for r in (first, last)
            ]
            for c, digits, unit in (("share", 1, "%"), ("recall", 2, ""))
        )
        parts.append(
            f"{name}: from slot {first['slot']} to slot {last['slot']} the within-block share goes "
            f"from {shares[0]} to {shares[1]} and recall@{k} from {recalls[0]} to {recalls[1]}"
        )
    return ". ".join(parts) + "."
