"""Figures as files: a canonical JSON as the figure of record, and HTML, PNG and SVG made from it.

The JSON holds plain number lists (never plotly's base64 arrays), numbers rounded to six
significant digits, sorted keys: the same tables give the same bytes, in any process. The HTML
inlines plotly.js, so it opens offline, and is a function of the JSON alone.
"""

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash2_lab.browser import IMAGE_FORMATS, ImageExportError, render_images, script_json
from dflash2_lab.errors import LabError
from dflash2_lab.plots.template import WIDTH, recolour
from dflash2_lab.tables import write_atomic

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DIGITS = 6  # significant digits of every number in a figure of record
HEIGHT = 450  # px; plotly's own, of a figure that names none
FORMATS = ("json", "html", *IMAGE_FORMATS)
CONFIG = {  # no button that sends a chart to a server
    "displaylogo": False,
    "responsive": False,
    "modeBarButtonsToRemove": ["sendChartToCloud"],
}
SCALES = (0.83, 0.68, 0.55, 0.44, 0.35)  # shares of its width at which a figure is drawn
SHEET = """:root {{ --scale: 1; }}
.sheet {{ width: calc({width}px * var(--scale)); height: calc(var(--height) * var(--scale));
  overflow: hidden; }}
.sheet > div {{ transform: scale(var(--scale)); transform-origin: 0 0; }}
{scales}"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ margin: 0; background: {paper}; }}
{css}
</style>
{script}
</head>
<body>
{figure}
</body>
</html>
"""


@dataclass(frozen=True)
class SavedFigures:
    """Files written, in order, and one line on the images left out ("" when none were)."""

    paths: tuple[Path, ...]
    skipped: str


def figure_json(fig: "Figure") -> str:
    """The figure of record: canonical JSON text with a final newline.

    NaN and infinities become null. Reading it back and writing it again gives the same text.
    """
    plain = _plain(fig.to_plotly_json())
    figure = {"data": plain["data"], "layout": plain["layout"]}
    return json.dumps(figure, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def themed(figure: "str | Figure", dark: bool = True) -> "Figure":
    """The figure in the dark look (or, with `dark=False`, as it is); any figure of `plots`, or its
    `figure_json`."""
    from plotly.graph_objects import Figure

    plain = _parsed(figure)
    return Figure(recolour(plain) if dark else plain)


def figure_div(figure: "str | Figure", div_id: str = "figure") -> str:
    """The figure as a <div> with the given id and the script that fills it.

    Its caption is what a screen reader says. The page must hold `plotly_script()` before it.
    `figure` is a Figure or its `figure_json`.
    """
    plain = _parsed(figure)
    size = {side: plain["layout"].get(side) for side in ("width", "height")}
    css = ";".join(f"{side}:{pixels}px" for side, pixels in size.items() if pixels)
    caption = plain["layout"].get("meta", {}).get("caption", "")
    alt = f' role="img" aria-label="{html.escape(caption)}"' if caption else ""
    return (
        f'<div id="{html.escape(div_id)}" style="{css}"{alt}></div>\n'
        f"<script>Plotly.newPlot({script_json(div_id)}, {script_json(plain['data'])}, "
        f"{script_json(plain['layout'])}, {script_json(CONFIG)});</script>"
    )


def figure_sheet(figure: "str | Figure", div_id: str = "figure") -> str:
    """`figure_div` in a sheet that shrinks with a narrow window; its page needs `sheet_css`."""
    height = _parsed(figure)["layout"].get("height", HEIGHT)
    return f'<div class="sheet" style="--height: {height}px">\n{figure_div(figure, div_id)}\n</div>'


def sheet_css(room: int = 0) -> str:
    """The rules by which a sheet is as wide as the window has place, `room` px beside it."""
    wider = (1.0, *SCALES[:-1])  # the scale that no longer fits
    ends = [round(WIDTH * scale) + room - 1 for scale in wider]
    scales = "\n".join(
        f"@media (max-width: {end}px) {{ :root {{ --scale: {scale}; }} }}"
        for end, scale in zip(ends, SCALES, strict=True)
    )
    return SHEET.format(width=WIDTH, scales=scales)


def plotly_script() -> str:
    """plotly.js itself as an inline <script> element (about 4.8 MB)."""
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


def figure_html(figure: "str | Figure", div_id: str = "figure") -> str:
    """A self-contained page: plotly.js inlined, no request to anywhere, always the same bytes."""
    plain = _parsed(figure)
    layout = plain["layout"]
    title = layout.get("title", {}).get("text", "figure")
    title = title.replace("<b>", "").replace("</b>", "").replace("<br>", " ")
    return PAGE.format(
        title=html.escape(html.unescape(title)),
        paper=layout.get("template", {}).get("layout", {}).get("paper_bgcolor", "white"),
        script=plotly_script(),
        css=sheet_css(),
        figure=figure_sheet(figure, div_id),
    )


def show(*figures: "Figure", timeout_s: float = 60.0) -> None:
    """Show figures in a notebook, each with its caption; a cell's last line, it returns nothing.

    An output holds the figure as Plotly's JSON, which JupyterLab draws with the renderer that the
    plotly package brings (no network), and as an SVG for all that know pictures only: a code host,
    HTML by nbconvert. It is no PNG, because that renderer shows a PNG that it finds instead of
    drawing the figure. plotly.js itself (4.8 MB) is in neither: a notebook is committed. One Chrome
    makes all pictures within `timeout_s` seconds; without it a line says what to install.
    """
    from IPython.display import HTML, display

    plain = [_parsed(figure) for figure in figures]
    try:
        jobs = [(figure, "svg") for figure in plain]
        pictures, lost = render_images(jobs, timeout_s=timeout_s), ""
    except ImageExportError as error:
        pictures, lost = [None] * len(plain), f"No picture: {error}"
    for figure, picture in zip(plain, pictures, strict=True):
        caption = figure["layout"].get("meta", {}).get("caption", "")
        bundle = {"application/vnd.plotly.v1+json": figure | {"config": CONFIG}}
        bundle["text/plain"] = caption or "figure"
        if picture is None:
            bundle["text/html"] = f"<p>{html.escape(lost)}</p>"
        else:
            bundle["image/svg+xml"] = picture.decode("utf-8")
        display(bundle, raw=True)
        if caption:
            display(HTML(f"<p><em>{html.escape(caption)}</em></p>"))


def save_figure(
    fig: "Figure",
    path_stem: Path | str,
    formats: Sequence[str] = FORMATS,
    *,
    timeout_s: float = 60.0,
    browser: Path | None = None,
) -> list[Path]:
    """Write `<path_stem>.<format>` for each format, JSON and HTML first; each file is atomic.

    Raises ImageExportError (its one line says what to install or what failed) when an image was
    asked for and could not be made; JSON and HTML are written by then. LabError for other formats.
    """
    stem = Path(path_stem)
    texts = _texts({stem.name: fig}, formats)
    paths = _write_texts(stem.parent, texts, formats)
    return paths + _write_images(stem.parent, texts, formats, timeout_s, browser)


def save_figures(
    figures: "Mapping[str, Figure]",
    folder: Path | str,
    formats: Sequence[str] = FORMATS,
    *,
    timeout_s: float = 60.0,
    browser: Path | None = None,
) -> SavedFigures:
    """Write `<folder>/<name>.<format>` for every figure; all images come from one Chrome process.

    An image export that fails does not raise: `skipped` is the one line to show the user.
    """
    folder = Path(folder)
    texts = _texts(figures, formats)
    paths = _write_texts(folder, texts, formats)
    try:
        paths += _write_images(folder, texts, formats, timeout_s, browser)
    except ImageExportError as error:
        return SavedFigures(tuple(paths), str(error))
    return SavedFigures(tuple(paths), "")


def _texts(figures: "Mapping[str, Figure]", formats: Sequence[str]) -> dict[str, str]:
    unknown = [suffix for suffix in formats if suffix not in FORMATS]
    if unknown:
        raise LabError(f"figure format: found {unknown[0]!r}, expected one of {FORMATS}")
    return {name: figure_json(fig) for name, fig in figures.items()}


def _write_texts(folder: Path, texts: Mapping[str, str], formats: Sequence[str]) -> list[Path]:
    paths = []
    for name, text in texts.items():
        if "json" in formats:
            paths.append(_write(folder, name, "json", text.encode("utf-8")))
        if "html" in formats:
            paths.append(_write(folder, name, "html", figure_html(text).encode("utf-8")))
    return paths


def _write_images(
    folder: Path,
    texts: Mapping[str, str],
    formats: Sequence[str],
    timeout_s: float,
    browser: Path | None,
) -> list[Path]:
    names = [(name, suffix) for name in texts for suffix in IMAGE_FORMATS if suffix in formats]
    if not names:
        return []
    jobs = [(json.loads(texts[name]), suffix) for name, suffix in names]
    drawn = render_images(jobs, timeout_s=timeout_s, browser=browser)
    return [
        _write(folder, name, suffix, content)
        for (name, suffix), content in zip(names, drawn, strict=True)
    ]


def _write(folder: Path, name: str, suffix: str, content: bytes) -> Path:
    path = folder / f"{name}.{suffix}"
    write_atomic(path, lambda handle: handle.write(content))
    return path


def _parsed(figure: "str | Figure") -> dict[str, Any]:
    return json.loads(figure if isinstance(figure, str) else figure_json(figure))


def _plain(value: Any) -> Any:
    """The value with arrays as lists and floats rounded; plotly's base64 arrays are decoded."""
    if isinstance(value, Mapping):
        if set(value) in ({"dtype", "bdata"}, {"dtype", "bdata", "shape"}):
            return _plain(_decoded(value))
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        # adding 0.0 turns -0.0, which would print differently, into 0.0
        return float(f"{value:.{DIGITS}g}") + 0.0 if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def _decoded(value: Mapping[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(value["bdata"]), dtype=np.dtype(value["dtype"]))
    if "shape" not in value:
        return flat
    return flat.reshape([int(size) for size in str(value["shape"]).split(",")])
