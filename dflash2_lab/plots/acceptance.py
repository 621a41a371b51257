"""Acceptance length by policy, with the headroom between top-1 and the oracle marked.

One panel per drafter, one row per policy: pooled and per-request lengths with their intervals, and
beside them the pooled numbers and the share of the headroom, (policy - top1) / (oracle - top1).
"""

import math
from collections.abc import Mapping, Sequence
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
from dflash2_lab.plots.template import GRID, HEADROOM, INK, MUTED, SMALL, style

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.tables import Run

ROW = 44  # px per policy
GAP = 60  # px between panels: the next drafter's name
COLUMNS = (14, 152)  # px right of the panel: pooled with its interval, share of the headroom


def acceptance_by_policy(
    runs: "Run | Mapping[str, Run]",
    title: str | None = None,
    policies: Sequence[str] | None = None,
    oracle_ks: Sequence[int] = (16,),
) -> "Figure":
    """Acceptance length (tokens per verify step, bonus counted) by policy, terminal steps included.

    `policies` are those of the run unless given; `oracle_ks` the candidate counts of the oracle.
    """
    from dflash2_lab import stats

    named = as_runs(runs)
    tables = {
        name: stats.acceptance_by_policy(run, policies=policies, oracle_ks=oracle_ks)
        for name, run in named.items()
    }
    shares = {
        name: stats.headroom(run, policies, oracle_k=max(oracle_ks))
        for name, run in named.items()
        if oracle_ks and "top1" in run.policies
    }
    return draw_acceptance(tables, title, source(named), shares)


def draw_acceptance(
    tables: "Mapping[str, DataFrame]",
    title: str | None = None,
    origin: str = "",
    shares: "Mapping[str, DataFrame] | None" = None,
) -> "Figure":
    """The figure from {drafter: table of `stats.acceptance_by_policy`}; pure.

    `origin`, as of `parts.source`, ends the footnote; `shares` are the tables of `stats.headroom`,
    without which no share is written.
    """
    from plotly.subplots import make_subplots

    panels = {name: table[table["terminal"] == "with"] for name, table in tables.items()}
    policies = {name: list(dict.fromkeys(panel["policy"])) for name, panel in panels.items()}
    height = sum(ROW * len(rows) for rows in policies.values()) + GAP * (len(panels) - 1)
    fig = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        row_heights=[float(len(rows)) for rows in policies.values()],
        vertical_spacing=GAP / height if len(panels) > 1 else 0.0,
    )
    for position, (name, panel) in enumerate(panels.items()):
        axis = position + 1
        for trace in _marks(panel, policies[name], name, position):
            fig.add_trace(trace, row=axis, col=1)
        _headroom(fig, panel, policies[name], axis, (shares or {}).get(name))
        panel_title(fig, label(name).replace("<br>", " "), axis, bold=True)
        count = len(policies[name])
        fig.update_yaxes(
            tickvals=list(range(count)),
            ticktext=[label(policy) for policy in policies[name]],
            range=[count - 0.5, -0.5],
            showgrid=False,
            row=axis,
        )
    for text, fill in (("pooled over verify steps", ""), ("mean over requests", "-open")):
        marker = {"color": MUTED, "symbol": f"circle{fill}", "size": 9}
        fig.add_trace(key(text, mode="markers", marker=marker))
    square = {
        "color": HEADROOM,
        "symbol": "square",
        "size": 14,
        "line": {"color": GRID, "width": 1},
    }
    fig.add_trace(key("headroom: top1 to oracle", mode="markers", marker=square))
    highs = [float(v) for panel in panels.values() for v in panel["high"] if math.isfinite(v)]
    tops = [float(v) for panel in panels.values() for v in panel["value"] if math.isfinite(v)]
    fig.update_xaxes(range=[0.9, max([*highs, *tops, 2.0]) * 1.03], showticklabels=True)
    fig.update_xaxes(
        title_text="acceptance length (tokens per verify step, bonus counted)", row=len(panels)
    )
    frame(
        fig,
        title=title or "Acceptance length by policy",
        name="acceptance_by_policy",
        plot_height=height,
        head=46,
        left=136,
        right=300,
        note="Bars and brackets: 95 % intervals, prompts resampled; steps cut by EOS or the length "
        "limit included. The oracle accepts the target's token whenever it is among the k best "
        "candidates: an upper bound, not a policy. Headroom: (policy \N{MINUS SIGN} top1) / "
        f"(oracle \N{MINUS SIGN} top1), pooled. {origin}",
        caption=_caption(panels, policies),
    )
    return fig


def _caption(panels: "Mapping[str, DataFrame]", policies: Mapping[str, Sequence[str]]) -> str:
    parts = [
        f"{name}: "
        + ", ".join(f"{policy} {interval(*_pooled(panels[name], policy))}" for policy in rows)
        for name, rows in policies.items()
    ]
    return f"Pooled acceptance length, tokens per verify step. {'; '.join(parts)}."


def _pooled(panel: "DataFrame", policy: str) -> tuple[float, float, float]:
    rows = panel[(panel["policy"] == policy) & (panel["aggregation"] == "pooled")]
    if rows.empty:
        return math.nan, math.nan, math.nan
    return tuple(float(rows[column].iloc[0]) for column in ("value", "low", "high"))


def _oracle(policies: Sequence[str]) -> str | None:
    """The oracle with the most candidates, or None when the table has no oracle."""
    oracles = [p for p in policies if p.startswith("oracle@")]
    return max(oracles, key=lambda p: int(p.removeprefix("oracle@"))) if oracles else None


def _recovered(shares: "DataFrame") -> dict[str, str]:
    """What to write of each policy's share of the headroom, from a table of `stats.headroom`."""
    return {
        row.policy: interval(row.value, row.low, row.high, 0, "%")
        for row in shares.itertuples()
        if row.policy != "top1" and math.isfinite(row.value)
    }


def _marks(panel: "DataFrame", policies: Sequence[str], name: str, position: int) -> list[dict]:
    look = style(position)
    traces = []
    for aggregation, shift, fill in (("pooled", -0.13, ""), ("per_request", 0.15, "-open")):
        rows = panel[panel["aggregation"] == aggregation]
        value = list(rows["value"])
        traces.append(
            {
                "type": "scatter",
                "x": numbers(value),
                "y": [policies.index(policy) + shift for policy in rows["policy"]],
                "error_x": error_bars(rows, look.color),
                "customdata": [
                    [policy, low, high]
                    for policy, low, high in zip(
                        rows["policy"], numbers(rows["low"]), numbers(rows["high"]), strict=True
                    )
                ],
                "mode": "markers",
                "name": f"{label(name)}, {aggregation}",
                "showlegend": False,
                "marker": {
                    "color": look.color,
                    "symbol": look.symbol + fill,
                    "size": 9,
                    "line": {"width": 1.5, "color": look.color},
                },
                "hovertemplate": f"{label(name)}, %{{customdata[0]}}, {aggregation}: %{{x:.3f}} "
                "[%{customdata[1]:.3f}, %{customdata[2]:.3f}]<extra></extra>",
            }
        )
    return traces


def _headroom(
    fig: "Figure",
    panel: "DataFrame",
    policies: Sequence[str],
    axis: int,
    shares: "DataFrame | None",
) -> None:
    """Shade top1..oracle, and write the pooled numbers and the recovered shares at the right."""
    oracle = _oracle(policies)
    floor = _pooled(panel, "top1")[0]
    ceiling = _pooled(panel, oracle)[0] if oracle else math.nan
    span = ceiling - floor
    suffix = "" if axis == 1 else str(axis)
    if math.isfinite(span):
        where = {"xref": f"x{suffix}", "yref": f"y{suffix} domain", "y0": 0, "y1": 1}
        fig.add_shape(
            type="rect",
            x0=floor,
            x1=ceiling,
            fillcolor=HEADROOM,
            line_width=0,
            layer="below",
            **where,
        )
        for edge in (floor, ceiling):
            line = {"color": MUTED, "width": 1, "dash": "dot"}
            fig.add_shape(type="line", x0=edge, x1=edge, line=line, layer="below", **where)
    cells = {"font": {"size": SMALL, "color": INK}, "showarrow": False, "xref": "paper", "x": 1}
    cells |= {"xanchor": "left", "align": "left"}
    recovered = {} if shares is None else _recovered(shares)
    heads = ("pooled [95 %]", *(["headroom<br>recovered"] if recovered else []))
    for text, shift in zip(heads, COLUMNS, strict=False):
        fig.add_annotation(
            text=text, xshift=shift, yref=f"y{suffix} domain", y=1, yanchor="bottom", **cells
        )
    for row, policy in enumerate(policies):
        value, low, high = _pooled(panel, policy)
        bounds = f" [{low:.2f}, {high:.2f}]" if math.isfinite(low + high) else ""
        texts = [f"<b>{value:.2f}</b>{bounds}" if math.isfinite(value) else "none"]
        texts += [recovered[policy]] if policy in recovered else []
        for text, shift in zip(texts, COLUMNS, strict=False):
            fig.add_annotation(text=text, xshift=shift, yref=f"y{suffix}", y=row, **cells)
