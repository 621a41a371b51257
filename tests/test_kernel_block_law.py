"""Block verification emits the target's law: laws that depend on the path, and cells of the random
numbers in which every outcome is one."""

import itertools

import pytest
import torch
from test_kernel_verify import KINDS_OF_Q

from dflash2_lab.kernels import block_verify
from dflash2_lab.kernels.block_verify import block_verify_reference
from dflash2_lab.kernels.row_law import row_law_reference
from dflash2_lab.kernels.verify import CandidateLaw, FullLaw

KINDS = pytest.mark.parametrize("kind", KINDS_OF_Q)
VOCAB, SLOTS = 3, 3


def random_laws():
    """p and q after every path, float64, {path: [V]}; some tokens have no mass in either."""
    generator = torch.Generator().manual_seed(3)
    p, q = {}, {}
    for length in range(SLOTS + 1):
        for path in itertools.product(range(VOCAB), repeat=length):
            weight = torch.rand(2, VOCAB, generator=generator, dtype=torch.float64) ** 3 + 1e-2
            weight[torch.rand(2, VOCAB, generator=generator) < 0.15] = 0.0
            weight[:, len(p) % VOCAB] += 0.1
            p[path], q[path] = weight / weight.sum(-1, keepdim=True)
    return p, q


def rule(p, q, path):
    """w_0..w_P, h_1..h_P and the residuals' laws after each number accepted, from the formulas."""
    weights, chances, finals = [1.0], [], []
    for slot, token in enumerate(path):
        before = path[:slot]
        left = (weights[-1] * p[before] - q[before]).clamp_min(0)
        finals.append(left / left.sum() if left.sum() > 0 else p[before])
        if slot:
            chances.append(float(left.sum() / (left.sum() + 1 - weights[-1])))
        weights.append(min(1.0, weights[-1] * float(p[before][token] / q[before][token])))
    return weights, [*chances, weights[-1]], [*finals, p[path]]


def cells(p, q):
    """(path, uniform number of each test and of the final draw, weight) of all outcomes."""
    for path in itertools.product(range(VOCAB), repeat=SLOTS):
        drawn = [float(q[path[:slot]][token]) for slot, token in enumerate(path)]
        if min(drawn) == 0:
            continue
        _, chances, finals = rule(p, q, path)
        for passes in itertools.product((True, False), repeat=SLOTS):
            weight, tests = torch.tensor(drawn).double().prod(), []
            for ok, h in zip(passes, chances, strict=True):
                weight = weight * (h if ok else 1 - h)
                tests.append(h * (1 - 1e-5) if ok else h + 1e-5 * (1 - h))
            n = max((slot + 1 for slot in range(SLOTS) if passes[slot]), default=0)
            ends = finals[n].cumsum(0).tolist()
            for token, mass in enumerate(finals[n].tolist()):
                for inside in (1e-5, 1 - 1e-5):  # both ends of the token's stretch of the CDF
                    if mass > 0:
                        number = ends[token] - mass * inside
                        yield path, tests, number, float(weight * mass / 2)


def enumerated(monkeypatch, kind, p, q):
    """{emitted tokens: probability} of the reference, over all cells."""
    if kind == "one-hot":  # drafts of the token with the most mass
        q = {path: torch.eye(VOCAB).double()[law.argmax()] for path, law in q.items()}
    found = list(cells(p, q))
    draft = torch.tensor([path for path, *_ in found])
    numbers = torch.tensor([[*tests, final] for _, tests, final, _ in found]).double()
    rows = torch.arange(len(found))

    def laws(table, num):
        return torch.stack(
            [torch.stack([table[path[:slot]] for slot in range(num)]) for path, *_ in found]
        )

    logits, q_rows = laws(p, SLOTS + 1).log().float(), laws(q, SLOTS).float()
    given = None
    if kind == "candidates":  # in an order of their own, with entries that stand for nothing
        ids = torch.tensor([2, 0, 1, 0, 2]).expand(len(found), SLOTS, 5).contiguous()
        probs = torch.cat([q_rows[..., [2, 0, 1]], torch.zeros(len(found), SLOTS, 2)], -1)
        given = CandidateLaw(ids, probs)
    if kind == "full":
        ones = torch.ones(len(found) * SLOTS)
        given = FullLaw(q_rows.log(), row_law_reference(q_rows.log().flatten(0, 1), ones))
    monkeypatch.setattr(block_verify, "uniforms", lambda keys, counters: numbers[keys, counters])
    ones = torch.ones(len(found))
    accepted, following = block_verify_reference(
        logits,
        row_law_reference(logits.flatten(0, 1), ones.repeat_interleave(SLOTS + 1)),
        draft,
        given,
        ones,
        rows,
        torch.zeros_like(rows),
        rows,
        torch.full_like(rows, SLOTS),
        torch.full((len(rows),), SLOTS, dtype=torch.int32),
    )
    law = {}
    for (path, *_, mass), n, token in zip(
        found, accepted.tolist(), following.tolist(), strict=True
    ):
        law[(*path[:n], token)] = law.get((*path[:n], token), 0.0) + mass
    return law


def distance(law, p):
    """Total variation between emitted tokens, continued by p, and p alone."""
    whole = 0.0
    for path in itertools.product(range(VOCAB), repeat=SLOTS + 1):
        sure = [float(p[path[:slot]][token]) for slot, token in enumerate(path)]
        emitted = sum(
            law.get(path[:length], 0.0) * float(torch.tensor(sure[length:]).double().prod())
            for length in range(1, SLOTS + 2)
        )
        whole += abs(emitted - float(torch.tensor(sure).double().prod()))
    return whole / 2


@KINDS
def test_what_is_emitted_has_exactly_the_targets_law(kind, monkeypatch):
    p, q = random_laws()
    law = enumerated(monkeypatch, kind, p, q)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-6)
    assert distance(law, p) < 1e-6
    assert {len(path) for path in law} >= {1, 2, 4}


def test_a_residual_that_forgets_its_weight_is_seen_in_the_law(monkeypatch):
    def forgetful(*arguments):
        return drawn(*arguments[:-2], torch.ones_like(arguments[-2]), arguments[-1])

    p, q = random_laws()
    drawn = block_verify.draw_final_reference
    monkeypatch.setattr(block_verify, "draw_final_reference", forgetful)
    assert distance(enumerated(monkeypatch, "full", p, q), p) > 1e-3
