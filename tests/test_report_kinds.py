"""Every kind of run folder that the commands write has a page, made here by the commands on tiny
models; what stands on the pages of traces, training and checks."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from drafters import tiny_drafter
from helpers import save_tiny
from sample_files import WARM, draw_lines, write_lines
from test_report_html import LIMIT, between, needs_browser, opened, without_scripts

from dflash2_lab import verify_decode_commands
from dflash2_lab.cli import main
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.battery import Budget
from dflash2_lab.losslessness.verifying import Plan
from dflash2_lab.models.io import save_drafter
from dflash2_lab.report_commands import PAGES, report_page
from dflash2_lab.tables import Run, write_run_info
from dflash2_lab.target import load_target

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "figures" / "losslessness" / "tables"
COMMANDS = {
    "trace": ("trace", "--prompts", "{root}/prompts.jsonl", "--max-new-tokens", "12"),
    "decode": (
        *("decode", "--drafter", "{root}/drafter", "--prompts", "{root}/prompts.jsonl"),
        *("--max-new-tokens", "12"),
    ),
    "decode alone": ("decode", "--drafter", "none", "--prompt", "a", "--max-new-tokens", "8"),
    "train": (
        *("train", "--data", "{root}/traces", "--held-out", "1", "--num-layers", "1"),
        *("--intermediate-size", "16", "--block-size", "4", "--steps", "4", "--batch-size", "2"),
        *("--num-anchors", "2", "--mask-token-id", "3", "--report-every", "2"),
    ),
    "reproduce": ("reproduce", "--drafter", "{root}/drafter", "--limit", "2"),
    "certificate": ("verify", "--drafter", "{root}/drafter", "--temperature", "0.8"),
    "greedy": ("verify", "--drafter", "{root}/drafter", "--temperature", "0"),
    "campaign": ("verify", "--drafter", "{root}/drafter", "--mutation-score"),
    "samples": (
        *("verify", "--samples", "{root}/warm.jsonl", "--temperature", "0.8"),
        *("--top-p", "0.95", "--top-k", "50"),
    ),
    "against": ("verify", "--samples", "{root}/warm.jsonl", "--against", "{root}/again.jsonl"),
    "verify-replay": (
        *("verify-replay", "--drafter", "{root}/drafter", "--prompts", "{root}/prompts.jsonl"),
        *("--max-new-tokens", "8"),
    ),
}  # fmt: skip
WORDS = {  # on the page: its title, its first section
    "trace": ("Traces of", "Responses"),
    "decode": ("Decode with", "Acceptance length"),
    "decode alone": ("Decode without a drafter", "Result"),
    "train": ("Training of a drafter", "At the end, by slot"),
    "reproduce": ("The main job", "Acceptance length, drafter"),
    "certificate": ("Losslessness certificate: passed", "Verdict"),
    "greedy": ("Greedy losslessness certificate: passed", "Verdict"),
    "campaign": ("Mutation score of the engine: passed", "Verdict"),
    "samples": ("Audit of samples: inconclusive", "Verdict"),
    "against": ("Two sample files: ", "Verdict"),
    "verify-replay": ("Decode against replay: equal", "Verdict"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    target = load_target(save_tiny(root / "target"))
    save_drafter(tiny_drafter("dflash2"), root / "drafter")
    lines = [{"id": f"p{i}", "turns": [f"tell me {i}"]} for i in range(3)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_lines(root / "warm.jsonl", draw_lines(target, WARM, 4, 24))
    write_lines(root / "again.jsonl", draw_lines(target, WARM, 4, 24, seed=1))
    made(root, "trace", root / "traces")
    return root


def made(root, name, out):
    words = [word.format(root=root) for word in COMMANDS[name]]
    target = ["--target", str(root / "target"), "--device", "cpu"]
    assert main([*words, *target, "--out", str(out)]) == 0
    return out


@pytest.fixture
def small(monkeypatch):
    """Checks of few tokens, and figures left out where they are not looked at."""
    monkeypatch.setattr(
        verify_decode_commands, "plan_of", lambda _level, seed: Plan(300, 10, seed=seed)
    )
    monkeypatch.setattr(verify_decode_commands, "QUICK", Plan(60, 2))
    monkeypatch.setattr(verify_decode_commands, "FAULTS", {"residual-is-p": None})
    monkeypatch.setattr(verify_decode_commands, "CONTROLS", {"correct": None})
    monkeypatch.setattr(verify_decode_commands, "mutation_score", lambda seed: Score())
    monkeypatch.setattr("dflash2_lab.reproduce.save_figures", lambda *_: Saved())
    monkeypatch.setattr("dflash2_lab.html_report.record_figures", lambda runs: {})


class Score:
    """Stands for the score of the toy, which takes half a minute and has its own tests."""

    def to_dict(self):
        counts = {"killed": 36, "total": 36, "killed_by_sampling": 35}
        return counts | {"controls_passed": 8, "false_alarms": 0}


class Saved:
    """Stands for the figures' files."""

    skipped = ""


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("small")
def test_what_a_command_leaves_has_a_page(name, root, tmp_path, capsys):
    folder = made(root, name, tmp_path / "run")
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0, capsys.readouterr().err
    text = (folder / "report.html").read_text()
    title, first = WORDS[name]
    assert text.split("<h1>")[1].startswith(title)
    assert text.split("<h2>")[1].startswith(f"{first}</h2>")
    assert "<h2>Provenance" in text and "did NOT pass" not in text
    assert "http" not in without_scripts(text)


def test_every_kind_that_is_written_anywhere_has_a_page():
    source = "".join(path.read_text() for path in (ROOT / "dflash2_lab").rglob("*.py"))
    written = {*re.findall(r'"kind": "([a-z-]+)",', source)}
    assert written >= {"trace", "record", "decode", "train", "reproduce", "bench", "verify-replay"}
    assert written <= {*PAGES}


# what is refused: one sentence, never a stack trace


@pytest.mark.parametrize("kind", [*PAGES, "of tomorrow", None])
def test_a_folder_that_holds_next_to_nothing_is_one_sentence(kind, tmp_path, capsys):
    write_run_info(tmp_path, {"kind": kind, "complete": True})
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and str(tmp_path) in error
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("kind", PAGES)
def test_a_run_that_was_stopped_before_its_end_is_one_sentence(kind, tmp_path, capsys):
    write_run_info(tmp_path, {"kind": kind, "complete": False})
    assert main(["report", str(tmp_path)]) == 2
    assert "the run is unfinished" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{", "{}"])
def test_a_malformed_result_is_one_sentence(text, tmp_path):
    write_run_info(tmp_path, {"kind": "verify-samples", "complete": True})
    (tmp_path / "verify.json").write_text(text)
    with pytest.raises(LabError, match="malformed"):
        report_page(tmp_path)


def test_a_check_in_memory_is_refused():
    with pytest.raises(LabError, match="run in memory: of kind 'bench'"):
        report_page(Run(info={"kind": "bench"}))


# traces


def traces(**change):
    shared = {"turn": 0, "sample": 0, "dataset": "self", "prompt_ids": [1, 2], "finish": "eos"}
    shared |= {"logprob": [-1.0], "logprob_unfiltered": [-1.0], "on_policy": True}
    rows = [
        shared | {"prompt_id": f"self/{index:03d}", "response_ids": [*range(10 + 10 * index)]}
        for index in range(5)
    ]
    rows[4]["finish"] = "length"
    info = {"kind": "trace", "target": {"name": "t", "dtype": "float32"}, "prompt_set_hash": "ab"}
    info |= {"template": [{"options": {"enable_thinking": False}, "system": "be brief"}]}
    info |= {"sampling": {"temperature": 0.5, "top_p": 1.0, "top_k": 0}}
    return Run.in_memory(info, {"traces": pd.DataFrame(rows).assign(**change)})


@pytest.fixture
def spelled(monkeypatch):
    """A tokenizer that spells ids."""

    class Tokenizer:
        def decode(self, ids):
            return "".join(f"<{token}>" for token in ids)

    monkeypatch.setattr("dflash2_lab.target.local_tokenizer", lambda name: Tokenizer())


@pytest.mark.usefixtures("spelled")
def test_traces_have_counts_reasons_lengths_hash_template_and_texts():
    text = report_page(traces())
    row = re.findall(r"<td[^>]*>([^<]*)</td>", between(text, "Responses"))
    assert row == ["self", "5", "5", "150", "4", "1"]
    lengths = re.findall(r"<td[^>]*>([^<]*)</td>", between(text, "Tokens of a response"))
    assert lengths == ["self", "10", "14", "20", "30", "40", "46", "50", "30.0"]
    found = between(text, "Prompts and sampling")
    for word in (">ab<", "enable_thinking", "be brief", "sampling.temperature"):
        assert word in found
    samples = between(text, "Some of them")
    assert samples.count("<h3>") == 3
    assert "&lt;1&gt;&lt;2&gt;&lt;0&gt;" in samples
    assert "On policy: 5 of 5" in text and 'role="note"' not in text


@pytest.mark.usefixtures("spelled")
def test_traces_are_marked_off_policy_and_degenerate_before_everything():
    head = report_page(traces(on_policy=[True, False, True, True, True])).split("<h2>")[0]
    assert "1 of 5 responses are off-policy" in head
    loop = report_page(traces(response_ids=[[7] * 40, *([[*range(20)]] * 4)])).split("<h2>")[0]
    assert "degenerate_output: 1 of 5 prompts" in loop


@pytest.mark.usefixtures("spelled")
def test_texts_of_others_are_not_copied():
    text = report_page(traces(dataset="gsm8k"))
    assert "&lt;1&gt;" not in text and "project&#x27;s own prompts only" in text


def test_a_tokenizer_that_is_not_here_leaves_the_page_without_texts():
    assert "No text: target t: neither" in report_page(traces())


def test_traces_of_the_default_target_are_shown_as_its_tokenizer_spells_them():
    run = traces(prompt_ids=[[1, 4093, 198]] * 5)
    run.info["target"]["name"] = "smollm2-135m"
    assert "&lt;|im_start|&gt;user\n" in report_page(run)


def test_traces_without_a_response_are_told():
    run = traces()
    with pytest.raises(LabError, match="found no response"):
        report_page(Run(info=run.info, frames={"traces": run.traces.iloc[:0]}))


# checks


def edited(tmp_path, name, change):
    folder = Path(shutil.copytree(RECORDED / name, tmp_path / name))
    found = json.loads((folder / "certificate.json").read_text())
    change(found)
    (folder / "certificate.json").write_text(json.dumps(found))
    return folder


def test_a_certificate_says_what_was_shown_with_gates_tests_levels_noise_and_score():
    text = report_page(RECORDED / "certificate_pr")
    verdict = between(text, "Verdict")
    for words in ("Shown: all gates hold", "0.090 a token", "Not shown", "36 of 36 broken"):
        assert words in verdict
    gates = between(text, "Gates, T = 1")
    assert gates.count("<tr>") == 1 + 8 and "largest distance of a reported q" in gates
    tests = re.findall(r"<td[^>]*>([^<]*)</td>", between(text, "Tests, T = 1"))
    rows = {row[0]: row[1:] for row in (tests[i : i + 7] for i in range(0, len(tests), 7))}
    assert len(rows) == 17
    # twelve tests of tokens at the level of their family: Anderson-Darling has the smallest p of
    # the first arm, support the largest; five of stages, draft_heat first
    levels = {tier: Budget(arms=3).level(tier) for tier in ("pit", "component")}
    assert rows["ad"][:2] == ["0.312", f"{levels['pit'] / 12:.3g}"]
    assert rows["support"][:2] == ["1", f"{levels['pit']:.3g}"]
    assert rows["draft_heat"][:2] == ["0.277", f"{levels['component'] / 5:.3g}"]
    size = between(text, "Size, T = 1")
    assert "7.53e-06" in size and "1,365" in size and size.count("never") == 3
    assert "did NOT pass" not in text


def test_a_certificate_that_failed_says_so_first_and_names_what_failed(tmp_path):
    def change(found):
        found["passed"] = False
        arm = found["arms"][1]
        arm["checks"][0] |= {"found": 7, "passed": False}
        arm["pit"]["ks"], arm["rejected"], arm["stopped"] = 1e-9, ["ks"], 640

    text = report_page(edited(tmp_path, "certificate_pr", change))
    assert "<h1>Losslessness certificate: FAILED</h1>" in text
    assert "did NOT pass" in text.split("<h2>")[0]
    assert "draws, ks, monitor" in between(text, "Verdict")
    assert "Not shown" not in text
    assert ">7 FAILED<" in between(text, "Gates, T = 1")
    assert ">1e-09 REJECTED<" in between(text, "Tests, T = 1")
    assert "after 640 tokens" in between(text, "Size, T = 1")


def test_the_score_of_the_engine_names_every_fault_and_what_caught_it(tmp_path):
    text = report_page(RECORDED / "engine_faults_t1")
    assert "32 of 32 faults caught" in between(text, "Verdict")
    assert "Not shown" in between(text, "Verdict")
    faults = between(text, "Faults")
    assert faults.count("<tr>") == 1 + 36 and faults.count("changes nothing here") == 4

    def change(found):
        found["passed"] = False
        found["mutants"][0] |= {"passed": False, "spoke": {}, "arm": None}

    text = report_page(edited(tmp_path, "engine_faults_t1", change))
    assert "did NOT pass" in text.split("<h2>")[0]
    assert "nothing (MISSED)" in between(text, "Faults")


@pytest.mark.usefixtures("small")
def test_samples_of_another_law_are_rejected_on_their_page(root, tmp_path, capsys):
    words = ["verify", "--samples", root / "warm.jsonl", "--temperature", 0.1, "--out", tmp_path]
    words += ["--target", root / "target", "--device", "cpu"]
    assert main([str(word) for word in words]) == 1
    text = report_page(tmp_path)
    assert "did NOT pass" in text.split("<h2>")[0]
    assert "differ: the tokens do not have" in between(text, "Verdict")
    assert " REJECTED<" in between(text, "Tests")


# in a browser


@pytest.mark.slow
@needs_browser
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("width", [1280, 640])
@pytest.mark.parametrize("name", [*COMMANDS, *(path.name for path in RECORDED.iterdir())])
def test_a_browser_shows_the_page_offline_without_an_error_or_an_overflow(
    name, width, root, tmp_path
):
    folder = made(root, name, tmp_path / "run") if name in COMMANDS else RECORDED / name
    text = report_page(folder)
    assert len(text.encode()) < LIMIT
    told, lines = opened(text, width)
    assert lines == []
    assert told["window"] == width and told["wide"] <= width
    assert all(svgs > 0 for _, svgs, *_ in told["drawn"])
