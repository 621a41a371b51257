"""`verify --drafter`: the certificate, its folder and exit codes."""

import json

import pytest
from drafters import tiny_drafter
from helpers import save_tiny

from dflash2_lab import verify_decode_commands
from dflash2_lab.cli import main
from dflash2_lab.losslessness.verifying import Plan
from dflash2_lab.models.io import save_drafter
from dflash2_lab.tables import read_run_info


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "target")
    save_drafter(tiny_drafter("dflash2"), root / "drafter")
    return root


@pytest.fixture
def verify(models, monkeypatch):
    """The command on tiny models, 100 tokens an arm."""
    monkeypatch.setattr(
        verify_decode_commands, "plan_of", lambda _level, seed: Plan(300, 10, seed=seed)
    )
    parts = ("--target", models / "target", "--drafter", models / "drafter", "--device", "cpu")
    return lambda *words: main([str(word) for word in ("verify", *parts, *words)])


def test_a_right_decode_is_exit_code_0_and_a_certificate(verify, tmp_path, capsys):
    assert verify("--out", tmp_path / "run", "--temperature", 0.8, "--top-p", 0.95) == 0
    text = capsys.readouterr().out
    assert text.startswith("losslessness: passed")
    for part in ("T = 0.8, top-p 0.95", "== opposite: 100 tokens", "never stopped", "Not shown"):
        assert part in text
    record = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert record["passed"] and len(record["arms"]) == 3
    assert (tmp_path / "run" / "certificate.txt").read_text() in text
    info = read_run_info(tmp_path / "run")
    assert info["kind"] == "verify-decode" and info["complete"] and info["passed"]


def test_a_planted_fault_is_exit_code_1(verify, capsys):
    assert verify("--inject", "residual-is-p", "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["passed"] and record["configuration"]["inject"] == "residual-is-p"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--temperature", 0), "--temperature: found 0, expected more"),
        (("--inject", "nonsense"), "inject: found 'nonsense', expected one of accept-inverted"),
        (("--policy", "markov"), "a dflash2 drafter has top1"),
        (("--mutation-score",), "expected one of --drafter DRAFTER, --samples FILE"),
    ],
)
def test_bad_options_are_told_in_one_line(verify, capsys, words, message):
    assert verify(*words) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert message in shown[-1] and "Traceback" not in "".join(shown)


def test_a_fault_needs_a_decode_to_be_planted_in(capsys):
    assert main(["verify", "--mutation-score", "--inject", "residual-is-p"]) == 2
    assert "--inject NAME: expected --drafter" in capsys.readouterr().err
