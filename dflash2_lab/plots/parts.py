"""What the figures share: their input, escaped labels, and a header and footer placed in pixels.

Title, legends and footnote sit at fixed pixel distances from the edges, and the plotting area gets
what is left, so that a longer legend makes the figure taller instead of covering something.
"""

import html
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dflash2_lab.errors import LabError
from dflash2_lab.plots.template import (
    FONT_SIZE,
    MUTED,
    NOTE,
    TEMPLATE,
    WIDTH,
    Style,
    register_templates,
)

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.results import Results
    from dflash2_lab.tables import Run

LEFT, RIGHT = 84, 24  # px margins
EDGE = 14  # px from the left edge to title, legends and footnote
ROW = 25  # px per legend row
CHAR = 7.6  # px per character at FONT_SIZE, on the wide side
LABEL = 28  # characters of a drafter's name per line
NOTE_LINE = 17  # px per line of the footnote
NOTE_CHARS = 120  # characters per line of the footnote, in the widest font of the template
CLOSE_TO_ZERO = 12  # decimals: what is left of a difference of equal numbers is 0 on any machine
MINUS = "\N{MINUS SIGN}"


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


def as_result(results: "Results | Mapping[str, Results]") -> "Results":
    """One result, or a mapping {name: Results} of exactly one; LabError for more or none."""
    from dflash2_lab.results import Results

    if isinstance(results, Results):
        return results
    if len(results) != 1:
        raise LabError(f"this figure shows one result, found {len(results)}: {', '.join(results)}")
    return next(iter(results.values()))


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
    return [round(float(v), CLOSE_TO_ZERO) if math.isfinite(v) else None for v in values]


def interval(value: float, low: float, high: float, digits: int = 2, unit: str = "") -> str:
    """A number with its interval, as in "3.72 [3.60, 3.84]"; without it when it is not finite."""
    if not math.isfinite(value):
        return "undefined"
    one = f"{{:,.{digits}f}}{unit}" if unit != "%" else f"{{:.{digits}%}}"
    text = one.format(value)
    if math.isfinite(low + high):
        text += f" [{one.format(low)}, {one.format(high)}]"
    return text.replace("-", MINUS)


def error_bars(rows: "DataFrame", color: str, names: Sequence[str] = ("value", "low", "high")):
    """Plotly's error bars from the columns of a value, its lower and its upper bound."""
    value, low, high = (rows[name] for name in names)
    return {
        "type": "data",
        "symmetric": False,
        "array": numbers(high - value),
        "arrayminus": numbers(value - low),
        "color": color,
        "thickness": 1.5,
        "width": 4,
    }


def source(runs: "Mapping[str, Run]") -> str:
    """Where the numbers come from, for the footnote: n, target, device and commit of the runs.

    Said once when all runs agree, else for each run under its name.
    """
    said = {name: _source(run) for name, run in runs.items()}
    if len(set(said.values())) == 1:
        return f"{next(iter(said.values()))}."
    return "; ".join(f"{name}: {text}" for name, text in said.items()) + "."


def _source(run: "Run") -> str:
    anchors = run.anchors
    target, made = run.info.get("target", {}), run.info.get("environment", {})
    words = [
        f"{anchors['prompt_id'].nunique():,} prompts",
        f"{len(anchors):,} blocks",
        f"T = {run.temperature:g}",
        *(str(value) for value in (target.get("name"), target.get("dtype")) if value),
    ]
    return ", ".join(words) + run_text(made)


def run_text(environment: "Mapping[str, object]") -> str:
    """The run as in "; run on cpu at ba45fe829f18", from its environment; empty for none."""
    words = []
    if environment.get("device"):
        words.append(f"on {environment['device']}")
    if environment.get("git"):
        commit, dirty = str(environment["git"])[:12], str(environment["git"]).endswith("-dirty")
        words.append(f"at commit {commit}{' and changes' if dirty else ''}")
    return f"; run {' '.join(words)}" if words else ""


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


def title_extra(names: Iterable[str]) -> int:
    """Pixels that panel titles of these (plain) names take beyond one line of text."""
    return round(FONT_SIZE * 1.3) * max(label(name).count("<br>") for name in names)


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
    caption: str,
    head: int = 0,
    foot: int = 50,
    left: int = LEFT,
    right: int = RIGHT,
    stacked: bool = False,
) -> None:
    """Set title, legends, footnote, margins and height of a figure whose traces are in place.

    `plot_height` is the height in pixels of the area of all panels; `head` and `foot` are the
    pixels that panel titles above it and axis titles below it need. The first legend lists the
    drafters (one a row when `stacked`), the second explains dashes and markers. `name` goes to
    `layout.meta`, so that a file says which figure it is, and so does `caption`, one or two
    sentences on what the figure shows, for readers who do not see it.
    """
    width = WIDTH - left - right  # plotly breaks legends at the width of the panels
    entries = [t for t in fig.data if t.showlegend is not False and t.name]
    drafters = [t.name for t in entries if t.legend != "legend2"]
    if stacked:
        rows = sum(len(name.split("<br>")) for name in drafters)
    else:
        rows = legend_rows(drafters, width)
    keys = legend_rows([t.name for t in entries if t.legend == "legend2"], width)
    lines = _wrapped(note)
    first = 44  # px from the top edge to the first legend
    second = first + ROW * rows
    top = second + ROW * keys + 10 + head
    bottom = foot + NOTE_LINE * len(lines) + 14
    height = top + plot_height + bottom
    edge = {"xref": "container", "x": EDGE / WIDTH, "xanchor": "left", "yanchor": "top"}
    edge |= {"yref": "container"}
    rowwise = {**edge, "orientation": "h", "traceorder": "normal", "tracegroupgap": 0}
    register_templates()
    fig.layout.template = TEMPLATE  # replaces plotly's default, which an update would merge into
    fig.update_layout(
        width=WIDTH,
        height=height,
        meta={"figure": name, "caption": caption},
        margin={"l": left, "r": right, "t": top, "b": bottom, "autoexpand": False},
        title={
            "text": f"<b>{html.escape(title, quote=False)}</b>",
            "font": {"size": 18},
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
            font={"size": NOTE, "color": MUTED},
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


def _wrapped(note: str) -> list[str]:
    """The lines of a footnote; a number and its unit, "95 %" or "T = 1", stay on one."""
    tied = re.sub(r"(?<=\d) (?=%)| (?==)|(?<==) ", "\N{NO-BREAK SPACE}", note)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in textwrap.wrap(tied, NOTE_CHARS)]


def panel_title(fig: "Figure", text: str, axis: int, *, bold: bool = False) -> None:
    """A small title, left-aligned above the panel whose axes are number `axis` (1, 2, ...)."""
    suffix = "" if axis == 1 else str(axis)
    fig.add_annotation(
        text=f"<b>{text}</b>" if bold else text,
        font={"size": FONT_SIZE},
        align="left",
        showarrow=False,
        xref=f"x{suffix} domain",
        x=0,
        xanchor="left",
        yref=f"y{suffix} domain",
        y=1,
        yanchor="bottom",
        yshift=3,
    )
