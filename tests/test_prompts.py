"""Prompts: files, their faults, rendering, hashes, benchmarks, made-up turns (cases C12, K8)."""

import inspect
import json
import sys
from types import SimpleNamespace

import pytest
from helpers import tiny_target

from dflash2_lab import benchmarks
from dflash2_lab.benchmarks import BENCHMARKS, benchmark_rows
from dflash2_lab.errors import LabError
from dflash2_lab.prompts import (
    Prompt,
    is_usable_turn,
    load_prompts,
    prompt_set_hash,
    render,
    synthesize_prompts,
    user_prefix,
)


def lines(path, *rows):
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


GOOD = {"id": "a", "turns": ["hello"], "reference": None}


def test_file_is_read_in_order_with_its_name_as_data_set(tmp_path):
    path = lines(
        tmp_path / "mine.jsonl", GOOD, "", {"id": "b", "turns": ["x", "y"], "dataset": "random"}
    )
    assert load_prompts(path) == [
        Prompt("a", ("hello",), "mine"),
        Prompt("b", ("x", "y"), "random"),
    ]
    assert [prompt.id for prompt in load_prompts(str(path), limit=1)] == ["a"]


def test_line_separators_inside_strings_do_not_split_lines(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "turns": ["one\u2028two\x85three"]}\n', encoding="utf-8")
    assert load_prompts(path)[0].turns == ("one\u2028two\x85three",)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a", "turns": ["hi"]}\r\n')
    assert [prompt.id for prompt in load_prompts(path)] == ["a"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "found list"),
        ({"turns": ["x"]}, "id: found None"),
        ({"id": 3, "turns": ["x"]}, "id: found 3"),
        ({"id": "b"}, "turns: found None"),
        ({"id": "b", "turns": "x"}, "turns: found 'x'"),
        ({"id": "b", "turns": [1]}, "list of strings"),
        ({"id": "b", "turns": []}, "'b' is empty"),
        ({"id": "b", "turns": ["x", " \n"]}, "'b' is empty"),
        ({"id": "b", "turns": ["x"], "dataset": ""}, "dataset"),
        ({"id": "a", "turns": ["x"]}, "came before, on line 1"),
        ({"id": "b", "turns": ["\ud800"]}, "half of a surrogate pair"),
        ({"id": "\udfff", "turns": ["x"]}, "half of a surrogate pair"),
    ],
)
def test_malformed_lines_are_errors_with_file_and_line(tmp_path, bad, message):
    with pytest.raises(LabError, match=rf"p\.jsonl:2: .*{message}"):
        load_prompts(lines(tmp_path / "p.jsonl", GOOD, bad))


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LabError, match=r"p\.jsonl: cannot read it"):
        load_prompts(tmp_path / "p.jsonl")


def test_no_prompt_at_all_is_an_error(tmp_path):
    with pytest.raises(LabError, match="found no prompt"):
        load_prompts(lines(tmp_path / "p.jsonl", ""))


@pytest.mark.parametrize(
    ("spec", "message"),
    [("no/such/file", "gsm8k, math500"), ("self:x", "self:N"), ("self:3", "needs the target")],
)
def test_unknown_sources_are_errors(spec, message):
    with pytest.raises(LabError, match=message):
        load_prompts(spec)


def test_limit_must_be_positive(tmp_path):
    with pytest.raises(LabError, match="found 0"):
        load_prompts(lines(tmp_path / "p.jsonl", GOOD), limit=0)


def text_of(target, prompt, history=()):
    return target.tokenizer.decode(render(target, prompt, history))


def test_rendering_ends_where_the_target_answers():
    prompt = Prompt("a", ("hi", "more"), "x", system="be brief")
    assert text_of(tiny_target(), prompt, ["ok"]) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_options_reach_the_template_and_the_hash(tmp_path):
    target, path = tiny_target(), lines(tmp_path / "p.jsonl", GOOD)
    plain = load_prompts(path)
    loud = load_prompts(path, template_options={"shout": True})
    assert text_of(target, loud[0]) == text_of(target, plain[0]) + "LOUD\n"
    assert prompt_set_hash(target, plain) != prompt_set_hash(target, loud)


def test_hash_ignores_order_and_sees_system_and_later_turns():
    target = tiny_target()
    first, second = Prompt("a", ("hi",), "x"), Prompt("b", ("ho", "more"), "x")
    base = prompt_set_hash(target, [first, second])
    assert prompt_set_hash(target, [second, first]) == base
    others = [
        [first],
        [first, Prompt("b", ("ho", "less"), "x")],
        [first, Prompt("b", ("ho", "more"), "x", system="s")],
        [Prompt("a2", ("hi",), "x"), second],
    ]
    assert len({base, *(prompt_set_hash(target, other) for other in others)}) == 5


def test_prompt_longer_than_the_positions_is_an_error():
    with pytest.raises(LabError, match=r"prompt long, turn 0: \d+ tokens, .* 512 positions"):
        render(tiny_target(), Prompt("long", ("word " * 200,), "x"))


def test_target_without_template_is_an_error_unless_one_is_given():
    target = tiny_target()
    target.tokenizer.chat_template = None
    with pytest.raises(LabError, match="no chat template"):
        render(target, Prompt("a", ("hi",), "x"))
    own = (("chat_template", "{{ messages[0]['content'] }}!"),)
    assert text_of(target, Prompt("a", ("hi",), "x", template_options=own)) == "hi!"


@pytest.mark.parametrize("template", ["{{ broken", "{{ raise_exception('no system role') }}"])
def test_a_template_that_fails_is_an_error_of_the_target(template):
    with pytest.raises(LabError, match="tiny-qwen3: its chat template fails"):
        render(tiny_target(), Prompt("a", ("hi",), "d", None, (("chat_template", template),)))


def test_a_prompt_without_a_token_is_an_error():
    with pytest.raises(LabError, match="prompt a, turn 0: no token is left"):
        render(tiny_target(), Prompt("a", ("hi",), "d", None, (("chat_template", "{# #}"),)))


def test_asking_for_a_turn_too_many_is_an_error():
    with pytest.raises(LabError, match="turn 1 asked for, it has 1"):
        render(tiny_target(), Prompt("a", ("hi",), "x"), ["answer"])


ROWS = {
    "gsm8k": {"question": "Q?", "answer": "#### 3"},
    "math500": {"problem": "P", "unique_id": "test/algebra/1.json"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():"},
    "mbpp": {"task_id": 11, "prompt": "Write f."},
    "mt_bench": {"prompt": ["one", "two"], "prompt_id": 9},
}
EXPECTED = {
    "gsm8k": (
        "gsm8k/test/0",
        ("Q?\nPlease reason step by step, and put your final answer within \\boxed{}.",),
    ),
    "math500": (
        "test/algebra/1.json",
        ("P\nPlease reason step by step, and put your final answer within \\boxed{}.",),
    ),
    "humaneval": (
        "HumanEval/0",
        (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n```",
        ),
    ),
    "mbpp": ("mbpp/11", ("Write f.",)),
    "mt_bench": ("mt_bench/81", ("one", "two")),
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_benchmarks_are_pinned_and_formatted(name, monkeypatch):
    asked = {}

    def load_dataset(path, config, **options):
        asked.update(options, path=path, config=config)
        return [ROWS[name]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (prompt,) = load_prompts(name)
    assert (prompt.id, prompt.turns, prompt.dataset) == (*EXPECTED[name], name)
    assert len(asked["revision"]) == 40
    assert set(asked["revision"]) <= set("0123456789abcdef")
    assert "trust_remote_code" not in asked


def test_benchmarks_are_the_five_and_run_no_remote_code():
    assert set(BENCHMARKS) == set(ROWS)
    assert "trust_remote_code" not in inspect.getsource(benchmarks)


def test_benchmark_without_network_or_package_says_what_to_do(monkeypatch):
    def refuse(*_args, **_options):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=refuse))
    with pytest.raises(LabError, match=r"gsm8k.*no route.*JSON-lines file"):
        benchmark_rows("gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LabError, match="pip install datasets"):
        benchmark_rows("gsm8k")


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("What is the capital of France?", True),
        ("Too short now", False),
        ("Qu'est-ce que c'est: \u4f60\u597d\u4f60\u597d\u4f60\u597d, \u4f60\u597d?", False),
        ("{ } ( ) [ ] ; : = = = = = =", False),
        ("", False),
    ],
)
def test_usable_turns_are_plain_english_of_four_words(text, usable):
    assert is_usable_turn(text) is usable


def test_user_prefix_ends_where_the_user_begins():
    target = tiny_target()
    assert target.tokenizer.decode(user_prefix(target)) == "<|im_start|>user\n"


def test_a_target_that_makes_up_nothing_usable_is_an_error():
    with pytest.raises(LabError, match="0 usable ones, expected 1"):
        synthesize_prompts(tiny_target(), 1, max_new_tokens=2, batch_size=500)


def test_default_prompts_are_48_varied_finished_turns():
    prompts = load_prompts("default")
    assert [prompt.id for prompt in prompts] == [f"self/{i:03d}" for i in range(48)]
    assert {prompt.dataset for prompt in prompts} == {"self"}
    texts = [prompt.turns[0] for prompt in prompts]
    assert all(len(prompt.turns) == 1 for prompt in prompts)
    assert all(is_usable_turn(text) for text in texts)
    assert len({" ".join(text.lower().split()) for text in texts}) == 48
    assert len({tuple(text.lower().split()[:3]) for text in texts}) > 24


@pytest.mark.slow
def test_smollm2_makes_up_turns_that_a_seed_repeats(smollm2):
    first = synthesize_prompts(smollm2, 2, seed=1, max_new_tokens=40, batch_size=8)
    assert first == synthesize_prompts(smollm2, 2, seed=1, max_new_tokens=40, batch_size=8)
    assert [prompt.id for prompt in first] == ["self/000", "self/001"]
