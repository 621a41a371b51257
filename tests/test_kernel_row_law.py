"""Row laws and draws in both forms, against laws made by ranking and at known random numbers."""

import numpy as np
import pytest
import torch
from test_kernel_candidate_selector import keys_for

from dflash2_lab.kernels.draw import draw_reference, draw_triton
from dflash2_lab.kernels.row_law import Law, law_probs, row_law_reference, row_law_triton
from dflash2_lab.sampling import filter_logits

LAWS = pytest.mark.parametrize("form", [row_law_reference, row_law_triton])
DRAWS = pytest.mark.parametrize("form", [draw_reference, draw_triton])


def options(form, **some):
    """Those of the launcher for the launcher alone."""
    return some if form.__name__.endswith("_triton") else {}


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
    some = {"block": 128, "sorted_sizes": (16, 32)}
    law = call(row_law_triton, device, some, logits=logits, **settings_of(rows))
    check_law(logits, law, rows)


def test_kernel_law_of_a_row_shorter_than_a_chunk(device, poisoned):
    rows = SETTINGS[2:5]
    logits = some_logits("plain", 3, 37)
    some = {"block": 64, "sorted_sizes": (8, 32)}
    law = call(row_law_triton, device, some, logits=logits, **settings_of(rows))
    check_law(logits, law, rows)


TIED = ((1.0, 6, 1.0), (1.0, 0, 0.35), (0.7, 9, 0.5), (1.0, 1, 1.0), (1.0, 10**6, 1e-6))
TIED += ((1.0, 10**6, 0.9999),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [8, 9, 16, 17, 32, 33])
def test_ties_are_cut_by_id_when_a_list_just_fits_what_is_sorted_or_does_not(
    vocab, dtype, device, poisoned
):
    """All tokens tie, so that a list has them all: sorted as 8 or 16, searched, or not made."""
    logits = torch.full((len(TIED), vocab), -1.375).to(dtype)
    some = {"block": 16, "sorted_sizes": (8, 16), "list_size": 32}
    law = call(row_law_triton, device, some, logits=logits, **settings_of(TIED))
    check_law(logits, law, TIED)


@pytest.mark.parametrize("sizes", [(8, 32), (4, 4)])
@pytest.mark.parametrize("kind", ["plain", "tied bf16", "minus infinity", "signed zeros"])
def test_sorted_and_searched_lists_give_the_same_law(kind, sizes, device, poisoned):
    rows = ((1.0, 9, 1.0), (0.5, 0, 0.9), (1.3, 20, 0.7), (1.0, 1, 0.5), (0.0, 4, 0.5))
    logits = some_logits(kind, len(rows), 32)
    logits[:, 0] = 1.0  # whatever the kind, not all of a row is -inf
    some = {"block": 16, "sorted_sizes": sizes, "list_size": 32}
    law = call(row_law_triton, device, some, logits=logits, **settings_of(rows))
    check_law(logits, law, rows)


@pytest.mark.parametrize("given", ["top_k", "top_p"])
def test_one_filter_is_cut_without_the_other(given, device, poisoned):
    logits = some_logits("plain", 2, 50)
    rows = ((0.8, 7, 1.0), (0.8, 0, 1.0)) if given == "top_k" else ((0.8, 0, 0.6), (0.8, 0, 1.0))
    settings = settings_of(rows)
    arguments = {"temperature": settings["temperature"], given: settings[given]}
    some = {"block": 32, "sorted_sizes": (8, 32)}
    check_law(logits, call(row_law_triton, device, some, logits=logits, **arguments), rows)


@pytest.mark.parametrize("sizes", [(32, 32), (4, 4)])
def test_a_threshold_is_found_between_neighbouring_floats_of_both_signs(sizes, device, poisoned):
    """fp32 whose ordered bits differ by one, and by nearly all of 32 bits."""
    near = torch.tensor([2.0, -2.0, 1e-38, -1e-38, 0.0, -0.0])
    far = torch.tensor([9.0, -8.0, 3.0])
    logits = torch.cat([near, near.nextafter(torch.tensor(9.0)), far, far - 20]).repeat(3, 1)
    rows = ((4.0, 4, 1.0), (4.0, 8, 1.0), (4.0, 13, 0.97))
    some = {"block": 32, "sorted_sizes": sizes, "list_size": 64}
    law = call(row_law_triton, device, some, logits=logits, **settings_of(rows))
    check_law(logits, law, rows)


@pytest.mark.parametrize("kind", ["bf16", "tied bf16"])
def test_a_law_too_flat_for_the_list_is_found_in_the_whole_row(kind, device, poisoned):
    rows = ((1.0, 7, 0.8), (2.0, 0, 0.97))
    logits = some_logits(kind, 2, 100)
    some = {"block": 64, "list_size": 4, "sorted_sizes": (8, 32)}
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
    some = {"block": 64, "sorted_sizes": (8, 32)}
    law = call(form, device, some, logits=logits, **arguments)
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
    some = {"arrivals": arrivals, "block": 32, "list_size": 64, "sorted_sizes": (8, 32)}
    laws = [row_law_triton(logits, **arguments, **some) for _ in range(2)]
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
        logits=logits,
        law=row_law_reference(logits, temperature),
        temperature=temperature,
        keys=keys_for([0.0, 0.5, 1 - 2.0**-48]),
        counters=torch.zeros(3, dtype=torch.int64),
    )
    assert (tokens % 2 == 1).all()
    assert tokens[0] == 1
    assert tokens[2] == 151_935
