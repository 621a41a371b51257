"""`verify` at temperature 0: right decodes pass in any precision, planted faults fail by the gate
that is made for them (cases B1, B2, B4, B5, B7)."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from decode_helpers import OWN_POLICY, oracle, plain_greedy, request
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.decoding import cycle as cycles
from dflash2_lab.decoding import eager
from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.steps import DrafterRow, Proposal
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness import greedy, greedy_machines
from dflash2_lab.losslessness.greedy import make_case, repeat, tied, verify_greedy
from dflash2_lab.losslessness.greedy_certificate import as_json, page
from dflash2_lab.losslessness.greedy_gates import calibrate, judge
from dflash2_lab.losslessness.greedy_machines import ArmEngine
from dflash2_lab.losslessness.verifying import Plan
from dflash2_lab.models.io import load_drafter
from dflash2_lab.prompts import Prompt, load_prompts

PROMPTS = [Prompt(f"p{index}", ("go on" + "!" * index,), "set") for index in range(6)]
GATES = ("regret", "prefix", "flips", "control", "blocks")


def models(dtype="float32", seed=2):
    target, drafter = tiny_target(seed=seed), tiny_drafter("dflash2", seed=seed)
    target.model.to(getattr(torch, dtype))
    return target, drafter.to(getattr(torch, dtype))


def run(pair, arms=("realistic",), tokens=30, responses=3, engine="eager", policy="selector"):
    plan = Plan(tokens * len(arms), responses, arms)
    return verify_greedy(*pair, PROMPTS, policy=policy, plan=plan, engine=engine)


def failed(found):
    """Names of the gates that failed, whatever their arm."""
    return {name.split(" (")[0] for name in found.failed}


def measured(pair, tokens=30, responses=3, engine="eager"):
    """What is verified, one arm, and its calibration."""
    plan = Plan(tokens, responses, ("realistic",))
    case = make_case(*pair, "selector", "token", PROMPTS, plan, engine)
    with torch.inference_mode():
        return case, calibrate(case)


def judged(case, found):
    """Gates of the realistic arm, decoded now: its result and the names of those that failed."""
    with torch.inference_mode():
        texts = [own.tokens for own in found.own]
        answers = greedy_machines.decode_texts(case.machines["realistic"], case.requests, texts)
        arm = judge(case, found, "realistic", answers, 1e-3)
    return arm, {check.name for check in arm.checks if not check.passed}


@pytest.fixture(scope="module")
def plain():
    return measured(models())


@pytest.fixture(scope="module")
def coarse():
    """The graph engine in bfloat16, whose choices are not always those of one-token passes."""
    return measured(models("bfloat16"), 72, 6, "graph")


@pytest.fixture(scope="module")
def right():
    return run(models(), ("realistic", "opposite", "near-perfect"))


def test_a_right_decode_in_float32_is_equal(right):
    assert (right.verdict, right.passed, right.failed) == ("equal", True, ())
    assert [arm.arm for arm in right.arms] == ["realistic", "opposite", "near-perfect"]
    for arm in right.arms:
        assert tuple(check.name for check in arm.checks) == GATES
        assert (arm.tokens, arm.num_flips, arm.divergences, arm.worst.gap) == (30, 0, (), 0.0)
    assert right.arms[2].acceptance_length > 1.5 > right.arms[1].acceptance_length
    assert 0 < right.eps < 1e-4 and right.acceptance_deterministic
    assert {one.way: (one.batch, one.num) for one in right.noise} == {
        "blocks": (1, 30),
        "batch": (3, 30),
    }
    assert right.ladder.num_different == 0 < right.ladder.tokens
    assert right.ladder.largest_noise < 1e-10


def test_a_certificate_is_plain_json_and_a_page(right):
    record = json.loads(json.dumps(as_json(right)))
    assert (record["verdict"], record["passed"]) == ("equal", True)
    assert record["arms"][0]["worst_argmax_gap"].keys() == record["worst_argmax_gap"].keys()
    assert record["worst_argmax_gap"].keys() >= {"gap", "prompt_id", "position", "token"}
    assert all(check["passed"] for arm in record["arms"] for check in arm["checks"])
    assert record["configuration"]["float64"].startswith("1 of 3 prompts, ")
    text = page(right)
    for part in (
        "passed (equal)",
        "worst_argmax_gap: 0",
        "Not shown",
        "torch 2",
        "eps ",
        "99.99 %",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 110


def test_rounding_in_bf16_is_tie_level_and_no_loss(coarse, right):
    # Case B1, second half: every first difference lies inside the band that is reported.
    case, found = coarse
    arm, failures = judged(case, found)
    assert not failures and arm.num_flips > 0
    assert 0 < arm.worst.gap <= found.band
    assert arm.divergences and max(one.gap for one in arm.divergences) <= found.band
    # Case B2: places where the target alone, in blocks, chooses otherwise; all others are ties.
    control = {(case.ids[number], position) for number, position in found.control}
    assert control & {(one.prompt_id, one.position) for one in arm.divergences}
    certificate = replace(right, eps=found.eps, arms=(arm,))
    assert (certificate.verdict, certificate.passed) == ("tie-level", True)
    assert "differ from the target's own only by ties" in page(certificate)


def test_a_mismatch_outside_control_and_band_is_a_bug_of_the_logic(coarse):
    case, found = coarse
    # As if the target had been measured alone in blocks, which hardly move its logits.
    steady = replace(found.noise[0], delta=found.noise[0].delta._replace(largest=np.full(9, 1e-3)))
    arm, failures = judged(case, replace(found, control={}, noise=(steady,)))
    outside = {check.name: check.found for check in arm.checks}["control"]
    assert {"control", "prefix", "regret"} <= failures
    assert outside == sum(one.gap > 4e-3 for one in arm.divergences) > 0


def plant(monkeypatch, once_at=None, change=lambda found, logits: found):
    """Change what the eager engine's verifier says, at one of its steps (None: at all)."""
    accept, law, seen, calls = eager.accept, eager.target_law, [], []

    def keep(target, logits, sampling):
        seen.append(logits)
        return law(target, logits, sampling)

    def changed(*arguments):
        found = accept(*arguments)
        calls.append(found)
        return change(found, seen[-1]) if once_at in (None, len(calls)) else found

    monkeypatch.setattr(eager, "target_law", keep)
    monkeypatch.setattr(eager, "accept", changed)
    return calls


def rank_50(found, logits):
    order = logits[found.num].argsort(descending=True, stable=True)
    return found._replace(token=int(order[50]))


def test_a_wrong_token_of_rank_50_fails_even_in_bf16_and_is_named(monkeypatch):
    # Case B5, in the fifth step of the first response.
    calls = plant(monkeypatch, 5, rank_50)
    found = run(models("bfloat16"))
    assert found.verdict == "bug" and {"regret", "blocks"} <= failed(found)
    place = sum(one.num + 1 for one in calls[:5])
    assert (found.worst.prompt_id, found.worst.position) == ("p0", place)
    assert found.worst.gap > 2 * found.eps
    assert found.worst.token != found.worst.best_token
    text = page(found)
    assert f"worst_argmax_gap: {found.worst.gap:.3g} at prompt p0, position {place}" in text
    assert "FAILED (bug)" in text and "bug of the logic" in text


def test_a_wrong_token_of_rank_50_fails_in_float32(plain, monkeypatch):
    plant(monkeypatch, 5, rank_50)
    _, failures = judged(*plain)
    assert failures == {"regret", "prefix", "flips", "control", "blocks"}


def test_target_rows_off_by_one_fail_in_float64_too(monkeypatch):
    law = eager.target_law

    def later(target, logits, sampling):
        return law(target, torch.cat([logits[1:], logits[-1:]]), sampling)

    monkeypatch.setattr(eager, "target_law", later)
    found = run(models())
    assert {"regret", "prefix", "control", "blocks", "float64"} <= failed(found)
    assert found.ladder.num_different == 1


def test_one_stale_entry_of_the_cache_fails(plain, monkeypatch):
    draft = ArmEngine._draft

    def stale(self, row, *arguments):
        proposal = draft(self, row, *arguments)
        if arguments[2] == 4:  # the anchor; the entry before it is that of another token
            for layer in row.cache.layers:
                layer.keys[..., -1, :] = layer.keys[..., -2, :]
                layer.values[..., -1, :] = layer.values[..., -2, :]
        return proposal

    monkeypatch.setattr(ArmEngine, "_draft", stale)
    arm, failures = judged(*plain)
    assert arm.worst.position > 4
    assert {"regret", "prefix", "blocks"} <= failures


def test_ties_that_go_to_the_last_id_are_counted(plain, monkeypatch):
    law = eager.target_law

    def last_wins(target, logits, sampling):
        return law(target, logits.flip(-1), sampling).flip(-1)

    with torch.inference_mode():
        assert tied(plain[0]) == 0
        monkeypatch.setattr(eager, "target_law", last_wins)
        # In float32 nothing but an exact tie shows it, and the prompts have none.
        assert judged(*plain)[1] == set()
        assert tied(plain[0]) > 5


def test_the_head_is_as_before_when_ties_were_planted(plain):
    target = plain[0].target
    kept = target.head.weight.clone()
    with torch.inference_mode():
        tied(plain[0])
    assert torch.equal(target.head.weight, kept)


def test_too_many_flips_inside_the_band_are_seen_by_their_count_alone(coarse, monkeypatch):
    verify = cycles.verify

    def careless(logits, law, draft, *rest, **options):
        """Takes the second best token whenever it is near the best."""
        accepted, following = verify(logits, law, draft, *rest, **options)
        rows = logits[torch.arange(len(logits)), accepted].float()
        values, ids = rows.topk(2)
        near = (values[:, 0] - values[:, 1] < 0.4) & (ids[:, 0] == following)
        return accepted, torch.where(near, ids[:, 1], following)

    monkeypatch.setattr(cycles, "verify", careless)
    arm, failures = judged(*coarse)
    assert failures == {"flips"}
    assert arm.flip_tail < 1e-3 and arm.num_flips > 2 * arm.expected_flips


def test_a_forward_pass_that_is_wrong_does_not_pass_by_a_wide_band(monkeypatch):
    class Turned(GraphEngine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.cycle.large.trunk.cos.mul_(0.5)

    monkeypatch.setattr(greedy_machines, "GraphEngine", Turned)
    _, found = measured(models(), engine="graph")
    assert [one.largest <= one.limit for one in found.noise] == [True, False]


def test_a_drafter_that_proposes_nothing_is_an_error(plain, monkeypatch):
    nothing = Proposal(torch.empty(0, dtype=torch.long))
    monkeypatch.setattr(DrafterRow, "draft", lambda *_arguments: nothing)
    with pytest.raises(LabError, match=r"no drafts proposed in \d+ steps, so that nothing"):
        judged(*plain)


CHANGES = {  # of a repeated run: responses with other tokens, and whether the counts are the same
    "nothing": (lambda one: one, (0, True)),
    "counts": (lambda one: replace(one, accepted_raw=[*one.accepted_raw[:-1], 9]), (0, False)),
    "tokens": (lambda one: replace(one, response_ids=[*one.response_ids[:-1], 9]), (2, True)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_runs_that_do_not_repeat_are_told(what, plain, right, monkeypatch):
    # Case B7: other accepted counts are on record, other tokens fail.
    (case, found), (change, expected) = plain, CHANGES[what]
    answers = case.machines["realistic"].run(case.requests[:1])
    monkeypatch.setattr(greedy, "decode_texts", lambda *_arguments: [change(answers[0])])
    assert repeat(case, found, "realistic", answers) == expected
    certificate = replace(right, acceptance_deterministic=expected[1])
    assert ("NOT the same" in page(certificate)) == (what == "counts")


BAD = {
    "an engine": ({"engine": "fast"}, "engine: found 'fast', expected 'eager' or 'graph'"),
    "few tokens": ({"tokens": 29}, "expected a prompt and 30 tokens an arm"),
    "arms": ({"arms": ("friendly",)}, "arms: found ['friendly']"),
    "a policy": ({"policy": "markov"}, "a dflash2 drafter has"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_verified_is_told(case):
    options, message = BAD[case]
    with pytest.raises(LabError) as error:
        run(models(), **options)
    assert message in str(error.value)


def test_arms_that_a_policy_has_no_opposite_for_are_left_out():
    assert greedy_machines.fitting_arms(("realistic", "opposite"), "markov") == ("realistic",)
    both = greedy_machines.fitting_arms(("realistic", "opposite"), "selector")
    assert both == ("realistic", "opposite")


def _knowing(engine, sequence, num_draft):
    """Make a graph engine draft what follows in `sequence`, its prompt included."""
    text = torch.tensor([*sequence, *[9] * num_draft])

    def propose():
        places = engine.cycle.progress.start[:, None] + torch.arange(1, num_draft + 1)
        return text[places.clamp_max(len(text) - 1)], None

    engine.cycle._propose = propose


@pytest.mark.parametrize("name", ["eager", "graph"])
@pytest.mark.parametrize("num_draft", [1, 3])
@pytest.mark.parametrize("kind", OWN_POLICY)
@pytest.mark.parametrize("knows", [False, True], ids=["random", "oracle"])
def test_every_decode_loop_gives_the_greedy_tokens(kind, num_draft, name, knows, continued):
    # Case B4: a drafter that is hardly ever right, and one that always is.
    target, prompt, expected = continued
    drafter, policy, limit = tiny_drafter(kind), OWN_POLICY[kind], 1 + 4 * (num_draft + 1)
    asked = request(policy, prompt, limit)
    if name == "eager":
        drafter = oracle(drafter, [*prompt, *expected]) if knows else drafter
        engine = EagerEngine(target, drafter, policy, num_draft)
    else:
        engine = GraphEngine(target, drafter, policy, 1, len(prompt) + limit, num_draft)
        if knows:
            _knowing(engine, [*prompt, *expected], num_draft)
    answer = engine.run([asked])[0]
    assert answer.response_ids == expected[:limit]
    assert (answer.accepted_raw == [num_draft] * 4) == knows


@pytest.fixture(scope="module")
def continued():
    target, prompt = tiny_target(), (23, 24, 25, 26)
    return target, prompt, plain_greedy(target, prompt, 20)


@pytest.mark.slow
def test_smollm2_with_its_drafter_is_greedy_and_its_noise_is_what_was_measured(smollm2):
    drafter = load_drafter("zoo:dflash2", target=smollm2)
    plan = Plan(90, 3, ("realistic", "opposite", "near-perfect"))
    found = verify_greedy(smollm2, drafter, load_prompts("default"), policy="selector", plan=plan)
    assert found.verdict == "equal"
    assert 1e-5 < found.eps < 1e-3
    assert found.ladder.largest_noise < 1e-10
    lengths = [arm.acceptance_length for arm in found.arms]
    assert lengths[1] < lengths[0]
