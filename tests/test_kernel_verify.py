"""Row laws, draws and acceptance in both forms: against laws made by loops, and by enumeration of
the random numbers, so that a law of tokens is checked and not a sample of it."""

import itertools

import numpy as np
import pytest
import torch
from test_kernel_candidate_selector import keys_for

from dflash2_lab.kernels import candidate_selector, verify
from dflash2_lab.kernels.candidate_selector import select_reference, uniforms
from dflash2_lab.kernels.verify import (
    CandidateLaw,
    FullLaw,
    Law,
    draw_reference,
    draw_triton,
    law_probs,
    row_law_reference,
    row_law_triton,
    verify_reference,
    verify_triton,
)
from dflash2_lab.sampling import filter_logits, row_key

LAWS = pytest.mark.parametrize("form", [row_law_reference, row_law_triton])
DRAWS = pytest.mark.parametrize("form", [draw_reference, draw_triton])
VERIFIERS = pytest.mark.parametrize("form", [verify_reference, verify_triton])


def options(form, **some):
    """Those of the launcher for the launcher alone."""
    return some if form in (row_law_triton, draw_triton, verify_triton) else {}


def to(device, part):
    """A tensor, or a tuple or dict with tensors in it, on the device."""
    if isinstance(part, torch.Tensor):
        return part.to(device)
    if isinstance(part, dict):
        return {name: to(device, value) for name, value in part.items()}
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(to(device, value) for value in part))
    return part


def call(form, device, some=None, **arguments):
    """`form` on the device, its result on the CPU; `some` are options of a launcher."""
    return to(torch.device("cpu"), form(**to(device, arguments), **options(form, **(some or {}))))


# Row laws.


def law_by_ranking(logits, temperature, top_k, top_p):
    """p of one row in float64, and how near to `top_p` a running mass came."""
    row = logits.double().numpy()
    ranked = np.lexsort((np.arange(len(row)), -row))
    p = np.zeros(len(row))
    if temperature == 0:
        p[ranked[0]] = 1.0
        return p, 1.0
    kept = ranked[: top_k if 0 < top_k < len(row) else len(row)]
    weight = np.exp((row[kept] - row[ranked[0]]) / temperature)
    weight /= weight.sum()
    before = np.concatenate([[0.0], weight.cumsum()[:-1]])
    stays = (before < top_p) | (top_p >= 1)
    p[kept[stays]] = weight[stays] / weight[stays].sum()
    return p, np.abs(before - top_p).min() if top_p < 1 else 1.0


SETTINGS = (
    *((1.0, 0, 1.0), (0.7, 0, 0.9), (1.0, 5, 1.0), (1.3, 7, 0.8), (0.0, 5, 0.5), (1.0, 1, 1.0)),
    *((2.0, 0, 0.999), (0.5, 0, 1e-4), (1.0, 10**6, 1.0), (1.0, 30, 0.3), (0.1, 3, 0.99)),
)
KINDS = ("plain", "tied", "bf16", "tied bf16", "minus infinity", "signed zeros")


def settings_of(rows):
    temperature, top_k, top_p = zip(*rows, strict=True)
    return {
        "temperature": torch.tensor(temperature),
        "top_k": torch.tensor(top_k, dtype=torch.int32),
        "top_p": torch.tensor(top_p),
    }


def some_logits(kind, rows, vocab):
    logits = 3 * torch.randn(rows, vocab)
    if kind == "tied":
        return logits.round()  # a handful of values
    if kind == "bf16":
        return logits.bfloat16()
    if kind == "tied bf16":
        return (logits.round() / 2).bfloat16()
    if kind == "minus infinity":
        return logits.masked_fill(torch.rand_like(logits) < 0.8, -torch.inf)
    if kind == "signed zeros":
        return logits.sign() * 0.0
    return logits


def check_law(logits, law, rows):
    found = law_probs(logits, law, settings_of(rows)["temperature"])
    assert law.argmax.tolist() == [int(np.argmax(row)) for row in logits.double().numpy()]
    assert law.finite.all()
    for row, setting in enumerate(rows):
        expected, gap = law_by_ranking(logits[row], *setting)
        if gap < 1e-6:  # rounding decides whether one token more stays
            more = int((found[row] > 0).sum()) - int((expected > 0).sum())
            assert abs(more) <= 1, setting
            continue
        assert ((found[row] > 0).numpy() == (expected > 0)).all(), setting
        np.testing.assert_allclose(found[row], expected, atol=2e-6, err_msg=str(setting))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [37, 300, 3000])
def test_reference_law_is_the_ranked_row_cut(vocab, kind):
    logits = some_logits(kind, len(SETTINGS), vocab)
    check_law(logits, row_law_reference(logits, **settings_of(SETTINGS)), SETTINGS)


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_law_is_the_ranked_row_cut(kind, device, poisoned):
    # the interpreter is slow: each kind of row meets some of the settings
    rows = SETTINGS[KINDS.index(kind) % 4 :: 4]
    logits = some_logits(kind, len(rows), 300)
    law = call(row_law_triton, device, {"block": 128}, logits=logits, **settings_of(rows))
    check_law(logits, law, rows)


def test_kernel_law_of_a_row_shorter_than_a_chunk(device, poisoned):
    rows = SETTINGS[2:5]
    logits = some_logits("plain", 3, 37)
    law = call(row_law_triton, device, {"block": 64}, logits=logits, **settings_of(rows))
    check_law(logits, law, rows)


@pytest.mark.parametrize("kind", ["bf16", "tied bf16"])
def test_a_law_too_flat_for_the_list_is_found_in_the_whole_row(kind, device, poisoned):
    rows = ((1.0, 7, 0.8), (2.0, 0, 0.97))
    logits = some_logits(kind, 2, 100)
    some = {"block": 64, "list_size": 4}
    law = call(row_law_triton, device, some, logits=logits, **settings_of(rows))
    check_law(logits, law, rows)


@LAWS
def test_without_filters_a_law_is_the_softmax_and_greedy_is_one_hot(form, device, poisoned):
    logits = torch.randn(3, 200).round().bfloat16()
    temperature = torch.tensor([1.0, 0.0, 0.3])
    law = call(form, device, {"block": 64}, logits=logits, temperature=temperature)
    found = law_probs(logits, law, temperature)
    for row in range(3):
        expected = filter_logits(logits[row], float(temperature[row]))
        torch.testing.assert_close(found[row], expected, rtol=0, atol=2e-6)
    assert torch.equal(law.argmax, logits.float().argmax(-1))


@LAWS
def test_rows_without_a_usable_logit_are_marked_and_harm_nobody(form, device):
    logits = torch.randn(6, 100).bfloat16()
    logits[0, 70], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, ::2] = -torch.inf
    arguments = settings_of([(1.0, 5, 0.9)] * 5 + [(0.0, 0, 1.0)])
    law = call(form, device, {"block": 64}, logits=logits, **arguments)
    assert law.finite.tolist() == [False, False, False, True, True, True]
    assert ((law.argmax >= 0) & (law.argmax < 100)).all()
    good = law_probs(logits, law, arguments["temperature"])[3:]
    torch.testing.assert_close(good.sum(-1), torch.ones(3))


def test_the_largest_logit_of_a_broken_row_may_be_nan_but_a_draw_is_a_token(device):
    logits = torch.full((3, 100), torch.nan)
    logits[1], logits[2, 99] = -torch.inf, torch.inf
    temperature = torch.tensor([1.0, 1.0, 1.0])
    keys, zeros = keys_for([0.0, 0.5, 0.999]), torch.zeros(3, dtype=torch.int64)
    for make, take in ((row_law_reference, draw_reference), (row_law_triton, draw_triton)):
        law = call(make, device, {"block": 64}, logits=logits, temperature=temperature)
        tokens = call(
            take,
            device,
            {"block": 64},
            logits=logits,
            law=law,
            temperature=temperature,
            keys=keys,
            counters=zeros,
        )
        assert ((tokens >= 0) & (tokens < 100)).all()


def test_arrivals_are_zero_again_so_that_a_launch_can_be_replayed(device):
    logits = to(device, torch.randn(2, 100).bfloat16())
    arguments = to(device, settings_of([(1.0, 5, 1.0), (0.0, 0, 1.0)]))
    arrivals = torch.zeros(2, dtype=torch.int32, device=device)
    laws = [
        row_law_triton(logits, **arguments, arrivals=arrivals, block=32, list_size=64)
        for _ in range(2)
    ]
    assert all(torch.equal(*pair) for pair in zip(*laws, strict=True))
    assert not arrivals.any()


# Draws.


def spread(probs, vocab=100, at=(3, 40, 70, 99), temperature=0.5):
    """Logits whose law at `temperature` has these probabilities at these ids and none elsewhere."""
    logits = torch.full((*probs.shape[:-1], vocab), -torch.inf)
    logits[..., list(at)] = temperature * probs.log()
    return logits


@DRAWS
def test_a_draw_is_the_first_token_whose_running_total_exceeds_the_number(form, device, poisoned):
    probs = torch.tensor([0.25, 0.5, 0.0, 0.25])
    steps = np.array([0.0, 0.25, 0.75, 1.0])
    numbers = np.concatenate([steps, steps - 1e-5, steps + 1e-5]).clip(0, 1 - 2.0**-48)
    rows, temperature = len(numbers), torch.full((len(numbers),), 0.5)
    logits = spread(probs).expand(rows, -1).contiguous()
    tokens = call(
        form,
        device,
        {"block": 64},
        logits=logits,
        law=row_law_reference(logits, temperature),
        temperature=temperature,
        keys=keys_for(numbers, 7),
        counters=torch.full((rows,), 7),
    )
    assert tokens.dtype == torch.int64
    assert set(tokens.tolist()) == {3, 40, 99}
    sure = np.abs(numbers[:, None] - [0.25, 0.75]).min(1) > 1e-6
    expected = np.select([numbers < 0.25, numbers < 0.75], [3, 40], 99)
    assert tokens.numpy()[sure].tolist() == expected[sure].tolist()


@DRAWS
def test_each_row_is_drawn_at_its_own_temperature(form, device):
    # a grid of numbers: each token is drawn as often as its law says, to one grid point
    grid = (np.arange(10) + 0.5) / 10
    base = torch.tensor([0.0, 0.3, 0.2, -0.4, 0.1])
    temperature = torch.tensor([0.1, 1.0, 0.0]).repeat_interleave(10)
    logits = base.expand(30, 5).contiguous()
    tokens = call(
        form,
        device,
        {"block": 16},
        logits=logits,
        law=row_law_reference(logits, temperature),
        temperature=temperature,
        keys=keys_for([*grid, *grid, *grid]),
        counters=torch.zeros(30, dtype=torch.int64),
    ).view(3, 10)
    counts = torch.stack([row.bincount(minlength=5) for row in tokens])
    expected = torch.stack([10 * filter_logits(base, t) for t in (0.1, 1.0, 0.0)])
    assert (counts - expected).abs().max() <= 1
    assert (counts[0] - expected[1]).abs().max() > 2


def test_draws_never_leave_the_filtered_support():
    logits, number = 2 * torch.randn(300), 5000
    grid = (torch.arange(number) + 0.5) / number
    law = row_law_reference(logits[None], **settings_of([(0.8, 20, 0.9)]))
    probs = law_probs(logits[None], law, torch.tensor([0.8]))[0]
    expected = filter_logits(logits, 0.8, top_p=0.9, top_k=20)
    tokens = draw_reference(
        logits.expand(number, -1),
        Law(*(part.expand(number) for part in law)),
        torch.full((number,), 0.8),
        keys_for(grid.double()),
        torch.zeros(number, dtype=torch.int64),
    )
    counts = tokens.bincount(minlength=300)
    assert ((probs > 0) == (expected > 0)).all()
    assert not counts[expected == 0].any()
    assert (counts - number * expected).abs().max() <= 1.01


@DRAWS
def test_half_of_a_large_vocabulary_is_impossible_and_never_drawn(form, device):
    logits = torch.randn(3, 151_936).bfloat16()
    logits[:, ::2] = -torch.inf
    temperature = torch.ones(3)
    tokens = call(
        form,
        device,
        {"block": 65_536},
        logits=logits,
        law=row_law_reference(logits, temperature),
        temperature=temperature,
        keys=keys_for([0.0, 0.5, 1 - 2.0**-48]),
        counters=torch.zeros(3, dtype=torch.int64),
    )
    assert (tokens % 2 == 1).all()
    assert tokens[0] == 1
    assert tokens[2] == 151_935


# Acceptance. Tokens 3, 40, 70, 99 of a vocabulary of 100; all probabilities are such that a small
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
    following = torch.searchsorted(AT, following)
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
def test_greedy_rows_accept_the_argmax_and_end_with_it(form, device):
    arguments = random_problem(rows=4)
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


@VERIFIERS
def test_a_forced_number_is_accepted_up_to_what_is_offered(form, device):
    arguments = random_problem(rows=6)
    real, _ = verify_reference(**arguments)
    arguments["num_offered"] = torch.tensor([3, 3, 3, 2, 2, 3], dtype=torch.int32)
    arguments["forced"] = torch.tensor([0, 1, 3, 3, 0, -1], dtype=torch.int32)
    accepted, following = call(form, device, {"block": 64}, **arguments)
    assert accepted.tolist() == [0, 1, 3, 2, 0, int(real[5])]
    assert ((following >= 0) & (following < 100)).all()


@pytest.mark.parametrize("kind", KINDS_OF_Q)
def test_broken_rows_end_with_a_token_and_leave_the_others_alone(kind, device):
    arguments = random_problem(rows=6, kind=kind)
    expected = verify_reference(**arguments)
    arguments["logits"][1] = torch.nan
    arguments["logits"][4] = torch.inf
    per_row = arguments["temperature"].repeat_interleave(4)
    filters = (torch.full((24,), 40, dtype=torch.int32), torch.full((24,), 0.9))
    law = row_law_reference(arguments["logits"].flatten(0, 1), per_row, *filters)
    for form in (verify_reference, verify_triton):
        found = call(form, device, {"block": 64}, **arguments | {"law": law})
        assert ((found[1] >= 0) & (found[1] < 100)).all()
        for row in (0, 2, 3, 5):
            assert found[0][row] == expected[0][row]
            assert found[1][row] == expected[1][row]


def test_views_with_gaps_are_read_right_and_arrivals_end_at_zero(device):
    arguments = random_problem(rows=3)
    expected = verify_reference(**arguments)
    wide = torch.cat([arguments["logits"], torch.full((3, 4, 28), torch.nan)], -1)
    block = torch.cat([torch.full((3, 1), -5), arguments["draft"]], 1)
    moved = to(device, arguments)
    moved |= {"logits": wide.to(device)[..., :100], "draft": block.to(device)[:, 1:]}
    arrivals = torch.zeros(3, dtype=torch.int32, device=device)
    for _ in range(2):
        found = verify_triton(**moved, arrivals=arrivals, block=64)
        assert found[0].tolist() == expected[0].tolist()
        assert found[1].tolist() == expected[1].tolist()
        assert not arrivals.any()


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


@pytest.mark.parametrize("name", ["draft", "accept_keys", "num_offered"])
def test_shapes_that_do_not_fit_are_named(name, device):
    arguments = random_problem(rows=3)
    arguments[name] = arguments[name][1:]
    with pytest.raises(ValueError, match="found"):
        call(verify_triton, device, **arguments)
