"""`verify --drafter`: the certificate, its folder and exit codes."""

import json

import pytest
from drafters import tiny_drafter
from helpers import save_tiny

from dflash2_lab import verify_decode_commands
from dflash2_lab.cli import main
from dflash2_lab.losslessness.mutation import mutation_score
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
    """The command on tiny models, 100 tokens an arm, and two faults of the toy."""
    monkeypatch.setattr(
        verify_decode_commands, "plan_of", lambda _level, seed: Plan(300, 10, seed=seed)
    )
    names = ["residual-is-p", "correct"]
    monkeypatch.setattr(
        verify_decode_commands, "mutation_score", lambda seed: mutation_score(names, 512, seed)
    )
    parts = ("--target", models / "target", "--drafter", models / "drafter", "--device", "cpu")
    return lambda *words: main([str(word) for word in ("verify", *parts, *words)])


def test_a_right_decode_is_exit_code_0_and_a_certificate(verify, tmp_path, capsys):
    assert verify("--out", tmp_path / "run", "--temperature", 0.8, "--top-p", 0.95) == 0
    text = capsys.readouterr().out
    assert text.startswith("losslessness: passed")
    for part in (
        "== T = 0.8, top-p 0.95, opposite drafter: 100 tokens",
        "never stopped",
        "Not shown",
        "1 of 1 broken decoders of the toy, 1 by sampling; 1 of 1 harmless ones pass",
        ", torch 2.",
    ):
        assert part in text
    record = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert record["passed"] and len(record["arms"]) == 3
    assert record["mutation_score"]["killed"] == 1 and record["environment"]["packages"]["torch"]
    assert (tmp_path / "run" / "certificate.txt").read_text() in text
    info = read_run_info(tmp_path / "run")
    assert info["kind"] == "verify-decode" and info["complete"] and info["passed"]


def test_configurations_share_the_budget_of_one_run(verify, capsys):
    assert verify("--also", "0.8,0.95,50", "--engine", "graph", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert [arm["sampling"] for arm in record["arms"][::3]] == [
        "T = 1",
        "T = 0.8, top-k 50, top-p 0.95",
    ]
    assert record["budget"]["configurations"] == 2 and record["configuration"]["engine"] == "graph"


def test_a_greedy_decode_has_a_certificate_of_its_own(verify, tmp_path, capsys):
    assert verify("--temperature", 0, "--out", tmp_path / "run") == 0
    text = capsys.readouterr().out
    assert text.startswith("greedy losslessness: passed (equal)")
    record = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert record["passed"] and record["verdict"] == "equal" and record["eps"] > 0
    assert (tmp_path / "run" / "certificate.txt").read_text() in text


def test_a_planted_fault_is_exit_code_1(verify, capsys):
    assert verify("--inject", "residual-is-p", "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["passed"] and record["configuration"]["inject"] == "residual-is-p"


def test_the_mutation_score_of_a_decode_counts_its_faults(verify, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verify_decode_commands, "QUICK", Plan(60, 2))
    monkeypatch.setattr(verify_decode_commands, "FAULTS", {"residual-is-p": None})
    monkeypatch.setattr(verify_decode_commands, "CONTROLS", {"correct": None})
    assert verify("--mutation-score", "--out", tmp_path / "run") == 0
    assert "1 of 1 faults caught, 1 of 1 harmless controls" in capsys.readouterr().out
    record = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert record["killed"] == record["total"] == 1 and record["false_alarms"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--temperature", 0, "--also", "1"), "found --also or --inject beside one"),
        (("--inject", "nonsense"), "inject: found 'nonsense', expected one of accept-inverted"),
        (("--policy", "markov"), "a dflash2 drafter has top1"),
        (("--also", "0.8,0.95,50,1"), "--also: found '0.8,0.95,50,1', expected temperature"),
        (("--also", "warm"), "--also: found 'warm'"),
        (("--also", "1"), "found a configuration twice"),
        (("--inject", "residual-is-p", "--engine", "graph"), "found engine 'graph'"),
        (("--mutation-score", "--engine", "graph"), "found --acceptance token and --engine graph"),
        (("--mutation-score", "--also", "1"), "expected neither"),
        (("--mutation-score", "--enumerate"), "expected one of --drafter DRAFTER, --samples FILE"),
    ],
)
def test_bad_options_are_told_in_one_line(verify, capsys, words, message):
    assert verify(*words) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert message in shown[-1] and "Traceback" not in "".join(shown)


def test_a_fault_needs_a_decode_to_be_planted_in(capsys):
    assert main(["verify", "--mutation-score", "--inject", "residual-is-p"]) == 2
    assert "--inject NAME: expected --drafter" in capsys.readouterr().err
