"""`verify-replay`: decode against replay block by block, ties against bugs (cases B1, B2, B5)."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from decode_helpers import OWN_POLICY, two_word_target
from drafters import tiny_drafter
from helpers import END_ID, save_tiny, tiny_target

from dflash2_lab.agreement import block_comparison, margins, noise_band, verify_replay
from dflash2_lab.agreement.block_comparison import Step
from dflash2_lab.agreement.margins import Subject
from dflash2_lab.cli import main
from dflash2_lab.decoding import cycle as cycles
from dflash2_lab.decoding import eager, graph
from dflash2_lab.models.io import load_drafter, save_drafter
from dflash2_lab.policies import Block
from dflash2_lab.prompts import Prompt, load_prompts
from dflash2_lab.recording import record
from dflash2_lab.sampling import Sampling
from dflash2_lab.tables import read_run_info
from dflash2_lab.tracing import trace
from dflash2_lab.verify_commands import verification_text

PROMPTS = [
    Prompt("one", ("hi",), "set"),
    Prompt("two", ("go on",), "set"),
    Prompt("talk", ("why?", "and then?"), "set"),
]
IDS = ["one", "two", "three", "four"]
PAIRS = [("eager", "replay"), ("graph", "replay"), ("graph", "eager")]
verify = verify_replay.verify_replay


@pytest.fixture(scope="module")
def words():
    """A target that is easy to draft for, and never stops."""
    return replace(two_word_target(), eos_token_ids=frozenset([END_ID]))


def bf16(target, drafter):
    target.model.bfloat16()
    return target, drafter.bfloat16()


def differences(result):
    return [one for pair in result["engine_pairs"] for one in pair["differences"]]


@pytest.mark.parametrize("kind", OWN_POLICY)
def test_in_fp32_decode_and_replay_are_equal_block_by_block(kind, words):
    num_draft = 2 if kind == "dflash2" else None
    result = verify(
        words, tiny_drafter(kind), PROMPTS, 12, num_draft=num_draft, batch_size=2, seed=3
    )
    assert (result["verdict"], result["policy"]) == ("equal", OWN_POLICY[kind])
    assert [tuple(pair["ways"]) for pair in result["engine_pairs"]] == PAIRS
    for pair in result["engine_pairs"]:
        assert pair["num_blocks"] == pair["num_equal"] > 4
        assert pair["num_unshared"] == 0
    assert differences(result) == result["skipped"] == result["broken_scorings"] == []
    assert result["num_responses_equal"] == {"eager": 4, "graph": 4}
    assert result["worst_argmax_gap"]["gap"] == 0
    assert 0 < result["noise_band"]["target"] < 1e-4
    assert 0 < result["noise_band"]["draft"] < 1e-3


def test_ends_by_stop_token_and_by_length_are_compared_too():
    result = verify(two_word_target(), tiny_drafter(), PROMPTS, 20)
    assert result["verdict"] == "equal"
    assert result["num_tokens"] < 80  # some responses stop


def test_differences_of_bf16_are_ties_and_later_blocks_are_still_compared():
    # Cases B1 and B2.
    result = verify(*bf16(tiny_target(seed=2), tiny_drafter(seed=2)), PROMPTS, 18)
    assert result["verdict"] == "tie-level"
    assert result["num_bugs"] == 0 < result["num_ties"]
    band = result["noise_band"]
    for one in differences(result):
        assert one["verdict"] == "tie"
        assert one["gap"] <= 2 * band[one["kind"]]
    assert min(result["num_responses_equal"].values()) < 4
    # Hardly a draft is accepted: all text was compared, though some responses left the trace.
    for pair in result["engine_pairs"]:
        assert pair["num_blocks"] > 0.9 * 4 * 18
    assert {"whole", "eager", "graph"} == set(band["by_scoring"]["target"])
    flips = [noise["num_flips"] for noise in band["by_scoring"]["target"].values()]
    assert min(flips) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_planted_wrong_token_is_a_bug_in_any_precision(dtype, monkeypatch):
    # Case B5: rank 50, once, in the seventh step of the first response.
    target, drafter = tiny_target(seed=2), tiny_drafter(seed=2)
    if dtype == "bfloat16":
        bf16(target, drafter)
    calls, seen = [], []
    law = eager.target_law

    def keep_logits(target, logits, sampling):
        seen.append(logits)
        return law(target, logits, sampling)

    def planted(*arguments):
        found = accept(*arguments)
        calls.append(found)
        if len(calls) != 7:
            return found
        order = seen[-1][found.num].argsort(descending=True, stable=True)
        return found._replace(token=int(order[50]))

    accept = eager.accept
    monkeypatch.setattr(eager, "target_law", keep_logits)
    monkeypatch.setattr(eager, "accept", planted)
    result = verify(target, drafter, PROMPTS[:2], 12)
    assert result["verdict"] == "bug"
    bugs = [one for one in differences(result) if one["verdict"] == "bug"]
    assert [tuple(one["ways"]) for one in bugs] == [PAIRS[0], PAIRS[2]]
    place = sum(found.num + 1 for found in calls[:7])
    assert {(one["prompt_id"], one["position"], one["kind"]) for one in bugs} == {
        ("one", place, "target")
    }
    worst = result["worst_argmax_gap"]
    assert (worst["prompt_id"], worst["position"], worst["verdict"]) == ("one", place, "bug")
    assert worst["gap"] == bugs[0]["gap"] > 4 * result["noise_band"]["target"]
    assert worst["token"] == bugs[0]["found"][0] != worst["best_token"]
    # The rest of that response is not looked at; the other one is.
    eager_pair = result["engine_pairs"][0]
    assert eager_pair["num_bugs"] == 1
    assert 12 < eager_pair["num_blocks"] < 24


def test_a_graph_engine_that_emits_another_token_is_a_bug(words, monkeypatch):
    def off_by_one(*arguments, **options):
        accepted, following = verify_rows(*arguments, **options)
        return accepted, (following + 1) % 264

    verify_rows = cycles.verify
    monkeypatch.setattr(cycles, "verify", off_by_one)
    result = verify(words, tiny_drafter(), PROMPTS[:2], 12)
    assert result["verdict"] == "bug"
    assert result["engine_pairs"][0]["num_bugs"] == 0
    assert result["engine_pairs"][1]["num_bugs"] > 0


def test_a_drafter_that_differs_from_the_recorded_one_is_a_bug_of_the_drafts(words, monkeypatch):
    drafter = tiny_drafter("dflash")

    def other_weights(target, drafter, *arguments, **options):
        return record(target, tiny_drafter("dflash", seed=1), *arguments, **options)

    monkeypatch.setattr(verify_replay, "record", other_weights)
    result = verify(words, drafter, PROMPTS, 10)
    assert result["verdict"] == "bug"
    assert result["num_responses_equal"] == {"eager": 4, "graph": 4}
    pair = result["engine_pairs"][0]
    assert pair["num_bugs"] > 0
    assert {one["kind"] for one in pair["differences"]} == {"draft"}
    assert result["engine_pairs"][2]["num_bugs"] == 0  # both engines have the same drafter


def test_a_steps_table_that_disagrees_otherwise_is_a_bug(words, monkeypatch):
    def shifted(*arguments):
        frame = steps_frame(*arguments)
        return frame.assign(context_len=frame["context_len"] + 1)

    steps_frame = block_comparison.steps_frame
    monkeypatch.setattr(block_comparison, "steps_frame", shifted)
    result = verify(words, tiny_drafter(), PROMPTS[:1], 8)
    assert {one["kind"] for one in differences(result)} == {"table"}
    assert result["verdict"] == "bug"


def test_a_forward_pass_that_is_wrong_does_not_widen_the_band(words, monkeypatch):
    # Rotary angles of the wrong base, in the graph engine alone.
    class Turned(graph.GraphEngine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.cycle.large.trunk.cos.mul_(0.5)

    monkeypatch.setattr(verify_replay, "GraphEngine", Turned)
    result = verify(tiny_target(), tiny_drafter(), PROMPTS[:1], 12)
    assert result["verdict"] == "bug"
    assert {line.split(":")[0] for line in result["broken_scorings"]} == {"graph"}
    assert result["noise_band"]["target"] < 1e-4
    assert result["noise_band"]["by_scoring"]["target"]["graph"]["is_rounding"] is False


def test_traces_that_are_not_greedy_are_noticed(words):
    traces = trace(words, PROMPTS[:1], max_new_tokens=8)
    response = [int(token) for token in traces.traces.loc[0, "response_ids"]]
    frame = traces.traces.assign(response_ids=[[*response[:7], 77]])
    rows = list(frame.itertuples(index=False))
    subject = Subject(words, tiny_drafter(), "selector", 3)
    limits = {"max_new_tokens": 8, "max_total": None}
    requests = block_comparison.trace_requests(subject, rows, limits)
    band = noise_band.measure_band(subject, subject, rows, requests, None)
    worst = noise_band.Judge(subject, rows, band).worst()
    assert (worst["position"], worst["token"], worst["verdict"]) == (7, 77, "bug")
    assert worst["best_token"] == response[7]


def test_an_architecture_without_a_graph_engine_is_skipped_in_one_line():
    result = verify(tiny_target("mistral"), tiny_drafter(), PROMPTS[:1], 8)
    assert [tuple(pair["ways"]) for pair in result["engine_pairs"]] == PAIRS[:1]
    assert len(result["skipped"]) == 1
    assert "graph engine skipped: target tiny-mistral has architecture" in result["skipped"][0]
    assert result["verdict"] == "equal"


STEPS = {  # (mine, theirs, their tokens) and the differences: (kind, place, found)
    "equal": (Step(1, (5, 6)), Step(1, (5, 6)), (5, 6), []),
    "another bonus token": (Step(1, (5, 6)), Step(1, (5, 7)), (5, 7), [("target", 1, (6, 7))]),
    "fewer drafts accepted": (Step(1, (5, 6)), Step(2, (5, 6, 8)), (5, 6), [("draft", 1, (1, 2))]),
    "both": (
        Step(2, (5, 6, 7)),
        Step(0, (5,)),
        (5, 6, 9),
        [("draft", 0, (2, 0)), ("target", 2, (7, 9))],
    ),
    "drafts behind another token": (
        Step(3, (5, 6, 7, 8)),
        Step(1, (5, 9)),
        (5, 9),
        [("target", 1, (6, 9))],
    ),
    "no block there": (Step(1, (5, 6)), None, (5, 6), []),
    "a prefill": (Step(None, (5,)), Step(2, (5, 6, 7)), (5,), []),
    "other columns": (
        Step(1, (5, 6), (4, "")),
        Step(1, (5, 6), (4, "eos")),
        (5, 6),
        [("table", 0, ((4, ""), (4, "eos")))],
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_differences_of_a_block(name):
    mine, theirs, tokens, expected = STEPS[name]
    assert block_comparison._block_differences(mine, theirs, tokens) == expected


@pytest.mark.parametrize("kind", OWN_POLICY)
def test_a_draft_margin_is_positive_where_the_recorded_path_hits(kind, words):
    drafter, policy = tiny_drafter(kind), OWN_POLICY[kind]
    traces = trace(words, PROMPTS[:2], max_new_tokens=12)
    run = record(words, drafter, traces, (policy,), attention=False)
    paths = run.paths.set_index(["prompt_id", "anchor", "slot"])["hit"]
    subject = Subject(words, drafter, policy, drafter.settings.num_draft)
    compared = 0
    for row in traces.traces.itertuples():
        anchors = np.arange(len(row.response_ids) - 1)
        _, block = margins.whole_pass(subject, row, anchors)
        found = margins.draft_margins(block, policy)
        for anchor in anchors:
            hits = paths.loc[row.prompt_id, anchor].tolist()
            # Behind the first miss a path follows its own tokens, a margin the trace's.
            known = hits.index(False) + 1 if False in hits else len(hits)
            assert (found[anchor, :known] > 0).tolist() == hits[:known]
            compared += known
    assert compared > 20


@pytest.mark.parametrize(("kind", "policy"), [("dflash", "top1"), ("dflash2", "selector")])
def test_the_graph_engines_own_drafts_are_those_of_its_margins(kind, policy, words):
    drafter = tiny_drafter(kind)
    subject = Subject(words, drafter, policy, 3)
    rows = list(trace(words, PROMPTS[:2], max_new_tokens=8).traces.itertuples(index=False))
    requests = block_comparison.trace_requests(
        subject, rows, {"max_new_tokens": 8, "max_total": None}
    )
    engine = graph.GraphEngine(words, drafter, policy, 2, 60)
    with torch.inference_mode():
        engine.admit([0, 1], requests)
        path, _ = engine.cycle._propose()
        tokens = torch.cat([engine.cycle.progress.anchor[:, None], path], dim=1)
        drafted = margins._lean_draft(engine.cycle, tokens)
        block = Block(drafter=drafter, sampling=Sampling(), uniforms={}, **drafted)
        assert (margins.draft_margins(block, policy) > 0).all()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("verify")
    save_tiny(root / "target")
    save_drafter(tiny_drafter("dflash2"), root / "drafter")
    lines = [{"id": name, "turns": [name]} for name in IDS]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def arguments(made, *more):
    words = ["verify-replay", "--target", made / "target", "--drafter", made / "drafter"]
    words += ["--prompts", made / "prompts.jsonl", "--device", "cpu", "--max-new-tokens", 8]
    return [str(word) for word in (*words, *more)]


def test_the_command_prints_a_table_and_writes_a_run_folder(made, tmp_path, capsys):
    assert main(arguments(made, "--limit", 2, "--out", tmp_path / "run")) == 0
    text = capsys.readouterr().out
    for part in ("graph = eager", "greedy, float32 on cpu", "worst argmax gap", "verdict: equal"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100
    info = read_run_info(tmp_path / "run")
    assert (info["kind"], info["verdict"], info["complete"]) == ("verify-replay", "equal", True)
    result = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert main(arguments(made, "--limit", 2, "--out", tmp_path / "run", "--json")) == 0
    again = json.loads(capsys.readouterr().out)
    assert again.pop("folder") == str(tmp_path / "run")
    assert again == result
    assert main(arguments(made, "--limit", 3, "--out", tmp_path / "run")) == 2
    assert "holds another run" in capsys.readouterr().err


def test_the_command_compares_laws_at_a_temperature(made, capsys):
    words = ["--temperature", 1.5, "--top-k", 30, "--samples", 4, "--policy", "top1"]
    words += ["--num-draft", 1, "--json", "--limit", 2]
    assert main(arguments(made, *words)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] in ("agree", "inconclusive")
    assert result["num_responses_shared"] == result["num_responses"] == 8
    assert result["engine_pairs"][0]["counts"] == result["engine_pairs"][1]["counts"]
    text = verification_text(result)
    for part in ("T = 1.5, top-k 30", "graph = replay", "8 conversations a side", "num_draft 1,"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_command_compares_block_verification_with_its_own_replay(made, capsys):
    words = ["--temperature", 1.5, "--samples", 3, "--policy", "sampled", "--json", "--limit", 2]
    assert main(arguments(made, *words, "--acceptance", "block")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] in ("agree", "inconclusive")
    assert result["acceptance"] == "block"
    assert result["num_responses_shared"] == result["num_responses"] == 6
    assert "block verification, T = 1.5, float32" in verification_text(result)
    assert main(arguments(made, *words)) == 0
    token = json.loads(capsys.readouterr().out)
    for block, other in zip(result["engine_pairs"], token["engine_pairs"], strict=True):
        assert block["counts"][0] != other["counts"][0]  # the engine by this rule
        assert block["counts"][1] != other["counts"][1]  # and the replay


def test_block_verification_is_equal_in_greedy_runs(words):
    result = verify(words, tiny_drafter(), PROMPTS[:1], 8, acceptance="block")
    assert (result["verdict"], result["acceptance"]) == ("equal", "block")


def test_a_failed_check_is_exit_code_1_with_its_differences(made, monkeypatch, capsys):
    accept = eager.accept

    def planted(*arguments):
        return accept(*arguments)._replace(token=200)

    monkeypatch.setattr(eager, "accept", planted)
    assert main(arguments(made)) == 1
    text = capsys.readouterr().out
    assert "bug: prompt one, position " in text
    assert "eager emits token 200, replay " in text
    assert "verdict: bug" in text
    assert max(map(len, text.splitlines())) <= 100


def test_bad_options_are_exit_code_2(made, capsys):
    for words, message in (
        (["--policy", "viterbi"], "viterbi"),
        (["--num-draft", 9], "num_draft"),
        (["--temperature", -1], "temperature"),
        (["--batch-size", 0], "batch_size"),
        (["--temperature", 1, "--samples", 0], "samples"),
    ):
        assert main(arguments(made, *words)) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2_decodes_as_it_replays(smollm2):
    drafter = load_drafter("zoo:dflash2", target=smollm2)
    result = verify(smollm2, drafter, load_prompts("default", limit=3), 32)
    assert result["verdict"] == "equal"
    assert result["num_bugs"] == result["num_ties"] == 0
    assert result["num_responses_equal"] == {"eager": 3, "graph": 3}
    assert result["num_blocks"] > 90
    assert result["worst_argmax_gap"]["gap"] == 0
    assert 0 < result["noise_band"]["target"] < 1e-3
