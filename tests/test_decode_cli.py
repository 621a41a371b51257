"""The decode command on tiny models: streaming, summary, --json, exit codes."""

import io
import json
import os
import subprocess
import sys

import pytest
from drafters import tiny_drafter
from helpers import save_tiny, tiny_target, tiny_tokenizer

from dflash2_lab.cli import main
from dflash2_lab.decode_commands import Detokenizer, Stream
from dflash2_lab.decoding.api import decode
from dflash2_lab.models.io import load_drafter, save_drafter
from dflash2_lab.prompts import Prompt, load_prompts
from dflash2_lab.tables import Run
from dflash2_lab.target import load_target
from dflash2_lab.tracing import Turn


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny target, a drafter and prompts, one of them of two turns."""
    root = tmp_path_factory.mktemp("decode")
    save_tiny(root / "target")
    save_drafter(tiny_drafter("dflash2"), root / "drafter")
    lines = [{"id": "one", "turns": ["hi"]}, {"id": "two", "turns": ["tell me", "and then?"]}]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture(scope="module")
def expected(made):
    target = load_target(made / "target")
    drafter = load_drafter(made / "drafter", target=target)
    return decode(target, drafter, load_prompts(made / "prompts.jsonl"), max_new_tokens=10)


def arguments(made, *more):
    common = ["--target", made / "target", "--drafter", made / "drafter", "--device", "cpu"]
    return [str(word) for word in ("decode", *common, "--max-new-tokens", 10, *more)]


def test_responses_are_streamed_with_headers_and_summed_up(made, expected, capsys):
    assert main(arguments(made, "--prompts", made / "prompts.jsonl")) == 0
    out = capsys.readouterr().out
    headers = ("== one", "== two, turn 0", "== two, turn 1")
    streamed = "".join(
        f"{header}\n{text}\n\n" for header, text in zip(headers, expected.texts, strict=True)
    )
    assert out.startswith(streamed)
    summary = out.removeprefix(streamed)
    for part in (
        "acceptance length",
        "selector",
        "survival",
        "30 tokens in 3 responses",
        "by length",
    ):
        assert part in summary
    assert f"{expected.acceptance.pooled.value:.2f} [" in summary
    assert "tokens/s, eager engine, wall clock" in summary
    assert max(map(len, summary.splitlines())) <= 100


def test_one_prompt_as_text_has_no_header(made, capsys):
    assert main(arguments(made, "--prompt", "hi")) == 0
    out = capsys.readouterr().out
    assert "==" not in out
    assert "10 tokens in 1 response:" in out


def test_json_is_one_object_and_all_there_is_on_standard_output(made, expected, capsys, tmp_path):
    options = ["--prompts", made / "prompts.jsonl", "--json", "--out", tmp_path / "run"]
    assert main(arguments(made, *options)) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["policy"], result["num_draft"], result["engine"]) == ("selector", 3, "eager")
    pooled = result["acceptance_length"]["pooled"]
    assert pooled["value"] == expected.acceptance.pooled.value
    assert pooled["interval"][0] <= pooled["value"] <= pooled["interval"][1]
    assert len(result["survival"]) == len(result["conditional_acceptance"]) == 3
    assert result["tokens_per_step"] <= result["accepted_drafts_per_step"] + 1
    assert result["eos_token_ids"] == [2]
    assert result["num_tokens"] == 30
    assert result["finish"] == {"length": 3}
    assert [response["text"] for response in result["responses"]] == expected.texts
    assert result["folder"] == str(tmp_path / "run")
    assert Run.open(tmp_path / "run", "decode").steps.equals(expected.steps)


def test_without_a_drafter_the_text_is_the_same(made, expected, capsys):
    words = arguments(made, "--prompts", made / "prompts.jsonl", "--json", "--drafter", "none")
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert [response["text"] for response in result["responses"]] == expected.texts
    assert (result["acceptance_length"], result["policy"], result["drafter"]) == (
        None,
        None,
        "none",
    )


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_sampling_options_reach_the_decoder(made, engine, capsys):
    words = ["--prompt", "hi", "--temperature", 1.5, "--seed", 3, "--samples", 2, "--num-draft", 2]
    words += ["--acceptance", "block", "--engine", engine]
    assert main(arguments(made, *words, "--policy", "sampled", "--limit", 1, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["policy"], result["num_draft"], len(result["responses"])) == ("sampled", 2, 2)
    assert result["acceptance"] == "block"
    target = load_target(made / "target")
    again = decode(
        target,
        load_drafter(made / "drafter", target=target),
        [Prompt("prompt", ("hi",), "prompt")],
        max_new_tokens=10,
        temperature=1.5,
        seed=3,
        samples=2,
        num_draft=2,
        policy="sampled",
        acceptance="block",
    )
    assert [response["text"] for response in result["responses"]] == again.texts


BAD = {
    "two sources of prompts": (
        ["--prompt", "hi", "--prompts", "default"],
        "--prompt and --prompts",
    ),
    "an empty prompt": (["--prompt", " "], "--prompt: found no text"),
    "an unknown policy": (["--prompt", "hi", "--policy", "viterbi"], "viterbi"),
    "a window beyond the trained one": (["--prompt", "hi", "--num-draft", "9"], "num_draft"),
    "a policy and no drafter": (
        ["--prompt", "hi", "--drafter", "none", "--policy", "top1"],
        "without a drafter",
    ),
    "a bad temperature": (["--prompt", "hi", "--temperature", "-1"], "temperature"),
    "a prompt longer than the positions": (["--prompt", "x" * 600], "512 positions"),
    "no such drafter": (["--prompt", "hi", "--drafter", "zoo:none"], "zoo:none"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_on_standard_error_and_exit_code_2(name, made, capsys):
    words, message = BAD[name]
    assert main(arguments(made, *words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip().splitlines()[-1].startswith("dflash2-lab: ")
    assert message in captured.err


def test_a_reader_that_leaves_in_the_middle_of_the_stream_is_no_error(made, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(arguments(made, "--prompt", "hi")) == 0


def pieces(tokenizer, ids, sizes):
    detokenizer, out, start = Detokenizer(tokenizer), [], 0
    for size in sizes:
        last = start + size >= len(ids)
        out.append(detokenizer.add(ids[start : start + size], last))
        start += size
    return out


def test_a_character_of_several_tokens_is_shown_when_it_is_complete():
    # One token a byte here: the euro sign has three, the wave four.
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a€b👋")["input_ids"]
    assert len(ids) == 9
    assert pieces(tokenizer, ids, [1] * 9) == ["a", "", "", "€", "b", "", "", "", "👋"]
    assert pieces(tokenizer, ids, [2, 5, 2]) == ["a", "€b", "👋"]
    assert pieces(tokenizer, ids[:6], [3, 3]) == ["a", "€b\N{REPLACEMENT CHARACTER}"]


def test_streamed_pieces_join_to_the_whole_text(expected):
    tokenizer = tiny_tokenizer()
    for ids, text in zip(expected.tokens, expected.texts, strict=True):
        for size in (1, 3):
            assert "".join(pieces(tokenizer, ids, [size] * len(ids))) == text


def test_rows_that_grow_together_are_written_one_after_the_other():
    out = io.StringIO()
    stream = Stream(tiny_target(), out, headed=True)
    ids = {letter: tiny_tokenizer()(letter)["input_ids"] for letter in "abc"}
    turns = [Turn(Prompt(name, ("x",), "set"), 0, 0, [5], 3) for name in ("p", "q", "r")]
    stream(turns[0], ids["a"])
    stream(turns[1], ids["b"])
    assert out.getvalue() == "== p\na"
    stream(turns[1], [*ids["b"], 2])  # the end token
    stream(turns[2], ids["c"])
    assert out.getvalue() == "== p\na"
    stream(turns[0], [*ids["a"], *ids["a"]])  # the limit
    assert out.getvalue() == "== p\naaa\n\n== q\nbb\n\n== r\nc"


@pytest.mark.slow
def test_smollm2_streams_its_answer_in_a_process_of_its_own():
    words = [
        "--drafter",
        "zoo:dflash2",
        "--prompt",
        "Name three colours.",
        "--max-new-tokens",
        "24",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "dflash2_lab", "decode", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer, summary = done.stdout.split("\n\nacceptance length")
    assert len(answer.split()) > 3
    assert "zoo:dflash2" in summary
    assert "tokens/s" in summary
