"""Tokens until the battery finds each fault of the catalogue, and which test finds it.

From the table of `stats_results.detections`, one row a fault.
"""

import html
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash2_lab.plots.parts import as_result, frame, key, run_text
from dflash2_lab.plots.template import GRID, MUTED, SMALL, style

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from dflash2_lab.results import Results

ROW = 24  # px per fault
TIERS = {  # by the start of a test's name; the others test the emitted tokens
    "draft_": "drafts and the law reported",
    "accept_": "the verifier's log",
    "residual_": "the verifier's log",
    "bonus_": "the verifier's log",
    "monitor": "anytime monitor",
    "draw_contract": "contract on values",
}
TOKENS = "emitted tokens"


def tokens_to_detection(
    score: "Results | Mapping[str, Results]", title: str | None = None
) -> "Figure":
    """The mutation score as a dot plot: one row per fault, by stage of the decoder."""
    from dflash2_lab import stats_results

    result = as_result(score)
    table = stats_results.detections(result.values)
    controls = result.values["controls"]
    made = run_text(result.info.get("environment", {}))
    origin = (
        f"{result.values['killed']} of {result.values['total']} faults found, "
        f"{result.values['false_alarms']} of {len(controls)} harmless decoders rejected{made}."
    )
    return draw_detection(table, title, origin)


def draw_detection(table: "DataFrame", title: str | None = None, origin: str = "") -> "Figure":
    """The figure from the table of `stats_results.detections`; pure. `origin` ends the footnote."""
    from plotly.graph_objects import Figure

    order = {stage: index for index, stage in enumerate(dict.fromkeys(table["stage"]))}
    rows = table.assign(place=table["stage"].map(order), late=table["tokens"].fillna(math.inf))
    rows = rows.sort_values(["place", "late", "name"], ignore_index=True)
    fig = Figure()
    fig.update_layout(annotations=_texts(rows), shapes=_bands(rows))
    tiers = rows["found_by"].map(_tier)
    for position, tier in enumerate(dict.fromkeys([TOKENS, *TIERS.values()])):
        found = rows[(tiers == tier) & rows["tokens"].notna()]
        if len(found):
            look = style(position)
            fig.add_trace(
                {
                    "type": "scatter",
                    "x": [float(n) for n in found["tokens"]],
                    "y": [int(row) for row in found.index],
                    "mode": "markers",
                    "name": tier,
                    "marker": {"color": look.color, "symbol": look.symbol, "size": 10},
                    "customdata": [*zip(found["name"], found["found_by"], strict=True)],
                    "hovertemplate": "%{customdata[0]}: %{x:,} tokens, by %{customdata[1]}"
                    "<extra></extra>",
                }
            )
    listed = rows[rows["listed"].notna()]
    tick = {"color": MUTED, "symbol": "line-ns-open", "size": 12, "line": {"width": 2}}
    fig.add_trace(
        {
            "type": "scatter",
            "x": [float(n) for n in listed["listed"]],
            "y": [int(row) for row in listed.index],
            "mode": "markers",
            "marker": tick,
            "showlegend": False,
            "hovertemplate": "asked for within %{x:,} tokens<extra></extra>",
        }
    )
    fig.add_trace(key("size at which the catalogue asks for it", mode="markers", marker=tick))
    largest = max(float(rows["num_tokens"].max()), float(rows["tokens"].max()))
    ticks = [4**n for n in range(1, 12) if 4 <= 4**n <= largest]
    fig.update_xaxes(
        type="log",
        title_text="emitted tokens (log scale)",
        tickvals=ticks,
        ticktext=[f"{tick:,}" for tick in ticks],
        range=[math.log10(5), math.log10(largest * 14)],
    )
    fig.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[html.escape(name, quote=False) for name in rows["name"]],
        range=[len(rows) - 0.5, -0.5],
        tickfont={"size": SMALL},
        showgrid=True,
    )
    frame(
        fig,
        title=title or "Tokens until a fault is found",
        name="tokens_to_detection",
        plot_height=ROW * len(rows),
        head=6,
        left=268,
        right=124,
        note="One seeded run of each broken decoder on the toy, judged at powers of two: the "
        "smallest size from which it was found at every larger size tried, and the test with the "
        "smallest p-value there (Holm over the tests of a tier, one false alarm in 1,000 runs). "
        f"At the right: that test. A single run has no interval. {origin}",
        caption=_caption(rows),
    )
    return fig


def _tier(test: str) -> str:
    return next((tier for start, tier in TIERS.items() if test.startswith(start)), TOKENS)


def _extents(rows: "DataFrame") -> list[tuple[str, float, float]]:
    """Each stage with the upper and the lower edge of its rows."""
    groups = rows.groupby("stage", sort=False)
    return [(str(s), float(p.index.min()) - 0.5, float(p.index.max()) + 0.5) for s, p in groups]


def _bands(rows: "DataFrame") -> list[dict]:
    """Every other stage shaded."""
    look = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "layer": "below"}
    look |= {"fillcolor": GRID, "opacity": 0.45, "line": {"width": 0}}
    return [look | {"y0": top, "y1": bottom} for _, top, bottom in _extents(rows)[::2]]


def _texts(rows: "DataFrame") -> list[dict]:
    """Each stage's name in its first row; the test that found a fault at the right of its row."""
    place = {"xref": "paper", "x": 1, "yanchor": "middle", "showarrow": False}
    right = place | {"xanchor": "right", "xshift": -4, "font": {"size": SMALL, "color": MUTED}}
    stages = [
        right | {"text": f"<i>{html.escape(stage, quote=False)}</i>", "y": top + 0.5}
        for stage, top, _ in _extents(rows)
    ]
    beside = place | {"xanchor": "left", "xshift": 8, "font": {"size": SMALL}}
    tests = [
        beside | {"text": html.escape(test, quote=False) or "not found", "y": int(row)}
        for row, test in rows["found_by"].items()
    ]
    return stages + tests


def _caption(rows: "DataFrame") -> str:
    found = rows[rows["tokens"].notna()]
    worst = found.loc[found["tokens"].idxmax()]
    counts = found["found_by"].value_counts()
    tests = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return (
        f"{len(found)} of {len(rows)} faults are found; half of them within "
        f"{found['tokens'].median():,.0f} tokens, the last ({worst['name']}) at "
        f"{worst['tokens']:,.0f}. Found by: {tests}."
    )
