"""Tokens per second by concurrency: autoregressive decoding and the drafters, T = 0 and T > 0."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash2_lab.plots.parts import (
    as_result,
    error_bars,
    frame,
    interval,
    label,
    numbers,
    panel_title,
    run_text,
)
from dflash2_lab.plots.template import DASHES, style

if TYPE_CHECKING:
    from pandas import DataFrame, Series
    from plotly.graph_objects import Figure

    from dflash2_lab.results import Results


def throughput_by_concurrency(
    bench: "Results | Mapping[str, Results]", title: str | None = None
) -> "Figure":
    """Decode tokens/s of a `bench throughput` result (or a mapping of one), a panel per
    temperature."""
    from dflash2_lab import stats_results

    result = as_result(bench)
    values = result.values
    table = stats_results.throughput(values)
    origin = (
        f"{values['num_prompts']} prompts ({', '.join(values['datasets'])}), "
        f"{values['max_new_tokens']} tokens each, {values['dtype']}, medians of "
        f"{values['repeats']} rounds{run_text(result.info.get('environment', {}))}."
    )
    return draw_throughput(table, title, origin)


def draw_throughput(table: "DataFrame", title: str | None = None, origin: str = "") -> "Figure":
    """The figure from the table of `stats_results.throughput`; pure. `origin` ends the footnote."""
    from plotly.subplots import make_subplots

    temperatures = sorted(table["temperature"].unique())
    levels = [int(c) for c in sorted(table["concurrency"].unique())]
    fig = make_subplots(rows=1, cols=len(temperatures), shared_yaxes=True, horizontal_spacing=0.04)
    for col, temperature in enumerate(temperatures, start=1):
        panel = table[table["temperature"] == temperature]
        for position, (name, rows) in enumerate(panel.groupby("side", sort=False)):
            trace = _line(rows.sort_values("concurrency"), str(name), position, legend=col == 1)
            fig.add_trace(trace, row=1, col=col)
        text = "greedy (T = 0)" if temperature == 0 else f"T = {temperature:g}"
        panel_title(fig, text, col, bold=True)
    fig.update_xaxes(
        type="log",
        title_text="concurrency (sequences)",
        tickvals=levels,
        ticktext=[str(level) for level in levels],
    )
    fig.update_yaxes(type="log", tickformat="~s", tickvals=_ticks(table["low"], table["high"]))
    fig.update_yaxes(title_text="decode, tokens/s (log scale)", col=1)
    forced = sorted(
        {(t, n) for t, n in zip(table["temperature"], table["forced"], strict=True) if n}
    )
    told = " and ".join(f"{n} draft{'s' if n > 1 else ''} a cycle at T = {t:g}" for t, n in forced)
    frame(
        fig,
        title=title or "Throughput by concurrency",
        name="throughput_by_concurrency",
        plot_height=340,
        head=24,
        note="Tokens per second of decoding, prefill not included. "
        + (
            f"Dashed, open marks: random weights, whose acceptance is forced to {told}; its height "
            "is a choice, not a result. "
            if forced
            else ""
        )
        + "Intervals, distribution-free for the median and at least 95 % from six rounds on, are "
        f"drawn and mostly narrower than the marks. {origin}",
        caption=_caption(table),
    )
    return fig


def _line(rows: "DataFrame", name: str, position: int, *, legend: bool) -> dict:
    look = style(position)
    forced = bool(rows["forced"].any())
    return {
        "type": "scatter",
        "x": [int(c) for c in rows["concurrency"]],
        "y": numbers(rows["value"]),
        "error_y": error_bars(rows, look.color),
        "customdata": [
            f"{interval(r.value, r.low, r.high, 0)} tokens/s, {r.speedup:.2f} x autoregressive, "
            f"{r.acceptance_length:.2f} tokens per step"
            for r in rows.itertuples()
        ],
        "mode": "lines+markers",
        "name": label(name),
        "legendgroup": name,
        "showlegend": legend,
        "line": {"color": look.color, "width": 2, "dash": DASHES[1 if forced else 0]},
        "marker": {
            "color": look.color,
            "symbol": look.symbol + ("-open" if forced else ""),
            "size": 9,
        },
        "hovertemplate": f"{label(name)}<br>%{{x}} sequences: %{{customdata}}<extra></extra>",
    }


def _ticks(low: "Series", high: "Series") -> list[int]:
    """1, 2 and 5 times the powers of ten around the values."""
    steps = [step * 10**power for power in range(9) for step in (1, 2, 5)]
    return [step for step in steps if low.min() / 2 < step < high.max() * 2]


def _caption(table: "DataFrame") -> str:
    parts = []
    for temperature, group in table.groupby("temperature", sort=False):
        for concurrency in sorted({group["concurrency"].min(), group["concurrency"].max()}):
            sides = ", ".join(
                f"{r.side}{' (forced acceptance)' if r.forced else ''} {r.value:,.0f}"
                for r in group[group["concurrency"] == concurrency].itertuples()
            )
            parts.append(f"T = {temperature:g}, {concurrency} at a time: {sides}")
    return f"Decode tokens/s, medians. {'; '.join(parts)}."
