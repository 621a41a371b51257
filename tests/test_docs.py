"""Every command that README and docs show is one that exists, and runs on tiny models."""

import re
import shlex
from pathlib import Path

import pytest
from drafters import tiny_drafter
from helpers import save_tiny

from dflash2_lab import verify_decode_commands
from dflash2_lab.cli import main, parser
from dflash2_lab.losslessness.verifying import Plan
from dflash2_lab.models.io import save_drafter

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "figures" / "README.md", *(ROOT / "docs").glob("*.md")])
SMALL = {
    "--limit": "2", "--max-new-tokens": "12", "--max-total": "64", "--steps": "2",
    "--device": "cpu", "--dtype": "float32", "--level": "pr",
}  # fmt: skip
# Recorded before, audited from files, or measured: what these need, other tests have.
ELSEWHERE = ("bench", "train", "replay", "figures", "report", "compare", "reproduce")


def commands(path: Path) -> list[list[str]]:
    """The words after `dflash2-lab` of every command in an indented block."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    found = re.findall(r"^    (?:\.venv/bin/)?dflash2-lab (.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


EVERY = [(path.name, words) for path in PAGES for words in commands(path)]
NAMES = [f"{name}: {' '.join(words)[:60]}" for name, words in EVERY]


def test_the_pages_show_commands():
    assert len(EVERY) > 25
    assert {words[0] for _, words in EVERY} >= {"record", "replay", "decode", "verify", "bench"}


@pytest.mark.parametrize(("page", "words"), EVERY, ids=NAMES)
def test_a_command_in_the_docs_exists_with_its_options(page, words):
    assert callable(parser().parse_args(words).run)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "target")
    save_drafter(tiny_drafter("dflash2"), root / "drafter")
    lines = ['{"id": "a", "turns": ["one"]}', '{"id": "b", "turns": ["two or three"]}']
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return root


def small(words: list[str], models: Path) -> list[str]:
    """The same command on tiny models, and less of it."""
    words = list(words)
    for index, word in enumerate(words[:-1]):
        if word in SMALL:
            words[index + 1] = SMALL[word]
        elif word == "--prompts":
            words[index + 1] = str(models / "prompts.jsonl")
        elif word in ("--drafter", "--target"):
            words[index + 1] = str(models / word.removeprefix("--"))
    if words[0] == "inspect":
        return ["inspect", str(models / "drafter")]
    if "--target" not in words:
        words += ["--target", str(models / "target")]
    if words[0] in ("record", "decode", "verify-replay") and "--max-new-tokens" not in words:
        words += ["--max-new-tokens", "12"]
    if words[0] == "verify-replay" and "--limit" not in words:
        words += ["--limit", "2"]
    return words


RUNNABLE = [
    (page, words)
    for page, words in EVERY
    if words[0] not in ELSEWHERE and "--samples" not in words and "--enumerate" not in words
    and (words[0] != "verify" or "--drafter" in words)
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "words"), RUNNABLE, ids=[" ".join(words)[:60] for _, words in RUNNABLE]
)
def test_a_command_in_the_docs_runs(page, words, models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        verify_decode_commands, "plan_of", lambda _level, seed: Plan(90, 3, seed=seed)
    )
    monkeypatch.setattr(verify_decode_commands, "QUICK", Plan(60, 2))
    monkeypatch.setattr(verify_decode_commands, "FAULTS", {"residual-is-p": None})
    monkeypatch.setattr(verify_decode_commands, "CONTROLS", {"correct": None})
    monkeypatch.setattr(verify_decode_commands, "mutation_score", lambda seed: Few())
    assert main(small(words, models)) == (1 if "--inject" in words else 0), capsys.readouterr().err
    assert capsys.readouterr().out.strip()


class Few:
    """Stands for the score of the toy, which takes half a minute and has its own tests."""

    def to_dict(self):
        counts = ("killed", "total", "killed_by_sampling", "controls_passed", "false_alarms")
        return dict.fromkeys(counts, 0)
