"""The look of every figure, as data: colours, markers, dashes, fonts, axes.

The colours are safe for the common colour-vision deficiencies, and neighbours differ in lightness.
No meaning rests on colour alone: a drafter also has its marker, a kind of quantity its dash.
"""

from dataclasses import dataclass

WIDTH = 900  # px; every figure is laid out for this width
PALETTE = ("#004488", "#D55E00", "#009E73", "#AA4499", "#B8860B", "#56B4E9", "#5F5F5F")
SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "star",
    "cross",
    "hexagon",
)
DASHES = ("solid", "dash", "dot", "dashdot")
FILLS = ("", "-open", "-dot", "-open-dot")  # suffixes of a marker symbol, in the order of DASHES

INK = "#222222"
MUTED = "#555555"
GRID = "#E4E4E4"
HEADROOM = "#ECECEC"
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
FONT_SIZE = 13
SMALL = 12

AXIS = {
    "showline": True,
    "linecolor": INK,
    "linewidth": 1,
    "ticks": "outside",
    "ticklen": 4,
    "tickcolor": INK,
    "tickfont": {"size": SMALL},
    "gridcolor": GRID,
    "zeroline": False,
    "title": {"font": {"size": FONT_SIZE}, "standoff": 8},
}

TEMPLATE = {
    "layout": {
        "font": {"family": FONT, "size": FONT_SIZE, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "colorway": list(PALETTE),
        "xaxis": AXIS,
        "yaxis": AXIS,
        "hoverlabel": {"font": {"family": FONT, "size": SMALL}},
        "legend": {"font": {"size": FONT_SIZE}, "bgcolor": "rgba(255,255,255,0)"},
    }
}


@dataclass(frozen=True)
class Style:
    """How one drafter is drawn: `color` is a hex colour, `symbol` a plotly marker symbol."""

    color: str
    symbol: str

    def tint(self, alpha: float) -> str:
        """The colour with an opacity in 0..1, as plotly's rgba string."""
        red, green, blue = (int(self.color[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{alpha})"


def style(index: int) -> Style:
    """Style of the drafter at a position of the mapping; 56 pairs differ before one repeats."""
    return Style(PALETTE[index % len(PALETTE)], SYMBOLS[index % len(SYMBOLS)])
