"""Acceptance in both forms, by enumeration of the random numbers, so that a law of tokens is
checked and not a sample of it."""

import itertools

import pytest
import torch
from test_kernel_candidate_selector import keys_for
from test_kernel_row_law import call, spread

from dflash2_lab.kernels import candidate_selector, verify
from dflash2_lab.kernels.candidate_selector import select_reference
from dflash2_lab.kernels.draw import draw_reference
from dflash2_lab.kernels.row_law import law_probs, row_law_reference
from dflash2_lab.kernels.tools import uniforms
from dflash2_lab.kernels.verify import CandidateLaw, FullLaw, verify_reference, verify_triton
from dflash2_lab.sampling import row_key

VERIFIERS = pytest.mark.parametrize("form", [verify_reference, verify_triton])

# Tokens 3, 40, 70, 99 of a vocabulary of 100; all probabilities are such that a small
# grid of random numbers gives every law exactly.

AT = torch.tensor([3, 40, 70, 99])
P_ROWS = torch.tensor([[6, 9, 3, 6], [12, 3, 3, 6], [8, 0, 16, 0]]) / 24
Q_ROWS = torch.tensor([[2, 1, 1, 0], [1, 1, 1, 1]]) / 4


def q_of(kind, rows, slots):
    if kind == "one-hot":
        return None
    probs = Q_ROWS[:slots].expand(rows, -1, -1)
    if kind == "candidates":  # with entries that stand for nothing
        ids = torch.cat([AT, torch.tensor([3, 0])]).expand(rows, slots, 6)
        padded = torch.cat([probs, torch.zeros(rows, slots, 2)], -1)
        return CandidateLaw(ids.contiguous(), padded)
    logits = spread(probs)
    law = row_law_reference(logits.flatten(0, 1), torch.full((rows * slots,), 0.5))
    return FullLaw(logits, law)


def problem(kind, draft, p_rows, keys, counters, final_keys, temperature=0.5):
    rows, slots = draft.shape
    logits = spread(p_rows.expand(rows, -1, -1), temperature=temperature)
    temperatures = torch.full((rows,), temperature)
    law = row_law_reference(logits.flatten(0, 1), temperatures.repeat_interleave(slots + 1))
    return {
        "logits": logits,
        "law": law,
        "draft": AT[draft],
        "q": q_of(kind, rows, slots),
        "temperature": temperatures,
        "accept_keys": keys,
        "accept_counters": counters,
        "final_keys": final_keys,
        "final_counters": torch.full((rows,), 11),
        "num_offered": torch.full((rows,), slots, dtype=torch.int32),
    }


def emitted_law(draft, weight, accepted, following):
    """Probability of each emitted sequence: the accepted drafts, then the token that follows."""
    law = {}
    following = torch.searchsorted(AT.to(following.device), following)
    for row, n in enumerate(accepted.tolist()):
        path = (*draft[row, :n].tolist(), int(following[row]))
        law[path] = law.get(path, 0.0) + float(weight[row])
    return law


def speculative_law(q_rows, p_rows):
    """The same from the theory: min(p, q) an accepted slot, then (p - q)+, or p for the bonus."""
    law, reached = {}, {(): 1.0}
    for q, p in zip(q_rows, p_rows, strict=False):
        law |= {
            (*path, v): w * max(p[v] - q[v], 0) for path, w in reached.items() for v in range(4)
        }
        reached = {(*path, v): w * min(p[v], q[v]) for path, w in reached.items() for v in range(4)}
    law |= {(*path, v): w * p_rows[-1][v] for path, w in reached.items() for v in range(4)}
    return {path: float(w) for path, w in law.items() if w > 0}


def same_law(found, expected, atol=1e-6):
    return set(found) == set(expected) and all(
        abs(found[path] - w) < atol for path, w in expected.items()
    )


KINDS_OF_Q = ("one-hot", "candidates", "full")


@pytest.mark.parametrize("kind", KINDS_OF_Q)
@VERIFIERS
def test_one_slot_gives_exactly_min_p_q_then_the_residual_or_the_bonus(
    form, kind, device, poisoned
):
    drafts = [0] if kind == "one-hot" else [0, 1, 2]
    tests, finals = (4, 6) if kind == "one-hot" else (2, 3)
    cells = list(itertools.product(drafts, range(tests), range(finals)))
    token, test, final = (torch.tensor(part) for part in zip(*cells, strict=True))
    arguments = problem(
        kind,
        token[:, None],
        P_ROWS[[0, 2]],
        keys_for((test + 0.5) / tests, 5),
        torch.full((len(cells),), 5),
        keys_for((final + 0.5) / finals, 11),
    )
    accepted, following = call(form, device, {"block": 128}, **arguments)
    assert accepted.dtype == following.dtype == torch.int64
    q = torch.eye(4)[:1] if kind == "one-hot" else Q_ROWS[:1]
    weight = q[0, token] / (tests * finals)
    found = emitted_law(token[:, None], weight, accepted, following)
    assert same_law(found, speculative_law(q.tolist(), P_ROWS[[0, 2]].tolist()))


def two_slots(monkeypatch, kind):
    """Every draft of two slots against a grid of 4 x 4 x 12 numbers: row b's digits say which."""
    drafts = [(0, 0)] if kind == "one-hot" else list(itertools.product(range(3), range(4)))
    grid = list(itertools.product(range(4), range(4), range(12)))
    cells = torch.tensor([(*draft, *point) for draft in drafts for point in grid])
    rows = torch.arange(len(cells))

    def digits(keys, counters):
        # counter 0 and 1: the tests of the slots; 11: the final draw
        column, base = torch.where(counters == 11, 4, counters + 2), torch.tensor([0, 0, 4, 4, 12])
        return (cells[keys, column].double() + 0.5) / base[column]

    monkeypatch.setattr(verify, "uniforms", digits)
    arguments = problem(kind, cells[:, :2], P_ROWS, rows, torch.zeros_like(rows), rows)
    q = torch.eye(4)[:1].expand(2, 4) if kind == "one-hot" else Q_ROWS
    weight = q[0, cells[:, 0]] * q[1, cells[:, 1]] / len(grid)
    return arguments, cells[:, :2], weight, q


@pytest.mark.parametrize("kind", KINDS_OF_Q)
def test_two_slots_give_exactly_the_joint_law_of_speculative_decoding(kind, monkeypatch):
    arguments, draft, weight, q = two_slots(monkeypatch, kind)
    found = emitted_law(draft, weight, *verify_reference(**arguments))
    assert same_law(found, speculative_law(q.tolist(), P_ROWS.tolist()))
    first = torch.zeros(4)
    for path, w in found.items():
        first[path[0]] += w
    torch.testing.assert_close(first, P_ROWS[0])  # what is emitted first has the target's law


def test_a_q_that_was_not_drawn_from_is_seen_in_the_joint_law(monkeypatch):
    arguments, draft, weight, q = two_slots(monkeypatch, "candidates")
    other = arguments["q"].probs.clone()
    other[..., :3] = other[..., :3].flip(-1)
    arguments["q"] = arguments["q"]._replace(probs=other)
    found = emitted_law(draft, weight, *verify_reference(**arguments))
    assert not same_law(found, speculative_law(q.tolist(), P_ROWS.tolist()), atol=0.01)


@VERIFIERS
def test_the_residual_is_normalised_not_put_through_a_softmax(form, device):
    # p = (.3, .6, .1), the argmax drafted and refused: (.3, 0, .1) -> (.75, 0, .25)
    p = torch.tensor([[0.3, 0.6, 0.1, 0.0], [0.0, 0.0, 0.0, 1.0]])
    numbers = [0.0, 0.4, 0.7499, 0.7501, 0.9, 1 - 2.0**-48]
    rows = torch.ones(6, 1, dtype=torch.int64)
    test, final = keys_for([0.65] * 6, 5), keys_for(numbers, 11)
    arguments = problem("one-hot", rows, p, test, 5 * rows[:, 0], final)
    accepted, following = call(form, device, {"block": 64}, **arguments)
    assert not accepted.any()
    assert following.tolist() == [3, 3, 3, 70, 70, 70]


@VERIFIERS
def test_a_residual_without_mass_falls_back_to_p(form, device):
    token = torch.zeros(4, 1, dtype=torch.int64)
    final = keys_for([0.1, 0.4, 0.6, 0.9], 11)
    p = torch.stack([Q_ROWS[1], P_ROWS[2]])
    arguments = problem("candidates", token, p, final, token[:, 0].contiguous(), final)
    q = arguments["q"]
    q.probs[..., :4] = 1.01 * Q_ROWS[1]  # nowhere below p
    arguments["forced"] = torch.zeros(4, dtype=torch.int32)
    accepted, following = call(form, device, {"block": 64}, **arguments)
    assert not accepted.any()
    assert following.tolist() == AT.tolist()


def random_problem(rows=6, slots=3, vocab=100, dtype=torch.float32, kind="full"):
    """Every row accepts something now and then; temperatures 0, 0.8, 1.3, ..."""
    temperature = torch.tensor([0.0, 0.8, 1.3])[torch.arange(rows) % 3]
    logits = (2 * torch.randn(rows, slots + 1, vocab)).to(dtype)
    draft_logits = (logits[:, :slots].float() + 0.7 * torch.randn(rows, slots, vocab)).to(dtype)
    per_slot = temperature.repeat_interleave(slots)
    filters = (torch.full((rows * slots,), 50), torch.full((rows * slots,), 0.95))
    q_law = row_law_reference(draft_logits.flatten(0, 1), per_slot, *filters)
    keys = torch.tensor([row_key(1, "draft", row) for row in range(rows * slots)])
    slot_of = torch.arange(rows * slots)
    drafted = draw_reference(draft_logits.flatten(0, 1), q_law, per_slot, keys, slot_of)
    q = {"full": FullLaw(draft_logits, q_law), "one-hot": None}.get(kind)
    if kind == "candidates":
        probs = law_probs(draft_logits.flatten(0, 1), q_law, per_slot)
        ids = probs.topk(50).indices
        shape = (rows, slots, 50)
        q = CandidateLaw(ids.view(shape).int(), probs.gather(1, ids).view(shape))
    filters = (torch.full((rows * (slots + 1),), 40), torch.full((rows * (slots + 1),), 0.9))
    law = row_law_reference(
        logits.flatten(0, 1), temperature.repeat_interleave(slots + 1), *filters
    )
    return {
        "logits": logits,
        "law": law,
        "draft": drafted.view(rows, slots),
        "q": q,
        "temperature": temperature,
        "accept_keys": torch.tensor([row_key(0, "accept", row) for row in range(rows)]),
        "accept_counters": torch.arange(rows) * slots,
        "final_keys": torch.tensor([row_key(0, "final", row) for row in range(rows)]),
        "final_counters": torch.arange(rows),
        "num_offered": torch.full((rows,), slots, dtype=torch.int32),
    }


@pytest.mark.parametrize("kind", KINDS_OF_Q)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_and_reference_take_the_same_decisions(kind, dtype, device, poisoned):
    arguments = random_problem(rows=9, dtype=dtype, kind=kind)
    arguments["num_offered"] = torch.tensor([3, 3, 3, 3, 3, 3, 0, 1, 2], dtype=torch.int32)
    expected = verify_reference(**arguments)
    found = call(verify_triton, device, {"block": 64}, **arguments)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == expected[1].tolist()
    assert len(set(expected[0].tolist())) > 1


@VERIFIERS
def test_slots_that_are_not_offered_are_not_accepted_and_give_the_bonus_row(form, device):
    token = torch.zeros(3, 2, dtype=torch.int64)
    sure = torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0], [0, 0, 1.0, 0]])
    keys, counters = keys_for([0.5] * 3), torch.zeros(3, dtype=torch.int64)
    arguments = problem("one-hot", token, sure, keys, counters, keys)
    arguments["num_offered"] = torch.tensor([0, 1, 2], dtype=torch.int32)
    accepted, following = call(form, device, {"block": 64}, **arguments)
    assert accepted.tolist() == [0, 1, 2]
    assert following.tolist() == [3, 3, 70]


def test_drafts_tests_and_final_draws_never_share_a_random_number(monkeypatch):
    # steps of 4 slots at anchors 0 to 9 of two requests: a number is a (key, counter)
    used = []

    def counted(keys, counters):
        pairs = torch.broadcast_tensors(keys, counters)
        used.extend(zip(*(part.flatten().tolist() for part in pairs), strict=True))
        return uniforms(keys, counters)

    monkeypatch.setattr(candidate_selector, "uniforms", counted)
    monkeypatch.setattr(verify, "uniforms", counted)
    roles = {
        role: torch.tensor([row_key(0, prompt, role) for prompt in ("a", "b")])
        for role in ("selector", "accept", "final")
    }
    codes, temperature = torch.randn(30, 8), torch.ones(2)
    for anchor in range(10):
        at = torch.tensor([anchor, anchor])
        unary, ids = torch.randn(2, 4, 30).topk(6)
        gate = torch.randn(2, 4, 8)
        draft, law = select_reference(
            unary, ids, at, gate, codes, codes, temperature, roles["selector"], at * 4
        )
        logits = torch.randn(2, 5, 30)
        verify_reference(
            logits,
            row_law_reference(logits.flatten(0, 1), temperature.repeat_interleave(5)),
            draft,
            CandidateLaw(ids, law),
            temperature,
            roles["accept"],
            at * 4,
            roles["final"],
            at,
            torch.full((2,), 4, dtype=torch.int32),
        )
    assert len(used) == 10 * 2 * (4 + 4 + 1)
    assert len(set(used)) == len(used)
