"""`lab.decode`: its result, conversations, randomness, run folders, bad input (cases A7, A8, C15,
D3, D6)."""

import json
import math

import pandas as pd
import pytest
import torch
from decode_helpers import ALL_POLICIES, hybrid_target, two_word_target
from drafters import tiny_drafter
from helpers import END_ID, tiny_model, tiny_target, tiny_tokenizer

import dflash2_lab as lab
from dflash2_lab.decoding import api
from dflash2_lab.decoding.api import busy_seconds, decode, steps_acceptance
from dflash2_lab.errors import LabError
from dflash2_lab.prompts import Prompt, render
from dflash2_lab.sampling import filter_logits
from dflash2_lab.schema import conform_frame
from dflash2_lab.tables import Run
from dflash2_lab.target import wrap_target
from dflash2_lab.tracing import trace

PROMPTS = [
    Prompt(f"p{i}", (text,), f"set{i % 2}") for i, text in enumerate(["hi", "go on", "why?"])
]
TALK = Prompt("talk", ("hi", "and then?", "why?"), "set0")


@pytest.fixture(scope="module")
def target():
    return two_word_target()


@pytest.fixture(scope="module")
def output(target):
    return lab.decode(target, tiny_drafter(), [*PROMPTS, TALK], max_new_tokens=12)


def test_the_result_has_a_row_for_every_turn(output):
    keys = list(zip(output.requests["prompt_id"], output.requests["turn"], strict=True))
    assert keys == [*((f"p{i}", 0) for i in range(3)), *(("talk", turn) for turn in range(3))]
    assert output.requests["num_tokens"].tolist() == list(map(len, output.tokens))
    assert output.requests["dataset"].tolist() == ["set0", "set1", "set0", *["set0"] * 3]
    assert (output.engine, output.policy, output.num_draft) == ("eager", "selector", 3)
    assert len(output.texts) == 6
    pd.testing.assert_frame_equal(output.steps, conform_frame(output.steps, "steps"))
    assert (output.steps["policy"] == "selector").all()


def test_turns_follow_the_targets_own_answers(target, output):
    # Greedy, so the tokens are those of a trace, which is tested by itself.
    run = trace(target, [*PROMPTS, TALK], max_new_tokens=12)
    assert output.tokens == [list(map(int, ids)) for ids in run.traces["response_ids"]]
    assert output.requests["finish"].tolist() == run.traces["finish"].tolist()
    own = output.steps[(output.steps["prompt_id"] == "talk") & (output.steps["anchor"] == 0)]
    for turn, context_len in zip(own["turn"], own["context_len"], strict=True):
        assert context_len == len(render(target, TALK, output.texts[3 : 3 + turn]))


def test_acceptance_is_the_steps_summed_up(output):
    steps, found = output.steps, output.acceptance
    assert found.pooled.value == pytest.approx(steps["num_emitted"].mean())
    per_request = steps.groupby(["prompt_id", "turn"])["num_emitted"].mean()
    assert found.per_request.value == pytest.approx(per_request.mean())
    uncut = steps[steps["terminal"] == ""]
    assert found.pooled_uncut.value == pytest.approx(uncut["num_emitted"].mean())
    for slot, estimate in enumerate(found.survival, start=1):
        offered = steps[steps["num_offered"] >= slot]
        assert estimate.value == pytest.approx((offered["num_accepted"] >= slot).mean())
        assert estimate.num == len(offered)
    assert found.pooled.low <= found.pooled.value <= found.pooled.high
    single = (output.requests["num_tokens"] == 1).sum()
    assert single == found.num_requests_dropped == 6 - found.num_requests > 0
    again = steps_acceptance(steps.sample(frac=1.0, random_state=0), output.requests, 3)
    assert again.survival == found.survival


def test_seconds_and_tokens_per_second_are_of_decoding_only():
    times = iter(range(1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api.time, "perf_counter", lambda: float(next(times)))
        output = decode(tiny_target(), None, PROMPTS, max_new_tokens=5)
    # One look at the clock a token: four seconds a response, none for its prefill.
    assert output.requests["seconds"].tolist() == [4.0, 4.0, 4.0]
    assert output.tokens_per_second == 1.0
    assert busy_seconds([(0.0, 4.0), (1.0, 3.0), (3.5, 6.0), (9.0, 10.0)]) == 7.0


def test_without_a_drafter_there_is_no_step(target, output):
    plain = decode(target, None, [*PROMPTS, TALK], max_new_tokens=12)
    assert plain.tokens == output.tokens
    assert plain.steps.empty
    assert (plain.acceptance, plain.policy, plain.num_draft) == (None, None, 0)


def test_responses_of_one_token_have_no_acceptance(target):
    output = decode(target, tiny_drafter(), PROMPTS, max_new_tokens=1)
    assert output.acceptance is None
    assert output.tokens_per_second is None
    assert list(map(len, output.tokens)) == [1, 1, 1]


def test_randomness_depends_on_seed_prompt_turn_and_sample_only(target):
    options = {"max_new_tokens": 8, "temperature": 2.0}
    drafter = tiny_drafter()
    two = decode(target, drafter, PROMPTS, samples=2, **options)
    assert two.requests["sample"].tolist() == [0, 1] * 3
    assert len(set(map(tuple, two.tokens))) == 6
    backwards = decode(target, drafter, PROMPTS[::-1], **options)
    assert backwards.tokens == two.tokens[4::-2]
    assert decode(target, drafter, PROMPTS, seed=1, **options).tokens != two.tokens[::2]


@pytest.mark.parametrize(("kind", "policy"), ALL_POLICIES)
def test_sampled_output_stays_inside_the_filters_under_every_policy(target, kind, policy):
    # Cases A7 and A8: the policy is on record, and no token is outside the truncated law.
    law = {"temperature": 1.5, "top_p": 0.8, "top_k": 4}
    prompts = PROMPTS[1:]
    output = decode(target, tiny_drafter(kind), prompts, 8, policy=policy, **law)
    assert set(output.steps["policy"]) == {policy}
    assert set(output.steps["temperature"]) == {1.5}
    for prompt, response in zip(prompts, output.tokens, strict=True):
        ids = torch.tensor([[*render(target, prompt), *response]])
        p = filter_logits(target.model(ids).logits[0, -len(response) - 1 : -1], **law)
        assert (p.gather(-1, torch.tensor(response)[:, None]) > 0).all()


def test_the_acceptance_rule_reaches_the_engine_and_is_on_record(target, tmp_path):
    outputs = {
        rule: decode(target, tiny_drafter(), PROMPTS, 30, 0.3, acceptance=rule, out=tmp_path / rule)
        for rule in ("token", "block")
    }
    for rule, output in outputs.items():
        assert output.acceptance_rule == rule
        assert Run.open(tmp_path / rule, "decode").info["acceptance"] == rule
    # The same random numbers lead to other steps.
    assert outputs["token"].tokens != outputs["block"].tokens
    greedy = [decode(target, tiny_drafter(), PROMPTS, 12, acceptance=rule) for rule in outputs]
    assert greedy[0].tokens == greedy[1].tokens
    assert greedy[0].steps.equals(greedy[1].steps)


def test_responses_end_where_the_positions_or_the_total_do(target):
    prompt = PROMPTS[0]
    length = len(render(target, prompt))
    small = tiny_target(max_position_embeddings=length + 3)
    for options, room in (({}, 3), ({"max_total": length + 1}, 1), ({"max_total": 999}, 3)):
        output = decode(small, tiny_drafter(), [prompt], temperature=1, **options)
        assert len(output.tokens[0]) == room
        assert output.requests["finish"].tolist() == ["length"]
    with pytest.raises(LabError, match=f"target tiny-qwen3 has {length} positions"):
        decode(tiny_target(max_position_embeddings=length), tiny_drafter(), [prompt])


@pytest.mark.parametrize(
    ("config", "generation", "union"),
    [(7, None, (2, 7)), ([7, 9], 11, (2, 7, 9, 11)), (None, None, (2,))],
)
def test_stop_ids_are_the_union_of_all_sources_and_are_told(config, generation, union):
    # Case D6; the tokenizer says 2.
    model = tiny_model(eos_token_id=config)
    model.generation_config.eos_token_id = generation
    target = wrap_target(model, tiny_tokenizer(), "tiny")
    output = decode(target, tiny_drafter(), PROMPTS[:1], max_new_tokens=3)
    assert output.stop_ids == union


def test_on_tokens_hears_every_step_of_every_turn(target):
    heard = []
    output = decode(
        target, tiny_drafter(), [TALK], 8, on_tokens=lambda turn, ids: heard.append((turn, ids))
    )
    for number in range(3):
        parts = [ids for turn, ids in heard if turn.turn == number]
        assert [token for part in parts for token in part] == output.tokens[number]
        assert len(parts) == 1 + (output.steps["turn"] == number).sum()


def test_a_run_folder_has_steps_and_no_text(target, tmp_path):
    options = {"max_new_tokens": 6, "temperature": 0.7, "seed": 4, "num_draft": 2}
    output = decode(target, tiny_drafter(), PROMPTS, out=tmp_path, **options)
    run = Run.open(tmp_path, "decode")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "steps-00000.parquet"]
    pd.testing.assert_frame_equal(run.steps, output.steps)
    info = json.loads((tmp_path / "run.json").read_text())
    assert (info["policy"], info["num_draft"], info["engine"]) == ("selector", 2, "eager")
    assert info["drafter"]["num_draft"] == 3
    assert info["sampling"] == {"temperature": 0.7, "top_p": 1.0, "top_k": 0}
    assert info["eos_token_ids"] == [END_ID, 90]
    assert info["num_tokens"] == sum(map(len, output.tokens))
    assert info["complete"]
    again = decode(target, tiny_drafter(), PROMPTS, out=tmp_path, **options)
    pd.testing.assert_frame_equal(again.steps, output.steps)
    with pytest.raises(LabError, match="holds another run, seed"):
        decode(target, tiny_drafter(), PROMPTS, out=tmp_path, **(options | {"seed": 5}))


BAD = {
    "no limit": ({"max_new_tokens": 0}, "max_new_tokens: found 0"),
    "no sample": ({"samples": 0}, "samples: found 0"),
    "no batch": ({"batch_size": 0}, "batch_size: found 0"),
    "a negative temperature": ({"temperature": -1.0}, "temperature: found -1"),
    "an unknown policy": ({"policy": "oracle@5"}, "policies: found"),
    "an unknown engine": ({"engine": "fast"}, "engine: found 'fast', expected 'eager' or 'graph'"),
    "an unknown rule": ({"acceptance": "tree"}, "acceptance: found 'tree', expected 'token' or"),
    "a rule that no engine has": (
        {"acceptance": "tree", "engine": "graph"},
        "acceptance: found 'tree', expected 'token' or",
    ),
    "too many slots": ({"num_draft": 4}, "num_draft: found 4, expected 1 to 3"),
    "no prompt": ({"prompts": []}, "no prompt"),
    "a prompt twice": ({"prompts": [PROMPTS[0]] * 2}, "'p0' comes twice"),
    "no room": ({"max_total": 10}, "leave no room"),
    "a policy and no drafter": ({"drafter": None, "policy": "top1"}, "without a drafter"),
    "a drafter of another target": ({"drafter": tiny_drafter(hidden_size=64)}, "wrong target"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_error_and_leaves_no_folder(target, name, tmp_path):
    change, message = BAD[name]
    options = {"drafter": tiny_drafter(), "prompts": PROMPTS, "out": tmp_path / "run"} | change
    with pytest.raises(LabError, match=message):
        decode(target, **options)
    assert not (tmp_path / "run").exists()


def test_a_recurrent_target_is_refused_before_anything_is_decoded():
    heard = []
    with pytest.raises(LabError, match="recurrent state"):
        decode(
            hybrid_target("qwen3_next"),
            tiny_drafter(),
            PROMPTS,
            on_tokens=lambda *told: heard.append(told),
        )
    assert heard == []


def test_a_drafter_of_nan_is_an_error_and_no_acceptance_of_one(target, tmp_path):
    # Case C15.
    drafter = tiny_drafter()
    drafter.layers[0].mlp.down_proj.weight.fill_(torch.nan)
    with pytest.raises(LabError, match=r"drafter dflash2: layers\.0"):
        decode(target, drafter, PROMPTS, out=tmp_path)
    with pytest.raises(LabError, match="unfinished"):
        Run.open(tmp_path)


def test_an_engine_that_a_later_turn_does_not_fit_is_made_anew(target, monkeypatch):
    # Bytes that are no text come back as three tokens each, so later prompts grow beyond any guess.
    made = []
    real = api._engine
    monkeypatch.setattr(api, "_engine", lambda *args: made.append(args[-1]) or real(*args))
    output = decode(tiny_target(), None, [TALK], max_new_tokens=12)
    prompts = [len(render(target, TALK, output.texts[:turn])) for turn in range(3)]
    guess = len(render(target, TALK, ["", ""])) + 3 * 12
    assert made == [guess, prompts[2] + 12]
    assert api._longest(target, [TALK], 12, 60) == 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zoo:dflash", "zoo:dflash2"])
def test_smollm2_decodes_its_greedy_answers_and_replays_to_the_same_steps(smollm2, name):
    prompts = lab.load_prompts("default", limit=3)
    drafter = lab.load_drafter(name, target=smollm2)
    traces = trace(smollm2, prompts, max_new_tokens=40)
    output = lab.decode(smollm2, drafter, prompts, max_new_tokens=40)
    assert output.tokens == [list(map(int, ids)) for ids in traces.traces["response_ids"]]
    run = lab.record(smollm2, drafter, traces, attention=False)
    steps = lab.replay(run, output.policy).steps
    columns = ["prompt_id", "anchor", "num_offered", "num_accepted", "num_emitted", "terminal"]
    pd.testing.assert_frame_equal(output.steps[columns], steps[columns])
    assert output.acceptance.pooled.value > 1.5
    assert math.isfinite(output.tokens_per_second)
