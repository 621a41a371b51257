"""Traces: batches equal single rows, randomness by key, limits, resuming (cases D3, H5)."""

import json

import numpy as np
import pytest
import torch
from helpers import END_ID, tiny_target

from dflash2_lab import tracing as trace_module
from dflash2_lab.errors import LabError
from dflash2_lab.generate import Request, generate
from dflash2_lab.prompts import Prompt, render
from dflash2_lab.sampling import Sampling, token_logprobs
from dflash2_lab.tables import Run, read_run_info
from dflash2_lab.tracing import trace
from dflash2_lab.tracing_import import import_traces

WORDS = ["hi", "what is this?", "tell me of the sea and of the sky", "x" * 30, "go", "a b c"]
PROMPTS = [Prompt(f"p{i}", (text,), "set") for i, text in enumerate(WORDS)]
LAWS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 1.2, "top_p": 0.7},
]


def responses(run):
    return [list(map(int, ids)) for ids in run.traces["response_ids"]]


def greedy_by_hand(target, ids, limit):
    """One full forward pass a token, without a cache."""
    out = []
    while len(out) < limit:
        logits = target.model(torch.tensor([[*ids, *out]])).logits[0, -1]
        out.append(int(logits.argmax()))
        if out[-1] in target.eos_token_ids:
            break
    return out


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3", {}), ("llama", {}), ("mistral", {"sliding_window": 12})],
)
def test_greedy_traces_equal_stepping_without_cache_or_padding(family, overrides):
    target = tiny_target(family, **overrides)
    run = trace(target, PROMPTS, max_new_tokens=40, batch_size=4)
    for prompt, response in zip(PROMPTS, responses(run), strict=True):
        assert response == greedy_by_hand(target, render(target, prompt), 40)


@pytest.mark.parametrize("law", LAWS)
def test_rows_do_not_depend_on_their_batch(law):
    target = tiny_target(seed=1)
    alone = trace(target, PROMPTS, max_new_tokens=40, batch_size=1, samples=2, **law)
    for other in (
        trace(target, PROMPTS, max_new_tokens=40, batch_size=5, samples=2, **law),
        trace(target, PROMPTS[::-1], max_new_tokens=40, batch_size=64, samples=2, **law),
    ):
        frame = other.traces.sort_values(["prompt_id", "sample"], ignore_index=True)
        assert frame["response_ids"].map(list).equals(alone.traces["response_ids"].map(list))
        for column in ("logprob", "logprob_unfiltered"):
            for x, y in zip(frame[column], alone.traces[column], strict=True):
                np.testing.assert_allclose(x, y, atol=2e-4)


def test_randomness_depends_on_seed_prompt_and_sample():
    target = tiny_target()
    options = {"max_new_tokens": 24, "temperature": 1.5}
    run = trace(
        target, [*PROMPTS[:2], Prompt("again", PROMPTS[0].turns, "s")], samples=2, **options
    )
    rows = [tuple(row) for row in responses(run)]
    assert len(set(rows)) == 6
    assert responses(trace(target, PROMPTS[:1], samples=2, **options)) == [
        list(r) for r in rows[:2]
    ]
    assert responses(trace(target, PROMPTS[:1], seed=1, **options)) != [list(rows[0])]


@pytest.mark.parametrize("law", LAWS)
def test_logprobs_are_those_of_a_teacher_forced_pass(law):
    target = tiny_target(seed=2)
    run = trace(target, PROMPTS[:3], max_new_tokens=20, **law)
    for row in run.traces.itertuples():
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        logits = target.model(ids).logits[0, len(row.prompt_ids) - 1 : -1]
        tokens = torch.tensor(list(row.response_ids))
        filtered, plain = token_logprobs(logits, tokens, Sampling(**law))
        np.testing.assert_allclose(row.logprob, filtered.numpy(), atol=1e-4)
        np.testing.assert_allclose(row.logprob_unfiltered, plain.numpy(), atol=1e-4)


def eager_to_stop(target, by=2.5):
    """A target whose logit of the end token is raised, so that answers end at varied lengths."""

    def raise_end(_module, _args, logits):
        logits[..., END_ID] += by
        return logits

    target.head.register_forward_hook(raise_end)
    return target


def test_rows_end_at_eos_and_leave_while_others_go_on():
    target = eager_to_stop(tiny_target())
    run = trace(target, PROMPTS, max_new_tokens=60, temperature=1.0, samples=4)
    lengths = [len(row) for row in responses(run)]
    assert min(lengths) < 16 < max(lengths)
    for row, why in zip(responses(run), run.traces["finish"], strict=True):
        assert END_ID not in row[:-1]
        assert why == ("eos" if row[-1] == END_ID else "length")
    alone = trace(target, PROMPTS, max_new_tokens=60, temperature=1.0, samples=4, batch_size=1)
    assert responses(alone) == responses(run)


def test_eos_as_first_token_is_an_answer_of_one_token():
    run = trace(eager_to_stop(tiny_target(), by=1e4), PROMPTS[:2], max_new_tokens=5)
    assert responses(run) == [[END_ID], [END_ID]]
    assert set(run.traces["finish"]) == {"eos"}


def test_every_limit_up_to_two_checks_is_met_exactly():
    target = eager_to_stop(tiny_target(), by=-1e4)
    for limit in (1, 2, 15, 16, 17, 33):
        run = trace(target, PROMPTS[:2], max_new_tokens=limit)
        assert [len(row) for row in responses(run)] == [limit, limit]
        assert set(run.traces["finish"]) == {"length"}


def test_rows_of_one_batch_may_have_their_own_limits():
    target = tiny_target()
    ids = render(target, PROMPTS[0])
    limits = [1, 40, 3, 17]
    answers = generate(target, [Request(ids, 0, n) for n in limits], Sampling(), 8)
    longest = answers[1].response_ids
    assert [a.response_ids for a in answers] == [longest[:n] for n in limits]


def test_max_total_cuts_prompt_and_answer_together():
    target = tiny_target()
    lengths = [len(render(target, prompt)) for prompt in PROMPTS]
    run = trace(target, PROMPTS, max_new_tokens=30, max_total=max(lengths) + 4)
    for length, row in zip(lengths, responses(run), strict=True):
        assert len(row) == min(30, max(lengths) + 4 - length)
    with pytest.raises(LabError, match="prompt p2: 52 tokens leave no room"):
        trace(target, PROMPTS, max_total=max(lengths))


def test_positions_of_the_target_are_a_limit_too():
    target = tiny_target(max_position_embeddings=64)
    run = trace(target, PROMPTS[:1], max_new_tokens=500)
    assert len(run.traces["prompt_ids"][0]) + len(responses(run)[0]) == 64


def test_turns_follow_the_targets_own_answers():
    target = tiny_target()
    talk = Prompt("talk", ("hi", "and then?", "why?"), "set")
    run = trace(target, [PROMPTS[0], talk], max_new_tokens=12)
    assert list(zip(run.traces["prompt_id"], run.traces["turn"], strict=True)) == [
        ("p0", 0),
        ("talk", 0),
        ("talk", 1),
        ("talk", 2),
    ]
    answers = [target.tokenizer.decode(r, skip_special_tokens=True) for r in responses(run)[1:]]
    assert list(run.traces["prompt_ids"][3]) == render(target, talk, answers[:2])


def test_target_is_left_as_it_was():
    target = tiny_target()
    trace(target, PROMPTS[:2], max_new_tokens=4)
    assert target.config._attn_implementation == "sdpa"


def test_generation_looks_at_the_device_once_in_sixteen_tokens(monkeypatch):
    looks = []
    real = torch.Tensor.nonzero
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda self: looks.append(1) or real(self))
    monkeypatch.setattr(
        torch.Tensor, "item", lambda self: pytest.fail("a device value was read on the host")
    )
    target = tiny_target()
    generate(target, [Request([5, 6, 7], 1, 64)] * 3, Sampling(1.0), 3)
    assert len(looks) == 3


def test_finished_rows_leave_the_batch(monkeypatch):
    sizes = []
    target = eager_to_stop(tiny_target())
    target.decoder.embed_tokens.register_forward_hook(lambda _m, a, _o: sizes.append(len(a[0])))
    trace(target, PROMPTS, max_new_tokens=64, temperature=1.0, samples=4)
    assert sizes[0] == 24
    assert sizes[-1] < 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"samples": 0}, "samples"),
        ({"batch_size": 0}, "batch_size"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(LabError, match=message):
        trace(tiny_target(), PROMPTS[:1], **options)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_target_of_broken_weights_is_an_error_and_leaves_no_traces(name, law, tmp_path):
    target = tiny_target()
    made = trace(target, PROMPTS[:2], max_new_tokens=4).traces.to_dict("records")
    target.model.get_parameter(name)[5, 0] = torch.nan
    with pytest.raises(LabError, match="tiny-qwen3: its logits are not finite"):
        trace(target, PROMPTS[:2], max_new_tokens=4, out=tmp_path, **law)
    assert not list(tmp_path.glob("*.parquet"))
    with pytest.raises(LabError, match="tiny-qwen3: its logits are not finite"):
        import_traces(target, made, **law)


def test_repeated_ids_and_no_prompts_are_errors():
    with pytest.raises(LabError, match="'p0' comes twice"):
        trace(tiny_target(), [PROMPTS[0], PROMPTS[0]])
    with pytest.raises(LabError, match="no prompt"):
        trace(tiny_target(), [])


MANY = [Prompt(f"m{i}", (f"question {i}",), "set") for i in range(11)]


def test_a_run_broken_off_resumes_to_the_same_tables(tmp_path, monkeypatch):
    target = tiny_target()
    options = {"max_new_tokens": 6, "temperature": 1.0, "batch_size": 1}
    whole = trace(target, MANY, out=tmp_path / "whole", **options)
    assert whole.info["complete"]
    real = trace_module.write_shard

    def broken(folder, table, index, frame):
        if index == 1:
            raise KeyboardInterrupt
        real(folder, table, index, frame)

    monkeypatch.setattr(trace_module, "write_shard", broken)
    with pytest.raises(KeyboardInterrupt):
        trace(target, MANY, out=tmp_path / "part", **options)
    assert not read_run_info(tmp_path / "part")["complete"]
    made = []
    monkeypatch.setattr(
        trace_module, "write_shard", lambda *args: made.append(args[2]) or real(*args)
    )
    resumed = trace(target, MANY, out=tmp_path / "part", **options)
    assert made == [1, 2]
    for name in ("traces-00000", "traces-00001", "traces-00002"):
        path = f"{name}.parquet"
        assert (tmp_path / "part" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes()
    assert resumed.info["complete"]
    assert responses(resumed) == responses(trace(target, MANY, **options))


def test_a_finished_run_is_not_made_again(tmp_path, monkeypatch):
    target = tiny_target()
    trace(target, MANY[:2], max_new_tokens=3, out=tmp_path / "run")
    monkeypatch.setattr(trace_module, "generate", lambda *_: pytest.fail("generated again"))
    assert len(trace(target, MANY[:2], max_new_tokens=3, out=tmp_path / "run").traces) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 5}, "seed"),
        ({"max_new_tokens": 4}, "max_new_tokens"),
        ({"temperature": 1.0}, "sampling"),
        ({"prompts": MANY[:3]}, "prompt_set_hash"),
    ],
)
def test_a_folder_of_another_run_is_refused(tmp_path, change, named):
    target = tiny_target()
    options = {"prompts": MANY[:2], "max_new_tokens": 3, "out": tmp_path / "run"}
    trace(target, **options)
    with pytest.raises(LabError, match=f"holds another run, {named}"):
        trace(target, **(options | change))


def test_tables_without_run_information_are_refused(tmp_path):
    target = tiny_target()
    trace(target, MANY[:2], max_new_tokens=3, out=tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(LabError, match=r"no run\.json"):
        trace(target, MANY[:2], max_new_tokens=3, out=tmp_path)


def test_run_information_says_what_the_numbers_depend_on(tmp_path):
    target = tiny_target()
    prompts = [Prompt("a", ("hi",), "set", "be brief", (("shout", True),))]
    run = trace(target, prompts, max_new_tokens=3, temperature=0.5, top_p=0.9, seed=4, out=tmp_path)
    info = json.loads((tmp_path / "run.json").read_text())
    assert info == Run.open(tmp_path).info == run.info
    assert info["kind"] == "trace"
    assert info["sampling"] == {"temperature": 0.5, "top_p": 0.9, "top_k": 0}
    assert info["target"] == {"name": "tiny-qwen3", "dtype": "float32", "quantisation": "none"}
    assert info["template"] == [{"system": "be brief", "options": {"shout": True}}]
    assert info["eos_token_ids"] == [END_ID]
    assert (info["seed"], info["on_policy"], info["complete"]) == (4, True, True)
    assert len(info["prompt_set_hash"]) == 64


@pytest.mark.slow
def test_smollm2_batches_give_the_greedy_tokens_of_single_rows_and_of_transformers(smollm2):
    texts = ["Hi", "Name three colours of the sea.", "What is 17 + 25? " * 6, "Tell me a joke."]
    prompts = [Prompt(str(i), (text,), "set") for i, text in enumerate(texts)]
    run = trace(smollm2, prompts, max_new_tokens=40)
    assert responses(trace(smollm2, prompts, max_new_tokens=40, batch_size=1)) == responses(run)
    for prompt, row in zip(prompts, responses(run), strict=True):
        ids = torch.tensor([render(smollm2, prompt)])
        made = smollm2.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False
        )
        assert made[0, ids.shape[1] :].tolist() == row
    assert import_traces(smollm2, run.traces.to_dict("records")).info["on_policy"]


@pytest.mark.slow
def test_smollm2_sampled_rows_do_not_depend_on_their_batch(smollm2):
    prompts = [Prompt(str(i), (text,), "s") for i, text in enumerate(["Hi", "Why is it so? " * 5])]
    options = {"max_new_tokens": 24, "temperature": 0.8, "top_p": 0.9, "top_k": 50}
    assert responses(trace(smollm2, prompts, **options)) == responses(
        trace(smollm2, prompts, batch_size=1, **options)
    )
