"""Acceptance length of oracle@k for every k, with the policies' own lengths as levels.

How much of the headroom is there at all, and from how many candidates on: one panel per drafter.
"""

import math
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
    source,
    title_extra,
)
from dflash2_lab.plots.template import DASHES, MUTED, SMALL, style

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.tables import Run

COLUMNS = 3  # panels in a row
PANEL, GAP = 320, 96  # px
TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def headroom_by_k(
    runs: "Run | Mapping[str, Run]",
    title: str | None = None,
    policies: Sequence[str] | None = None,
    max_k: int = 64,
) -> "Figure":
    """Acceptance length (tokens per verify step, bonus counted) of oracle@1 .. oracle@max_k.

    `policies` are the levels, all of the run unless given; the number of candidates that the
    drafter's selector sees is marked.
    """
    from dflash2_lab import stats

    named = as_runs(runs)
    tables = {
        name: (
            stats.oracle_by_k(run, range(1, max_k + 1)),
            stats.acceptance_by_policy(run, policies, oracle_ks=()),
            stats.num_candidates(run),
        )
        for name, run in named.items()
    }
    return draw_headroom(tables, title, source(named))


def draw_headroom(
    tables: "Mapping[str, tuple[DataFrame, DataFrame, int]]",
    title: str | None = None,
    origin: str = "",
) -> "Figure":
    """The figure from {drafter: (table of `stats.oracle_by_k`, table of
    `stats.acceptance_by_policy`, candidates to mark)}; pure.

    `origin`, as of `parts.source`, ends the footnote.
    """
    from plotly.subplots import make_subplots

    levels = {name: _levels(table) for name, (_, table, _) in tables.items()}
    policies = list(dict.fromkeys(p for rows in levels.values() for p in rows["policy"]))
    columns = min(COLUMNS, len(tables))
    rows = math.ceil(len(tables) / columns)
    titles = title_extra(tables)
    gap = GAP + titles
    height = rows * PANEL + (rows - 1) * gap
    fig = make_subplots(
        rows=rows,
        cols=columns,
        shared_yaxes=True,
        horizontal_spacing=0.05,
        vertical_spacing=gap / height if rows > 1 else 0.0,
    )
    for position, (name, (curve, _, candidates)) in enumerate(tables.items()):
        row, col = position // columns + 1, position % columns + 1
        for trace in _traces(curve, levels[name], policies, name, position):
            fig.add_trace(trace, row=row, col=col)
        axis = "" if position == 0 else str(position + 1)
        where = {"xref": f"x{axis}", "yref": f"y{axis} domain"}
        line = {"color": MUTED, "width": 1, "dash": "dot"}
        fig.add_shape(
            type="line", x0=candidates, x1=candidates, y0=0, y1=1, line=line, layer="below", **where
        )
        fig.add_annotation(
            text=f"k = {candidates}",
            x=math.log10(candidates),
            y=0,
            xanchor="left",
            yanchor="bottom",
            xshift=4,
            showarrow=False,
            font={"size": SMALL, "color": MUTED},
            **where,
        )
        panel_title(fig, label(name), position + 1, bold=True)
    for order, policy in enumerate(policies):
        look = {"color": MUTED, "width": 2, "dash": DASHES[(order + 1) % 4]}
        fig.add_trace(key(policy, line=look))
    fig.add_trace(key("oracle@k", line={"color": MUTED, "width": 2}))
    last = max(int(curve["k"].max()) for curve, _, _ in tables.values())
    fig.update_xaxes(
        type="log",
        title_text="k, candidates of a slot",
        tickvals=[tick for tick in TICKS if tick <= last],
        range=[math.log10(0.9), math.log10(last * 1.1)],
    )
    fig.update_yaxes(title_text="acceptance length<br>(tokens per verify step)", col=1)
    frame(
        fig,
        title=title or "Headroom by the number of candidates",
        name="headroom_by_k",
        plot_height=height,
        head=24 + titles,
        left=100,
        note="Oracle@k accepts the target's token whenever it is among the k best unary candidates "
        "of the slot: an upper bound for any selector on those k. Marked: the number of candidates "
        "that the drafter's selector sees. Dashed: what its policies reach. Pooled over verify "
        "steps, bonus counted, steps cut by EOS or the length limit included; bands: 95 % "
        f"intervals, prompts resampled. {origin}",
        caption=_caption(tables, levels),
    )
    return fig


def _levels(table: "DataFrame") -> "DataFrame":
    return table[(table["aggregation"] == "pooled") & (table["terminal"] == "with")]


def _traces(
    curve: "DataFrame", levels: "DataFrame", policies: Sequence[str], name: str, position: int
) -> list[dict]:
    look = style(position)
    k = [int(value) for value in curve["k"]]
    oracle = {
        "type": "scatter",
        "x": k,
        "y": numbers(curve["value"]),
        "customdata": [
            list(pair) for pair in zip(numbers(curve["low"]), numbers(curve["high"]), strict=True)
        ],
        "mode": "lines",
        "name": label(name),
        "showlegend": False,
        "line": {"color": look.color, "width": 2.5},
        "hovertemplate": f"{label(name)}<br>oracle@%{{x}}: %{{y:.2f}} "
        "[%{customdata[0]:.2f}, %{customdata[1]:.2f}]<extra></extra>",
    }
    traces = [band(k, list(curve["low"]), list(curve["high"]), look, name), oracle]
    ends = [k[0], k[-1]]
    for row in levels.itertuples():
        order = policies.index(row.policy)
        traces.append(band(ends, [row.low] * 2, [row.high] * 2, look, name))
        traces.append(
            {
                "type": "scatter",
                "x": ends,
                "y": numbers([row.value] * 2),
                "mode": "lines",
                "name": f"{label(name)}, {row.policy}",
                "showlegend": False,
                "line": {"color": look.color, "width": 2, "dash": DASHES[(order + 1) % 4]},
                "hovertemplate": f"{label(name)}<br>{row.policy}: "
                f"{interval(row.value, row.low, row.high)}<extra></extra>",
            }
        )
    return traces


def _caption(
    tables: "Mapping[str, tuple[DataFrame, DataFrame, int]]", levels: "Mapping[str, DataFrame]"
) -> str:
    parts = []
    for name, (curve, _, candidates) in tables.items():
        rows = curve.set_index("k")
        oracles = [
            f"oracle@{k} {interval(*rows.loc[k, ['value', 'low', 'high']])}"
            for k in sorted({min(candidates, int(curve["k"].max())), int(curve["k"].max())})
        ]
        reached = [
            f"{r.policy} {interval(r.value, r.low, r.high)}" for r in levels[name].itertuples()
        ]
        parts.append(f"{name}: {', '.join([*reached, *oracles])}")
    return f"Pooled acceptance length, tokens per verify step. {'; '.join(parts)}."
