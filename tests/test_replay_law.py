"""Coupled replay has the joint law of tokens and accepted counts of live speculative decoding.

Both sides are enumerated on three tokens in float64 and compared to 1e-12: live decoding over
drafts, acceptances, residual and bonus draws, by the rules written out here and by the decoder's
own verifier; replay over traces of the target, accepted by the functions of dflash2_lab.replaying.
Drafter laws depend on the whole context and the path so far.
"""

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from recordings import Request, make_run

from dflash2_lab.decoding.steps import Proposal, accept
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.losslessness.enumeration import enumerate_block
from dflash2_lab.replaying import accept_law, expected_walk, replay

V = 3
EOS = 2


class Toy:
    """Target p(token | previous token) and drafter laws q(token | context, path so far)."""

    def __init__(self, kind, seed=0):
        self.kind = kind
        self.rng = np.random.default_rng(seed)
        self.target = self.rng.dirichlet(np.full(V, 0.7), size=V)
        # A filtered target has zeros that a drafter may still propose.
        self.target[1] = [0.6, 0.4, 0.0]
        self.laws = {}

    def p(self, context):
        return self.target[context[-1]]

    def law(self, key, num_candidates=V, one_hot=False):
        if key not in self.laws:
            law = np.zeros(V)
            ids = self.rng.permutation(V)[:num_candidates]
            law[ids] = self.rng.dirichlet(np.ones(num_candidates))
            self.laws[key] = np.eye(V)[law.argmax()] if one_hot else law
        return self.laws[key]

    def q(self, context, path):
        if self.kind == "sampled":
            return self.law((context, len(path)))
        if self.kind == "selector":
            # The K candidates depend on the slot, the law on them on the path.
            key = ("ids", context, len(path))
            if key not in self.laws:
                self.laws[key] = self.rng.permutation(V)[: V - 1]
            law = np.zeros(V)
            law[self.laws[key]] = self.law((context, path))[self.laws[key]]
            return law / law.sum()
        return self.law((context, path), one_hot=self.kind != "markov")


KINDS = ["sampled", "selector", "markov", "selector_greedy"]


def draws(law):
    return [(token, law[token]) for token in range(V) if law[token] > 0]


def live_block(toy, context, num_draft, rule):
    """Yield (drafts accepted, last token, probability) of one live verify step."""
    paths = [((), 1.0)]
    for _ in range(num_draft):
        paths = [
            ((*path, token), chance * q)
            for path, chance in paths
            for token, q in draws(toy.q(context, path))
        ]
    for path, chance in paths:
        p = [toy.p(context + path[:i]) for i in range(num_draft + 1)]
        q = [toy.q(context, path[:i]) for i in range(num_draft)]
        for num, accepted, residual in rule(path, p, q):
            last = residual if num < num_draft else p[num_draft]
            for token, final in draws(last):
                if chance * accepted > 0:
                    yield path[:num], token, chance * accepted * final


def token_rule(path, p, q):
    reached = 1.0
    for i, token in enumerate(path):
        accept = min(1.0, p[i][token] / q[i][token])
        residual = np.maximum(p[i] - q[i], 0)
        if accept < 1:
            yield i, reached * (1 - accept), residual / residual.sum()
        reached *= accept
    yield len(path), reached, None


def block_rule(path, p, q):
    """Sun et al., algorithm 2: every slot is tried, the last success counts."""
    weight, weights = 1.0, [1.0]
    for i, token in enumerate(path):
        weight = min(1.0, weight * p[i][token] / q[i][token])
        weights.append(weight)
    residual = [np.maximum(weights[i] * p[i] - q[i], 0) for i in range(len(path))]
    later = weights[-1]
    yield len(path), later, None
    failed = 1 - later
    for i in range(len(path) - 1, -1, -1):
        total = residual[i].sum()
        success = 1.0 if i == 0 else (total / (total + 1 - weights[i]) if total > 0 else 0.0)
        if failed * success > 1e-16:
            yield i, failed * success, residual[i] / total
        failed *= 1 - success


RULES = {"token": token_rule, "block": block_rule}


def verified_block(toy, context, num_draft, acceptance):
    """As `live_block`, by every branch of the decoder's own `accept`."""

    def draft(context, noise):
        path, laws, ids = (), [], None
        for slot in range(num_draft):
            laws.append(torch.from_numpy(toy.q(context, path)))
            path += (int(inverse_cdf(laws[-1], noise.draft[slot])),)
        if toy.kind == "selector_greedy":
            return Proposal(torch.tensor(path))
        law = torch.stack(laws)
        if toy.kind == "selector":
            ids = np.array([toy.laws["ids", context, slot] for slot in range(num_draft)])
            ids = torch.from_numpy(ids)
            law = law.gather(-1, ids)
        return Proposal(torch.tensor(path), law, ids)

    def verify(context, proposal, noise):
        path = tuple(proposal.tokens.tolist())
        p = np.array([toy.p(context + path[:slot]) for slot in range(num_draft + 1)])
        return accept(torch.from_numpy(p), proposal, noise.accept, noise.final, acceptance)

    for tokens, chance in enumerate_block(draft, verify, context, num_draft).law.items():
        yield tokens[:-1], tokens[-1], chance


def live_two_blocks(toy, start, num_draft, rule, block=live_block):
    law = defaultdict(float)
    for path, last, chance in block(toy, start, num_draft, rule):
        first = (*path, last)
        for second, end, rest in block(toy, start + first, num_draft, rule):
            law[len(path), len(second), (*first, *second, end)] += chance * rest
    return law


def replay_two_blocks(toy, start, num_draft, acceptance):
    law = defaultdict(float)
    for trace in itertools.product(range(V), repeat=2 * (num_draft + 1)):
        text = start + trace
        chance = np.prod([toy.p(text[:i])[text[i]] for i in range(len(start), len(text))])
        if chance == 0:
            continue

        def counts(position, text=text):
            slots = range(position, position + num_draft)
            p = np.array([toy.p(text[:i])[text[i]] for i in slots])
            q = np.array([toy.q(text[:position], text[position:i])[text[i]] for i in slots])
            return accept_law(p, q, acceptance)

        for num, first in enumerate(counts(len(start))):
            position = len(start) + num + 1
            for more, second in enumerate(counts(position)):
                key = (num, more, text[len(start) : position + more + 1])
                law[key] += chance * first * second
    return law


def assert_same_law(live, replayed):
    assert abs(sum(live.values()) - 1) < 1e-12
    worst = max(abs(live[key] - replayed[key]) for key in {*live, *replayed})
    assert worst < 1e-12


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_draft", "seed"), [(1, 0), (2, 1), (2, 2)])
def test_joint_law_over_two_blocks_equals_live_decoding(kind, acceptance, num_draft, seed):
    toy = Toy(kind, seed)
    live = live_two_blocks(toy, (0,), num_draft, RULES[acceptance])
    assert_same_law(live, replay_two_blocks(toy, (0,), num_draft, acceptance))


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_joint_law_over_two_blocks_of_the_decoders_verifier_is_the_replays(kind, acceptance):
    toy = Toy(kind, 1)
    live = live_two_blocks(toy, (0,), 2, acceptance, verified_block)
    assert_same_law(live, replay_two_blocks(toy, (0,), 2, acceptance))


@pytest.mark.parametrize("kind", KINDS)
def test_three_slots_of_the_decoders_verifier_have_the_law_of_the_written_out_rules(kind):
    toy = Toy(kind, 2)
    for acceptance, rule in RULES.items():
        laws = defaultdict(float), defaultdict(float)
        blocks = live_block(toy, (0,), 3, rule), verified_block(toy, (0,), 3, acceptance)
        for law, block in zip(laws, blocks, strict=True):
            for path, last, chance in block:
                law[(*path, last)] += chance
        assert_same_law(*laws)


def test_three_slots_and_the_block_rule_accepts_more():
    toy = Toy("markov", 3)
    mean = {}
    for name, rule in RULES.items():
        live, replayed = defaultdict(float), defaultdict(float)
        for path, last, chance in live_block(toy, (0,), 3, rule):
            live[(*path, last)] += chance
        for trace in itertools.product(range(V), repeat=4):
            text = (0, *trace)
            p = np.array([toy.p(text[:i])[text[i]] for i in range(1, 5)])
            if p.prod() == 0:
                continue
            q = np.array([toy.q((0,), text[1:i])[text[i]] for i in range(1, 4)])
            for num, chance in enumerate(accept_law(p[:3], q, name)):
                replayed[trace[: num + 1]] += p.prod() * chance
        assert_same_law(live, replayed)
        mean[name] = sum(len(tokens) * chance for tokens, chance in replayed.items())
    assert mean["block"] > mean["token"] + 1e-3


def live_requests(toy, limit, num_draft, rule):
    """Decode to EOS or `limit` tokens: law of (tokens, accepted counts that still count)."""
    law = defaultdict(float)

    def go(tokens, counts, chance):
        if tokens[-1] == EOS or len(tokens) == limit:
            law[tokens, counts] += chance
            return
        window = min(num_draft, limit - len(tokens))
        for path, last, step in live_block(toy, tokens, window, rule):
            emitted = (*path, last)[: limit - len(tokens)]
            if EOS in emitted:
                emitted = emitted[: emitted.index(EOS) + 1]
            count = min(len(path), len(emitted))
            go(tokens + emitted, (*counts, count), chance * step)

    for token, chance in draws(toy.p((0,))):
        go((token,), (), chance)
    return law


def all_traces(toy, limit):
    def go(tokens, chance):
        if tokens[-1] == EOS or len(tokens) == limit:
            yield tokens, chance
            return
        for token, p in draws(toy.p(tokens)):
            yield from go((*tokens, token), chance * p)

    for token, chance in draws(toy.p((0,))):
        yield from go((token,), chance)


def recorded(toy, traces, num_draft):
    requests = []
    for number, (tokens, _) in enumerate(traces):
        shape = (max(len(tokens) - 1, 0), num_draft)
        p, q = np.ones(shape), np.zeros(shape)
        for anchor, slot in itertools.product(*map(range, shape)):
            at = anchor + slot + 1
            if at < len(tokens):
                p[anchor, slot] = toy.p(tokens[:at])[tokens[at]]
                context, path = tokens[: anchor + 1], tokens[anchor + 1 : at]
                q[anchor, slot] = toy.q(context, path)[tokens[at]]
        requests.append(
            Request(
                len(tokens),
                p=p,
                q={"policy": q},
                prompt_id=f"{number:04d}",
                finish="eos" if tokens[-1] == EOS else "length",
            )
        )
    return make_run(requests, num_draft, temperature=1.0, num_requests=len(traces))


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_requests_with_eos_and_length_limit_equal_live_decoding(kind, acceptance):
    toy, limit, num_draft = Toy(kind, 5), 5, 2
    live = live_requests(toy, limit, num_draft, RULES[acceptance])
    traces = list(all_traces(toy, limit))
    run = recorded(toy, traces, num_draft)
    walk = expected_walk(run, "policy", acceptance=acceptance)
    blocks, replayed = walk.blocks, defaultdict(float)
    names = blocks.requests["prompt_id"].tolist()

    def go(tokens, first, anchor, counts, chance):
        if anchor == len(tokens) - 1:
            replayed[tokens, counts] += chance
            return
        for num, step in enumerate(walk.law[first + anchor]):
            if step > 0:
                after = min(anchor + num + 1, len(tokens) - 1)
                go(tokens, first, after, (*counts, num), chance * step)

    for number, (tokens, chance) in enumerate(traces):
        if len(tokens) == 1:
            replayed[tokens, ()] += chance
        else:
            go(tokens, blocks.first[names.index(f"{number:04d}")], 0, (), chance)
    assert_same_law(live, replayed)

    # The sums that replay() forms are the expectations under that law.
    result = replay(run, "policy", acceptance=acceptance)
    chances = {f"{number:04d}": chance for number, (_, chance) in enumerate(traces)}
    weight = result.requests["prompt_id"].map(chances).to_numpy()
    steps = sum(len(counts) * chance for (_, counts), chance in live.items())
    tokens = sum((len(tokens) - 1) * chance for (tokens, _), chance in live.items())
    assert weight @ result.requests["steps"] == pytest.approx(steps, abs=1e-12)
    assert weight @ result.requests["tokens"] == pytest.approx(tokens, abs=1e-12)
    assert result.num_requests_dropped == sum(len(tokens) == 1 for tokens, _ in traces)


def test_a_wrong_acceptance_rule_is_seen_by_the_enumeration():
    """The comparison above has power: accepting 5 % more often is far outside 1e-12."""
    toy = Toy("markov", 1)
    live = live_two_blocks(toy, (0,), 2, token_rule)

    def generous(path, p, q):
        return token_rule(path, [1.05 * row for row in p], q)

    wrong = live_two_blocks(toy, (0,), 2, generous)
    assert max(abs(live[key] - wrong[key]) for key in {*live, *wrong}) > 1e-3
