"""Block verification in both forms: its law by enumeration, its decisions against those of the
eager engine's `accept`, number by number."""

import itertools

import pytest
import torch
from test_kernel_candidate_selector import key_for
from test_kernel_row_law import call, to
from test_kernel_verify import KINDS_OF_Q, random_problem

from dflash2_lab.decoding.steps import Proposal, accept
from dflash2_lab.kernels import block_verify
from dflash2_lab.kernels.block_verify import block_verify_reference, block_verify_triton
from dflash2_lab.kernels.draw import draw_reference
from dflash2_lab.kernels.row_law import Law, row_law_reference
from dflash2_lab.kernels.tools import uniforms
from dflash2_lab.kernels.verify import CandidateLaw, FullLaw, verify_reference
from dflash2_lab.sampling import filter_logits, row_key

FORMS = pytest.mark.parametrize("form", [block_verify_reference, block_verify_triton])
KINDS = pytest.mark.parametrize("kind", KINDS_OF_Q)


# The emitted law, by enumeration: laws that depend on the path, and cells of the random numbers in
# which every outcome is one.

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


@pytest.mark.parametrize("kind", ["full", "one-hot"])
@FORMS
def test_greedy_rows_accept_the_argmax_and_end_with_it(form, kind, device):
    arguments = random_problem(rows=4, kind=kind)
    arguments["temperature"] = torch.zeros(4)
    arguments["law"] = row_law_reference(arguments["logits"].flatten(0, 1), torch.zeros(16))
    best = arguments["logits"].argmax(-1)
    draft = best[:, :3].clone()
    draft[0, 0] = (draft[0, 0] + 1) % 100
    draft[1, 2] = (draft[1, 2] + 1) % 100
    arguments["draft"] = draft
    arguments["num_offered"] = torch.tensor([3, 3, 3, 1], dtype=torch.int32)
    accepted, following = call(form, device, {"block": 64}, **arguments)
    assert accepted.tolist() == [0, 2, 3, 1]
    assert following.tolist() == best[range(4), [0, 2, 3, 1]].tolist()


@pytest.mark.parametrize("kind", ["candidates", "full"])
@FORMS
def test_a_forced_number_is_accepted_up_to_what_is_offered(form, kind, device):
    arguments = random_problem(rows=6, kind=kind)
    arguments["num_offered"] = torch.tensor([3, 3, 3, 2, 2, 3], dtype=torch.int32)
    real, _ = block_verify_reference(**arguments)
    arguments["forced"] = torch.tensor([0, 1, 3, 3, 0, -1], dtype=torch.int32)
    accepted, following = call(form, device, {"block": 128}, **arguments)
    assert accepted.tolist() == [0, 1, 3, 2, 0, int(real[5])]
    assert ((following >= 0) & (following < 100)).all()


@KINDS
def test_broken_rows_end_with_a_token_and_leave_the_others_alone(kind, device):
    arguments = random_problem(rows=6, kind=kind)
    expected = pairs(block_verify_reference(**arguments))
    arguments["logits"][1] = torch.nan
    arguments["logits"][4] = torch.inf
    per_row = arguments["temperature"].repeat_interleave(4)
    filters = (torch.full((24,), 40, dtype=torch.int32), torch.full((24,), 0.9))
    law = row_law_reference(arguments["logits"].flatten(0, 1), per_row, *filters)
    for form in (block_verify_reference, block_verify_triton):
        found = call(form, device, {"block": 128}, **arguments | {"law": law})
        assert ((found[1] >= 0) & (found[1] < 100)).all()
        for row in (0, 2, 3, 5):
            assert pairs(found)[row] == expected[row]


def test_views_with_gaps_are_read_right_and_arrivals_end_at_zero(device):
    arguments = random_problem(rows=2)
    expected = pairs(block_verify_reference(**arguments))
    wide = torch.cat([arguments["logits"], torch.full((2, 4, 28), torch.nan)], -1)
    block = torch.cat([torch.full((2, 1), -5), arguments["draft"]], 1)
    q_wide = torch.cat([torch.full((2, 1, 100), torch.nan), arguments["q"].logits], 1)
    moved = to(device, arguments | {"q": None})
    moved |= {"logits": wide.to(device)[..., :100], "draft": block.to(device)[:, 1:]}
    law = Law(*(part.to(device) for part in arguments["q"].law))
    moved["q"] = FullLaw(q_wide.to(device)[:, 1:], law)
    arrivals = torch.zeros(2, dtype=torch.int32, device=device)
    for _ in range(2):
        found = block_verify_triton(**moved, arrivals=arrivals, block=64)
        assert pairs(found) == expected
        assert not arrivals.any()


@pytest.mark.parametrize("name", ["draft", "accept_keys", "num_offered"])
def test_shapes_that_do_not_fit_are_named(name, device):
    arguments = random_problem(rows=3)
    arguments[name] = arguments[name][1:]
    with pytest.raises(ValueError, match="found"):
        call(block_verify_triton, device, **arguments)


def test_more_is_accepted_than_token_by_token():
    arguments = random_problem(rows=900, slots=5)
    block, token = block_verify_reference(**arguments)[0], verify_reference(**arguments)[0]
    assert block.float().mean() > token.float().mean() + 0.02
    greedy = arguments["temperature"] == 0
    assert torch.equal(block[greedy], token[greedy])
