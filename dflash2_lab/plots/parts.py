"""What the figures share: their input, escaped labels, and a header and footer placed in pixels.

Title, legends and footnote sit at fixed pixel distances from the edges, and the plotting area gets
what is left, so that a longer legend makes the figure taller instead of covering something.
"""

import html
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dflash2_lab.errors import LabError
from dflash2_lab.plots.template import FONT_SIZE, MUTED, SMALL, TEMPLATE, WIDTH, Style

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from dflash2_lab.tables import Run

LEFT, RIGHT = 76, 24  # px margins
EDGE = 14  # px from the left edge to title, legends and footnote
ROW = 22  # px per legend row
CHAR = 7.2  # px per character at FONT_SIZE, on the wide side
LABEL = 28  # characters of a drafter's name per line


def as_runs(runs: "Run | Mapping[str, Run]") -> "dict[str, Run]":
    """One run, or an ordered mapping {name: Run}, as a mapping; one run is named by its drafter.

    Runs that should not be compared (other prompts, another target precision) are logged as
    warnings by `tables.assert_comparable`. LabError when the mapping is empty.
    """
    from dflash2_lab.tables import Run, assert_comparable

    if isinstance(runs, Run):
        return {str(runs.info["drafter"]["name"]): runs}
    named = dict(runs)
    if not named:
        raise LabError("a figure needs at least one run, found an empty mapping")
    if len(named) > 1:
        assert_comparable(named)
    return named


def visiting_policy(run: "Run", policy: str | None) -> str:
    """The policy whose decode says which anchors are visited.

    `policy` when given, else the drafter's own; else the first recorded one, when a recording left
    the own one out.
    """
    from dflash2_lab import stats

    own = policy or stats.default_policy(run)
    return own if policy or own in run.policies else run.policies[0]


def label(name: str) -> str:
    """A name made safe for plotly's pseudo-HTML and broken into lines of 28 characters."""
    lines = textwrap.wrap(name, LABEL) or [""]
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def numbers(values: Iterable[float]) -> list[float | None]:
    """Plain floats; NaN and infinities become None, which plotly draws as a gap."""
    return [float(v) if math.isfinite(v) else None for v in values]


def slot_ticks(slots: Sequence[int], room: int) -> list[int]:
    """At most `room` of the slots as ticks, evenly spaced, starting at the first one."""
    step = math.ceil(len(slots) / room) if slots else 1
    return list(slots)[::step]


def band(
    x: Sequence[float], low: Sequence[float], high: Sequence[float], style: Style, group: str
) -> dict:
    """The interval as one closed polygon; points without a finite interval are left out."""
    points = [
        (a, b, c)
        for a, b, c in zip(x, low, high, strict=True)
        if math.isfinite(b) and math.isfinite(c)
    ]
    return {
        "type": "scatter",
        "x": [p[0] for p in points] + [p[0] for p in reversed(points)],
        "y": [float(p[1]) for p in points] + [float(p[2]) for p in reversed(points)],
        "fill": "toself",
        "fillcolor": style.tint(0.16),
        "line": {"width": 0},
        "mode": "lines",
        "hoverinfo": "skip",
        "legendgroup": group,
        "showlegend": False,
    }


def key(text: str, **look: object) -> dict:
    """An empty trace that only explains a dash, a marker or a pattern, in the second legend."""
    return {
        "type": "scatter",
        "x": [None],
        "y": [None],
        "mode": "lines",
        "name": text,
        "legend": "legend2",
        "hoverinfo": "skip",
        **look,
    }


def legend_rows(names: Sequence[str], width: float) -> int:
    """Text rows that a horizontal legend of these (escaped) names needs in `width` pixels.

    Plotly lays a legend that does not fit on one row out in columns of the widest entry.
    """
    if not names:
        return 0
    lines = [html.unescape(name).split("<br>") for name in names]
    sizes = [48 + CHAR * max(map(len, entry)) for entry in lines]
    tallest = max(map(len, lines))
    if sum(sizes) <= width:
        return tallest
    return math.ceil(len(names) / max(1, int(width // max(sizes)))) * tallest


def frame(
    fig: "Figure",
    *,
    title: str,
    name: str,
    plot_height: int,
    note: str,
    head: int = 0,
    foot: int = 44,
    left: int = LEFT,
    right: int = RIGHT,
    stacked: bool = False,
) -> None:
    """Set title, legends, footnote, margins and height of a figure whose traces are in place.

    `plot_height` is the height in pixels of the area of all panels; `head` and `foot` are the
    pixels that panel titles above it and axis titles below it need. The first legend lists the
    drafters (one a row when `stacked`), the second explains dashes and markers. `name` goes to
    `layout.meta`, so that a file says which figure it is.
    """
    width = WIDTH - EDGE - RIGHT
    entries = [t for t in fig.data if t.showlegend is not False and t.name]
    drafters = [t.name for t in entries if t.legend != "legend2"]
    if stacked:
        rows = sum(len(name.split("<br>")) for name in drafters)
    else:
        rows = legend_rows(drafters, width)
    keys = legend_rows([t.name for t in entries if t.legend == "legend2"], width)
    lines = textwrap.wrap(note, 150)
    first = 40  # px from the top edge to the first legend
    second = first + ROW * rows
    top = second + ROW * keys + 10 + head
    bottom = foot + 16 * len(lines) + 14
    height = top + plot_height + bottom
    edge = {"xref": "container", "x": EDGE / WIDTH, "xanchor": "left", "yanchor": "top"}
    edge |= {"yref": "container"}
    rowwise = {**edge, "orientation": "h", "traceorder": "normal", "tracegroupgap": 0}
    fig.layout.template = TEMPLATE  # replaces plotly's default, which an update would merge into
    fig.update_layout(
        width=WIDTH,
        height=height,
        meta={"figure": name},
        margin={"l": left, "r": right, "t": top, "b": bottom, "autoexpand": False},
        title={
            "text": f"<b>{html.escape(title, quote=False)}</b>",
            "font": {"size": 16},
            **edge,
            "y": 1 - 14 / height,
        },
        # a vertical legend in a container pushes axis titles aside: stack by entries of full width
        legend={
            **rowwise,
            "y": 1 - first / height,
            **({"entrywidth": 0.95, "entrywidthmode": "fraction"} if stacked else {}),
        },
        legend2={
            **rowwise,
            "y": 1 - second / height,
            "itemclick": False,
            "itemdoubleclick": False,
            # the template's legend styles the first legend only; white would hide part of that
            "bgcolor": "rgba(0,0,0,0)",
            "font": {"color": MUTED, "size": FONT_SIZE},
        },
    )
    if lines:
        fig.add_annotation(
            text="<br>".join(html.escape(line, quote=False) for line in lines),
            font={"size": SMALL, "color": MUTED},
            align="left",
            showarrow=False,
            xref="paper",
            x=0,
            xanchor="left",
            xshift=EDGE - left,
            yref="paper",
            y=0,
            yanchor="top",
            yshift=-foot - 4,
        )


def panel_title(fig: "Figure", text: str, axis: int, *, bold: bool = False) -> None:
    """A small title, left-aligned above the panel whose axes are number `axis` (1, 2, ...)."""
    suffix = "" if axis == 1 else str(axis)
    fig.add_annotation(
        text=f"<b>{text}</b>" if bold else text,
        font={"size": FONT_SIZE},
        showarrow=False,
        xref=f"x{suffix} domain",
        x=0,
        xanchor="left",
        yref=f"y{suffix} domain",
        y=1,
        yanchor="bottom",
        yshift=3,
    )
