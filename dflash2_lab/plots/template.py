"""The look of every figure, as data: colours, markers, dashes, fonts, axes, and the dark colours.

The colours are safe for the common colour-vision deficiencies, and neighbours differ in lightness.
No meaning rests on colour alone: a drafter also has its marker, a kind of quantity its dash. Text
is large for the width, so that a figure shown at half of it can still be read.

Every figure is drawn in the light look; `recolour` swaps each colour for the dark look's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 900  # px; every figure is laid out for this width
PALETTE = ("#004488", "#D55E00", "#009E73", "#9430E0", "#5A2408", "#E27FE8", "#9A9FB5")
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
SCALE = ("#F7FBFF", "#C9DDF0", "#85B8DC", "#3A84C0", "#08468B", "#08264F")  # shares, low to high

PAPER = "#FFFFFF"
STRONG = "#000000"
INK = "#222222"
MUTED = "#555555"
GRID = "#E4E4E4"
HEADROOM = "#ECECEC"
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
FONT_SIZE = 15
SMALL = 14  # ticks and numbers
NOTE = 13  # the footnote

DARK: Mapping[str, str] = {
    "#004488": "#5C9DFF",
    "#D55E00": "#FFB766",
    "#009E73": "#66E0BC",
    "#9430E0": "#D85040",
    "#5A2408": "#D9D2FF",
    "#E27FE8": "#9469B0",
    "#9A9FB5": "#B5FF4A",
    "#F7FBFF": "#16202B",
    "#C9DDF0": "#1D3F63",
    "#85B8DC": "#2B69A3",
    "#3A84C0": "#559BD6",
    "#08468B": "#9CCBF2",
    "#08264F": "#EAF5FF",
    PAPER: "#14171A",
    STRONG: "#FFFFFF",
    INK: "#ECECEC",
    MUTED: "#BDBDBD",
    GRID: "#353A40",
    HEADROOM: "#292E34",
}

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
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "colorway": list(PALETTE),
        "xaxis": AXIS,
        "yaxis": AXIS,
        "hoverlabel": {"font": {"family": FONT, "size": SMALL}},
        "legend": {"font": {"size": FONT_SIZE}, "bgcolor": "rgba(0,0,0,0)"},
    }
}
NAMES = ("dflash2_lab", "dflash2_lab_dark")


@dataclass(frozen=True)
class Style:
    """How one drafter is drawn: `color` is a hex colour, `symbol` a plotly marker symbol."""

    color: str
    symbol: str

    def tint(self, alpha: float) -> str:
        """The colour with an opacity in 0..1, as plotly's rgba string."""
        return _rgba(self.color, f"{alpha}")


def style(index: int) -> Style:
    """Style of the drafter at a position of the mapping; 56 pairs differ before one repeats."""
    return Style(PALETTE[index % len(PALETTE)], SYMBOLS[index % len(SYMBOLS)])


def colour_scale() -> list[list]:
    """`SCALE` as plotly's colorscale, 0 to 1."""
    return [[index / (len(SCALE) - 1), color] for index, color in enumerate(SCALE)]


def register_templates() -> None:
    """Make the light and the dark look known to plotly, under `NAMES`; drawing a figure does it.

    With `plotly.io.templates.default = "dflash2_lab_dark"` a figure of one's own has the look too.
    """
    import plotly.io as pio
    from plotly.graph_objects import layout

    for name, look in zip(NAMES, (TEMPLATE, recolour(TEMPLATE)), strict=True):
        if name not in pio.templates:
            pio.templates[name] = layout.Template(look)


def recolour(value: Any, key: str = "") -> Any:
    """Plain plotly data with each colour of the light look replaced by that of the dark one.

    Only values under colour keys change, so that no name or text is taken for a colour; other
    colours, and opacities, stay.
    """
    if isinstance(value, Mapping):
        return {name: recolour(item, name) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [recolour(item, key) for item in value]
    if not isinstance(value, str) or not (
        key.endswith("color") or key in ("colorway", "colorscale")
    ):
        return value
    found = re.fullmatch(r"rgba\((\d+),(\d+),(\d+),([\d.]+)\)", value)
    if found is None:
        return DARK.get(value, value)
    light = "#{:02X}{:02X}{:02X}".format(*map(int, found.groups()[:3]))
    return value if light not in DARK or found[4] == "0" else _rgba(DARK[light], found[4])


def _rgba(color: str, alpha: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
