"""The whole verification with real (tiny) models: right decodes pass, planted faults are found."""

import numpy as np
import pytest
import torch
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.certificate import as_json, page
from dflash2_lab.losslessness.plain import plain_pass
from dflash2_lab.losslessness.verifying import LEVELS, Plan, lengths, requests_of, verify
from dflash2_lab.losslessness.witness import Witness
from dflash2_lab.models.io import load_drafter
from dflash2_lab.prompts import Prompt
from dflash2_lab.sampling import Sampling
from dflash2_lab.target import load_target

PROMPTS = [Prompt(f"p{index}", ("go on" + "!" * index,), "set") for index in range(9)]
HOT = Sampling(1.0)


@pytest.fixture(scope="module")
def pair():
    return tiny_target(), tiny_drafter("dflash2")


def run(pair, arm, *, sampling=HOT, tokens=100, **options):
    plan = Plan(tokens, 10, (arm,), seed=options.pop("seed", 0))
    options = {"policy": "selector"} | options
    return verify(*pair, PROMPTS, sampling=sampling, plan=plan, **options)


@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("arm", ["realistic", "opposite", "near-perfect"])
def test_a_right_decode_passes(pair, arm, acceptance, engine):
    law = Sampling(0.8, 0.95, 50)
    found = run(pair, arm, sampling=law, acceptance=acceptance, engine=engine)
    assert found.passed
    result = found.arms[0]
    assert result.tokens == 100
    assert {"opposite": 1, "realistic": 1, "near-perfect": 2}[arm] <= result.acceptance_length
    assert 0 < min(result.component.values()) <= 1


def test_the_graph_engine_decodes_by_default_where_it_can_and_no_fault_is_planted(pair):
    def engine(target, **options):
        found = run((target, pair[1]), "realistic", **options)
        return found.configuration["engine"]

    assert engine(pair[0]) == "graph"
    assert engine(pair[0], inject="correct") == "eager"
    assert engine(tiny_target(attention_bias=True)) == "graph"
    wide = tiny_target()
    wide.model.double()
    assert engine(wide) == "eager"
    assert engine(tiny_target("mistral", sliding_window=6)) == "eager"


# Which of the checks is the one that must speak; a gate does not need many tokens.
FOUND_BY = {
    "target-rows-off-by-one": ("near-perfect", "target"),
    "residual-is-p": ("opposite", "rule"),
    "accept-p-alone": ("near-perfect", "accept_flags"),
    "accept-inverted": ("opposite", "accept_flags"),
}


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_planted_fault_is_found_by_the_check_that_names_it(pair, name):
    arm, check = FOUND_BY[name]
    found = run(pair, arm, inject=name, tokens=200 if check == "accept_flags" else 100)
    result = found.arms[0]
    assert not found.passed
    faults = {gate.name for gate in result.checks if not gate.passed} | set(result.rejected)
    assert check in faults
    assert "FAILED" in page(found) and check in page(found)


@pytest.mark.parametrize("name", ["one-hot-consistent", "correct"])
def test_what_only_looks_like_a_fault_passes(pair, name):
    assert run(pair, "realistic", inject=name).passed


@pytest.mark.parametrize("side", ["target", "drafter"])
def test_a_cache_with_another_token_in_it_is_seen(pair, side):
    engine = Witness(*pair, "selector", "realistic")
    asked = requests_of(pair[0], PROMPTS, [9], HOT, 0, "realistic", "selector")[0]
    found = engine.testify(asked)
    assert plain_pass(found).state_error < 1e-4
    row, drafts = found.rows
    with torch.inference_mode():
        _keep_another(row, drafts, side)
    assert plain_pass(found).state_error > 1e-2


@pytest.mark.parametrize("side", ["target", "drafter"])
def test_a_cache_with_an_entry_that_is_no_number_is_seen(pair, side):
    engine = Witness(*pair, "selector", "realistic")
    asked = requests_of(pair[0], PROMPTS, [9], HOT, 0, "realistic", "selector")[0]
    found = engine.testify(asked)
    row, drafts = found.rows
    kept = row.cache.layers[2].values if side == "target" else drafts.keys[1][0]
    with torch.inference_mode():
        kept[..., -1, 0] = float("nan")
    assert np.isnan(plain_pass(found).state_error)


def _keep_another(row, drafts, side):
    kept = row.cache.layers[1].keys if side == "target" else drafts.keys[0][0]
    kept[..., -1, :] = kept[..., -2, :].clone()


def test_rounding_in_fewer_bits_is_refused(pair):
    target = tiny_target()
    target.model.bfloat16()
    with pytest.raises(LabError, match=r"found torch\.bfloat16, expected float32"):
        run((target, pair[1]), "realistic")


def test_lengths_are_unequal_and_sum_up():
    found = lengths(1365, 24)
    assert sum(found) == 1365 and len(set(found)) >= 3 and min(found) > 0
    assert LEVELS["pr"] < LEVELS["nightly"] < LEVELS["release"]


def test_a_certificate_says_what_was_run_and_what_was_not_shown(pair):
    found = run(pair, "realistic")
    record = as_json(found)
    assert record["passed"] and record["configuration"]["policy"] == "selector"
    assert record["arms"][0]["checks"][0]["passed"]
    assert 0 < record["smallest_tv"] < 1
    cells = record["arms"][0]["cells"]["drafter_cells"]
    assert cells["num"] == 100 and 0 <= cells["df"] <= 3 and 0 <= cells["tv"] < 0.3
    assert cells["p_value"] == record["arms"][0]["pit"]["drafter_cells"]
    text = page(found)
    assert "chi2" in text and "Not shown" in text and "realistic drafter: 100 tokens" in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_same_seed_gives_the_same_numbers(pair):
    first, again, other = (run(pair, "realistic", seed=seed).arms[0] for seed in (1, 1, 2))
    assert first.pit == again.pit and first.log_e == again.log_e
    assert not np.isclose(first.pit["ks"], other.pit["ks"])


BAD = {
    "greedy": ({"sampling": Sampling()}, "temperature: found 0"),
    "too few": ({"tokens": 99}, "expected a prompt and 100 tokens"),
    "an unknown arm": ({"arm": "friendly"}, "arms: found ['friendly']"),
    "an unknown fault": ({"inject": "nonsense"}, "inject: found 'nonsense'"),
    "a fault in another rule": (
        {"inject": "residual-is-p", "acceptance": "block"},
        "found acceptance 'block'",
    ),
    "a policy of others": ({"policy": "markov"}, "a dflash2 drafter has"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_verified_is_told(pair, case):
    options, message = BAD[case]
    options = {"arm": "realistic"} | options
    with pytest.raises(LabError) as error:
        run(pair, options.pop("arm"), **options)
    assert message in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [HOT, Sampling(0.8, 0.95, 50)], ids=["plain", "filtered"])
def test_the_gates_hold_for_smollm2_with_its_drafter(sampling):
    """A float32 law of 49,152 tokens sums to 1 up to 1e-5, which is rounding and no fault."""
    target = load_target("smollm2-135m", dtype="float32", device="cpu")
    drafter = load_drafter("zoo:dflash2", target=target, dtype="float32", device="cpu")
    found = verify(target, drafter, sampling=sampling, plan=Plan(90, 3))
    assert found.passed
    assert found.arms[2].acceptance_length > found.arms[1].acceptance_length
