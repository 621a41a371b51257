"""The anytime monitor's evidence against the tokens seen, up to its stopping level.

From the tables of `stats_results.monitor_quantiles`: quantiles over runs of one decoder.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash2_lab.plots.parts import MINUS, as_result, band, frame, label, numbers, run_text
from dflash2_lab.plots.template import DASHES, INK, SMALL, style

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.results import Results

LINES = (*DASHES, "longdash", "longdashdot")
ROOM = 0.6  # how far above the stopping level the axis goes, in stopping levels


def monitor_path(paths: "Results | Mapping[str, Results]", title: str | None = None) -> "Figure":
    """log10 E of the monitor against tokens, for each decoder of a table of `monitor_paths`."""
    from dflash2_lab import stats_results

    result = as_result(paths)
    curves, stops = stats_results.monitor_quantiles(result.values)
    made = run_text(result.info.get("environment", {})).removeprefix("; ").capitalize()
    return draw_monitor(curves, stops, title, f"{made}." if made else "")


def draw_monitor(
    curves: "DataFrame", stops: "DataFrame", title: str | None = None, origin: str = ""
) -> "Figure":
    """The figure from the tables of `stats_results.monitor_quantiles`; pure.

    `origin` ends the footnote.
    """
    from plotly.graph_objects import Figure

    fig = Figure()
    level = float(stops["level"].iloc[0])
    names = list(stops["decoder"])
    for position, name in enumerate(names):
        rows = curves[curves["decoder"] == name]
        stop = stops[stops["decoder"] == name].iloc[0]
        for trace in _traces(rows, stop, position):
            fig.add_trace(trace)
    last = int(curves["tokens"].max())
    first = int(curves["tokens"].min())
    fig.add_shape(
        type="line",
        xref="paper",
        x0=0,
        x1=1,
        y0=level,
        y1=level,
        line={"color": INK, "width": 1.5, "dash": "dash"},
    )
    fig.add_annotation(
        text=f"stop: E = {10**level:,.0f}",
        xref="paper",
        x=0.01,
        y=level,
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
        font={"size": SMALL},
    )
    ticks = [2**n for n in range(math.ceil(math.log2(first)), int(math.log2(last)) + 1)]
    fig.update_xaxes(
        type="log",
        title_text="emitted tokens seen (log scale)",
        tickvals=ticks,
        ticktext=[f"{tick:,}" for tick in ticks],
        range=[math.log10(first * 0.95), math.log10(last * 1.05)],
    )
    low = min(float(curves["low"].min()), -1.0)
    fig.update_yaxes(
        title_text="log10 E of the monitor",
        range=[low * 1.05, level * (1 + ROOM)],
        zeroline=True,
        zerolinecolor=INK,
        zerolinewidth=1,
    )
    runs = sorted({int(n) for n in stops["num_runs"]})
    frame(
        fig,
        title=title or "Evidence of the anytime monitor, by tokens seen",
        name="monitor_path",
        plot_height=380,
        head=8,
        stacked=True,
        note=f"Lines: median of {' or '.join(map(str, runs))} runs of each decoder on the toy; "
        "bands: 10 % to 90 % of the runs. E is an e-process: for a right decoder it ever reaches "
        f"the level with probability at most 1 / {10**level:,.0f}, however often one looks. "
        f"Legend: runs stopped within {last:,} tokens, and the median number of tokens at which "
        f"they were (checked after every token). {origin}",
        caption=_caption(stops, last),
    )
    return fig


def _traces(rows: "DataFrame", stop, position: int) -> list[dict]:
    look = style(position)
    name = str(stop["decoder"])
    tokens = [int(n) for n in rows["tokens"]]
    when = f", median {stop['stopped_at']:,.0f} tokens" if stop["num_stopped"] else ""
    line = {
        "type": "scatter",
        "x": tokens,
        "y": numbers(rows["value"]),
        "mode": "lines",
        "name": f"{label(name)}: {stop['num_stopped']} of {stop['num_runs']} stopped{when}",
        "legendgroup": name,
        "line": {"color": look.color, "width": 2.5, "dash": LINES[position % len(LINES)]},
        "hovertemplate": f"{label(name)}<br>%{{x:,}} tokens: log10 E = %{{y:.2f}}<extra></extra>",
    }
    return [band(tokens, list(rows["low"]), list(rows["high"]), look, name), line]


def _caption(stops: "DataFrame", last: int) -> str:
    parts = [
        f"{r.decoder}: {r.num_stopped} of {r.num_runs} runs stopped"
        + (f", median {r.stopped_at:,.0f} tokens" if r.num_stopped else "")
        + f" (highest log10 E {r.highest:.1f})".replace("-", MINUS)
        for r in stops.itertuples()
    ]
    return f"Evidence against each decoder within {last:,} tokens. {'; '.join(parts)}."
