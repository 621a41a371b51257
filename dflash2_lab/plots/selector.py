"""Where the selector beats the drafter's first choice, where it loses, and what is left to win.

From the table of `stats.selector_recovery`, slot by slot.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash2_lab.errors import LabError
from dflash2_lab.plots.parts import (
    as_runs,
    error_bars,
    frame,
    interval,
    key,
    label,
    numbers,
    panel_title,
    slot_ticks,
    source,
    title_extra,
)
from dflash2_lab.plots.template import GRID, INK, MUTED, PAPER, style

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.tables import Run

BAR, SHIFT, NET = 0.5, -0.12, 0.3  # width of the bars, and places beside the slot
ASIDE = 0.06  # that the bars of two series at one slot stand beside each other
HEIGHTS = (260, 220)  # px of the rows: helped and hurt, what is left
GAP, NEXT = 46, 108  # px between them; with another drafter below
COLUMNS = 2
TICKS = 16  # slots that can be told apart in the width of a figure


def selector_recovery(
    runs: "Run | Mapping[str, Run]", title: str | None = None, policy: str = "selector"
) -> "Figure":
    """Per slot: blocks in which `policy` is right and top-1 wrong, the reverse, and the remainder.

    Runs that did not record the policy are left out. LabError when none did.
    """
    from dflash2_lab import stats

    named = {name: run for name, run in as_runs(runs).items() if policy in run.policies}
    if not named:
        raise LabError(f"policy {policy!r}: found in none of the runs, expected it in one")
    tables = {name: stats.selector_recovery(run, policy) for name, run in named.items()}
    candidates = {name: stats.num_candidates(run) for name, run in named.items()}
    return draw_recovery(tables, title, source(named), policy=policy, candidates=candidates)


def draw_recovery(
    tables: "Mapping[str, DataFrame]",
    title: str | None = None,
    origin: str = "",
    *,
    policy: str = "selector",
    candidates: Mapping[str, int] | None = None,
) -> "Figure":
    """The figure from {drafter: table of `stats.selector_recovery`}; pure.

    `candidates` are the k of the oracle by drafter (16 where not given); `origin`, as of
    `parts.source`, ends the footnote.
    """
    from plotly.subplots import make_subplots

    columns = min(COLUMNS, len(tables))
    pairs = math.ceil(len(tables) / columns)
    titles = title_extra(tables)
    gap = GAP if pairs == 1 else NEXT + titles
    height = pairs * sum(HEIGHTS) + (2 * pairs - 1) * gap
    fig = make_subplots(
        rows=2 * pairs,
        cols=columns,
        row_heights=[float(size) for size in HEIGHTS] * pairs,
        horizontal_spacing=0.09,
        vertical_spacing=gap / height,
    )
    for position, (name, table) in enumerate(tables.items()):
        parts = {q: rows.sort_values("slot") for q, rows in table.groupby("quantity")}
        row, col = 2 * (position // columns) + 1, position % columns + 1
        for trace in _balance(parts, name, position, policy):
            fig.add_trace(trace, row=row, col=col)
        for trace in _rest(parts, name, position):
            fig.add_trace(trace, row=row + 1, col=col)
        _slots(fig, parts["net"], row, col, TICKS // columns)
        panel_title(fig, label(name), (row - 1) * columns + col, bold=True)
    for pair in range(pairs):
        rows = 2 * pair + 1, 2 * pair + 2
        fig.update_yaxes(title_text="share of blocks", row=rows[0], col=1)
        fig.update_yaxes(title_text="share left to win", row=rows[1], col=1)
        fig.update_yaxes(range=_range(tables, ("helped", "net"), ("hurt",)), row=rows[0])
        fig.update_yaxes(range=_range(tables, ("within", "beyond"), ()), row=rows[1])
        zero = {"zeroline": True, "zerolinecolor": INK, "zerolinewidth": 1}
        fig.update_yaxes(**zero, row=rows[0])
    fig.update_yaxes(tickformat=".0%")
    _keys(fig, policy)
    fig.update_layout(barmode="relative")
    seen = sorted({(candidates or {}).get(name, 16) for name in tables})
    frame(
        fig,
        title=title or f"What the {policy} recovers, slot by slot",
        name="selector_recovery",
        plot_height=height,
        head=24 + titles,
        foot=70,
        note=f"Of the blocks in which both the {policy} and top-1 were accepted at every earlier "
        f"slot. Top: the {policy} is right and top-1 wrong (helps), the reverse (hurts), and the "
        f"difference. Bottom: both wrong, the target's token among the "
        f"{' or '.join(map(str, seen))} candidates or beyond them. At T > 0 right and wrong are "
        "accepted and refused, both judged by one random number. Bars: 95 % intervals, prompts "
        f"resampled; too narrow where few blocks arrive. All recorded anchors. {origin}",
        caption=_caption(tables, policy),
    )
    return fig


def _slots(fig: "Figure", net: "DataFrame", row: int, col: int, room: int) -> None:
    """The slots below both panels of a drafter, with the number of blocks that reach each."""
    blocks = dict(zip(net["slot"], net["num_blocks"], strict=True))
    ticks = slot_ticks([int(slot) for slot in blocks], room)
    span = {"range": [min(blocks) - 0.6, max(blocks) + 0.6], "tickvals": ticks, "tickangle": 0}
    fig.update_xaxes(**span, showticklabels=False, row=row, col=col)
    text = [f"{slot}<br>{blocks[slot]:,.0f}" for slot in ticks]
    title = "draft slot, and blocks that reach it"
    fig.update_xaxes(**span, ticktext=text, title_text=title, row=row + 1, col=col)


def _range(
    tables: "Mapping[str, DataFrame]", up: tuple[str, ...], down: tuple[str, ...]
) -> list[float]:
    """Ends of an axis for everything drawn up and down from 0, with some air."""

    def reach(quantities: tuple[str, ...]) -> float:
        bounds = [
            float(bound)
            for table in tables.values()
            for column in ("value", "high")
            for bound in table.loc[table["quantity"].isin(quantities), column]
            if math.isfinite(bound)
        ]
        return max([0.0, *bounds])

    top, bottom = reach(up), reach(down)
    air = 0.06 * max(top + bottom, 0.01)
    return [-bottom - (air if down else 0), top + air]


def _balance(parts: "Mapping[str, DataFrame]", name: str, position: int, policy: str) -> list[dict]:
    look = style(position)
    traces = []
    for quantity, sign, pattern in (("helped", 1, ""), ("hurt", -1, "/")):
        rows = parts[quantity]
        signed = rows.assign(
            value=sign * rows["value"],
            low=sign * rows["low" if sign > 0 else "high"],
            high=sign * rows["high" if sign > 0 else "low"],
        )
        traces.append(
            {
                "type": "bar",
                "x": [int(slot) + SHIFT for slot in rows["slot"]],
                "y": numbers(signed["value"]),
                "width": BAR,
                "error_y": error_bars(signed, INK),
                "name": f"{label(name)}, {quantity}",
                "showlegend": False,
                "marker": {
                    "color": look.tint(0.5),
                    "line": {"color": look.color, "width": 1},
                    "pattern": {
                        "shape": pattern,
                        "fgcolor": look.color,
                        "bgcolor": look.tint(0.15),
                        "size": 6,
                    },
                },
                "customdata": [
                    [int(slot), value]
                    for slot, value in zip(rows["slot"], numbers(rows["value"]), strict=True)
                ],
                "hovertemplate": f"{label(name)}<br>slot %{{customdata[0]}}, {policy} {quantity}: "
                "%{customdata[1]:.1%}<extra></extra>",
            }
        )
    rows = parts["net"]
    traces.append(
        {
            "type": "scatter",
            "x": [int(slot) + NET for slot in rows["slot"]],
            "y": numbers(rows["value"]),
            "error_y": error_bars(rows, INK),
            "mode": "markers",
            "name": f"{label(name)}, net",
            "showlegend": False,
            "marker": {
                "color": INK,
                "symbol": "diamond",
                "size": 8,
                "line": {"color": PAPER, "width": 1},
            },
            "hovertemplate": f"{label(name)}<br>net: %{{y:.1%}}<extra></extra>",
        }
    )
    return traces


def _rest(parts: "Mapping[str, DataFrame]", name: str, position: int) -> list[dict]:
    look = style(position)
    traces = []
    for quantity, fill, dash, aside in (
        ("within", "", "solid", -ASIDE),
        ("beyond", "-open", "dot", ASIDE),
    ):
        rows = parts[quantity]
        traces.append(
            {
                "type": "scatter",
                "x": [int(slot) + aside for slot in rows["slot"]],
                "y": numbers(rows["value"]),
                "error_y": error_bars(rows, look.color),
                "customdata": [int(slot) for slot in rows["slot"]],
                "mode": "lines+markers",
                "name": f"{label(name)}, {quantity}",
                "showlegend": False,
                "line": {"color": look.color, "dash": dash, "width": 2},
                "marker": {"color": look.color, "symbol": look.symbol + fill, "size": 8},
                "hovertemplate": f"{label(name)}<br>slot %{{customdata}}, {quantity}: %{{y:.1%}}"
                "<extra></extra>",
            }
        )
    return traces


def _keys(fig: "Figure", policy: str) -> None:
    for text, pattern in ((f"{policy} helps", ""), (f"{policy} hurts", "/")):
        marker = {
            "color": GRID if pattern else MUTED,
            "line": {"color": MUTED, "width": 1},
            "pattern": {"shape": pattern, "fgcolor": MUTED, "bgcolor": GRID, "size": 6},
        }
        bar = key(text, marker=marker) | {"type": "bar"}
        del bar["mode"]
        fig.add_trace(bar)
    fig.add_trace(key("net", mode="markers", marker={"color": INK, "symbol": "diamond", "size": 9}))
    for text, fill, dash in (
        ("left among the candidates", "", "solid"),
        ("left beyond them", "-open", "dot"),
    ):
        marker = {"color": MUTED, "symbol": f"circle{fill}", "size": 8}
        line = {"color": MUTED, "dash": dash, "width": 2}
        fig.add_trace(key(text, mode="lines+markers", marker=marker, line=line))


def _caption(tables: "Mapping[str, DataFrame]", policy: str) -> str:
    parts = []
    for name, table in tables.items():
        ends = []
        for slot in (int(table["slot"].min()), int(table["slot"].max())):
            at = table[table["slot"] == slot].set_index("quantity")
            helped, hurt, within = (
                interval(*at.loc[q, ["value", "low", "high"]], 1, "%")
                for q in ("helped", "hurt", "within")
            )
            ends.append(
                f"at slot {slot} the {policy} helps in {helped} of the blocks and hurts in {hurt}, "
                f"{within} are left among the candidates"
            )
        parts.append(f"{name}: {'; '.join(ends)}")
    return ". ".join(parts) + "."
