"""The figures of record: redrawn, verified byte by byte, and every fault told in its own line."""

import json
import shutil
from pathlib import Path

import figure_frames as frames
import pytest
from recordings import Request, make_run

from dflash2_lab import figure_manifest
from dflash2_lab.browser import ImageExportError
from dflash2_lab.cli import main
from dflash2_lab.errors import LabError
from dflash2_lab.figure_manifest import find_folder, read_manifest, redraw, verify
from dflash2_lab.figures import figure_html
from dflash2_lab.tables import file_hash, write_run_info, write_shard

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "figures"


def store(run, folder):
    """Write a run in memory as a run folder."""
    made = {"command": ["dflash2-lab", "record"], "git": "0123abc", "device": "cpu"}
    write_run_info(folder, run.info | {"environment": made})
    for name, frame in run.frames.items():
        write_shard(folder, name, 0, frame)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with two figures: one of two recordings, one of a benchmark."""
    folder = tmp_path_factory.mktemp("figures")
    store(frames.recorded_run("a", attention=False), folder / "job/tables/a")
    store(frames.recorded_run("b", attention=False, seed=1), folder / "job/tables/b")
    bench = folder / "bench/cycle"
    write_run_info(bench, {"kind": "bench", "environment": {"device": "NVIDIA H200"}})
    (bench / "bench.json").write_text(json.dumps(frames.cycle_result()))
    tables = {"a": "job/tables/a", "b": "job/tables/b"}
    entries = [
        {
            "figure": "job/suffix_decay",
            "draw": "suffix_decay",
            "tables": tables,
            "options": {"k": 16, "title": "Recall@16"},
        },
        {"figure": "engine/cycle", "draw": "cycle_breakdown", "tables": {"4B": "bench/cycle"}},
    ]
    (folder / "manifest.json").write_text(json.dumps({"figures": entries}))
    (folder / "README.md").write_text("what lies here")
    redraw(folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of `made` to damage."""
    return Path(shutil.copytree(made, tmp_path / "figures"))


def edit_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_what_was_redrawn_verifies_and_drawing_again_changes_nothing(folder):
    found = verify(folder)
    assert (found.num_figures, found.num_runs, found.problems, found.notes) == (2, 3, (), ())
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert redraw(folder).paths == ()
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_the_manifest_names_files_hashes_function_tables_and_who_made_them(made):
    manifest = read_manifest(made)
    entry = manifest["figures"][0]
    text = (made / "job/suffix_decay.json").read_text()
    assert entry["json_sha256"] == file_hash(made / "job/suffix_decay.json")
    page = made.parent / "page.html"
    page.write_text(figure_html(text))
    assert entry["html_sha256"] == file_hash(page)
    assert (entry["draw"], entry["options"]["k"]) == ("suffix_decay", 16)
    assert "position_recall@16" in text
    run = manifest["runs"][entry["tables"]["a"]]
    assert run["run"] == {
        "id": file_hash(made / "job/tables/a/run.json")[:12],
        "kind": "record",
        "command": ["dflash2-lab", "record"],
        "git": "0123abc",
        "date": None,
        "device": "cpu",
    }
    slots = "slots-00000.parquet"
    assert run["files"][slots] == file_hash(made / "job/tables/a" / slots)
    assert manifest["command"] == "dflash2-lab figures"


def damage_figure(folder):
    path = folder / "job/suffix_decay.json"
    path.write_text(path.read_text().replace("Recall@16", "Recall@17", 1))


def lose_figure(folder):
    (folder / "engine/cycle.json").unlink()


def damage_values(folder):
    result = frames.cycle_result()
    result["cells"][0]["sides"]["dflash"]["cycle"]["median"] *= 1.01
    (folder / "bench/cycle/bench.json").write_text(json.dumps(result))


def lose_table(folder):
    (folder / "job/tables/b/slots-00000.parquet").unlink()


def lose_run(folder):
    (folder / "job/tables/a/run.json").unlink()


def add_file(folder):
    (folder / "job/notes.txt").write_text("left here")


def add_run(folder):
    shutil.copytree(folder / "bench/cycle", folder / "bench/other")


def edit_hash(folder):
    edit_manifest(folder, lambda m: m["figures"][1].update(html_sha256="0" * 64))


FAULTS = {
    "a changed byte of a figure": (
        damage_figure,
        ["job/suffix_decay.json: differs from what its tables draw"],
    ),
    "a lost figure": (
        lose_figure,
        ["engine/cycle.json: missing, expected the figure that its tables draw"],
    ),
    "a changed table": (
        damage_values,
        [
            "bench/cycle/bench.json: changed, found sha256",
            "engine/cycle.json: differs from what its tables draw",
            "engine/cycle: the manifest has another sha256 of its JSON",
            "engine/cycle: the manifest has another sha256 of its HTML",
        ],
    ),
    "a lost table": (
        lose_table,
        [
            "job/tables/b/slots-00000.parquet: missing, expected as in the manifest",
            "job/suffix_decay: cannot be drawn: ",
        ],
    ),
    "a lost run": (
        lose_run,
        [
            "job/tables/a/run.json: missing, expected as in the manifest",
            "job/suffix_decay: cannot be drawn: ",
        ],
    ),
    "a file nobody knows": (add_file, ["job/notes.txt: not in the manifest"]),
    "a run nobody knows": (
        add_run,
        [
            "bench/other/bench.json: not in the manifest",
            "bench/other/run.json: not in the manifest",
        ],
    ),
    "another hash": (edit_hash, ["engine/cycle: the manifest has another sha256 of its HTML"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_told_in_one_line_and_nothing_is_written(folder, fault):
    plant, expected = FAULTS[fault]
    plant(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    problems = verify(folder).problems
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(start)
        assert "\n" not in problem
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_command_tells_problems_and_ends_with_one(folder, capsys):
    assert main(["figures", "--verify", "--folder", str(folder)]) == 0
    assert capsys.readouterr().out == "2 figures from 3 runs: as recorded\n"
    add_file(folder)
    assert main(["figures", "--verify", "--folder", str(folder), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["figures"], told["runs"], len(told["problems"])) == (2, 3, 1)
    lose_figure(folder)
    assert main(["figures", "--folder", str(folder)]) == 0
    assert capsys.readouterr().out == f"changed  {folder / 'engine/cycle.json'}\n"


def test_another_plotly_leaves_the_html_uncompared_and_says_so(folder):
    edit_manifest(folder, lambda m: m.update(plotly="5.0.0"))
    edit_hash(folder)
    found = verify(folder)
    assert found.problems == ()
    assert "HTML not compared" in found.notes[0]
    assert "5.0.0" in found.notes[0]


# pictures


def test_a_picture_is_made_when_its_figure_changes_and_an_old_one_is_told(folder, monkeypatch):
    calls = []

    def save(figure, stem, formats):
        calls.append((stem.name, formats))
        path = stem.with_suffix(".svg")
        path.write_text(figure.layout.title.text)
        return [path]

    monkeypatch.setattr(figure_manifest, "save_figure", save)
    edit_manifest(folder, lambda m: m["figures"][0].update(images={"svg": {}}))
    assert redraw(folder).paths[0].name == "suffix_decay.svg"
    assert calls == [("suffix_decay", ("svg",))]
    redraw(folder)
    assert len(calls) == 1
    assert verify(folder).problems == ()

    def fail(figure, stem, formats):
        raise ImageExportError("no Chrome here")

    monkeypatch.setattr(figure_manifest, "save_figure", fail)
    edit_manifest(folder, lambda m: m["figures"][0]["options"].update(title="Another"))
    assert redraw(folder).skipped == ("suffix_decay.svg: no Chrome here",)
    stale = "job/suffix_decay.svg: is a picture of another drawing of the figure"
    assert verify(folder).problems == (stale,)


# bad input


def test_a_package_without_a_clone_has_no_figures_of_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figure_manifest, "__file__", str(tmp_path / "site" / "lab" / "m.py"))
    with pytest.raises(LabError, match=r"part of a clone .* name the folder with --folder"):
        find_folder()
    assert main(["figures", "--verify"]) == 2
    assert "not of the installed package" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "not found, expected the manifest"),
        ("{", "malformed"),
        ("[]", "no list under 'figures'"),
        ('{"figures": [{"figure": "a"}]}', "figure 1 lacks draw, tables"),
        (
            '{"figures": [{"figure": "a", "draw": "os", "tables": {}}]}',
            "drawn by 'os', expected a function of dflash2_lab.plots",
        ),
        (
            '{"figures": [{"figure": "a", "draw": "suffix_decay", "tables": {}, '
            '"options": {"kk": 1}}]}',
            "options of figure 'a': got an unexpected keyword argument 'kk'",
        ),
    ],
)
def test_a_manifest_that_cannot_be_followed_is_an_error(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(LabError, match=reason):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{run}"], "--out DIR: expected beside a RUN"),
        (["--out", "{out}"], "--out, --format and --dark: expected a RUN"),
        (["{run}", "--out", "{out}", "--verify"], "--verify and --folder are about the figures"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(made, tmp_path, capsys, words, reason):
    places = {"run": made / "job/tables/a", "out": tmp_path / "out"}
    assert main(["figures", *(word.format(**places) for word in words)]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_can_be_drawn_in_the_dark_look(tmp_path, capsys):
    store(make_run([Request(9, rank=0, accept={"top1": [3] * 8})], 3), tmp_path / "run")
    words = ["--format", "json", "--dark", "--out", str(tmp_path / "out")]
    assert main(["figures", str(tmp_path / "run"), *words]) == 0
    assert '"paper_bgcolor": "#14171A"' in (tmp_path / "out/suffix_decay.json").read_text()


# the committed folder


def test_the_committed_folder_is_small_and_holds_what_its_manifest_names():
    manifest = read_manifest(RECORDED)
    files = [path for path in RECORDED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6_000_000
    for name, run in manifest["runs"].items():
        for file, sha in run["files"].items():
            assert file_hash(RECORDED / name / file) == sha, f"{name}/{file}"


@pytest.mark.slow
def test_the_committed_figures_are_as_recorded():
    found = verify(RECORDED)
    assert found.problems == ()
    assert found.num_figures >= 15
