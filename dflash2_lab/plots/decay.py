"""Suffix decay: the fall of recall with the slot, its log-slope and its drop, per drafter."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash2_lab.plots.parts import (
    as_runs,
    band,
    frame,
    interval,
    label,
    numbers,
    panel_title,
    slot_ticks,
    source,
    visiting_policy,
)
from dflash2_lab.plots.template import DASHES, style

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.stats import SuffixDecay
    from dflash2_lab.tables import Run


def suffix_decay(
    runs: "Run | Mapping[str, Run]",
    title: str | None = None,
    k: int = 1,
    anchors: str = "all",
    policy: str | None = None,
) -> "Figure":
    """Recall@k by slot on a linear and a log scale; the legend gives log-slope and drop.

    `policy` says which anchors count as visited when `anchors` is "visited" (None: the drafter's
    own).
    """
    from dflash2_lab import stats

    named = as_runs(runs)
    decays = {
        name: stats.suffix_decay(run, k, anchors, visiting_policy(run, policy))
        for name, run in named.items()
    }
    return draw_decay(decays, title, source(named), k=k, anchors=anchors)


def draw_decay(
    decays: "Mapping[str, tuple[DataFrame, SuffixDecay]]",
    title: str | None = None,
    origin: str = "",
    *,
    k: int = 1,
    anchors: str = "all",
) -> "Figure":
    """The figure from {drafter: (curve, SuffixDecay)} of `stats.suffix_decay`; pure.

    `origin`, as of `parts.source`, ends the footnote.
    """
    from plotly.subplots import make_subplots

    fig = make_subplots(rows=1, cols=2, horizontal_spacing=0.1)
    slots = sorted({int(s) for curve, _ in decays.values() for s in curve["slot"]})
    for position, (name, (curve, decay)) in enumerate(decays.items()):
        rows = curve.sort_values("slot")
        for column in (1, 2):
            for trace in _curve(rows, name, position, decay, log=column == 2):
                fig.add_trace(trace, row=1, col=column)
        fig.add_trace(_fit(rows, name, position, decay), row=1, col=2)
    values = [
        float(v)
        for curve, _ in decays.values()
        for column in ("value", "low")
        for v in curve[column]
        if math.isfinite(v) and v > 0
    ]
    floor = min(values, default=0.1)
    fig.update_xaxes(
        title_text="draft slot",
        tickvals=slot_ticks(slots, 16),
        range=[min(slots, default=1) - 0.4, max(slots, default=1) + 0.4],
    )
    metric = f"position_recall@{k}"
    fig.update_yaxes(title_text=metric, range=[-0.02, 1.02], dtick=0.2, tickformat=".1f", col=1)
    fig.update_yaxes(
        title_text=f"{metric} (log scale)",
        type="log",
        range=[math.log10(floor * 0.9), math.log10(1.05)],
        tickvals=_log_ticks(floor),
        col=2,
    )
    panel_title(fig, "fall from the first slot to the last", 1)
    panel_title(fig, "log-slope: least-squares line", 2)
    where = "all recorded anchors" if anchors == "all" else "visited anchors"
    frame(
        fig,
        title=title or "Suffix decay: recall by draft slot",
        name="suffix_decay",
        plot_height=330,
        head=20,
        stacked=True,
        note=f"{metric}, marginal, over {where}. Slope: least-squares slope of its natural log per "
        "slot. Drop: recall of the first slot minus recall of the last. Brackets and bands: 95 % "
        f"intervals, prompts resampled. {origin}",
        caption=_caption(decays, metric, where),
    )
    return fig


def _caption(decays: "Mapping[str, tuple[DataFrame, SuffixDecay]]", metric: str, where: str) -> str:
    parts = []
    for name, (curve, decay) in decays.items():
        first, last = (float(curve.sort_values("slot")["value"].iloc[end]) for end in (0, -1))
        slope = interval(decay.slope, decay.slope_low, decay.slope_high, 3)
        parts.append(
            f"{name} falls from {first:.3f} at slot 1 to {last:.3f} at slot "
            f"{int(curve['slot'].max())}, log-slope {slope} per slot"
        )
    return f"{metric} over {where}. {'; '.join(parts)}."


def _log_ticks(floor: float) -> list[float]:
    """Ticks of a log axis from `floor` to 1, few enough to stand apart."""
    if floor > 0.1:
        return [0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0]
    steps = (1, 2, 5) if floor > 0.005 else (1,)
    decades = math.ceil(-math.log10(floor))
    return [step / 10**power for power in range(decades, 0, -1) for step in steps] + [1.0]


def _curve(
    rows: "DataFrame", name: str, position: int, decay: "SuffixDecay", log: bool
) -> list[dict]:
    look = style(position)
    x = [int(slot) for slot in rows["slot"]]
    value, low, high = (list(rows[column]) for column in ("value", "low", "high"))
    if log:  # zero has no logarithm: such a point, and its band, are left out
        value = [v if v > 0 else math.nan for v in value]
        low = [v if v > 0 else math.nan for v in low]
    slope = interval(decay.slope, decay.slope_low, decay.slope_high, 3)
    drop = interval(decay.drop, decay.drop_low, decay.drop_high, 3)
    line = {
        "type": "scatter",
        "x": x,
        "y": numbers(value),
        "customdata": [list(p) for p in zip(numbers(rows["low"]), numbers(high), strict=True)],
        "mode": "markers" if log else "lines+markers",
        "name": f"{label(name)}: slope {slope} per slot, drop {drop}",
        "legendgroup": name,
        "showlegend": not log,
        "line": {"color": look.color, "width": 2, "dash": DASHES[position % 4]},
        "marker": {"color": look.color, "symbol": look.symbol, "size": 8},
        "hovertemplate": f"{label(name)}<br>slot %{{x}}: %{{y:.3f}} "
        "[%{customdata[0]:.3f}, %{customdata[1]:.3f}]<extra></extra>",
    }
    return [band(x, low, high, look, name), line]


def _fit(rows: "DataFrame", name: str, position: int, decay: "SuffixDecay") -> dict:
    """The least-squares line: it passes through the mean slot and the mean log recall."""
    look = style(position)
    points = [
        (int(s), math.log(v)) for s, v in zip(rows["slot"], rows["value"], strict=True) if v > 0
    ]
    ends: list[int] = []
    if points and math.isfinite(decay.slope):
        ends = [points[0][0], points[-1][0]]
        middle = sum(p[0] for p in points) / len(points)
        level = sum(p[1] for p in points) / len(points)
    return {
        "type": "scatter",
        "x": ends,
        "y": [math.exp(level + decay.slope * (end - middle)) for end in ends],
        "mode": "lines",
        "line": {"color": look.color, "width": 2, "dash": DASHES[position % 4]},
        "legendgroup": name,
        "showlegend": False,
        "hoverinfo": "skip",
    }
