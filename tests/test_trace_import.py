"""Imported traces: log-probabilities by teacher forcing, the on-policy check, malformed rows."""

import logging
import math

import numpy as np
import pytest
import torch
from helpers import END_ID, tiny_target

from dflash2_lab.errors import LabError
from dflash2_lab.prompts import Prompt, render
from dflash2_lab.tracing import trace
from dflash2_lab.tracing_import import import_traces

WORDS = ["hi", "what is this?", "tell me of the sea", "x" * 30]
PROMPTS = [Prompt(f"p{i}", (text,), "set") for i, text in enumerate(WORDS)]
LAWS = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]


def responses(run):
    return [list(map(int, ids)) for ids in run.traces["response_ids"]]


@pytest.mark.parametrize("law", LAWS)
def test_own_traces_come_back_from_an_import_on_policy(law):
    target = tiny_target(seed=3)
    run = trace(target, PROMPTS, max_new_tokens=20, **law)
    back = import_traces(target, run.traces.to_dict("records"), **law)
    assert back.info["on_policy"]
    assert back.traces["on_policy"].all()
    assert responses(back) == responses(run)
    assert list(back.traces["finish"]) == list(run.traces["finish"])
    for x, y in zip(back.traces["logprob"], run.traces["logprob"], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


def test_traces_of_another_target_are_marked_off_policy(caplog, tmp_path):
    run = trace(tiny_target(seed=3), PROMPTS[:3], max_new_tokens=20)
    rows = run.traces.to_dict("records")
    other = tiny_target(seed=4)
    own = trace(other, PROMPTS[3:4], max_new_tokens=20).traces.to_dict("records")
    with caplog.at_level(logging.WARNING):
        back = import_traces(other, rows + own, out=tmp_path / "run")
    assert "3 of 4 imported traces are off-policy" in caplog.text
    assert list(back.traces["on_policy"]) == [False, False, False, True]
    assert not back.info["on_policy"]
    assert -math.inf in list(back.traces["logprob"][0])


def test_a_sampled_trace_is_off_policy_where_the_filters_cut_it_off():
    target = tiny_target()
    rows = trace(target, PROMPTS, max_new_tokens=30, temperature=1.5).traces.to_dict("records")
    assert import_traces(target, rows, temperature=1.5).info["on_policy"]
    assert not import_traces(target, rows, temperature=1.5, top_k=2).info["on_policy"]


def test_a_tie_within_rounding_is_on_policy_and_a_second_best_is_not():
    target = tiny_target()
    ids = render(target, PROMPTS[0])
    logits = target.model(torch.tensor([ids])).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    gap = float(logits[first] - logits[second])

    def close_gap(_module, _args, out):
        out[..., second] += gap * 0.999999
        return out

    def row(token):
        return [{"prompt_id": "p", "prompt_ids": ids, "response_ids": [token]}]

    assert not import_traces(target, row(second)).info["on_policy"]
    target.head.register_forward_hook(close_gap)
    assert import_traces(target, row(second)).info["on_policy"]
    assert import_traces(target, row(first)).info["on_policy"]


ROW = {"prompt_id": "p", "prompt_ids": [5, 6], "response_ids": [7, END_ID]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_ids": []}, "response_ids: found"),
        ({"prompt_ids": None}, "prompt_ids: found None"),
        ({"response_ids": [264]}, "id 264 is outside the vocabulary of 264"),
        ({"prompt_ids": [-1]}, "id -1 is outside"),
        ({"response_ids": [END_ID, 7]}, "after an end token"),
        ({"response_ids": [7.5]}, "response_ids: found"),
        ({"response_ids": "hello"}, "response_ids: found 'hello'"),
        ({"response_ids": [[7]]}, "response_ids: found"),
        ({"response_ids": 7}, "response_ids: found 7"),
        ({"response_ids": [None]}, "response_ids: found"),
        ({"turn": "x"}, "turn: found 'x'"),
        ({"sample": -1}, "sample: found -1"),
        ({"prompt_ids": [5] * 511}, "513 tokens, but target tiny-qwen3 has 512"),
    ],
)
def test_malformed_imports_are_errors_that_name_the_row(change, message):
    with pytest.raises(LabError, match=f"imported trace p: .*{message}"):
        import_traces(tiny_target(), [ROW | change])


def test_imports_without_rows_or_with_a_key_twice_are_errors():
    with pytest.raises(LabError, match="no row"):
        import_traces(tiny_target(), [])
    with pytest.raises(LabError, match="share prompt_id"):
        import_traces(tiny_target(), [ROW, ROW])
