"""The catalogue in the reference engine: every fault is condemned by its gate, no control is."""

import pytest
import torch
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.decoding.steps import Proposal, accept, block_chances
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.losslessness.audit import allowed_counts, wrong_draws, wrong_finals
from dflash2_lab.losslessness.faults import CONTROLS, FAULTS
from dflash2_lab.losslessness.injection import INJECTED, Injected, hooks_of, why_not
from dflash2_lab.losslessness.injection_verifier import match
from dflash2_lab.losslessness.step_log import side_by_side
from dflash2_lab.losslessness.trial import Trial
from dflash2_lab.losslessness.verifying import requests_of
from dflash2_lab.losslessness.witness import Step, Witness
from dflash2_lab.prompts import Prompt
from dflash2_lab.sampling import Sampling

PROMPTS = [Prompt(f"p{index}", ("go on" + "!" * index,), "set") for index in range(3)]
PLAIN, FILTERED = Sampling(1.0), Sampling(0.8, 0.95, 50)


@pytest.fixture(scope="module")
def pair():
    return tiny_target(), tiny_drafter("dflash2")


def heard(engine, sampling=FILTERED, sizes=(20,), seed=0):
    trial = Trial(engine, engine.arm, sampling.label)
    asked = requests_of(
        engine.target, PROMPTS, sizes, sampling, seed, engine.arm, engine.policy
    )  # fmt: skip
    for stream, request in enumerate(asked):
        trial.hear(stream, engine.testify(request))
    return {check.name for check in trial.audit.checks() if not check.passed}


def gates(pair, name, arm="realistic", policy="selector", **options):
    return heard(Injected(*pair, policy, arm, name), **options)


def response(pair, name, sampling, policy="selector"):
    engine = Injected(*pair, policy, "realistic", name)
    asked = requests_of(pair[0], PROMPTS, (12,), sampling, 0, "realistic", policy)[0]
    return engine.testify(asked).response


# Few numbers fall between a right and a slightly wrong chance; here one does.
LUCKY = {"sampling": PLAIN, "sizes": (24,), "seed": 8}

# Who speaks, exactly, and what it takes where that is not one response with the real drafter.
SPEAKS = {
    "target-rows-off-by-one": ({"target"}, {}),
    "stale-kv-slot": ({"target", "state"}, {}),
    "p-untempered": ({"target"}, {}),
    "p-unfiltered": ({"target"}, {}),
    "rows-swapped": ({"target"}, {"sizes": (20, 40)}),
    "bonus-off-by-one": ({"finals"}, {"arm": "near-perfect"}),
    "q-reported-uniform": ({"draws"}, {}),
    "q-unary-only": ({"draws"}, {}),
    "argmax-draw-soft-q": ({"draws"}, {}),
    "wrong-anchor-draw": ({"draws"}, {}),
    "q-untempered": ({"draws"}, {}),
    "draft-untempered": ({"draws"}, {}),
    "q-unfiltered": ({"draws"}, {}),
    "q-bfloat16": ({"q sums"}, {}),
    "accept-inverted": ({"decisions"}, {}),
    "accept-typical": ({"decisions"}, {}),
    "accept-p-alone": ({"decisions"}, {"arm": "near-perfect"}),
    "accept-target-argmax": ({"decisions"}, {"arm": "near-perfect"}),
    "no-cumulative-stop": ({"decisions"}, {}),
    "first-token-unverified": ({"decisions"}, {}),
    "ratio-times-1.3": ({"decisions"}, LUCKY),
    "accept-target-top": ({"decisions"}, {}),
    "ratio-power-0.9": ({"decisions"}, LUCKY),
    "ratio-times-1.05": ({"decisions"}, LUCKY),
    "residual-next-position": ({"finals"}, {}),
    "residual-unnormalised": ({"finals", "rule"}, {}),
    "residual-absolute": ({"finals", "rule"}, {}),
    "residual-candidates-only": ({"finals", "rule"}, {}),
    "residual-is-p": ({"finals", "rule"}, {}),
    "residual-q-wrong-position": ({"finals"}, {}),
    "residual-argmax": ({"finals", "rule"}, {}),
    "residual-p-without-draft": ({"finals", "rule"}, {}),
    "reseed-every-block": ({"random numbers"}, {}),
    "uniform-shared-draft-acceptance": ({"random numbers"}, {}),
    "uniform-shared-acceptance-residual": ({"random numbers"}, {}),
    "gumbel-shared-draft-residual": ({"random numbers"}, {}),
}


def test_every_name_of_the_catalogue_can_be_planted():
    assert set(INJECTED) == {*FAULTS, *CONTROLS}
    assert set(SPEAKS) == set(FAULTS)


QUICK = (
    *("target-rows-off-by-one", "stale-kv-slot", "wrong-anchor-draw", "q-bfloat16"),
    *("accept-typical", "ratio-times-1.05", "residual-is-p", "gumbel-shared-draft-residual"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_is_condemned_by_the_gates_that_name_it_and_no_other(pair, name):
    expected, options = SPEAKS[name]
    assert gates(pair, name, **options) == expected


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_is_let_through(pair, name, sampling):
    arm = "near-perfect" if name == "bonus-dropped" else "realistic"
    assert gates(pair, name, arm, sampling=sampling, sizes=(12,)) == hooks_of(name).speaks


def test_of_stale_features_the_state_has_to_speak():
    assert {name: set(hooks.speaks) for name, hooks in INJECTED.items() if hooks.speaks} == {
        "stale-features-consistent": {"state"}
    }


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("arm", ["realistic", "opposite", "near-perfect"])
def test_a_right_decode_passes_every_gate(pair, arm, acceptance):
    engine = Witness(*pair, "selector", arm, acceptance)
    assert heard(engine, sizes=(10, 12)) == set()


@pytest.mark.parametrize("kind, policy", [("dflash", "top1"), ("dspark", "markov")])
def test_faults_are_planted_with_other_drafters_too(pair, kind, policy):
    other = pair[0], tiny_drafter(kind)
    assert gates(other, "correct", policy=policy, sizes=(12,)) == set()
    assert gates(other, "residual-argmax", policy=policy, sizes=(12,)) == {"finals", "rule"}
    if policy == "markov":
        assert gates(other, "wrong-anchor-draw", policy=policy, sizes=(12,)) == {"draws"}
        assert gates(other, "wrong-anchor-consistent", policy=policy, sizes=(12,)) == set()
        assert gates(other, "q-unary-only", policy=policy, sizes=(12,)) == {"draws"}


def test_a_first_response_has_no_neighbour_whose_rows_it_could_get(pair):
    assert gates(pair, "rows-swapped", sizes=(20,)) == set()


REASONS = [
    ("p-untempered", "selector", "realistic", PLAIN, "T is 1"),
    ("draft-untempered", "selector", "opposite", PLAIN, "T is 1"),
    ("p-unfiltered", "selector", "realistic", PLAIN, "there is no top-k or top-p"),
    ("p-unfiltered", "selector", "realistic", Sampling(1.0, 1.0, 3), ""),
    ("q-unary-only", "selector", "near-perfect", FILTERED, "q does not depend on the token before"),
    ("wrong-anchor-draw", "sampled", "realistic", FILTERED, "q does not depend on the token"),
    ("q-bfloat16", "top1", "realistic", FILTERED, "q is one-hot by policy top1"),
    ("q-bfloat16", "top1", "near-perfect", FILTERED, ""),
    ("residual-is-p", "top1", "realistic", PLAIN, ""),
]


@pytest.mark.parametrize("name, policy, arm, sampling, reason", REASONS)
def test_a_fault_that_would_change_nothing_is_told(name, policy, arm, sampling, reason):
    found = why_not(name, policy, arm, sampling)
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.mark.parametrize(
    "name, policy",
    [(name, "selector") for name in ("p-untempered", "p-unfiltered", "q-untempered")]
    + [(name, "top1") for name in ("q-bfloat16", "accept-p-alone", "residual-p-without-draft")],
)
def test_what_is_said_to_change_nothing_changes_nothing(pair, name, policy):
    assert why_not(name, policy, "realistic", PLAIN)
    assert response(pair, name, PLAIN, policy) == response(pair, "correct", PLAIN, policy)


def test_an_unknown_fault_is_told():
    with pytest.raises(LabError, match="inject: found 'nonsense', expected one of accept-inverted"):
        hooks_of("nonsense")


def test_token_matching_is_the_rule_for_one_hot_drafts_with_other_numbers():
    generator = torch.Generator().manual_seed(0)
    nums = set()
    for _ in range(300):
        p = torch.randn(4, 5, generator=generator).double().softmax(-1)
        uniform = torch.rand(4, generator=generator)
        x = Proposal(inverse_cdf(p[:3], torch.rand(3, generator=generator)))
        found = match(p, x, uniform[:3].double(), uniform[3].double())
        own = inverse_cdf(p, torch.cat([uniform[:3].double(), found.final[None]]))
        assert 0 <= found.final < 1 and bool(((found.tests >= 0) & (found.tests < 1)).all())
        assert accept(p, x, found.tests, found.final) == (found.num, int(own[found.num]))
        nums.add(found.num)
    assert nums == {0, 1, 2, 3}


P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]], dtype=torch.float64)
Q = torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.3, 0.2]], dtype=torch.float64)
OFFERED = Proposal(torch.tensor([0, 0]), Q)  # p/q is 5/8 and 1/5


def step(num, token, tests, final=0.5, block=False):
    chances = block_chances(P, OFFERED) if block else None
    tests, final = (torch.tensor(x, dtype=torch.float64) for x in (tests, final))
    return Step(0, OFFERED, P[: num + 1], num, token, tests, tests, final, chances)


def fits(*steps):
    """Whether the steps, seen together, accept as many drafts as they may."""
    low, high = allowed_counts(side_by_side(steps))
    return [bool(low[i] <= one.num <= high[i]) for i, one in enumerate(steps)]


def ends_wrong(*steps):
    return wrong_finals(side_by_side(steps)).tolist()


@pytest.mark.parametrize(
    "num, tests",
    [(0, (0.63, 0.1)), (1, (0.62, 0.21)), (2, (0.62, 0.19))],
)
def test_the_number_accepted_has_to_be_the_rules(num, tests):
    assert fits(*(step(n, 1, tests) for n in range(3))) == [n == num for n in range(3)]


def test_a_number_at_the_edge_of_a_test_goes_either_way():
    tests = 0.625 + 1e-8, 0.5
    assert fits(*(step(num, 1, tests) for num in range(3))) == [True, True, False]
    assert fits(step(1, 1, (0.625 + 1e-5, 0.5))) == [False]


def test_block_verification_counts_from_the_last_slot_that_passes():
    chances = block_chances(P, OFFERED)
    assert float(chances[1]) == pytest.approx(0.125) and 0.125 < chances[0] < 0.625
    low, high = chances[0] - 0.01, chances[0] + 0.01
    for num, tests in [(0, (high, 0.13)), (1, (low, 0.13)), (2, (high, 0.12)), (2, (low, 0.12))]:
        steps = [step(n, 1, tests, block=True) for n in range(3)]
        assert fits(*steps) == [n == num for n in range(3)]


@pytest.mark.parametrize(
    "num, final, right",
    # (p - q)+ is 0.2 and 0.1 of tokens 1 and 2; at the second slot all of it is token 2's.
    [(0, 0.5, 1), (0, 0.7, 2), (1, 0.1, 2), (2, 0.5, 0), (2, 0.7, 1), (2, 0.95, 2)],
)
def test_the_last_token_has_to_be_the_rules(num, final, right):
    wrong = ends_wrong(*(step(num, token, (0.5, 0.5), final) for token in range(3)))
    assert wrong == [token != right for token in range(3)]


def test_a_last_token_at_the_edge_of_a_draw_goes_either_way():
    edge = 2 / 3 + 1e-8
    steps = [step(0, token, (0.9, 0.9), edge) for token in range(3)]
    assert ends_wrong(*steps) == [True, False, False]


def test_a_step_may_end_without_a_token_of_its_own():
    one = step(2, 0, (0.1, 0.1), 0.7)
    assert ends_wrong(one, one._replace(laws=one.laws[:2]), one) == [True, False, True]


def test_draws_are_those_of_the_reported_law():
    law = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]])
    ids = torch.tensor([[7, 3, 5], [1, 2, 4]])
    uniform = torch.tensor([0.25, 0.5, 0.9], dtype=torch.float64)
    assert wrong_draws(Proposal(torch.tensor([3, 1]), law, ids), uniform) == 0
    assert wrong_draws(Proposal(torch.tensor([5, 2]), law, ids), uniform) == 2
    assert wrong_draws(Proposal(torch.tensor([6, 1]), law, ids), uniform) == 1  # no candidate
    assert wrong_draws(Proposal(torch.tensor([1, 0]), law), uniform) == 0
