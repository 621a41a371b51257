"""The command line as a process: wrong options, Ctrl-C, and output that goes nowhere."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from drafters import tiny_drafter
from helpers import save_tiny

from dflash2_lab import commands
from dflash2_lab.cli import COMMANDS, main
from dflash2_lab.models.io import save_drafter

SEEDED = {
    "trace": ("--out", "x"), "record": ("--drafter", "x", "--out", "x"),
    "decode": ("--drafter", "x"), "verify-replay": ("--drafter", "x"), "verify": (),
    "train": ("--data", "x", "--out", "x"),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The words that name a tiny target and drafter with room for long texts."""
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "target", max_position_embeddings=8192)
    save_drafter(tiny_drafter("dflash2", max_position_embeddings=8192), root / "drafter")
    target = ("--target", str(root / "target"), "--device", "cpu")
    return target, ("--drafter", str(root / "drafter"))


def stopped(words, capsys):
    """Exit code, standard output and error of a command that the parser answers."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, words)])
    return stop.value.code, *capsys.readouterr()


@pytest.mark.parametrize("words", [(), ("bench",)], ids=["alone", "bench"])
def test_a_group_of_commands_alone_shows_its_help(words, capsys):
    code, out, err = stopped(words, capsys)
    assert (code, err) == (0, "")
    assert out.startswith("usage: dflash2-lab")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("wrong",), "dflash2-lab: argument COMMAND: invalid choice: 'wrong'"),
        (("trace",), "dflash2-lab: the following arguments are required: --out; see dflash2-lab"),
        (("bench", "cycle", "--batch"), "dflash2-lab: argument --batch: expected at least one"),
        (("trace", "--out", "x", "--limit", "two"), "argument --limit: invalid int value: 'two'"),
        (("replay", "run", "--polici", "x", "--out"), "see dflash2-lab --help"),
    ],
)
def test_wrong_options_are_one_line_on_standard_error(words, expected, capsys):
    code, out, err = stopped(words, capsys)
    assert (code, out) == (2, "")
    assert expected in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_with_a_seed_wants_none_below_zero(name, capsys):
    code, out, _ = stopped((name, "--help"), capsys)
    assert code == 0
    assert ("--seed" in out) == (name in SEEDED)
    if name in SEEDED:
        code, _, err = stopped((name, *SEEDED[name], "--seed", "-1"), capsys)
        assert code == 2
        assert "--seed: found '-1', expected a number of 0 or more" in err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("of Python"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 5 GB"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory.\nTried to allocate"),
    ],
    ids=["python", "torch", "cuda"],
)
def test_lack_of_memory_is_one_line(error, monkeypatch, capsys):
    def fail(_arguments):
        raise error

    monkeypatch.setattr(commands, "replay", fail)
    assert main(["replay", "run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dflash2-lab: not enough memory; take less at a time")
    assert len(err.splitlines()) == 1


def test_another_fault_of_the_program_keeps_its_stack_trace(monkeypatch):
    def fail(_arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(commands, "replay", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["replay", "run"])


def decode(models):
    target, drafter = models
    return main(["decode", *target, *drafter, "--prompt", "hi", "--max-new-tokens", "9"])


def test_standard_output_that_was_closed_is_no_error(models, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert decode(models) == 0
    sys.stdout.close()


def test_what_a_terminal_cannot_show_becomes_a_question_mark(models, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert decode(models) == 0  # a random model on bytes writes characters beyond ASCII
    assert b"?" in terminal.buffer.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_below_standard_output_is_one_line(models, monkeypatch, capfd):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert decode(models) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("dflash2-lab: ")
    assert "No space left on device" in last


def hears_ctrl_c():
    """In the child: what runs in the background of a shell is told to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trace", "record", "decode", "verify"])
def test_ctrl_c_is_one_line_that_says_whether_it_can_go_on(name, models, tmp_path):
    target, drafter = models
    words = [name, *target, "--out", str(tmp_path / "run")]
    words += [] if name == "trace" else drafter
    words += [] if name == "verify" else ["--max-new-tokens", "7000"]
    with subprocess.Popen(
        [sys.executable, "-m", "dflash2_lab", *words],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TQDM_DISABLE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hears_ctrl_c,
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "run").exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    again = "; run the same command again to go on" if name in ("trace", "record") else ""
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert err.decode().splitlines()[-1] == f"dflash2-lab: interrupted{again}"
