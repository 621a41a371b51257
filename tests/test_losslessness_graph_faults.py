"""Faults inside the graph engine's cycle: each is found by the gate that looks at what it does."""

import math
from dataclasses import replace

import pytest
import torch
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.decoding import cycle as decoding_cycle
from dflash2_lab.kernels.commit import FULL
from dflash2_lab.kernels.draw import draw
from dflash2_lab.kernels.row_law import Law
from dflash2_lab.kernels.verify import CandidateLaw
from dflash2_lab.losslessness.graph_witness import GraphWitness, WitnessedCycle
from dflash2_lab.losslessness.trial import Trial
from dflash2_lab.losslessness.verifying import requests_of
from dflash2_lab.prompts import Prompt
from dflash2_lab.sampling import Sampling

PROMPTS = [Prompt(f"p{index}", ("go on" + "!" * index,), "set") for index in range(9)]
HOT, CUT = Sampling(1.0), Sampling(0.8, 0.95, 50)
SIZES = [24, 30, 36, 20, 28]
ARGUMENTS = ("logits", "law", "draft", "q", "temperature", "accept_keys", "accept_at",
             "final_keys", "final_at", "offered", "forced")  # fmt: skip


@pytest.fixture(scope="module")
def pair(device):
    target = tiny_target()
    target.model.to(device)
    return target, tiny_drafter("dflash2").to(device)


def failed(pair, cycle=WitnessedCycle, *, arm="realistic", sizes=SIZES, sampling=HOT,
           acceptance="token", engine=GraphWitness):  # fmt: skip
    """Names of the gates that fail for a decode by such a cycle."""

    class Planted(engine):
        def _make_cycle(self, capacity, max_tokens):
            return cycle(self.arm, self.target, self.drafter, self.policy, self.num_draft,
                         self.batch_size, capacity, max_tokens, self.acceptance)  # fmt: skip

    requests = requests_of(pair[0], PROMPTS, sizes, sampling, 0, arm, "selector")
    machine = Planted(*pair, "selector", arm, 3, 120, acceptance)
    trial = Trial(machine, arm, sampling.label)
    for index, found in machine.testimonies(requests):
        trial.hear(index, found)
    return {check.name for check in trial.audit.checks() if not check.passed}


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("sampling", [HOT, CUT], ids=["hot", "cut"])
def test_without_a_fault_no_gate_speaks(pair, sampling, acceptance):
    assert failed(pair, sampling=sampling, acceptance=acceptance) == set()


# Rules of acceptance. `forced` makes the right one end as if so many drafts had been accepted.


def other(args, **changed):
    return [*(args | changed).values()]


def end_after(rule, args, accepted, **changed):
    return rule(*other(args, forced=accepted.int(), **changed))


def scaled(q, factor):
    if isinstance(q, CandidateLaw):
        return q._replace(probs=q.probs * factor)
    return q._replace(law=q.law._replace(log_total=q.law.log_total - math.log(factor)))


def ratio_too_large(rule, args):
    accepted, _ = rule(*other(args, q=scaled(args["q"], 1 / 1.05)))
    return end_after(rule, args, accepted)


def p_alone(rule, args):
    accepted, _ = rule(*other(args, q=scaled(args["q"], 1e9)))
    return end_after(rule, args, accepted)


def first_one_unverified(rule, args):
    return end_after(rule, args, rule(*args.values())[0].clamp_min(1))


def residual_is_p(rule, args):
    return end_after(rule, args, rule(*args.values())[0], q=scaled(args["q"], 1e-12))


def residual_on_candidates(rule, args):
    logits, ids = args["logits"], args["q"].ids.long()
    kept = logits.clone()
    kept[:, : ids.shape[1]] = float("-inf")
    kept[:, : ids.shape[1]].scatter_(-1, ids, logits[:, : ids.shape[1]].gather(-1, ids))
    return end_after(rule, args, rule(*args.values())[0], logits=kept)


def residual_of_another_slot(rule, args):
    rolled = CandidateLaw(*(part.roll(1, 1) for part in args["q"]))
    return end_after(rule, args, rule(*args.values())[0], q=rolled)


def bonus_of_another_slot(rule, args):
    accepted, following = rule(*args.values())
    rows, at = torch.arange(len(accepted), device=accepted.device), (accepted - 1).clamp_min(0)
    law = Law(*(part.view(len(rows), -1)[rows, at].contiguous() for part in args["law"]))
    logits = args["logits"][rows, at].contiguous()
    drawn = draw(logits, law, args["temperature"], args["final_keys"], args["final_at"])
    return accepted, torch.where(accepted == args["offered"], drawn, following)


def ends_by_a_number_of_the_tests(rule, args):
    return rule(*other(args, final_keys=args["accept_keys"], final_at=args["accept_at"]))


def accepts_by_the_number_of_the_end(rule, args):
    return rule(*other(args, accept_keys=args["final_keys"], accept_at=args["final_at"]))


RULES = {
    ratio_too_large: "decisions",
    p_alone: "decisions",
    first_one_unverified: "decisions",
    accepts_by_the_number_of_the_end: "decisions",
    residual_is_p: "finals",
    residual_on_candidates: "finals",
    residual_of_another_slot: "finals",
    bonus_of_another_slot: "finals",
    ends_by_a_number_of_the_tests: "finals",
}


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("fault", RULES)
def test_a_fault_of_the_rule_is_seen(pair, monkeypatch, fault, acceptance):
    name = "block_verify" if acceptance == "block" else "verify"
    right = getattr(decoding_cycle, name)

    def broken(*args, arrivals):
        def rule(*given):
            return right(*given, arrivals=arrivals)

        return fault(rule, dict(zip(ARGUMENTS, args, strict=True)))

    monkeypatch.setattr(decoding_cycle, name, broken)
    # The tiny selector's drafts are refused nearly always, with ratios near 0; and where p is sharp
    # a slightly larger ratio turns few tests over.
    near = {"arm": "near-perfect", "sizes": [80] * 6, "sampling": Sampling(3.0)}
    options = near if fault in (ratio_too_large, bonus_of_another_slot) else {}
    assert failed(pair, acceptance=acceptance, **options) == {RULES[fault]}


# Cycles with one method that is wrong, and the gates that it must fail.


class QOfAnotherTemperature(WitnessedCycle):
    def _propose(self):
        draft, q = super()._propose()
        return draft, q._replace(probs=(0.8 * q.probs.log()).softmax(-1))


class QInFewBits(WitnessedCycle):
    def _propose(self):
        draft, q = super()._propose()
        return draft, q._replace(probs=q.probs.bfloat16().float())


class BestDraftsWithSoftQ(WitnessedCycle):
    def _propose(self):
        _, q = super()._propose()
        return q.ids.gather(-1, q.probs.argmax(-1, keepdim=True))[..., 0].long(), q


class QOfAnotherSlot(WitnessedCycle):
    def _propose(self):
        draft, q = super()._propose()
        return draft, CandidateLaw(*(part.roll(1, 1).contiguous() for part in q))


class LaterRows(WitnessedCycle):
    def verify_pass(self, draft):
        rows = super().verify_pass(draft).unflatten(0, (-1, self.rows))
        return torch.cat([rows[:, 1:], rows[:, -1:]], 1).flatten(0, 1)


class RowsOfAnotherRequest(WitnessedCycle):
    def verify_pass(self, draft):
        return super().verify_pass(draft).roll(self.rows, 0)


class TargetAtT1(WitnessedCycle):
    def _accept(self, logits, draft, q):
        self.laws.row_temperature.fill_(1.0)
        return super()._accept(logits, draft, q)


class TargetWithoutFilters(WitnessedCycle):
    def _accept(self, logits, draft, q):
        self.laws.row_top_k.fill_(0)
        self.laws.row_top_p.fill_(1.0)
        return super()._accept(logits, draft, q)


class StaleTargetEntry(WitnessedCycle):
    """What the block before left at the anchor's place stays there."""

    def verify_pass(self, draft):
        keys = self.large.keys[1]
        shape = (-1, keys.shape[1], 1, keys.shape[3])
        place = self.progress.start[:, None, None, None].expand(shape)
        kept = keys.gather(2, place)
        logits = super().verify_pass(draft)
        keys.scatter_(2, place, kept)
        return logits


class ContextNotExtended(WitnessedCycle):
    def extend_context(self):
        self._join()


class DraftCounterStands(WitnessedCycle):
    def step(self):
        super().step()
        self.progress.draft_counter.zero_()


class FinalCounterStands(WitnessedCycle):
    def step(self):
        super().step()
        self.progress.final_counter.zero_()


class LastTokenIsAnother(WitnessedCycle):
    def step(self):
        super().step()
        at = self.progress
        last = at.length[:, None] - 1
        token = at.tokens.gather(1, last)
        ended = (at.status == FULL)[:, None]
        at.tokens.scatter_(1, last, torch.where(ended, (token + 1) % 260, token))


class EndsEarly(WitnessedCycle):
    def step(self):
        super().step()
        at = self.progress
        at.status.masked_fill_(at.length * 2 > at.limit, FULL)


CYCLES = {
    QOfAnotherTemperature: {"draws"},
    QInFewBits: {"q sums"},
    BestDraftsWithSoftQ: {"draws"},
    QOfAnotherSlot: {"draws"},
    LaterRows: {"target"},
    RowsOfAnotherRequest: {"target"},
    TargetAtT1: {"target"},
    TargetWithoutFilters: {"target"},
    StaleTargetEntry: {"target", "state"},
    ContextNotExtended: {"state"},
    DraftCounterStands: {"random numbers"},
    FinalCounterStands: {"random numbers"},
    LastTokenIsAnother: {"response"},
    EndsEarly: {"response"},
}


@pytest.mark.parametrize("fault", CYCLES)
def test_a_fault_of_the_cycle_is_seen(pair, fault):
    assert CYCLES[fault] <= failed(pair, fault, sampling=CUT)


# Prefill: the places of a batch are set up wrongly.


class FirstTokenAtAnotherTemperature(GraphWitness):
    def _start(self, index, ends, logits, requests):
        super()._start(index, ends, 2 * logits, requests)


class OneKeyForAll(GraphWitness):
    def _start(self, index, ends, logits, requests):
        super()._start(index, ends, logits, [replace(x, keys=requests[0].keys) for x in requests])


class OnePlaceTooFar(GraphWitness):
    def _start(self, index, ends, logits, requests):
        super()._start(index, ends + 1, logits, requests)


STARTS = {
    FirstTokenAtAnotherTemperature: {"first token"},
    OneKeyForAll: {"random numbers"},
    OnePlaceTooFar: {"target", "state"},
}


@pytest.mark.parametrize("fault", STARTS)
def test_a_fault_of_the_prefill_is_seen(pair, fault):
    assert STARTS[fault] <= failed(pair, engine=fault)
