"""Block verification in both forms: its decisions against those of the eager engine's `accept`,
number by number. Its law is enumerated in `test_kernel_block_law`."""

import pytest
import torch
from test_kernel_candidate_selector import key_for
from test_kernel_row_law import call
from test_kernel_verify import KINDS_OF_Q, random_problem

from dflash2_lab.decoding.steps import Proposal, accept
from dflash2_lab.kernels.block_verify import block_verify_reference, block_verify_triton
from dflash2_lab.kernels.draw import draw_reference
from dflash2_lab.kernels.row_law import row_law_reference
from dflash2_lab.kernels.tools import uniforms
from dflash2_lab.kernels.verify import CandidateLaw, FullLaw, verify_reference
from dflash2_lab.sampling import filter_logits, row_key

FORMS = pytest.mark.parametrize("form", [block_verify_reference, block_verify_triton])
KINDS = pytest.mark.parametrize("kind", KINDS_OF_Q)


# Decisions, against the eager engine's.


def uniforms_of(arguments, row, num):
    slots = torch.arange(num)
    tests = uniforms(
        arguments["accept_keys"][row].expand(num), arguments["accept_counters"][row] + slots
    )
    return tests, uniforms(arguments["final_keys"][row], arguments["final_counters"][row])


def eager_outcome(arguments, row, p, q):
    """What `accept` says of one row's drafts, its p [S, V] and its q [P, V] (None: as given)."""
    offered = int(arguments["num_offered"][row])
    given, draft = arguments["q"], arguments["draft"][row]
    if isinstance(given, CandidateLaw):
        q = torch.zeros_like(p[:-1]).scatter_add_(1, given.ids[row].long(), given.probs[row])
    tests, final = uniforms_of(arguments, row, offered)
    proposal = Proposal(draft, q).first(offered)
    found = accept(p[: offered + 1], proposal, tests, final, "block")
    return found.num, found.token


def eager_outcomes(arguments):
    """The same of all rows of a `random_problem`, whose laws are made here by `filter_logits`."""
    outcomes = []
    for row, temperature in enumerate(arguments["temperature"].tolist()):
        p = filter_logits(arguments["logits"][row], temperature, 0.9, 40)
        q = None
        if isinstance(arguments["q"], FullLaw):
            q = filter_logits(arguments["q"].logits[row], temperature, 0.95, 50)
        outcomes.append(eager_outcome(arguments, row, p, q))
    return outcomes


def pairs(found):
    return list(zip(*(part.tolist() for part in found), strict=True))


def mixed_offers(arguments, slots):
    rows = len(arguments["draft"])
    offered = torch.full((rows,), slots, dtype=torch.int32)
    offered[-slots:] = torch.arange(slots)
    return arguments | {"num_offered": offered}


@pytest.mark.parametrize("slots", [1, 2, 7])
@KINDS
def test_the_reference_decides_as_the_eager_engine(kind, slots):
    arguments = mixed_offers(random_problem(rows=120, slots=slots, kind=kind), slots)
    expected = eager_outcomes(arguments)
    assert pairs(block_verify_reference(**arguments)) == expected
    assert len({n for n, _ in expected}) > slots // 2 + 1
    assert expected != pairs(verify_reference(**arguments)) or slots == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@KINDS
def test_the_kernel_decides_as_the_eager_engine(kind, dtype, device, poisoned):
    arguments = mixed_offers(random_problem(rows=6, slots=3, dtype=dtype, kind=kind), 3)
    expected = eager_outcomes(arguments)
    found = call(block_verify_triton, device, {"block": 64}, **arguments)
    assert found[0].dtype == found[1].dtype == torch.int64
    assert pairs(found) == pairs(block_verify_reference(**arguments)) == expected
    assert len({n for n, _ in expected}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "block"), [(1, 64), (3, 16), (7, 128), (15, 128)])
@KINDS
def test_many_decisions_of_the_kernel_are_those_of_the_eager_engine(kind, slots, block, device):
    arguments = mixed_offers(random_problem(rows=24, slots=slots, kind=kind), slots)
    found = call(block_verify_triton, device, {"block": block}, **arguments)
    assert pairs(found) == eager_outcomes(arguments)


def dense(arguments, row):
    """p and q of a row in float64, from its logits at T = 1."""
    p = arguments["logits"][row].double().softmax(-1)
    given, draft = arguments["q"], arguments["draft"][row]
    if given is None:
        return p, torch.eye(p.shape[-1]).double()[draft]
    if isinstance(given, FullLaw):
        return p, given.logits[row].double().softmax(-1)
    return p, torch.zeros_like(p[1:]).scatter_add_(1, given.ids[row], given.probs[row].double())


def chances(p, q, draft):
    """h_1..h_P in float64."""
    weights, found = [1.0], []
    for slot, token in enumerate(draft.tolist()):
        if slot:
            left = float((weights[-1] * p[slot] - q[slot]).clamp_min(0).sum())
            found.append(left / (left + 1 - weights[-1]))
        weights.append(min(1.0, weights[-1] * float(p[slot][token] / q[slot][token])))
    return [*found, weights[-1]]


@KINDS
@FORMS
def test_each_test_turns_over_at_its_chance(form, kind, device):
    # rows: a slot's number just below and just above its h, the other slots' as they come
    slots, vocab = 4, 40
    draft = torch.tensor([5, 0, 20, 39])
    torch.manual_seed(2)
    logits = torch.randn(slots + 1, vocab)
    logits[range(slots), draft] += 4.0
    draft_logits = logits[:slots] + 0.5 * torch.randn(slots, vocab)
    draft_logits[range(slots), draft] += torch.tensor([1.0, -2.0, 1.5, 1.0])
    q = {"one-hot": None}.get(kind)
    if kind == "full":
        q = FullLaw(draft_logits[None], None)
    if kind == "candidates":
        probs, ids = draft_logits.topk(6)
        q = CandidateLaw(ids[None], probs.softmax(-1)[None])
    one = {"logits": logits[None], "draft": draft[None], "q": q}
    h = chances(*dense(one, 0), draft)
    # The second draft is likelier under p: there the weight is cut to 1, and the test is sure.
    assert (h[1] > 1 - 1e-9) == (kind != "one-hot")
    assert all(0.02 < h[slot] < 0.98 for slot in (0, 2, 3))
    sides = [(slot, side) for slot in (0, 2, 3) for side in (-1, 1)]
    rows = len(sides)
    keys = [key_for(h[slot] * (1 + 4e-6 * side), slot) for slot, side in sides]
    many = lambda part: part[None].expand(rows, *part.shape).contiguous()  # noqa: E731
    ones, zero = torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
    if kind == "full":
        spread = many(draft_logits)
        q = FullLaw(spread, row_law_reference(spread.flatten(0, 1), ones.repeat_interleave(slots)))
    if kind == "candidates":
        q = CandidateLaw(many(q.ids[0]), many(q.probs[0]))
    rows_of = many(logits)
    accepted, _ = call(
        form,
        device,
        {"block": 32 if kind == "full" else 64},
        logits=rows_of,
        law=row_law_reference(rows_of.flatten(0, 1), ones.repeat_interleave(slots + 1)),
        draft=many(draft),
        q=q,
        temperature=ones,
        accept_keys=torch.tensor(keys),
        accept_counters=zero,
        final_keys=zero,
        final_counters=zero,
        num_offered=torch.full((rows,), slots, dtype=torch.int32),
    )
    for (slot, side), key, n in zip(sides, keys, accepted.tolist(), strict=True):
        tests = uniforms(torch.full((slots,), key), torch.arange(slots)).tolist()
        passed = [u < chance for u, chance in zip(tests, h, strict=True)]
        assert passed[slot] == (side < 0)
        assert n == max((i + 1 for i in range(slots) if passed[i]), default=0)


# Shapes and values at the edge.


def problem_of(logits, q_logits, kind, k=None, temperature=1.0):
    """Rows of given logits [B, S, V] and draft logits [B, P, V]; drafts are drawn from q."""
    rows, slots, _ = q_logits.shape
    per_slot = torch.full((rows * slots,), temperature)
    q_law = row_law_reference(q_logits.flatten(0, 1), per_slot)
    keys = torch.tensor([row_key(1, "draft", row) for row in range(rows * slots)])
    drafted = draw_reference(q_logits.flatten(0, 1), q_law, per_slot, keys, torch.zeros_like(keys))
    q = {"full": FullLaw(q_logits, q_law)}.get(kind)
    if kind == "candidates":
        k = q_logits.shape[-1] if k is None else k
        best = q_logits.topk(min(k, q_logits.shape[-1]))
        probs = (best.values / temperature).softmax(-1)
        pick = (torch.rand(rows, slots, 1) >= probs.cumsum(-1)[..., :-1]).sum(-1, keepdim=True)
        drafted = best.indices.gather(-1, pick)
        more = k - best.indices.shape[-1]  # as many entries as asked for, on a smaller vocabulary
        ids = torch.cat([best.indices, best.indices[..., :1].expand(-1, -1, more)], -1)
        q = CandidateLaw(ids, torch.cat([probs, torch.zeros(rows, slots, more)], -1))
    per_row = torch.full((rows * (slots + 1),), temperature)
    return {
        "logits": logits,
        "law": row_law_reference(logits.flatten(0, 1), per_row),
        "draft": drafted.view(rows, slots),
        "q": q,
        "temperature": torch.full((rows,), temperature),
        "accept_keys": torch.tensor([row_key(0, "accept", row) for row in range(rows)]),
        "accept_counters": torch.arange(rows) * slots,
        "final_keys": torch.tensor([row_key(0, "final", row) for row in range(rows)]),
        "final_counters": torch.arange(rows),
        "num_offered": torch.full((rows,), slots, dtype=torch.int32),
    }


def expected_of(arguments):
    rows = []
    for row, temperature in enumerate(arguments["temperature"].tolist()):
        p, q = filter_logits(arguments["logits"][row], temperature), None
        if isinstance(arguments["q"], FullLaw):
            q = filter_logits(arguments["q"].logits[row], temperature)
        rows.append(eager_outcome(arguments, row, p, q))
    return rows


@pytest.mark.parametrize(("k", "vocab"), [(1, 20), (12, 8), (3, 33)])
@FORMS
def test_any_number_of_candidates_even_more_than_tokens(form, k, vocab, device):
    logits = torch.randn(4, 4, vocab)
    noisy = logits[:, :3] + torch.randn(4, 3, vocab)
    arguments = problem_of(logits, noisy, "candidates", k)
    found = call(form, device, {"block": 32}, **arguments)
    assert pairs(found) == expected_of(arguments)


@pytest.mark.parametrize("kind", ["full", "candidates"])
@FORMS
def test_drafts_from_the_targets_own_law_are_all_accepted(form, kind, device):
    logits = 2 * torch.randn(4, 4, 30)
    arguments = problem_of(logits, logits[:, :3].clone(), kind)
    accepted, following = call(form, device, {"block": 16}, **arguments)
    assert accepted.tolist() == [3] * 4
    assert following.tolist() == [token for _, token in expected_of(arguments)]


@KINDS
@FORMS
def test_tokens_that_are_ruled_out_are_never_accepted_nor_drawn(form, kind, device):
    logits = torch.randn(4, 4, 30)
    logits[:, :, 10:] = -torch.inf
    noisy = torch.randn(4, 3, 30)
    noisy[:, :2, 10:] -= 2.0
    noisy[2:, 1:, ::2] = -torch.inf
    arguments = problem_of(logits, noisy, kind, 20)
    accepted, following = call(form, device, {"block": 32}, **arguments)
    assert pairs((accepted, following)) == expected_of(arguments)
    assert (following < 10).all()
    for row, n in enumerate(accepted.tolist()):
        assert (arguments["draft"][row, :n] < 10).all()


def test_more_is_accepted_than_token_by_token():
    arguments = random_problem(rows=900, slots=5)
    block, token = block_verify_reference(**arguments)[0], verify_reference(**arguments)[0]
    assert block.float().mean() > token.float().mean() + 0.02
    greedy = arguments["temperature"] == 0
    assert torch.equal(block[greedy], token[greedy])
