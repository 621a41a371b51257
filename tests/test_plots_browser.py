"""The figures as a browser lays them out: no text is cut by an edge or covered by another text."""

import html
import json
import re
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import figure_frames as frames
import pytest
from test_viewer_browser import Page, wait_for

from dflash2_lab import plots
from dflash2_lab.browser import FLAGS, find_browser, script_json
from dflash2_lab.figure_manifest import find_folder, read_manifest
from dflash2_lab.figures import figure_html, figure_json, plotly_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chrome or Chromium on this machine"),
]
# DejaVu Sans, the widest of the template's fonts and the one that is there where others are not
PAGE = """<!DOCTYPE html><html><head><meta charset="utf-8">%s</head><body><script>
(async () => {
  const told = {};
  for (const [name, {data, layout}] of Object.entries(%s)) {
    const div = document.createElement("div");
    document.body.append(div);
    layout.template.layout.font.family = "DejaVu Sans";
    await Plotly.newPlot(div, data, layout);
    const edge = div.querySelector(".main-svg").getBoundingClientRect();
    const lines = (text) => {
      const found = [...text.querySelectorAll(".line")];
      return found.length ? found : [text];
    };
    const boxes = [...div.querySelectorAll(".main-svg text")].flatMap(lines)
      .map((line) => [line.textContent.trim(), line.getBoundingClientRect()])
      .filter(([text, box]) => text && box.width && box.height);
    const cut = boxes.filter(([, box]) => box.left < edge.left + 2 || box.right > edge.right - 2
      || box.top < edge.top || box.bottom > edge.bottom);
    const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
    const covered = boxes.flatMap(([text, a], i) =>
      boxes.slice(0, i).filter(([, b]) => meet(a, b)).map(([other]) => [text, other]));
    told[name] = {texts: boxes.length, cut: cut.map(([text]) => text), covered};
    div.remove();
  }
  const node = document.body.appendChild(document.createElement("pre"));
  node.id = "told";
  node.textContent = JSON.stringify(told);
})();
</script></body></html>"""


def laid_out(figures):
    """By figure: the number of its texts, those that an edge cuts, pairs that cover each other."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = Path(folder) / "page.html"
        page.write_text(PAGE % (plotly_script(), script_json(figures)))
        done = subprocess.run(
            [str(find_browser()), *FLAGS, f"--user-data-dir={folder}/profile", page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return json.loads(html.unescape(re.search(r'<pre id="told">(.*?)</pre>', done.stdout)[1]))


def of_record():
    folder = find_folder()
    names = [entry["figure"] for entry in read_manifest(folder)["figures"]]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def test_no_text_of_a_figure_of_record_is_cut_or_covered():
    told = laid_out(of_record())
    assert len(told) >= 15
    for name, found in told.items():
        assert found["texts"] > 10, name
        assert (found["cut"], found["covered"]) == ([], []), name


def test_long_names_and_many_slots_leave_every_text_room():
    names = ("z-lab/Qwen3-4B-DFlash-b16", "z-lab/Qwen3-4B-DFlash2-b16-trained-for-longer")
    short, long = (
        {name: frames.recorded_run("r", seed, num_draft) for seed, name in enumerate(names)}
        for num_draft in (4, 15)
    )
    drawn = {
        f"{draw.__name__} {num_draft}": draw(runs)
        for num_draft, runs in ((4, short), (15, long))
        for draw in (
            plots.recall_by_slot,
            plots.acceptance_by_policy,
            plots.suffix_decay,
            plots.attention_share,
            plots.attention_map,
            plots.selector_recovery,
            plots.headroom_by_k,
        )
    }
    drawn["many layers"] = plots.draw_attention_map(
        {name: frames.attention_map_table(7) for name in names}
    )
    told = laid_out({name: json.loads(figure_json(figure)) for name, figure in drawn.items()})
    for name, found in told.items():
        assert (found["cut"], found["covered"]) == ([], []), name


def test_the_layout_test_sees_a_cut_and_a_covered_text():
    figure = plots.suffix_decay(frames.recorded_run("r"))
    figure.add_annotation(text="far out", x=1.2, y=1, xref="paper", yref="paper", showarrow=False)
    for text in ("one", "two"):
        figure.add_annotation(text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    found = laid_out({"broken": json.loads(figure_json(figure))})["broken"]
    assert found["cut"] == ["far out"]
    assert ["two", "one"] in found["covered"]


@pytest.mark.parametrize("width", [500, 700, 1000])
def test_an_exported_page_shrinks_its_figure_to_the_window(tmp_path, width):
    (tmp_path / "page.html").write_text(figure_html(plots.suffix_decay(frames.recorded_run("r"))))
    with ExitStack() as stack:
        page = Page(stack, tmp_path / "chrome")
        options = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **options)
        page.call("Page.navigate", url=(tmp_path / "page.html").as_uri())
        read = "document.querySelector('.main-svg')?.getBoundingClientRect().width"
        drawn = wait_for(lambda: page.run(read), "the figure")
        assert 0.75 * min(width, 900) < drawn <= min(width, 900)
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.errors == []
