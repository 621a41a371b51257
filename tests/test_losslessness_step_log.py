"""All steps of a response looked at together, against a plain look at one step after another.

Responses are decoded by the real rules from random laws; some are spoilt afterwards.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash2_lab.decoding.requests import Request
from dflash2_lab.decoding.steps import Proposal, accept, block_chances, residual
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.losslessness import audit, step_log, weighing
from dflash2_lab.losslessness.plain import Plain
from dflash2_lab.losslessness.scoring import residual_pit, score
from dflash2_lab.losslessness.step_log import side_by_side
from dflash2_lab.losslessness.witness import Step
from dflash2_lab.losslessness.witness import Testimony as Response
from dflash2_lab.sampling import Sampling, filter_logits, uniforms

EDGE = 1e-6
LAWS = {"hot": Sampling(1.0), "cut": Sampling(0.7, 0.9, 4), "nucleus": Sampling(1.3, 0.8)}
KINDS = ("one-hot", "whole", "candidates", "p itself", "sure")


class Made:
    """A response of `length` tokens over a vocabulary of V, decoded by one rule."""

    def __init__(self, seed, kind, rule, sampling, length, dtype=torch.float32):
        self.random = torch.Generator().manual_seed(seed)
        self.kind, self.rule, self.vocab = kind, rule, self.pick(3, 9)
        self.sampling, self.num_candidates = sampling, self.pick(2, 12)
        self.logits = 2 * torch.randn(
            length + 9, self.vocab, generator=self.random, dtype=torch.float64
        )
        rounding = 1e-6 * torch.randn(self.logits.shape, generator=self.random)
        self.p = filter_logits(
            (self.logits + rounding).to(dtype), sampling.temperature, sampling.top_p, sampling.top_k
        )
        keys = {"prefill": seed}
        request = Request((0,), length, sampling, keys, frozenset())
        first = uniforms(torch.tensor(seed), torch.tensor(0))
        self.found = Response(request, [int(inverse_cdf(self.p[0], first))])
        while (room := length - len(self.found.response)) > 0:
            self.one_step(min(self.pick(0, 4), room))
        del self.found.response[length:]

    def pick(self, low, high):
        return int(torch.randint(low, high + 1, (1,), generator=self.random))

    def numbers(self, *shape):
        return torch.rand(*shape, generator=self.random, dtype=torch.float64)

    def propose(self, anchor, slots, uniform):
        own = self.p[anchor + 1 : anchor + 1 + slots]
        if self.kind == "p itself":
            law, ids = own, None
        elif self.kind == "candidates":  # more than the vocabulary, too; then ids stand twice
            num = self.num_candidates
            ids = torch.stack([self.shuffled(num) for _ in range(slots)]) if slots else None
            law = torch.rand(slots, num, generator=self.random).softmax(-1) if slots else None
        else:
            sharp = 60.0 if self.kind == "sure" else 2.0
            law = (sharp * torch.randn(slots, self.vocab, generator=self.random)).softmax(-1)
            ids = None
        if not slots:
            return Proposal(torch.zeros(0, dtype=torch.int64), law, ids)
        choice = inverse_cdf(law, uniform[:slots])
        if ids is not None:
            choice = ids.gather(-1, choice[:, None])[:, 0]
        return Proposal(choice) if self.kind == "one-hot" else Proposal(choice, law, ids)

    def shuffled(self, num):
        order = torch.randperm(self.vocab, generator=self.random)
        return order.repeat(num // self.vocab + 1)[:num]

    def one_step(self, slots):
        anchor = len(self.found.response) - 1
        uniform, tests, final = self.numbers(5), self.numbers(slots), self.numbers(1)[0]
        proposal = self.propose(anchor, slots, uniform)
        laws = self.p[anchor + 1 : anchor + 2 + slots]
        num, token = accept(laws, proposal, tests, final, self.rule)
        chances = block_chances(laws, proposal) if self.rule == "block" else None
        step = Step(anchor, proposal, laws[: num + 1].clone(), num, token, uniform, tests, final,
                    chances)  # fmt: skip
        self.found.response += [*proposal.tokens[:num].tolist(), token]
        if slots and num == slots and self.pick(0, 3) == 0:  # ends without the bonus
            step = step._replace(laws=step.laws[:slots])
            del self.found.response[-1]
        self.found.steps.append(step)

    def spoil(self):
        """Change one number, draft, count or token of some steps."""
        for index, step in enumerate(self.found.steps):
            slots = len(step.proposal.tokens)
            what = self.pick(0, 9)
            if what == 0:
                step = step._replace(token=(step.token + 1) % self.vocab)
            elif what == 1 and step.num > 0 and len(step.laws) > step.num:
                step = step._replace(num=step.num - 1, laws=step.laws[:-1])
            elif what == 2 and slots:
                tests = self.numbers(slots)
                step = step._replace(tests=tests)
            elif what == 3:
                step = step._replace(uniform=self.numbers(5), final=self.numbers(1)[0])
            self.found.steps[index] = step


def engine_of(made):
    return SimpleNamespace(
        target=SimpleNamespace(device=torch.device("cpu")), acceptance=made.rule, left=residual
    )


# One step after another, in plain numbers.


def entries(x, slot):
    """(token, q) of a slot in the order of its law."""
    if x.law is None:
        return [(int(x.tokens[slot]), 1.0)]
    ids = range(x.law.shape[1]) if x.ids is None else x.ids[slot].tolist()
    return list(zip(ids, x.law[slot].double().tolist(), strict=True))


def q_of(x, slot, vocab):
    law = [0.0] * vocab
    for token, mass in entries(x, slot):
        law[token] += mass
    return law


def gives(pairs, token, number):
    """Whether the inverse cdf of (token, mass) gives this token for this number."""
    whole, below = sum(mass for _, mass in pairs), 0.0
    for one, mass in pairs:
        above = below + mass
        inside = below / whole - EDGE <= number < above / whole + EDGE
        if one == token and mass > 0 and inside:
            return True
        below = above
    return False


def wrong_draws_of(step):
    x = step.proposal
    if x.law is None:
        return 0
    return sum(
        not gives(entries(x, slot), int(x.tokens[slot]), float(step.uniform[slot]))
        for slot in range(len(x.tokens))
    )


def counts_of(step, shift):
    x, vocab = step.proposal, step.laws.shape[1]
    slots = len(x.tokens)
    if step.chances is not None:
        passed = [
            slot + 1 for slot in range(slots) if step.tests[slot] < step.chances[slot] + shift
        ]
        return max(passed, default=0)
    for slot in range(min(slots, len(step.laws))):
        token = int(x.tokens[slot])
        ratio = float(step.laws[slot, token]) / q_of(x, slot, vocab)[token]
        if not step.tests[slot] < ratio + shift:
            return slot
    return min(slots, len(step.laws))


def weight_of(step, laws):
    weight = 1.0
    for slot in range(step.num if step.chances is not None else 0):
        token = int(step.proposal.tokens[slot])
        q = q_of(step.proposal, slot, laws.shape[1])[token]
        weight = min(1.0, weight * float(laws[slot, token]) / q)
    return weight


def ends_wrong(step):
    if len(step.laws) <= step.num:
        return False
    p, vocab = step.laws[step.num].double().tolist(), step.laws.shape[1]
    if step.num < len(step.proposal.tokens):
        weight, q = weight_of(step, step.laws), q_of(step.proposal, step.num, vocab)
        left = [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]
        p = left if sum(left) > 0 else p
    return not gives(list(enumerate(p)), step.token, float(step.final))


def distance(a, b):
    return float((a.double() - b.double()).abs().sum() / 2)


def drafts_log(made, p):
    """`Drafted` of the steps, field by field."""
    found, tokens = {name: [] for name in weighing.Drafted._fields}, made.found.response
    for step in made.found.steps:
        x, start = step.proposal, step.anchor + 1
        for slot, token in enumerate(x.tokens.tolist()):
            q = torch.tensor([mass for _, mass in entries(x, slot)], dtype=torch.float64)
            mine = q_of(x, slot, made.vocab)[token]
            logs = q.clamp_min(2.3e-308).log()
            mean = float(q @ logs)
            found["heat_score"].append(np.log(mine) - mean)
            found["heat_variance"].append(float(q @ (logs - mean) ** 2))
            found["heat_third"].append(float(q @ (logs - mean) ** 3))
            found["below"].append(float(q[q > mine].sum()))
            found["mass"].append(float(q[q == mine].sum()))
            if step.chances is None:
                reached, passed = slot <= step.num, slot < step.num
                ratio = float(p[start + slot, token]) / mine if reached else 0.0
                chance = min(1.0, ratio)
            else:
                reached, passed = slot + 1 >= step.num, slot + 1 == step.num
                chance = float(step.chances[slot]) if reached else 0.0
            for name, value in zip(("reached", "accepted", "accept_probability"),
                                   (reached, passed, chance), strict=True):  # fmt: skip
                found[name].append(value)
        last = start + step.num
        if last >= len(tokens) or len(step.laws) <= step.num:
            continue
        token = torch.tensor([tokens[last]])
        if step.num == len(x.tokens):
            one = score(token, p[last : last + 1])
            found["bonus_below"].append(one.below[0])
            found["bonus_mass"].append(one.mass[0])
        else:
            q = torch.tensor(q_of(x, step.num, made.vocab), dtype=torch.float64)[None]
            weight = torch.tensor([weight_of(step, p[start:])], dtype=torch.float64)
            pit = residual_pit(token, p[last : last + 1], q / q.sum(), weight)
            found["residual_below"].append(pit[0][0])
            found["residual_mass"].append(pit[1][0])
    return found


CASES = [
    (kind, rule, name)
    for kind in KINDS
    for rule in ("token", "block")
    for name in LAWS
    if (kind, name) != ("p itself", "hot") or rule == "token"
]


@pytest.fixture
def few_rows(monkeypatch):
    """So few laws at once that every response is cut into parts."""
    for module in (audit, weighing):
        monkeypatch.setattr(module, "ROWS", 3)
    assert step_log.ROWS > 3


def responses(kind, rule, name, spoilt):
    for seed in range(6):
        dtype = torch.float64 if seed % 2 else torch.float32
        made = Made(seed, kind, rule, LAWS[name], (1 + 9 * seed) or 1, dtype)
        if spoilt:
            made.spoil()
        if made.found.steps:
            yield made


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize(("kind", "rule", "name"), CASES)
def test_the_gates_are_those_of_one_step_after_another(few_rows, kind, rule, name, spoilt):
    wrong = 0
    for made in responses(kind, rule, name, spoilt):
        steps, log = made.found.steps, side_by_side(made.found.steps)
        draws = audit.wrong_draws(log.drafts, log.uniform)
        assert draws == sum(map(wrong_draws_of, steps))
        low, high = audit.allowed_counts(log)
        assert low.tolist() == [counts_of(step, -EDGE) for step in steps]
        assert high.tolist() == [counts_of(step, EDGE) for step in steps]
        ends = audit.wrong_finals(log).tolist()
        assert ends == [ends_wrong(step) for step in steps]
        sums = [sum(m for _, m in entries(x, i)) for x in (s.proposal for s in steps)
                for i in range(len(x.tokens))]  # fmt: skip
        error = max((abs(total - 1) for total in sums), default=0.0)
        assert audit.law_error(log.drafts) == pytest.approx(error, abs=1e-12)
        decided = [low[i] <= step.num <= high[i] for i, step in enumerate(steps)]
        wrong += draws + sum(ends) + len(steps) - sum(map(int, decided))
        if not spoilt:
            assert audit.foreign_tokens(made.found, log) == 0
    assert (wrong > 0) == spoilt


@pytest.mark.parametrize(("kind", "rule", "name"), CASES)
def test_the_evidence_is_that_of_one_token_after_another(few_rows, monkeypatch, kind, rule, name):
    for made in responses(kind, rule, name, False):
        logits = made.logits[: len(made.found.response)]
        monkeypatch.setattr(weighing, "plain_pass", lambda _found, x=logits: Plain(x, 0.0))
        evidence = weighing.weigh(engine_of(made), made.found, side_by_side(made.found.steps), 7)
        sampling, tokens = made.sampling, made.found.response
        p = filter_logits(logits, sampling.temperature, sampling.top_p, sampling.top_k)
        q, slot, implied, moved = p.clone(), [-1] * len(tokens), [], []
        for step in made.found.steps:
            for place, law in enumerate(step.laws):
                at = step.anchor + 1 + place
                if at >= len(tokens):
                    continue
                slot[at] = place
                moved.append(distance(law, p[at]))
                if place < len(step.proposal.tokens):
                    own = torch.tensor(q_of(step.proposal, place, made.vocab), dtype=torch.float64)
                    q[at] = own / own.sum()
                    law = law.double() / law.double().sum()
                    taken = torch.minimum(law, own)
                    implied.append(distance(taken + (1 - taken.sum()) * residual(law, own), law))
        assert evidence.emitted.slot.tolist() == slot and evidence.num_edge == 0
        np.testing.assert_allclose(evidence.moved, moved, atol=1e-9)
        assert evidence.moved.max() < 1e-5 and evidence.first < 1e-5
        assert max(evidence.implied, default=0.0) < 1e-6
        if rule == "token":
            np.testing.assert_allclose(evidence.implied, implied, atol=1e-12)
        expected = score(torch.tensor(tokens), p, q)
        for name_, column in expected._asdict().items():
            found = getattr(evidence.emitted.scores, name_)
            np.testing.assert_allclose(found, column, atol=1e-9, err_msg=name_)
        for name_, column in drafts_log(made, p).items():
            found = getattr(evidence.drafted, name_)
            np.testing.assert_allclose(found, column, atol=1e-6, err_msg=name_)


def one(kind="whole", rule="token", length=30):
    return Made(3, kind, rule, LAWS["hot"], length)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_law_that_is_no_number_fails_its_step(rule, place):
    made = one(rule=rule)
    at = next(i for i, step in enumerate(made.found.steps) if step.num and len(step.laws) > 1)
    step = made.found.steps[at]
    laws = step.laws.clone()
    laws[0 if place == "first" else step.num] = float("nan")
    step = step._replace(laws=laws)
    if rule == "block":
        chances = step.chances.clone()
        chances[0 if place == "first" else -1] = float("nan")
        step = step._replace(chances=chances)
    made.found.steps[at] = step
    log = side_by_side(made.found.steps)
    low, high = audit.allowed_counts(log)
    decided = low[at] <= step.num <= high[at]
    assert not decided or bool(audit.wrong_finals(log)[at])


def test_a_q_that_is_no_number_fails_its_draws_and_its_sum():
    made = one()
    log = side_by_side(made.found.steps)
    log.drafts.law[2] = float("nan")
    assert audit.wrong_draws(log.drafts, log.uniform) == 1
    assert np.isnan(audit.law_error(log.drafts))


def test_an_id_at_two_places_is_given_by_either():
    law, ids = torch.tensor([[0.0, 0.5, 0.3, 0.2]]), torch.tensor([[7, 3, 7, 4]])
    for number, token in [(0.25, 3), (0.6, 7), (0.9, 4)]:
        uniform = torch.tensor([number], dtype=torch.float64)
        wrong = [
            audit.wrong_draws(Proposal(torch.tensor([x]), law, ids), uniform) for x in (3, 7, 4)
        ]
        assert wrong == [int(x != token) for x in (3, 7, 4)]


def test_tokens_that_no_step_gave_or_that_are_missing_are_counted():
    made = one(length=20)
    log, right = side_by_side(made.found.steps), list(made.found.response)
    assert audit.foreign_tokens(made.found, log) == 0
    for spoilt, count in [
        ([*right[:-1], (right[-1] + 1) % made.vocab], 1),
        (right[:-2], 2),
        ([*right, 0], 1),
    ]:
        made.found.response = spoilt
        assert audit.foreign_tokens(made.found, log) == count
