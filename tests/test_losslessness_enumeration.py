"""Every branch of the real proposers and verifier on tiny vocabularies: the law is the target's to
1e-12, and the enumeration sees what breaks it (cases A1, A2, A6, A7, A9, A11)."""

import time
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate

import numpy as np
import pytest
import torch

from dflash2_lab.decoding import steps
from dflash2_lab.decoding.steps import ACCEPTANCES, Accepted, Proposal, accept, block_weights
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.losslessness.enumeration import (
    Choices,
    Noise,
    Oracle,
    enumerate_block,
    enumerate_law,
    float64,
)
from dflash2_lab.losslessness.enumeration_cases import (
    CASES,
    GATE,
    POLICY_KIND,
    Case,
    enumerate_case,
    law_by_definition,
    make_world,
    run_enumeration,
)
from dflash2_lab.sampling import Sampling, filter_logits


@cache
def suite_rows(name, acceptance):
    return run_enumeration([case for case in CASES if case.name == name], (acceptance,))


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_every_policy_has_the_targets_law_in_every_case(name, acceptance):
    rows = suite_rows(name, acceptance)
    assert [row.policy for row in rows] == [*POLICY_KIND]
    assert max(row.worst for row in rows) <= GATE
    assert all(row.passed for row in rows)


def test_the_cases_cover_acceptance_refusal_and_the_edges_of_the_laws():
    for case in CASES:
        emitted = [row.mean_emitted for row in suite_rows(case.name, "token")]
        assert any(1 < mean < case.num_draft + 1 for mean in emitted), case.name
    worlds = {case.name: make_world(case) for case in CASES}
    p, unary = (getattr(worlds["tokens ruled out"], name) for name in ("p", "unary"))
    q = filter_logits(unary, 1.0)
    assert ((p[..., None, :] == 0) & (q > 0)).any()
    assert ((p[..., None, :] > 0) & (q == 0)).any()
    tied = worlds["sums that meet top-p"].p
    assert set(tied.flatten().tolist()) == {0.0, 0.5, 1.0}
    assert set(worlds["ties where top-p cuts"].p.flatten().tolist()) == {0.0, 1 / 3, 2 / 3}
    everywhere = worlds["three slots, K < V"]
    for laws in (everywhere.p, everywhere.unary.flatten(0, 1)):
        assert len(laws.unique(dim=0)) == len(laws)


def test_the_block_rule_accepts_at_least_as_many_drafts_and_more_where_it_can():
    gains = []
    for case in CASES:
        both = [suite_rows(case.name, acceptance) for acceptance in ACCEPTANCES]
        for token, block in zip(*both, strict=True):
            gains.append(block.mean_emitted - token.mean_emitted)
            assert gains[-1] > -1e-12, token
            if case.num_draft == 1 or case.sampling.greedy:
                assert abs(gains[-1]) < 1e-12, token  # the rules are the same there
    assert max(gains) > 0.05


SMALL = Case("small", 3, 2, 2, Sampling(1.5), order=1, seed=5)


def small_law(policy="selector", acceptance="token", draft=None, verify=None, case=SMALL):
    """Law of a proposer and verifier in a small world; either may be another one than the lab's."""
    world = make_world(case)
    return enumerate_law(
        partial(draft, world) if draft else partial(world.draft, policy),
        partial(verify, world, acceptance) if verify else partial(world.verify, acceptance),
        world.law,
        num_draft=case.num_draft,
        start=(0,),
        order=1,
    )


def verifying(p=lambda p: p, proposal=lambda proposal: proposal, noise=lambda noise: noise):
    """The lab's verifier on changed input."""

    def verify(world, acceptance, context, drafts, numbers):
        rows = p(world.rows(context, drafts.tokens.tolist()))
        numbers = noise(numbers)
        return accept(rows, proposal(drafts), numbers.accept, numbers.final, acceptance)

    return verify


def tempered(law, power):
    return law**power / (law**power).sum(-1, keepdim=True)


VERIFIERS = {
    "ratio x1.05": verifying(noise=lambda n: n._replace(accept=n.accept * (1 / 1.05))),
    "accept u <= p": verifying(
        proposal=lambda drafts: HardMass(drafts.tokens, drafts.law, drafts.ids)
    ),
    "first draft unverified": verifying(
        noise=lambda n: n._replace(accept=n.accept * torch.tensor([0.0, 1.0]).double())
    ),
    "p of the slot before": verifying(p=lambda p: p.roll(1, 0)),
    "bonus of the slot before": verifying(p=lambda p: torch.cat([p[:-1], p[-2:-1]])),
    "p not tempered": verifying(p=lambda p: tempered(p, 1.5)),
    "p unfiltered": verifying(p=lambda p: 0.9 * p + 0.1 / p.shape[-1]),
    "q not tempered": verifying(
        proposal=lambda drafts: replace(drafts, law=tempered(drafts.law, 1.5))
    ),
    "q uniform": verifying(proposal=lambda drafts: replace(drafts, law=0 * drafts.law + 1 / 2)),
    "test's number for the residual": verifying(noise=lambda n: n._replace(final=n.accept[0])),
    "draft's number for the residual": verifying(noise=lambda n: n._replace(final=n.draft[0])),
    "draft's numbers for the tests": verifying(noise=lambda n: n._replace(accept=n.draft)),
}


class HardMass(Proposal):
    """q of the drafted tokens taken for 1, and for the law elsewhere."""

    def mass(self):
        return torch.ones(len(self.tokens), dtype=torch.float64)


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("fault", VERIFIERS)
def test_a_broken_verifier_is_seen(fault, acceptance):
    assert small_law(acceptance=acceptance, verify=VERIFIERS[fault]).total_variation > 1e-3


STEPS = {
    "residual = p": ("residual", lambda p, q: p),
    "residual without the token": ("residual", lambda p, q: p.index_fill(0, (q - p).argmax(), 0.0)),
    "residual |p - q|": ("excess", lambda p, q: (p.double() - q.double()).abs()),
    "residual of the best token": (
        "residual",
        lambda p, q: torch.eye(len(p)).double()[(p - q).argmax()],
    ),
}


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("fault", STEPS)
def test_a_broken_residual_is_seen(fault, acceptance, monkeypatch):
    monkeypatch.setattr(steps, *STEPS[fault])
    assert small_law(acceptance=acceptance).total_variation > 1e-3


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_the_residual_of_a_wrong_position_is_seen(acceptance, monkeypatch):
    dense = Proposal.dense
    monkeypatch.setattr(
        Proposal, "dense", lambda self, slot, vocab: dense(self, (slot + 1) % 2, vocab)
    )
    assert small_law(acceptance=acceptance).total_variation > 1e-3


BLOCK_STEPS = {
    "no running minimum": (
        "accumulate",
        lambda ratios, _f, initial: accumulate(ratios, lambda w, r: w * r, initial=initial),
    ),
    "residual without its weight": (
        "residual",
        lambda p, q, real=steps.residual: real(p / p.sum(), q),
    ),
}


@pytest.mark.parametrize("fault", BLOCK_STEPS)
def test_a_broken_block_rule_is_seen(fault, monkeypatch):
    monkeypatch.setattr(steps, *BLOCK_STEPS[fault])
    assert small_law(acceptance="block").total_variation > 1e-3


def test_a_block_rule_that_stops_at_the_first_failed_test_is_seen():
    def verify(world, _acceptance, context, drafts, noise):
        p = world.rows(context, drafts.tokens.tolist())
        weights, left = block_weights(p, drafts)
        num = int((noise.accept * (left + 1 - weights[1:]) < left).cumprod(-1).sum())
        law = p[num]
        if num < len(left):
            law = steps.residual(weights[num] * p[num], drafts.dense(num, p.shape[-1]))
        return Accepted(num, int(inverse_cdf(law, noise.final)))

    assert small_law(verify=verify).total_variation > 1e-3


def argmax_draft_soft_q(world, context, noise):
    greedy = world.draft("selector_greedy", context, noise)
    return replace(world.draft("selector", context, noise), tokens=greedy.tokens)


def unfiltered_q(world, context, noise):
    drafts = world.draft("sampled", context, noise)
    return replace(drafts, law=filter_logits(world.unary[context], 1.0))


def wrong_anchor_in_later_blocks(world, context, noise):
    return world.draft("selector", context if context == (0,) else ((context[0] + 1) % 3,), noise)


def test_a_proposer_whose_q_is_not_the_law_drawn_from_is_seen():
    # Cases A6 and A1.
    assert small_law(draft=argmax_draft_soft_q).total_variation > 1e-3
    filtered = replace(SMALL, sampling=Sampling(1.0, 1.0, 2))
    assert small_law(draft=unfiltered_q, case=filtered).total_variation > 1e-3


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_what_costs_acceptance_only_is_lossless(acceptance):
    honest = small_law(acceptance=acceptance)
    one_hot = small_law(
        acceptance=acceptance, verify=verifying(proposal=lambda d: Proposal(d.tokens))
    )
    stale = small_law(acceptance=acceptance, draft=wrong_anchor_in_later_blocks)
    for law in (one_hot, stale):
        assert law.worst <= GATE
        assert law.mean_emitted != pytest.approx(honest.mean_emitted, abs=1e-3)
    assert one_hot.mean_emitted < honest.mean_emitted


def test_token_matching_is_lossless_and_a_second_draw_after_it_is_not():
    # Case A9: emit the one target draw, or draw again when it was not the draft.
    def matching(world, _acceptance, context, drafts, noise, second=False):
        p = world.rows(context, drafts.tokens.tolist())
        for num, draft in enumerate(drafts.tokens.tolist()):
            drawn = int(inverse_cdf(p[num], noise.accept[num]))
            if drawn != draft:
                return Accepted(num, int(inverse_cdf(p[num], noise.final)) if second else drawn)
        return Accepted(len(drafts.tokens), int(inverse_cdf(p[-1], noise.final)))

    assert small_law(verify=matching).worst <= GATE
    assert small_law(verify=partial(matching, second=True)).total_variation > 1e-3


def test_a_wrong_anchor_of_the_target_in_later_blocks_is_seen_there():
    def verify(world, acceptance, context, drafts, noise):
        wrong = context if context == (0,) else ((context[0] + 1) % 3,)
        return world.verify(acceptance, wrong, drafts, noise)

    law = small_law(verify=verify)
    assert law.total_variation > 1e-3
    assert {context for (context, _), tv in law.conditional.items() if tv > GATE} == {
        (1,), (2,),
    }  # fmt: skip


def test_the_law_given_the_tokens_before_names_the_broken_place():
    law = small_law(verify=VERIFIERS["bonus of the slot before"])
    assert {len(before) for (_, before), tv in law.conditional.items() if tv > GATE} == {2}
    assert law.total_weight == pytest.approx(1.0, abs=GATE)


def test_the_code_runs_in_float64_and_float32_would_be_seen(monkeypatch):
    world = make_world(SMALL)
    noise = Noise.of(torch.rand(5, dtype=torch.float64))
    for policy in ("sampled", "selector", "markov"):
        law = world.draft(policy, (0,), noise).law
        assert law.dtype == torch.float64
        assert (law.sum(-1) - 1).abs().max() < 1e-15
    assert world.p.dtype == torch.float64
    assert torch.ones(1).float().dtype == torch.float32
    with float64():
        assert torch.ones(1).float().dtype == torch.float64
    monkeypatch.setattr("dflash2_lab.losslessness.enumeration_cases.float64", torch.no_grad)
    assert GATE < small_law().total_variation < 1e-6


def choices(num):
    oracle = Oracle([(0.0, 1.0)] * num)
    oracle.begin()
    return oracle, Choices(oracle, torch.arange(num), torch.ones(num, dtype=torch.float64))


def test_a_number_keeps_what_its_first_use_has_left_of_it():
    law = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)
    oracle, numbers = choices(2)
    seen = []
    while True:
        oracle.begin()
        first = int(inverse_cdf(law, numbers[0]))
        below = bool((numbers[:1] * 2.0 < torch.tensor([1.0]))[0])
        seen.append((first, below, int(inverse_cdf(law, numbers[0])), oracle.intervals[0]))
        if not oracle.advance():
            break
    assert seen == [
        (0, True, 0, (0.0, 0.25)),
        (2, True, 2, (0.25, 0.5)),
        (2, False, 2, (0.5, 1.0)),
    ]


def test_an_impossible_ratio_is_never_below():
    _, numbers = choices(1)
    for bound, scale in ((0.0, 0.0), (0.0, 1.0), (float("nan"), 1.0)):
        assert not (numbers * torch.tensor([scale]) < torch.tensor([bound])).any()
    assert (numbers * torch.tensor([0.0]) < torch.tensor([1.0])).all()


@pytest.mark.parametrize(
    "use", [torch.log, lambda u: torch.ones(1) * u, lambda u: torch.searchsorted(torch.ones(1), u)]
)
def test_another_use_of_a_random_number_is_an_error(use):
    with pytest.raises(LabError, match="found on uniform numbers, expected products, comp"):
        use(choices(1)[1])


def test_code_that_does_something_else_on_numbers_is_an_error():
    def verify(_context, _proposal, noise):
        return Accepted(0, int(isinstance(noise.final, Choices)))

    with pytest.raises(LabError, match=r"\(0, 1\) found by thresholds, \(0, 0\) on numbers"):
        enumerate_block(lambda *_: Proposal(torch.tensor([1])), verify, (0,), 1)


def test_a_law_by_its_definition():
    def law(weights, *sampling):
        return law_by_definition(np.log(weights), Sampling(*sampling)).tolist()

    eighths = [1.0, 4.0, 1.0, 2.0]
    assert law(eighths, 0.0) == [0, 1, 0, 0]
    assert law(eighths, 1.0) == [0.125, 0.5, 0.125, 0.25]
    assert law(eighths, 1.0, 0.5) == [0, 1, 0, 0]
    assert law(eighths, 1.0, 0.8) == pytest.approx([1 / 7, 4 / 7, 0, 2 / 7])
    assert law(eighths, 1.0, 1.0, 3) == pytest.approx([1 / 7, 4 / 7, 0, 2 / 7])
    assert law(eighths, 0.5, 1.0, 2) == pytest.approx([0, 0.8, 0, 0.2])
    assert law([1.0, 1.0, 1.0, 1.0], 1.5, 0.5) == [0.5, 0.5, 0, 0]


@pytest.mark.slow
@pytest.mark.timed
def test_the_whole_suite_takes_at_most_20_seconds():
    started = time.perf_counter()
    rows = run_enumeration()
    assert time.perf_counter() - started < 20
    assert len(rows) == 2 * len(CASES) * len(POLICY_KIND)
    assert all(row.passed for row in rows)


def test_equal_cases_make_equal_worlds():
    first, second = (enumerate_case(make_world(SMALL), "markov", "block") for _ in range(2))
    assert first == second
