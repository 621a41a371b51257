"""Parts of a self-contained HTML page: text, tables, figures, provenance. Everything is escaped.

A page needs no network and no second file. Figures are drawn light and, where the reader's system
asks for it, dark; they shrink in steps with the window and always print light.
"""

import html
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_lab.browser import script_json
from dflash2_lab.figures import CONFIG, figure_json, figure_sheet, plotly_script, sheet_css
from dflash2_lab.plots.template import (
    DARK,
    FONT,
    GRID,
    HEADROOM,
    INK,
    MUTED,
    PALETTE,
    PAPER,
    recolour,
)
from dflash2_lab.tables import write_atomic

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ALERT = PALETTE[1]
ROOM = 64  # px of a window beside a figure: padding and a scroll bar
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{css}
</style>
{plotly}
</head>
<body>
<main>
<h1>{title}</h1>
<p class="about">{about}</p>
{body}
</main>
{themes}
</body>
</html>
"""
CSS = """:root { color-scheme: light dark; %(light)s }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 %(font)s; }
main { max-width: 900px; margin: 0 auto; padding: 16px; overflow-wrap: break-word; }
h1 { font-size: 26px; line-height: 1.25; margin: 8px 0; }
h2 { font-size: 19px; margin: 36px 0 8px; border-bottom: 1px solid var(--grid); }
h3 { font-size: 16px; margin: 22px 0 4px; }
.about, figcaption { color: var(--muted); }
.warnings { border-left: 5px solid var(--alert); background: var(--shade); margin: 16px 0;
  padding: 8px 14px; }
.warnings ul { margin: 4px 0; padding-left: 20px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; text-align: right; vertical-align: top; }
th { border-bottom: 1px solid var(--ink); vertical-align: bottom; }
td { border-bottom: 1px solid var(--grid); }
th.key, td.key { text-align: left; }
.facts td { text-align: left; overflow-wrap: anywhere; }
.facts td.key { min-width: 19em; }
.facts td + td { font-family: ui-monospace, monospace; font-size: 13px; }
.interval { white-space: nowrap; }
pre { overflow-x: auto; font: clamp(7px, 1.5vw, 13px)/1.4 ui-monospace, monospace; }
pre.quoted { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
figure { margin: 20px 0 28px; }
%(sheet)s
@media (max-width: 650px) { body { font-size: 13px; } table { font-size: 12px; }
  th, td { padding-right: 6px; } }
@media (prefers-color-scheme: dark) { :root { %(dark)s } }
@media print {
  :root { --scale: 0.72; %(light)s }
  body { font-size: 11px; }
  figure, tr, .warnings { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  pre { white-space: pre-wrap; }
  .modebar { display: none; }
}"""
THEMES = """<script>
const dark = {dark};
const light = Object.fromEntries(Object.keys(dark).map((id) => {{
  const {{data, layout}} = document.getElementById(id);
  return [id, structuredClone({{data, layout}})];
}}));
const scheme = matchMedia("(prefers-color-scheme: dark)");
function draw(looks) {{
  for (const [id, look] of Object.entries(looks)) {{
    const {{data, layout}} = structuredClone(look);
    Plotly.react(id, data, layout, {config});
  }}
}}
if (scheme.matches) draw(dark);
scheme.addEventListener("change", () => draw(scheme.matches ? dark : light));
addEventListener("beforeprint", () => draw(light));
addEventListener("afterprint", () => draw(scheme.matches ? dark : light));
</script>"""


@dataclass(frozen=True)
class Table:
    """Cells as text; the first `keys` columns are words, the others numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: int = 1

    def to_html(self) -> str:
        """The table in a box that scrolls by itself where the window is narrower."""
        head = self._row(self.header, "th")
        body = "\n".join(self._row(row, "td") for row in self.rows)
        return f'<div class="scroll"><table>\n{head}\n{body}\n</table></div>'

    def _row(self, cells: Sequence[str], tag: str) -> str:
        marks = ['class="key"' if at < self.keys else "" for at in range(len(cells))]
        parts = zip(cells, marks, strict=True)
        return "<tr>" + "".join(f"<{tag} {m}>{_cell(c)}</{tag}>" for c, m in parts) + "</tr>"


def _cell(text: str) -> str:
    # a line may break before an interval, never inside one
    return re.sub(r"\[[^\]]*\]$", r'<span class="interval">\g<0></span>', escape(text))


def escape(text: object) -> str:
    """Text that is safe between tags and in attributes."""
    return html.escape(str(text))


def section(title: str, *parts: str) -> str:
    """A heading and what stands below it."""
    return "\n".join([f"<h2>{escape(title)}</h2>", *parts])


def paragraph(text: str) -> str:
    """One paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def warning_box(notes: Sequence[str]) -> str:
    """The warnings of a run; "" for none."""
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in dict.fromkeys(notes))
    return f'<div class="warnings" role="note"><strong>Warnings</strong><ul>{items}</ul></div>'


def preformatted(text: str) -> str:
    """Text with its own alignment, as a command prints it."""
    return f"<pre>{escape(text)}</pre>"


def quoted(text: str) -> str:
    """Text as somebody or something wrote it, its line ends kept and long lines broken."""
    return f'<pre class="quoted">{escape(text)}</pre>'


def figure_block(name: str, figure: "Figure") -> str:
    """A figure with its caption, which is also what a screen reader says."""
    plain = figure.to_plotly_json()["layout"]
    caption = plain.get("meta", {}).get("caption", "")
    return (
        f"<figure>{figure_sheet(figure, name)}\n<figcaption>{escape(caption)}</figcaption></figure>"
    )


def facts(values: Mapping[str, Any]) -> str:
    """Names and values, nested ones under dotted names, as a table of two columns."""
    cells = [(name, value) for name, value in _flat(values) if value is not None]
    rows = "\n".join(
        f'<tr><td class="key">{escape(name)}</td><td>{escape(value)}</td></tr>'
        for name, value in cells
    )
    return f'<table class="facts">\n{rows}\n</table>'


def provenance(info: Mapping[str, Any], of: str = "") -> str:
    """The section on how a run was made: all of its run.json, the command and the code first."""
    made = dict(info.get("environment", {}))
    command = made.pop("command", None)
    first = {
        "command": shlex.join(command) if command else None,
        **{name: made.pop(name, None) for name in ("date", "git", "device")},
    }
    rest = {key: info[key] for key in sorted(info) if key not in ("environment", "complete")}
    return section(f"Provenance{of}", facts(first | rest | {"environment": made}))


def page(
    title: str, about: str, body: Sequence[str], figures: "Mapping[str, Figure] | None" = None
) -> str:
    """The whole page; `figures` are those whose `figure_block` stands in the body, by name."""
    drawn = figures or {}
    dark = {name: recolour(json.loads(figure_json(figure))) for name, figure in drawn.items()}
    return PAGE.format(
        title=escape(title),
        about=escape(about),
        css=_css(),
        plotly=plotly_script() if drawn else "",
        body="\n".join(part for part in body if part),
        themes=THEMES.format(dark=script_json(dark), config=script_json(CONFIG)) if drawn else "",
    )


def write_page(path: Path, text: str) -> None:
    """Write a page atomically. Raises LabError where the file cannot be written."""
    write_atomic(path, lambda handle: handle.write(text.encode("utf-8")))


def _css() -> str:
    words = ("paper", "ink", "muted", "grid", "shade", "alert")
    colors = (PAPER, INK, MUTED, GRID, HEADROOM, ALERT)
    looks = {
        name: "; ".join(f"--{word}: {color}" for word, color in zip(words, look, strict=True))
        for name, look in (("light", colors), ("dark", [DARK[color] for color in colors]))
    }
    return CSS % {"font": FONT, "sheet": sheet_css(ROOM), **looks}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(dict(sorted(value.items())), f"{name}.")
        elif isinstance(value, str) or value is None:
            yield name, value
        else:
            yield name, json.dumps(value, sort_keys=True, ensure_ascii=False)
