"""Figures as files: canonical bytes, self-contained HTML, images with and without a Chrome."""

import base64
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import figure_frames as frames
import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest

from dflash2_lab import plots
from dflash2_lab.browser import ImageExportError, NoBrowserError, find_browser, render_images
from dflash2_lab.errors import LabError
from dflash2_lab.figures import (
    figure_div,
    figure_html,
    figure_json,
    plotly_script,
    save_figure,
    save_figures,
)

ROOT = Path(__file__).resolve().parents[1]
PIXEL = base64.b64encode(b"\x89PNG made up").decode()


def draw_all():
    two = ("dflash", "dflash2")
    return {
        "recall": plots.draw_recall({n: frames.recall_table(i) for i, n in enumerate(two)}),
        "acceptance": plots.draw_acceptance({n: frames.acceptance_table() for n in two}),
        "decay": plots.draw_decay({n: frames.decay_tables() for n in two}),
        "attention": plots.draw_attention({n: frames.attention_table() for n in two}),
    }


@pytest.fixture(scope="module")
def fig():
    return plots.draw_recall({"dflash": frames.recall_table()})


def fake_chrome(folder, body):
    """An executable that stands in for Chrome; `body` is Python, `page` the path of the page."""
    path = folder / "chrome"
    head = f"#!{sys.executable}\nimport os, signal, subprocess, sys, time\n"
    path.write_text(f"{head}page = sys.argv[-1].removeprefix('file://')\n{body}\n")
    path.chmod(0o755)
    return path


# bytes of the figure of record


def test_redrawing_gives_the_same_json_and_html_bytes():
    first, second = draw_all(), draw_all()
    for name in first:
        assert figure_json(first[name]) == figure_json(second[name])
        assert figure_html(first[name]) == figure_html(second[name])


def test_bytes_are_the_same_in_processes_with_other_hash_seeds():
    program = (
        "import sys; sys.path[:0] = ['tests']\n"
        "import hashlib, test_figures as t\n"
        "from dflash2_lab.figures import figure_html, figure_json\n"
        "text = ''.join(figure_json(f) + figure_html(f) for f in t.draw_all().values())\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_bytes_do_not_depend_on_the_default_template_of_plotly(monkeypatch):
    before = {name: figure_json(drawn) for name, drawn in draw_all().items()}
    monkeypatch.setattr(pio.templates, "default", "plotly_dark")
    assert {name: figure_json(drawn) for name, drawn in draw_all().items()} == before


def test_json_holds_plain_lists_and_values_round_trip_exactly():
    values = np.array([0.1, 1 / 3, 2e-17, 123456.7])
    table = np.arange(6, dtype=np.int16).reshape(2, 3)
    text = figure_json(go.Figure([go.Scatter(y=values), go.Heatmap(z=table)]))
    assert "bdata" not in text
    data = json.loads(text)["data"]
    assert data[0]["y"] == [0.1, 0.333333, 2e-17, 123457.0]
    assert data[1]["z"] == [[0, 1, 2], [3, 4, 5]]
    assert figure_json(go.Figure(json.loads(text))) == text


def test_stored_figures_read_back_and_write_the_same_bytes():
    for drawn in draw_all().values():
        text = figure_json(drawn)
        assert figure_json(go.Figure(json.loads(text))) == text


def test_numbers_json_cannot_hold_become_null_and_minus_zero_becomes_zero():
    text = figure_json(go.Figure(go.Scatter(y=[float("nan"), float("inf"), -0.0, 1e-320])))
    assert json.loads(text)["data"][0]["y"][:2] == [None, None]
    assert "-0.0" not in text
    assert "NaN" not in text


# HTML


def test_html_is_self_contained(fig):
    page = figure_html(fig)
    markup = page.replace(plotly_script(), "")
    assert len(markup) < len(page) - 4_000_000
    assert "src=" not in markup
    assert "href=" not in markup
    assert "http" not in markup
    assert re.findall(r'id="([^"]*)"', markup) == ["figure"]


def test_html_is_a_function_of_the_stored_json(fig):
    assert figure_html(figure_json(fig)) == figure_html(fig)


def test_text_of_a_figure_cannot_end_the_script_element():
    hostile = "</script><script>alert(1)</script><!--"
    drawn = plots.draw_recall({hostile: frames.recall_table()}, title=hostile)
    page = figure_html(drawn).replace(plotly_script(), "")
    assert page.count("<script>") == page.count("</script>") == 1
    assert "<!--" not in page
    assert "alert(1)</" not in page


def test_a_div_carries_the_id_it_is_given(fig):
    height = fig.layout.height
    start = f'<div id="recall-1" style="width:900px;height:{height}px" role="img" aria-label="'
    assert figure_div(fig, "recall-1").startswith(start)
    assert 'Plotly.newPlot("recall-1", ' in figure_div(fig, "recall-1")


def test_the_caption_is_what_a_screen_reader_says_and_cannot_end_its_attribute(fig):
    caption = 'a "quote" & <b>'
    fig = go.Figure(fig).update_layout(meta={"figure": "recall", "caption": caption})
    start = figure_div(fig).split("></div>")[0]
    assert start.endswith('aria-label="a &quot;quote&quot; &amp; &lt;b&gt;"')
    bare = go.Figure(fig)
    bare.layout.meta = None
    assert "aria-label" not in figure_div(bare)


# images


def test_without_chrome_one_line_says_what_to_install(fig, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash2_lab.browser.find_browser", lambda: None)
    with pytest.raises(NoBrowserError, match="install Chromium") as caught:
        save_figure(fig, tmp_path / "recall")
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recall.html", "recall.json"]


def test_saving_several_without_chrome_reports_once_and_keeps_the_rest(fig, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash2_lab.browser.find_browser", lambda: None)
    saved = save_figures({"a": fig, "b": fig}, tmp_path)
    assert [p.name for p in saved.paths] == ["a.json", "a.html", "b.json", "b.html"]
    assert saved.skipped.count("install Chromium") == 1
    assert "\n" not in saved.skipped


def test_a_path_without_browsers_finds_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("dflash2_lab.browser.APPLICATIONS", ())
    assert find_browser() is None
    fake_chrome(tmp_path, "")
    assert find_browser() == tmp_path / "chrome"


def test_images_come_from_one_process_without_sandbox_that_gets_the_figures(fig, tmp_path):
    body = (
        "assert '--no-sandbox' in sys.argv\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
        "text = open(page, encoding='utf-8').read()\n"
        "assert 'Plotly.toImage' in text and 'draft slot' in text\n"
        f"print('<pre id=\"image-0\">data:image/png;base64,{PIXEL}</pre>')\n"
        "print('<pre id=\"image-1\">data:image/svg+xml,%3Csvg%3E%25%3C/svg%3E</pre>')"
    )
    chrome = fake_chrome(tmp_path, body)
    paths = save_figure(fig, tmp_path / "out" / "recall", ("png", "svg"), browser=chrome)
    assert [p.name for p in paths] == ["recall.png", "recall.svg"]
    assert paths[0].read_bytes() == b"\x89PNG made up"
    assert paths[1].read_text() == "<svg>%</svg>"
    assert (tmp_path / "calls").read_text() == "x"


def test_a_killed_browser_is_a_clear_error(fig, tmp_path):
    chrome = fake_chrome(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ImageExportError, match="killed by signal 9") as caught:
        save_figure(fig, tmp_path / "recall", ("json", "png"), browser=chrome)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chrome", "recall.json"]


def test_a_browser_that_lacks_a_library_is_quoted(fig, tmp_path):
    chrome = fake_chrome(tmp_path, "sys.exit('libnss3.so: cannot open shared object file')")
    with pytest.raises(ImageExportError, match=r"exit code 1 \(libnss3.so: cannot open"):
        save_figure(fig, tmp_path / "recall", ("png",), browser=chrome)


def test_a_hanging_browser_is_stopped_with_its_children(fig, tmp_path):
    child = tmp_path / "child"
    body = (
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    chrome = fake_chrome(tmp_path, body)
    start = time.monotonic()
    with pytest.raises(ImageExportError, match=r"no image within 1\.5 s and was stopped"):
        save_figure(fig, tmp_path / "recall", ("png",), browser=chrome, timeout_s=1.5)
    assert time.monotonic() - start < 20
    # A killed process ends at its own pace, and init reaps it at its leisure.
    deadline = time.monotonic() + 20
    while _state(child.read_text()) not in "XZ" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _state(child.read_text()) in "XZ"


def _state(pid: str) -> str:
    """State of a process: R, S, ..., Z for a zombie, X for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("pass", "the page ended without it"),
        ("print('<pre id=\"failure\">Error: a &lt; b</pre>')", "Error: a < b"),
    ],
)
def test_a_page_without_its_image_is_an_error(fig, tmp_path, body, reason):
    chrome = fake_chrome(tmp_path, body)
    with pytest.raises(ImageExportError, match=re.escape(reason)):
        save_figure(fig, tmp_path / "recall", ("png",), browser=chrome)


def test_a_browser_that_is_no_program_is_an_error(fig, tmp_path):
    (tmp_path / "chrome").write_text("")
    with pytest.raises(ImageExportError, match="could not be started"):
        save_figure(fig, tmp_path / "recall", ("png",), browser=tmp_path / "chrome")


def test_unknown_formats_are_refused_before_anything_is_written(fig, tmp_path):
    with pytest.raises(LabError, match="found 'gif'"):
        save_figure(fig, tmp_path / "recall", ("json", "gif"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(LabError, match="found 'jpeg'"):
        render_images([({"data": [], "layout": {}}, "jpeg")])


def test_a_path_that_cannot_be_written_is_named_and_nothing_is_left(fig, tmp_path):
    (tmp_path / "recall.json").mkdir()
    with pytest.raises(LabError, match=r"recall\.json: could not be written"):
        save_figure(fig, tmp_path / "recall", ("json",))
    assert [p.name for p in tmp_path.iterdir()] == ["recall.json"]


@pytest.mark.slow
def test_real_export_gives_images_or_the_one_line(tmp_path):
    saved = save_figures(draw_all(), tmp_path, ("png", "svg"))
    if find_browser() is None:
        assert "install Chromium" in saved.skipped
    else:
        assert saved.skipped == ""
        assert [p.suffix for p in saved.paths] == [".png", ".svg"] * 4
        for path in saved.paths:
            start = path.read_bytes()[:8]
            assert start == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else start[:4] == b"<svg"


def test_plots_figures_and_report_import_neither_torch_nor_plotly():
    program = (
        "import sys, dflash2_lab.plots, dflash2_lab.figures, dflash2_lab.report\n"
        "import dflash2_lab.figure_commands, dflash2_lab.stats_results\n"
        "print([m for m in ('torch', 'transformers', 'plotly') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
