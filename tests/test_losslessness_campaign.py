"""The mutation score of the real engine: what is counted, and when a decode is stopped."""

import json
from dataclasses import replace

import pytest
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness import campaign as module
from dflash2_lab.losslessness.campaign import Attempt, Campaign, as_json, campaign, page
from dflash2_lab.losslessness.faults import CONTROLS, FAULTS
from dflash2_lab.losslessness.injection import Hooks
from dflash2_lab.losslessness.verifying import Plan
from dflash2_lab.models.io import load_drafter
from dflash2_lab.prompts import Prompt
from dflash2_lab.sampling import Sampling
from dflash2_lab.target import load_target

PROMPTS = [Prompt(f"p{index}", ("go on" + "!" * index,), "set") for index in range(3)]
PLAIN, FILTERED = Sampling(1.0), Sampling(0.8, 0.95, 50)
ONE_ARM = Plan(20, 2, ("realistic",))  # 8 tokens, then 12


@pytest.fixture(scope="module")
def pair():
    return tiny_target(), tiny_drafter("dflash2")


def run(pair, *names, sampling=FILTERED, plan=ONE_ARM, **options):
    options = {"policy": "selector"} | options
    return campaign(*pair, PROMPTS, sampling=sampling, plan=plan, names=names, **options)


def test_a_fault_is_stopped_at_the_response_that_condemns_it(pair):
    told = []
    found = run(pair, "residual-is-p", "correct", tell=told.append)
    caught, control = found.attempts
    assert told == ["residual-is-p", "correct"]
    assert (caught.tokens, caught.arm, caught.passed) == (8, "realistic", True)
    assert set(caught.spoke) == {"rule"}
    assert (control.tokens, control.arm, control.spoke, control.passed) == (8, None, None, True)
    assert (found.killed, found.total, found.controls_passed, found.controls) == (1, 1, 1, 1)
    assert found.false_alarms == 0 and found.passed


def test_arms_take_turns_so_that_each_fault_meets_its_drafter_early(pair):
    found = run(pair, "bonus-off-by-one", plan=Plan(60, 2)).attempts[0]
    assert (found.arm, found.tokens) == ("near-perfect", 24)


def test_a_fault_that_needs_a_second_response_is_found_there(pair):
    found = run(pair, "rows-swapped", plan=Plan(40, 2, ("realistic",))).attempts[0]
    assert found.tokens == 40 and set(found.spoke) >= {"target"}


def test_the_state_has_to_speak_of_stale_features_and_nothing_else(pair):
    found = run(pair, "stale-features-consistent")
    attempt = found.attempts[0]
    assert (attempt.tokens, set(attempt.spoke)) == (8, {"state"})
    assert attempt.passed and not attempt.alarmed
    assert (found.controls_passed, found.false_alarms) == (1, 0)
    assert not replace(attempt, spoke=None).passed
    assert not replace(attempt, spoke={"state": 1.0, "draws": 2.0}).passed


def test_what_gets_through_the_gates_is_judged_by_the_tests(pair, monkeypatch):
    """With the gates and the monitor silenced the tests alone have to find it."""
    monkeypatch.setattr(module, "_gates", lambda _trial: {})
    monkeypatch.setattr(module, "_monitor", lambda *_: {})
    found = run(pair, "target-rows-off-by-one", plan=Plan(40, 4, ("opposite",))).attempts[0]
    assert (found.tokens, found.arm) == (40, "opposite")
    assert found.spoke["support"] == 0 and found.spoke["ad"] < 1e-4


def test_the_monitor_stops_a_fault_by_itself(pair, monkeypatch):
    monkeypatch.setattr(module, "_gates", lambda _trial: {})
    found = run(pair, "target-rows-off-by-one").attempts[0]
    assert found.tokens == 8 and set(found.spoke) == {"monitor"}
    assert 1 <= found.spoke["monitor"] <= 8


def test_a_fault_that_does_nothing_survives_and_a_loud_control_is_a_false_alarm(pair, monkeypatch):
    planted = {"residual-is-p": Hooks(), "correct": Hooks(residual=lambda p, _x, n: p[n])}
    monkeypatch.setattr("dflash2_lab.losslessness.injection.INJECTED", planted)
    found = run(pair, *planted)
    assert [attempt.tokens for attempt in found.attempts] == [20, 8]
    assert (found.killed, found.total) == (0, 1)
    assert (found.controls_passed, found.controls, found.false_alarms) == (0, 1, 1)
    assert not found.passed
    assert "MISSED" in page(found) and "FAILED" in page(found)


def test_what_changes_nothing_is_said_and_not_counted(pair):
    found = run(pair, "p-untempered", "p-unfiltered", "q-bfloat16", sampling=PLAIN)
    assert [attempt.skipped for attempt in found.attempts] == [
        "T is 1", "there is no top-k or top-p", "",
    ]  # fmt: skip
    assert (found.killed, found.total) == (1, 1)
    text = page(found)
    assert "1 of 1 faults caught" in text and "2 change nothing here" in text
    assert "changes nothing: T is 1" in text


def test_an_arm_in_which_it_changes_nothing_is_left_out(pair):
    found = run(pair, "wrong-anchor-consistent", plan=Plan(60, 2)).attempts[0]
    assert found.tokens == 16 and found.passed


def test_a_score_survives_json_and_has_a_page_of_short_lines(pair):
    found = run(pair, "q-bfloat16", "correct", "p-unfiltered")
    record = json.loads(json.dumps(as_json(found)))
    numbers = ("killed", "total", "controls_passed", "controls", "false_alarms", "passed")
    assert [record[name] for name in numbers] == [2, 2, 1, 1, 0, True]
    assert record["mutants"][0]["spoke"]["q sums"] > 1e-4
    assert record["mutants"][0]["tokens"] == 8 and record["mutants"][0]["passed"]
    assert [entry["name"] for entry in record["controls_tried"]] == ["correct"]
    assert record["configuration"]["sampling"] == "T = 0.8, top-k 50, top-p 0.95"
    assert max(map(len, page(found).splitlines())) <= 110


def test_the_same_seed_gives_the_same_score(pair):
    first, again = (run(pair, "ratio-times-1.3", plan=ONE_ARM) for _ in "12")
    assert first.attempts == again.attempts


BAD = {
    "an unknown name": ({"names": ("correct", "nonsense")}, "inject: found 'nonsense'"),
    "greedy": ({"sampling": Sampling()}, "temperature: found 0"),
    "too few tokens": ({"plan": Plan(19, 2, ("realistic",))}, "expected a prompt and 20 tokens"),
    "an unknown arm": ({"plan": Plan(20, 2, ("kind",))}, "arms: found ['kind']"),
    "a policy of others": ({"policy": "markov"}, "a dflash2 drafter has"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_run_is_told_before_anything_is_decoded(pair, case, monkeypatch):
    monkeypatch.setattr(module, "_attempt", None)
    options, message = BAD[case]
    options = {"names": ("correct",)} | options
    with pytest.raises(LabError) as error:
        run(pair, *options.pop("names"), **options)
    assert message in str(error.value)


def test_the_whole_catalogue_is_tried_unless_names_are_given(pair, monkeypatch):
    monkeypatch.setattr(module, "_attempt", lambda *_: {"tokens": 20})
    found = campaign(*pair, PROMPTS, policy="selector", sampling=FILTERED, plan=ONE_ARM)
    assert [attempt.name for attempt in found.attempts] == [*FAULTS, *CONTROLS]
    assert (found.total, found.controls) == (36, 8)
    assert (found.killed, found.controls_passed) == (0, 7)  # one has to be spoken of


def test_an_attempt_without_a_word_is_a_survivor():
    missed = Attempt("q-bfloat16", "reported q", harmless=False, tokens=20)
    assert not missed.passed and not missed.alarmed
    assert Campaign({}, (missed,), 0.0).killed == 0


FEW = ("wrong-anchor-draw", "first-token-unverified", "residual-is-p", "reseed-every-block")


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_faults_of_each_kind_are_caught_with_smollm2_and_controls_are_not(sampling):
    target = load_target("smollm2-135m", dtype="float32", device="cpu")
    drafter = load_drafter("zoo:dflash2", target=target, dtype="float32", device="cpu")
    plan = Plan(60, 2)
    caught = campaign(target, drafter, sampling=sampling, plan=plan, names=FEW)
    assert (caught.killed, caught.total) == (4, 4)
    plan = Plan(20, 1, ("realistic", "near-perfect"))
    controls = campaign(target, drafter, sampling=sampling, plan=plan, names=[*CONTROLS])
    assert (controls.controls_passed, controls.controls, controls.false_alarms) == (8, 8, 0)
