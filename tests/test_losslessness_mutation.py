"""The catalogue of faults and its score on the toy."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.battery import Budget
from dflash2_lab.losslessness.fault import STAGES
from dflash2_lab.losslessness.faults import CONTROLS, FAULTS, find_fault
from dflash2_lab.losslessness.mutation import (
    DRAW_CONTRACT,
    first_tokens,
    judge,
    mutation_score,
    p_values,
    rejections,
)
from dflash2_lab.losslessness.toy import ToyConfig, make_toy
from dflash2_lab.losslessness.toy_decoding import Rules, decode
from dflash2_lab.losslessness.toy_observing import observe_drafts, observe_tokens

EARLY = [name for name, fault in FAULTS.items() if fault.num_tokens and fault.num_tokens <= 512]


def test_the_catalogue_has_36_faults_and_8_controls_each_with_formula_and_reason():
    assert (len(FAULTS), len(CONTROLS)) == (36, 8)
    assert not set(FAULTS) & set(CONTROLS)
    for name, fault in {**FAULTS, **CONTROLS}.items():
        assert name == fault.name and re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", name)
        assert fault.stage in STAGES
        assert fault.formula and "\n" not in fault.formula
        assert fault.why and "\n" not in fault.why
        assert fault.rules != Rules() or name == "correct"
    assert len({fault.formula for fault in FAULTS.values()}) == 36


def test_sizes_are_powers_of_two_and_one_fault_is_left_to_the_contract():
    sizes = {name: fault.num_tokens for name, fault in FAULTS.items()}
    assert [name for name, size in sizes.items() if size is None] == ["q-bfloat16"]
    assert all(size & (size - 1) == 0 for size in sizes.values() if size)
    assert len(EARLY) == 22
    assert all(control.num_tokens is None for control in CONTROLS.values())


@pytest.mark.parametrize("name", EARLY)
def test_strong_faults_are_found_at_the_size_of_their_entry(name):
    outcome = judge(make_toy(), FAULTS[name], FAULTS[name].num_tokens)
    assert outcome.tokens is not None
    assert 64 <= outcome.tokens <= outcome.num_tokens == FAULTS[name].num_tokens
    assert outcome.found_by != DRAW_CONTRACT


def all_tests(name, num_tokens, seed=0):
    toy = make_toy()
    decoded = decode(toy, find_fault(name).rules, num_tokens, seed=seed)
    tests = observe_tokens(toy, decoded, num_tokens), observe_drafts(toy, decoded, num_tokens)
    return p_values(*tests, np.random.default_rng(seed))


def test_a_draw_from_another_law_than_reported_is_seen_in_the_drafts_before_the_tokens():
    assert rejections(all_tests("draft-untempered", 4096, seed=1))[0] == "draft_heat"


def test_each_tier_has_its_share_of_the_budget_and_the_monitor_its_own():
    tiers = all_tests("residual-is-p", 2048)
    assert {tier: len(tests) for tier, tests in tiers.items()} == {
        "pit": 12, "component": 5, "monitor": 1,
    }  # fmt: skip
    assert {"residual_ad", "drafter_cells", "monitor"} <= set(rejections(tiers))
    quiet = {tier: dict.fromkeys(tests, 1.0) for tier, tests in tiers.items()}
    assert rejections(quiet) == []
    for tier, name, level in (
        ("pit", "ks", 0.5e-3 / 12),
        ("component", "draft_ad", 0.3e-3 / 5),
        ("monitor", "monitor", 0.2e-3),
    ):
        for factor, found in ((0.99, [name]), (1.01, [])):
            one = quiet | {tier: quiet[tier] | {name: factor * level}}
            assert rejections(one) == found
    assert rejections(one, Budget(alpha=2e-3)) == ["monitor"]


def test_rounding_of_q_is_found_by_the_contract_and_not_by_sampling():
    score = mutation_score(["q-bfloat16"])
    assert (score.killed, score.killed_by_sampling) == (1, 0)
    assert score.mutants[0].found_by == DRAW_CONTRACT
    assert decode(make_toy(), FAULTS["q-bfloat16"].rules, 64).drawn_apart < 4e-3


def test_the_contract_is_silent_where_the_law_reported_is_the_one_drawn_from():
    for name in ("correct", "wrong-anchor-consistent", "filtered-q-consistent", "residual-is-p"):
        assert decode(make_toy(), find_fault(name).rules, 64).drawn_apart == 0


@pytest.mark.parametrize("name", CONTROLS)
def test_harmless_controls_pass(name):
    outcome = judge(make_toy(), CONTROLS[name], 4096)
    assert (outcome.tokens, outcome.found_by) == (None, None)


def test_a_correct_decoder_passes_whatever_its_seed():
    toy = make_toy()
    assert all(judge(toy, CONTROLS["correct"], 256, seed).tokens is None for seed in range(20))


def test_a_fault_without_its_hook_passes():
    harmless = replace(FAULTS["residual-is-p"], rules=Rules())
    assert judge(make_toy(), harmless, 512).tokens is None


def test_tokens_to_detection_are_the_smallest_size_from_which_on_it_is_found():
    toy, fault = make_toy(), FAULTS["ratio-times-1.3"]
    small, large = (judge(toy, fault, size) for size in (64, 4096))
    assert small.tokens is None
    assert 64 < large.tokens < 4096 and large.num_tokens == 4096


def test_a_prefix_of_the_tokens_is_the_first_of_every_stream():
    toy = make_toy()
    emitted = observe_tokens(toy, decode(toy, Rules(), 256), 256)
    part = first_tokens(emitted, 4)
    assert np.array_equal(np.bincount(part.stream), np.full(8, 4))
    assert part.order.max() == 3
    assert len(part.scores.p) == len(part.scores.drafter_cells) == len(part.slot) == 32


def test_a_score_counts_faults_and_controls_and_survives_json():
    told = []
    names = ["stale-kv-slot", "ratio-times-1.05", "correct", "token-matching"]
    score = mutation_score(names, limit=256, progress=told.append)
    assert told == names
    found = json.loads(json.dumps(score.to_dict()))
    numbers = {key: found[key] for key in ("killed", "total", "false_alarms", "controls_passed")}
    # A ratio 5 % off needs many more tokens than the limit: it is counted, and it survives.
    assert numbers == {"killed": 1, "total": 2, "false_alarms": 0, "controls_passed": 2}
    assert [entry["name"] for entry in found["mutants"]] == names[:2]
    assert found["mutants"][1]["tokens"] is None and found["mutants"][1]["num_tokens"] == 256
    assert mutation_score(names, limit=256) == score


def test_a_decoder_that_proposes_nothing_is_an_error():
    silent = replace(CONTROLS["correct"], rules=Rules(offers=False))
    with pytest.raises(LabError, match="none proposed"):
        judge(make_toy(), silent, 64)


def test_unknown_names_and_limits_are_told():
    with pytest.raises(LabError, match="fault: found 'nothing'"):
        mutation_score(["nothing"])
    for limit in (32, 100):
        with pytest.raises(LabError, match=f"limit: found {limit}"):
            mutation_score([], limit=limit)


@pytest.mark.slow
def test_every_fault_is_found_at_its_size_and_no_control():
    score = mutation_score()
    late = [one.name for one in score.mutants if one.tokens > (one.listed_tokens or 64)]
    assert late == []
    assert (score.killed, score.total, score.killed_by_sampling) == (36, 36, 35)
    assert (score.false_alarms, score.controls_passed) == (0, 8)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["opposite", "near-perfect"])
def test_controls_pass_with_other_drafters(arm):
    toy = make_toy(ToyConfig(arm=arm))
    for control in CONTROLS.values():
        assert judge(toy, control, 16_384).tokens is None, control.name
