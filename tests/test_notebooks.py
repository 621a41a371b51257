"""The notebooks: how their files look, and that each runs from top to bottom and shows its figures
in JupyterLab's way, in a code host's and in exported HTML."""

import base64
import json
import os
import re
import resource
from contextlib import ExitStack
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from dflash2_lab import figures
from dflash2_lab.browser import NoBrowserError, find_browser
from dflash2_lab.errors import LabError
from dflash2_lab.figures import show
from dflash2_lab.results import command_line

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EVIDENCE = {"05_gpu_decode"}  # may be committed with outputs: what an H200 measured
LARGEST = 2_000_000  # bytes, outputs included
PLOTLY, SVG = "application/vnd.plotly.v1+json", "image/svg+xml"
FIGURES = {
    "01_suffix_decay": ["recall_by_slot", "suffix_decay", "suffix_decay"],
    "02_selection_headroom": [
        "headroom_by_k",
        "selector_recovery",
        "acceptance_by_policy",
        "headroom_by_k",
        "selector_recovery",
        "headroom_by_k",
    ],
    "03_attention_share": [
        "attention_share",
        "attention_map",
        "share_against_recall",
        "attention_share",
        "attention_map",
        "share_against_recall",
    ],
    "04_losslessness": ["tokens_to_detection", "monitor_path", "monitor_path"],
    "05_gpu_decode": ["cycle_breakdown", "throughput_by_concurrency"],
    "06_bring_your_own": ["acceptance_by_policy"],
}
DRAWN = "document.querySelectorAll('.jp-OutputArea .js-plotly-plot .main-svg').length"
DONE = """(() => {
  const notebook = window.jupyterapp.shell.currentWidget.content.model.sharedModel;
  const cells = [...notebook.cells].filter((cell) => cell.cell_type === "code");
  const failed = cells.flatMap((cell) => cell.outputs).filter((o) => o.output_type === "error");
  return failed.length > 0 || cells.every((cell) => cell.execution_count) ? {failed} : null;
})()"""
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def seconds_of_children():
    """CPU seconds of all processes that were waited for: the same on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shown(notebook):
    """Display data of the figures."""
    bundles = [output.get("data", {}) for output in outputs(notebook)]
    return [bundle for bundle in bundles if PLOTLY in bundle]


def capture(displayed, monkeypatch):
    """Into `displayed`: what is displayed, as (data, options)."""
    monkeypatch.setattr(
        "IPython.display.display", lambda data, **options: displayed.append((data, options))
    )


def test_there_is_a_notebook_for_every_question():
    assert [path.stem for path in NOTEBOOKS] == [*FIGURES]


@each_notebook
def test_committed_file_is_small_stripped_and_names_no_machine(path):
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert len(text.encode()) < LARGEST
    assert notebook.metadata.kernelspec == {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    if path.stem not in EVIDENCE:
        assert not outputs(notebook)
        assert all(cell.get("execution_count") is None for cell in notebook.cells)
    told = [cell.source for cell in notebook.cells]
    told += [json.dumps(output) for output in outputs(notebook)]
    for word in (
        r"(?<![\w.:])/(home|root|tmp|usr|work|opt|mnt)/",
        r"https?://(?!www\.w3\.org/)",
        "huggingface",
    ):
        assert not [part for part in told if re.search(word, part)], word
    assert not any(cell.get("attachments") for cell in notebook.cells)


def test_the_evidence_is_of_a_gpu_and_shows_its_figures_as_json_and_as_pictures():
    notebook = nbformat.read(ROOT / "notebooks" / "05_gpu_decode.ipynb", nbformat.NO_CONVERT)
    said = "".join(output.get("text", "") for output in outputs(notebook))
    assert "live, on NVIDIA H200" in said and said.count("measured just now") == 3
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    names = [bundle[PLOTLY]["layout"]["meta"]["figure"] for bundle in shown(notebook)]
    assert names == FIGURES["05_gpu_decode"]
    assert all(bundle[SVG].startswith("<svg ") for bundle in shown(notebook))
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert page.count('data-mime-type="image/svg+xml"') == len(names)


@each_notebook
def test_it_asks_and_says_what_would_change_the_answer_and_how_to_try_it(path):
    cells = nbformat.read(path, nbformat.NO_CONVERT).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert cells[0].source.startswith("# ")
    assert "**Question.**" in cells[0].source
    assert "## What would change the conclusion" in text
    assert "dflash2-lab " in text
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert re.search(r"^TARGET(, \w+)* = ", code, re.M)


@pytest.mark.slow
@each_notebook
def test_it_runs_small_and_shows_its_figures(path, monkeypatch):
    for name, value in (
        ("PYTHONPATH", str(ROOT)),
        ("OMP_NUM_THREADS", "1"),
        ("TQDM_DISABLE", "1"),
        ("CUDA_VISIBLE_DEVICES", ""),  # a device would measure, for minutes
    ):
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    folder = str(path.parent)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": folder}})
    before = seconds_of_children()
    client.execute(env=dict(os.environ))
    assert seconds_of_children() - before < 120
    assert len(nbformat.writes(notebook).encode()) < LARGEST
    names = [bundle[PLOTLY]["layout"]["meta"]["figure"] for bundle in shown(notebook)]
    assert names == FIGURES[path.stem]
    page, _ = HTMLExporter().from_notebook_node(notebook)
    # nbconvert's own template names scripts for formulas and drawings; figures need none
    assert not re.search(r'<script[^>]+src="[^"]*plotly', page)
    for bundle in shown(notebook):
        if find_browser() is not None:
            assert bundle[SVG].startswith("<svg ")
            encoded = base64.b64encode(bundle[SVG].encode()).decode()
            assert f"data:image/svg+xml;base64,{encoded}" in page.replace("\n", "")


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="no Chrome or Chromium on this machine")
def test_jupyterlab_runs_the_first_notebook_and_draws_its_figures(tmp_path):
    from test_viewer_browser import COMMAND, open_in_lab, wait_for

    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "viewer.ipynb").write_bytes(NOTEBOOKS[0].read_bytes())
    with ExitStack() as stack:
        page = open_in_lab(stack, folder, tmp_path)
        page.run(f"void {COMMAND}('notebook:run-all-cells')")
        wait_for(lambda: page.run(DRAWN), "a figure", 120)
        assert wait_for(lambda: page.run(DONE), "the last cell", 120) == {"failed": []}
        assert page.errors == []


def test_show_gives_json_and_a_picture_and_never_the_library(monkeypatch):
    from plotly.graph_objects import Figure

    asked, displayed = [], []

    def render(jobs, **options):
        asked.append(len(jobs))
        return [b"<svg/>"] * len(jobs)

    capture(displayed, monkeypatch)
    monkeypatch.setattr(figures, "render_images", render)
    layout = {"width": 900, "height": 400, "meta": {"caption": "a < b"}}
    show(Figure(layout=layout), Figure(layout=layout))
    assert asked == [2]  # one browser for both
    bundle, _ = displayed[0]
    # no image/png: JupyterLab would show it in place of the figure
    assert set(bundle) == {PLOTLY, SVG, "text/plain"}
    assert json.loads(json.dumps(bundle[PLOTLY]))["layout"]["width"] == 900
    assert bundle[SVG] == "<svg/>"
    assert displayed[1][0].data == "<p><em>a &lt; b</em></p>"
    assert len(displayed) == 4


def test_show_without_chrome_says_what_to_install(monkeypatch):
    from plotly.graph_objects import Figure

    def refuse(jobs, **options):
        raise NoBrowserError("needs <Chrome>")

    displayed = []
    capture(displayed, monkeypatch)
    monkeypatch.setattr(figures, "render_images", refuse)
    show(Figure())
    ((bundle, _),) = displayed
    assert set(bundle) == {PLOTLY, "text/html", "text/plain"}
    assert bundle["text/html"] == "<p>No picture: needs &lt;Chrome&gt;</p>"


def test_command_line_names_the_tool_and_no_folder_of_the_machine():
    made = {
        "command": ["__main__.py", "bench", "cycle", "--out", "/tmp/a b/out"],
        "device": "cpu",
        "packages": {"torch": "2.13.0"},
        "git": "0123456789",
    }
    told = command_line({"environment": made})
    assert told == "dflash2-lab bench cycle --out out   [cpu, torch 2.13.0, 0123456]"
    made["command"] = ["monitor_paths.py", "runs/it"]
    told = command_line({"environment": made})
    assert told.startswith("python -m dflash2_lab.monitor_paths runs/it ")
    with pytest.raises(LabError, match=r"environment\.command"):
        command_line({})
