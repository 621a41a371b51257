"""The verify command: tables, verdicts, exit codes, run folders, and one line for bad input."""

import json

import pytest
from helpers import END_ID, save_tiny
from sample_files import GREEDY, WARM, draw_lines, write_lines

from dflash2_lab.cli import main
from dflash2_lab.losslessness import enumeration_cases, mutation, samples
from dflash2_lab.losslessness.sample_report import mutation_text
from dflash2_lab.sampling import Sampling
from dflash2_lab.tables import read_run_info
from dflash2_lab.target import load_target

WARM_WORDS = ("--temperature", 0.8, "--top-p", 0.95, "--top-k", 50)
GREEDY_WORDS = ("--temperature", 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("verify")
    target = load_target(save_tiny(root / "target"))
    write_lines(root / "warm.jsonl", draw_lines(target, WARM, 4, 24))
    write_lines(root / "again.jsonl", draw_lines(target, WARM, 4, 24, seed=1))
    write_lines(root / "hot.jsonl", draw_lines(target, Sampling(1.5), 4, 24))
    greedy = draw_lines(target, GREEDY, 1, 24)
    write_lines(root / "greedy.jsonl", greedy)
    greedy[1]["output_ids"][5] = 77
    write_lines(root / "wrong.jsonl", greedy)
    return root


def verify(made, *words):
    common = ("--target", made / "target", "--device", "cpu")
    return main([str(word) for word in ("verify", *common, *words)])


def test_samples_of_the_law_are_exit_code_0_with_a_table_and_a_run_folder(made, tmp_path, capsys):
    words = ("--samples", made / "warm.jsonl", *WARM_WORDS, "--out", tmp_path / "run")
    assert verify(made, *words) == 0
    text = capsys.readouterr().out
    for part in (
        "T = 0.8, top-k 50, top-p 0.95",
        "rank_cells",
        "rejected: none",
        "Level pr asks for 4,096 tokens",
        "Not shown",
        "noise band",
        "verdict: inconclusive",
        f"run folder: {tmp_path}/run",
    ):
        assert part in text
    body = text.partition("T > 0")[2].partition("run folder")[0]
    assert max(map(len, body.splitlines())) <= 100
    info = read_run_info(tmp_path / "run")
    assert (info["kind"], info["complete"]) == ("verify-samples", True)
    assert info["verdict"] == "inconclusive"
    assert info["sampling"] == {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
    stored = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert verify(made, *words, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again.pop("folder") == str(tmp_path / "run")
    assert again == stored
    assert verify(made, *words, "--seed", 1) == 2
    assert "holds another run, seed is 0" in capsys.readouterr().err


def test_samples_of_another_law_are_exit_code_1(made, capsys):
    assert verify(made, "--samples", made / "hot.jsonl", *WARM_WORDS) == 1
    text = capsys.readouterr().out
    assert "outside the law: " in text
    assert "verdict: differ - the tokens do not have the target's law" in text
    assert "Not shown" not in text


def test_greedy_samples_are_held_to_the_argmax(made, capsys):
    assert verify(made, "--samples", made / "greedy.jsonl", *GREEDY_WORDS) == 0
    assert "verdict: equal" in capsys.readouterr().out
    assert verify(made, "--samples", made / "wrong.jsonl", *GREEDY_WORDS) == 1
    text = capsys.readouterr().out
    assert "wrong.jsonl:2, position 5, token 77 (best " in text
    assert "give its --dtype" in text
    assert verify(made, "--samples", made / "wrong.jsonl", *GREEDY_WORDS, "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["verdict"], result["sampled"]) == ("bug", None)
    assert result["greedy"]["worst_argmax_gap"]["position"] == 5


def test_two_files_are_compared_without_a_target(made, tmp_path, capsys):
    words = ["--samples", made / "warm.jsonl", "--against", made / "again.jsonl"]
    code = main(["verify", "--target", "no/such", *map(str, words), "--out", str(tmp_path / "run")])
    assert code == 0
    text = capsys.readouterr().out
    for part in ("mmd, Hamming kernel", "16 and 16 outputs", "25 to 125 times the tokens"):
        assert part in text
    assert "verdict: no difference" in text
    assert read_run_info(tmp_path / "run")["kind"] == "verify-against"
    lines = [{"prompt": "hi", "output_ids": [5, 6, 7], "seed": seed} for seed in range(12)]
    first = write_lines(tmp_path / "first.jsonl", lines)
    other = [dict(line, output_ids=[8, 9, 10]) for line in lines]
    second = write_lines(tmp_path / "second.jsonl", other)
    assert main(["verify", "--samples", str(first), "--against", str(second), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["verdict"], result["p_mmd"], result["unit"]) == ("differ", 1e-4, "tokens")


def test_the_mutation_score_is_printed_and_a_fault_that_passes_fails(tmp_path, monkeypatch, capsys):
    score = mutation.mutation_score

    def part(limit, names):
        return lambda seed, progress: score(names, limit, seed, progress)

    names = ["accept-inverted", "q-bfloat16", "correct"]
    monkeypatch.setattr(mutation, "mutation_score", part(64, names))
    assert main(["verify", "--mutation-score", "--out", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert read_run_info(tmp_path / "run")["verdict"] == "complete"
    assert "2 of 2 broken decoders found (1 by the draw contract alone)" in text
    assert "1 of 1 harmless ones passed, 0 false alarms" in text
    table = text.partition("run folder")[0]
    assert max(map(len, table.splitlines())) <= 100
    monkeypatch.setattr(mutation, "mutation_score", part(64, ["ratio-times-1.05"]))
    assert main(["verify", "--mutation-score", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["killed"], result["total"], result["false_alarms"]) == (0, 1, 0)
    assert "NOT FOUND" in mutation_text(result)


LINE = {"prompt": "hi", "output_ids": [5, 6], "seed": 0}
TEXT = {"prompt": "hi", "output": "yes", "seed": 0, "finish_reason": "length"}


def without(line, key):
    return {name: value for name, value in line.items() if name != key}


BAD = {  # the second line of a file, and what its error says
    "malformed JSON": ('{"prompt": "hi", ', "not JSON"),
    "no object": ("[1]", "found list, expected a JSON object"),
    "no prompt": (without(LINE, "prompt"), "found neither, expected one of prompt and prompt_ids"),
    "two prompts": (LINE | {"prompt_ids": [1]}, "found prompt and prompt_ids"),
    "no output": (without(LINE, "output_ids"), "expected one of output_ids and output"),
    "no seed": (without(LINE, "seed"), "found no seed"),
    "a seed that is no integer": (LINE | {"seed": "x"}, 'seed: found "x", expected an integer'),
    "an empty prompt": (LINE | {"prompt": " "}, 'prompt: found " ", expected text'),
    "messages that end with an answer": (
        LINE | {"prompt": [{"role": "assistant", "content": "x"}]},
        "user last",
    ),
    "an empty output": (LINE | {"output_ids": []}, "output_ids: found [], expected a list"),
    "an empty text": (TEXT | {"output": ""}, 'output: found "", expected text'),
    "text without its end": (without(TEXT, "finish_reason"), "without finish_reason"),
    "text of half a character": (TEXT | {"output": "a\ufffd"}, "does not give back"),
    "half of a surrogate pair": (
        '{"prompt": "hi", "output": "\\ud800", "seed": 0, "finish_reason": "length"}',
        "expected text",
    ),
    "a token beyond the vocabulary": (
        LINE | {"output_ids": [5, 264]},
        "output_ids: found 264 (position 1), expected ids below the 264",
    ),
    "a token below the vocabulary": (LINE | {"prompt_ids": [-1], "prompt": None}, "found -1"),
    "tokens after the end": (
        LINE | {"output_ids": [5, END_ID, 6, 7]},
        "found 2 tokens after stop token 2 (position 1)",
    ),
    "a stop token left out": (LINE | {"finish_reason": "stop"}, 'found finish_reason "stop"'),
    "an unknown end": (LINE | {"finish_reason": "eos"}, 'found "eos", expected "stop" or "length"'),
    "a seed twice": (LINE | {"output_ids": [7], "seed": 9}, "the prompt and the seed 9 of"),
    "another template": (LINE | {"prompt_hash": "0" * 64}, "prompt_hash: found 0000"),
    "too long a context": (LINE | {"output_ids": [5] * 512}, "has 512 positions"),
    "its own temperature": (LINE | {"temperature": 1.0}, "found no temperature, but"),
    "a filter without temperature": (LINE | {"top_p": 0.9}, "expected temperature beside it"),
    "a bad temperature": (LINE | {"temperature": -1}, "temperature: found -1"),
    "a temperature that is no number": (LINE | {"temperature": "1"}, 'temperature: found "1"'),
    "another option": (LINE | {"repetition_penalty": 1.1}, "repetition_penalty: found 1.1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_one_line_on_standard_error_and_exit_code_2(name, made, tmp_path, capsys):
    line, message = BAD[name]
    first = LINE | {"seed": 9}
    path = write_lines(tmp_path / "s.jsonl", [first, line])
    assert verify(made, "--samples", path, "--temperature", 1) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith(f"dflash2-lab: {path}:{1 if 'but' in message else 2}: ")
    assert message in last
    assert "Traceback" not in captured.err


OPTIONS = {
    "nothing to do": ([], "expected one of --drafter DRAFTER, --samples FILE, --enumerate and"),
    "both": (["--samples", "{good}", "--mutation-score"], "expected one of --drafter DRAFTER"),
    "no first file": (["--mutation-score", "--against", "{good}"], "expected --samples FILE"),
    "no file": (["--samples", "{tmp}/none.jsonl"], "none.jsonl: cannot be read"),
    "an empty file": (["--samples", "{tmp}/empty.jsonl"], "empty.jsonl: found no sample"),
    "no temperature": (["--samples", "{good}"], "--temperature is not given either"),
    "a bad temperature": (["--samples", "{good}", "--temperature", "-1"], "temperature: found -1"),
    "a bad level": (["--samples", "{good}", "--alpha", "0"], "--alpha: found 0.0"),
    "other prompts": (["--samples", "{good}", "--against", "{tmp}/other.jsonl"], "0 of them"),
    "text against ids": (["--samples", "{good}", "--against", "{tmp}/text.jsonl"], "found output,"),
    "another law": (
        ["--samples", "{tmp}/cold.jsonl", "--against", "{tmp}/hot.jsonl"],
        "found T = 1, but",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_options_are_one_line_on_standard_error_and_exit_code_2(name, made, tmp_path, capsys):
    words, message = OPTIONS[name]
    good = write_lines(tmp_path / "good.jsonl", [LINE])
    write_lines(tmp_path / "empty.jsonl", ["", " "])
    write_lines(tmp_path / "other.jsonl", [LINE | {"prompt": "ho"}])
    write_lines(tmp_path / "text.jsonl", [TEXT])
    write_lines(tmp_path / "cold.jsonl", [LINE | {"temperature": 0.5, "top_k": 7}])
    write_lines(tmp_path / "hot.jsonl", [LINE | {"temperature": 1}])
    assert verify(made, *(word.format(good=good, tmp=tmp_path) for word in words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.strip().splitlines()[-1]
    assert "Traceback" not in captured.err


def test_notes_reach_the_text_and_the_json(made, tmp_path, capsys):
    path = write_lines(tmp_path / "s.jsonl", [TEXT])
    assert verify(made, "--samples", path, "--temperature", 1) == 0
    assert "note: 1 of 1 outputs are text and were tokenised anew" in capsys.readouterr().out
    assert verify(made, "--samples", path, "--temperature", 1, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 1


def test_levels_are_those_of_the_library(made, tmp_path, capsys):
    path = write_lines(tmp_path / "s.jsonl", [LINE])
    for level, tokens in samples.LEVELS.items():
        words = ("--samples", path, "--temperature", 1, "--level", level, "--json")
        assert verify(made, *words) == 0
        assert json.loads(capsys.readouterr().out)["sampled"]["level_tokens"] == tokens


def test_the_enumeration_is_a_table_and_fails_by_its_gate(monkeypatch, capsys):
    cases = enumeration_cases.CASES[:1]
    rows = enumeration_cases.run_enumeration(cases)
    monkeypatch.setattr(enumeration_cases, "run_enumeration", lambda: rows)
    assert main(["verify", "--enumerate"]) == 0
    text = capsys.readouterr().out
    assert "selector_greedy" in text and "verdict: exact" in text
    rows[0] = rows[0]._replace(worst=1e-3)
    assert main(["verify", "--enumerate", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "faulty" and not found["rows"][0]["passed"]


def test_samples_audited_in_low_precision_have_a_run_folder_of_plain_json(made, tmp_path):
    # how far one whole pass may be off has no limit there, and JSON has no infinity
    words = ("--samples", made / "warm.jsonl", *WARM_WORDS, "--dtype", "bfloat16")
    assert verify(made, *words, "--out", tmp_path / "run") in (0, 1)
    noise = json.loads((tmp_path / "run" / "verify.json").read_text())["noise_band"]
    assert noise["by_scoring"]["whole"]["limit"] is None
