"""Recall of the unary candidates by slot, marginal and conditional, all and visited anchors.

From the table of `stats.recall_by_slot`, with intervals over prompts.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dflash2_lab.plots.parts import (
    as_runs,
    band,
    frame,
    interval,
    key,
    label,
    numbers,
    panel_title,
    slot_ticks,
    source,
    visiting_policy,
)
from dflash2_lab.plots.template import DASHES, FILLS, MUTED, style

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.tables import Run

ANCHORS = {"all": "all recorded anchors", "visited": "visited anchors"}
METRICS = {
    "position_recall": "position_recall@k<br>(marginal)",
    "conditional_recall": "conditional_recall@k<br>(earlier slots within k)",
}


def recall_by_slot(
    runs: "Run | Mapping[str, Run]",
    title: str | None = None,
    ks: Sequence[int] = (1, 16),
    policy: str | None = None,
) -> "Figure":
    """Recall@k by slot with 95 % intervals over prompts, for one run or several drafters.

    Columns are the anchors (all recorded, visited by a decode with `policy`; None: the drafter's
    own), rows the metric.
    """
    from dflash2_lab import stats

    named = as_runs(runs)
    tables = {
        name: stats.recall_by_slot(run, ks=ks, policy=visiting_policy(run, policy))
        for name, run in named.items()
    }
    return draw_recall(tables, title, source(named))


def draw_recall(
    tables: "Mapping[str, DataFrame]", title: str | None = None, origin: str = ""
) -> "Figure":
    """The figure from {drafter: table of `stats.recall_by_slot`}; pure.

    `origin`, as of `parts.source`, ends the footnote.
    """
    from plotly.subplots import make_subplots

    anchors = [a for a in ANCHORS if any((t["anchors"] == a).any() for t in tables.values())]
    ks = sorted({int(k) for table in tables.values() for k in table["k"]})
    slots = sorted({int(s) for table in tables.values() for s in table["slot"]})
    fig = make_subplots(
        rows=len(METRICS),
        cols=len(anchors),
        shared_xaxes=True,
        shared_yaxes=True,
        horizontal_spacing=0.05,
        vertical_spacing=0.07,
    )
    for row, metric in enumerate(METRICS, start=1):
        for col, which in enumerate(anchors, start=1):
            for position, (name, table) in enumerate(tables.items()):
                panel = table[(table["anchors"] == which) & (table["metric"] == metric)]
                for trace in _lines(panel, name, position, ks, legend=row == col == 1):
                    fig.add_trace(trace, row=row, col=col)
        fig.update_yaxes(title_text=METRICS[metric], row=row, col=1)
    for position, k in enumerate(ks):
        look = {"line": {"color": MUTED, "dash": DASHES[position % 4], "width": 2}}
        marker = {"color": MUTED, "symbol": f"circle{FILLS[position % 4]}", "size": 8}
        fig.add_trace(key(f"recall@{k}", mode="lines+markers", marker=marker, **look))
    fig.update_yaxes(range=[-0.02, 1.02], dtick=0.2, tickformat=".1f")
    fig.update_xaxes(
        tickvals=slot_ticks(slots, 16),
        range=[min(slots, default=1) - 0.4, max(slots, default=1) + 0.4],
    )
    fig.update_xaxes(title_text="draft slot", row=len(METRICS))
    for axis, which in enumerate(anchors, start=1):
        panel_title(fig, f"{ANCHORS[which]}, {_blocks(tables, which)}", axis)
    frame(
        fig,
        title=title or "Recall of the draft candidates by slot",
        name="recall_by_slot",
        plot_height=500,
        head=20,
        note="Share of blocks whose target token is among the k best unary candidates of the slot; "
        "bands: 95 % intervals, prompts resampled. Visited anchors: those where a decode "
        f"with the drafter's own policy starts a block. {origin}",
        caption=_caption(tables, ks),
    )
    return fig


def _blocks(tables: "Mapping[str, DataFrame]", anchors: str) -> str:
    """The number of blocks that start at such anchors; from the fewest to the most of a drafter."""
    counts = [
        int(table.loc[table["anchors"] == anchors, "num_blocks"].max()) for table in tables.values()
    ]
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)})) + " blocks"


def _caption(tables: "Mapping[str, DataFrame]", ks: Sequence[int]) -> str:
    parts = []
    for name, table in tables.items():
        rows = table[(table["anchors"] == "all") & (table["metric"] == "position_recall")]
        falls = []
        for k in ks:
            first, last = (rows[rows["k"] == k].sort_values("slot").iloc[end] for end in (0, -1))
            ends = [interval(row["value"], row["low"], row["high"]) for row in (first, last)]
            falls.append(f"recall@{k} {ends[0]} at slot 1, {ends[1]} at slot {last['slot']}")
        parts.append(f"{name}: {', '.join(falls)}")
    return f"Recall of the target's token over all recorded anchors. {'; '.join(parts)}."


def _lines(
    panel: "DataFrame", name: str, position: int, ks: Sequence[int], legend: bool
) -> list[dict]:
    look = style(position)
    traces = []
    for order, k in enumerate(ks):
        rows = panel[panel["k"] == k].sort_values("slot")
        x = [int(slot) for slot in rows["slot"]]
        low, high = list(rows["low"]), list(rows["high"])
        traces.append(band(x, low, high, look, name))
        traces.append(
            {
                "type": "scatter",
                "x": x,
                "y": numbers(rows["value"]),
                "customdata": [
                    list(pair) for pair in zip(numbers(low), numbers(high), strict=True)
                ],
                "mode": "lines+markers",
                "name": label(name),
                "legendgroup": name,
                "showlegend": legend and order == 0,
                "line": {"color": look.color, "dash": DASHES[order % 4], "width": 2},
                "marker": {
                    "color": look.color,
                    "symbol": look.symbol + FILLS[order % 4],
                    "size": 8,
                    "line": {"width": 1.5, "color": look.color},
                },
                "hovertemplate": f"{label(name)}<br>slot %{{x}}, recall@{k}: %{{y:.3f}} "
                "[%{customdata[0]:.3f}, %{customdata[1]:.3f}]<extra></extra>",
            }
        )
    return traces
