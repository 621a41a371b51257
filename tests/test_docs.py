"""Every command that the project prints is one that exists, and runs: on tiny models, small."""

import json
import re
import shlex
import shutil

import plotly.io
import pytest
from printed import ROOT, TEXTS, commands, make_targets, python_blocks
from stage import build, small, stand_ins

from dflash2_lab.cli import COMMANDS, main, parser

NAMED = {"trace --import FILE", "verify-replay", "bench", "verify --help"}  # no whole commands
EVERY = list(dict.fromkeys(line for text in TEXTS.values() for line in commands(text)))
EVERY = [line for line in EVERY if line not in NAMED]
each_command = pytest.mark.parametrize("line", EVERY, ids=lambda line: line[:70])


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """The folder of `stage`, made once."""
    folder = tmp_path_factory.mktemp("stage") / "work"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        stand_ins(patch, folder)
        build(folder)
    return folder


@pytest.fixture
def work(stage, tmp_path, monkeypatch):
    """A copy of it as the working folder."""
    folder = shutil.copytree(stage, tmp_path / "work", symlinks=True)
    stand_ins(monkeypatch, folder)
    return folder


def refuse(constant):
    raise ValueError(f"{constant} is no JSON")


def test_every_page_and_notebook_shows_commands_and_every_command_is_shown():
    assert {line for text in TEXTS.values() for line in commands(text)} >= NAMED
    silent = {name for name, text in TEXTS.items() if not commands(text)}
    assert silent == {"docs/metrics.md", "dflash2_lab/zoo/README.md"}
    assert {line.split()[0] for line in EVERY} == set(COMMANDS)


@each_command
def test_a_printed_command_exists_with_its_options(line):
    assert callable(parser().parse_args(shlex.split(line)).run)


def test_no_two_printed_commands_write_the_same_folder():
    # the second would be refused: the folder holds another run
    writers = {}
    for line in EVERY:
        words = shlex.split(line)
        if "--out" in words:
            writers.setdefault(words[words.index("--out") + 1], []).append(line)
    assert {out: lines for out, lines in writers.items() if len(lines) > 1} == {}


@pytest.mark.slow
@each_command
def test_a_printed_command_runs(line, work, capsys):
    words = small(line)
    if "--out" in words:  # what the stage made there is of other settings
        shutil.rmtree(work / words[words.index("--out") + 1], ignore_errors=True)
    assert main(words) == (1 if "--inject" in words else 0), capsys.readouterr().err
    out = capsys.readouterr().out
    assert json.loads(out, parse_constant=refuse) if "--json" in words else out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if python_blocks(text)])
def test_printed_python_runs(name, work, monkeypatch, capsys):
    monkeypatch.setattr(plotly.io.renderers, "default", "json")
    for block in python_blocks(TEXTS[name]):
        exec(compile(block, name, "exec"), {})


def test_printed_make_targets_are_those_of_the_makefile():
    rules = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    printed = {name for text in TEXTS.values() for name in make_targets(text)}
    assert printed >= {"reproduce", "test", "test-slow", "figures"}
    assert printed <= set(rules)
