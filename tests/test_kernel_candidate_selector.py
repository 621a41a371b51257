"""`select` in both forms against a walk by loops in float64."""

import numpy as np
import pytest
import torch

from dflash2_lab.kernels import candidate_selector
from dflash2_lab.kernels.candidate_selector import (
    select,
    select_reference,
    select_triton,
)
from dflash2_lab.kernels.tools import jit, tl, uniform48, uniforms
from dflash2_lab.sampling import row_key

FORMS = pytest.mark.parametrize("form", [select_reference, select_triton])
WORD = 2**64


def key_for(uniform: float, counter: int = 0) -> int:
    """The int64 key whose random number at `counter` is `uniform`, cut to 48 bits: SplitMix64
    backwards."""
    state = int(uniform * 2.0**48) << 16
    state = _unshift(state, 31) * pow(0x94D049BB133111EB, -1, WORD) % WORD
    state = _unshift(state, 27) * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD
    key = (_unshift(state, 30) - counter * 0x9E3779B97F4A7C15) % WORD
    return key - WORD if key >= WORD // 2 else key


def _unshift(x: int, bits: int) -> int:
    """The y with y ^ (y >> bits) = x."""
    y = x
    while x:
        x >>= bits
        y ^= x
    return y


def keys_for(numbers, counter: int = 0) -> torch.Tensor:
    return torch.tensor([key_for(float(number), counter) for number in numbers])


def inputs(rows=3, slots=5, candidates=6, rank=20, vocab=50, dtype=torch.float32, **changes):
    """Arguments of `select` by name; row b has temperature 0, 1, 0.7, 0, ..."""
    ids = torch.stack([torch.randperm(vocab)[:candidates] for _ in range(rows * slots)])
    arguments = {
        "unary": torch.randn(rows, slots, candidates).to(dtype),
        "ids": ids.view(rows, slots, candidates),
        "anchor": torch.randint(vocab, (rows,)),
        "gate": torch.randn(rows, slots, rank).to(dtype),
        "predecessor_codebook": torch.randn(vocab, rank).to(dtype),
        "successor_codebook": torch.randn(vocab, rank).to(dtype),
        "temperature": torch.tensor([0.0, 1.0, 0.7])[torch.arange(rows) % 3],
        "keys": torch.tensor([row_key(0, "draft", row) for row in range(rows)]),
        "counters": torch.arange(rows) * slots,
    }
    return arguments | changes


def run(form, device, arguments, **options):
    found = form(**{name: value.to(device) for name, value in arguments.items()}, **options)
    return tuple(part.cpu() for part in found)


def walk_by_loops(unary, ids, anchor, gate, predecessor_codebook, successor_codebook, **rest):
    """Tokens, laws and, for each drawn slot, how far its number was from the next candidate's."""
    temperature, drawn = rest["temperature"].tolist(), rest["keys"]
    rows, slots, candidates = ids.shape
    left, right = predecessor_codebook.double().numpy(), successor_codebook.double().numpy()
    gate, unary = gate.double().numpy(), unary.double().numpy()
    path, laws = np.zeros((rows, slots), int), np.zeros((rows, slots, candidates))
    for row in range(rows):
        previous = int(anchor[row])
        for slot in range(slots):
            found = ids[row, slot].numpy()
            scores = unary[row, slot] + right[found] @ (left[previous] * gate[row, slot])
            if temperature[row] == 0:
                choice = int(scores.argmax())
                laws[row, slot, choice] = 1
            else:
                law = np.exp((scores - scores.max()) / temperature[row])
                laws[row, slot] = law / law.sum()
                number = uniforms(drawn[row], rest["counters"][row] + slot)
                choice = int((laws[row, slot].cumsum() <= float(number)).sum())
            path[row, slot] = previous = int(found[choice])
    return path, laws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "slots", "candidates", "rank"), [(3, 7, 16, 64), (2, 3, 5, 7), (1, 2, 20, 33)]
)
@FORMS
def test_path_and_law_equal_the_loop(form, rows, slots, candidates, rank, dtype, device, poisoned):
    arguments = inputs(rows, slots, candidates, rank, dtype=dtype)
    path, laws = walk_by_loops(**arguments)
    tokens, found = run(form, device, arguments)
    assert tokens.dtype == torch.int64
    assert found.dtype == torch.float32
    assert tokens.tolist() == path.tolist()
    np.testing.assert_allclose(found, laws, atol=2e-5)


@FORMS
def test_one_call_serves_greedy_and_sampled_rows(form, device):
    arguments = inputs(rows=2)
    alike = {name: value[:1].expand_as(value) for name, value in arguments.items()}
    shared = {name: arguments[name] for name in ("predecessor_codebook", "successor_codebook")}
    alike |= shared | {"temperature": torch.tensor([0.0, 1.0])}
    alike = {name: value.contiguous() for name, value in alike.items()}
    _, laws = run(form, device, alike)
    assert laws[0].sum(-1).tolist() == [1.0] * 5
    assert ((laws[0] == 0) | (laws[0] == 1)).all()
    assert laws[0, 0].argmax() == laws[1, 0].argmax()
    assert (laws[1, 0] < 1).all()


@FORMS
def test_a_request_does_not_depend_on_the_batch_around_it(form, device):
    arguments = inputs(rows=3)
    tokens, laws = run(form, device, arguments)
    codes = ("predecessor_codebook", "successor_codebook")
    alone = {name: x if name in codes else x[2:] for name, x in arguments.items()}
    tokens_alone, laws_alone = run(form, device, alone)
    assert torch.equal(tokens[2:], tokens_alone)
    torch.testing.assert_close(laws[2:], laws_alone, rtol=0, atol=1e-6)


@FORMS
def test_equal_scores_take_the_first_candidate(form, device):
    arguments = inputs(rows=1, temperature=torch.zeros(1))
    arguments["unary"] = torch.tensor([2.0, 3.0, 3.0, 1.0, 3.0, 0.0]).expand(1, 5, 6)
    arguments["gate"] = torch.zeros_like(arguments["gate"])
    tokens, laws = run(form, device, arguments)
    assert tokens.tolist() == arguments["ids"][..., 1].tolist()
    assert laws.argmax(-1).tolist() == [[1] * 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@FORMS
def test_a_single_candidate_is_certain(form, temperature, device):
    arguments = inputs(rows=2, candidates=1, temperature=torch.full((2,), temperature))
    tokens, laws = run(form, device, arguments)
    assert torch.equal(tokens, arguments["ids"][..., 0])
    assert (laws == 1).all()


@FORMS
def test_candidates_padded_with_minus_infinity_are_never_chosen(form, device):
    # a vocabulary of 4 and 16 candidates: 12 of them stand for nothing
    arguments = inputs(rows=3, candidates=4, vocab=4)
    padding = torch.zeros(3, 5, 12, dtype=torch.int64)
    padded = arguments | {
        "unary": torch.cat([arguments["unary"], torch.full((3, 5, 12), -torch.inf)], -1),
        "ids": torch.cat([arguments["ids"], padding], -1),
    }
    tokens, laws = run(form, device, padded)
    plain_tokens, plain_laws = run(form, device, arguments)
    assert torch.equal(tokens, plain_tokens)
    assert not laws[..., 4:].any()
    torch.testing.assert_close(laws[..., :4], plain_laws, rtol=0, atol=1e-6)


def edges(law):
    """Numbers in [0, 1) on, just below and just above the steps of the law's CDF."""
    steps = np.concatenate([[0.0], np.asarray(law, dtype=np.float64).cumsum()])
    near = np.concatenate([steps, steps - 2.0**-40, steps + 2.0**-40, [1 - 2.0**-48]])
    return np.unique(near[(near >= 0) & (near <= 1 - 2.0**-48)])


@FORMS
def test_draws_follow_the_law_returned_to_the_last_bit_of_the_number(form, device):
    # one slot, law (1/4, 0, 1/2, 1/4, 0): the scores are the logs of it
    law = torch.tensor([0.25, 0.0, 0.5, 0.25, 0.0])
    numbers = edges(law)
    rows = len(numbers)
    arguments = inputs(rows, slots=1, candidates=5, temperature=torch.ones(rows))
    arguments["unary"] = law.log().expand(rows, 1, 5)
    arguments["gate"] = torch.zeros_like(arguments["gate"])
    arguments |= {"keys": keys_for(numbers, 9), "counters": torch.full((rows,), 9)}
    tokens, laws = run(form, device, arguments)
    torch.testing.assert_close(laws[:, 0], law.expand(rows, 5), rtol=0, atol=1e-7)
    cdf = laws[0, 0].double().cumsum(0)
    expected = torch.searchsorted(cdf, torch.tensor(numbers) * cdf[-1], right=True)
    assert expected.bincount(minlength=5).bool().tolist() == [True, False, True, True, False]
    assert tokens[:, 0].tolist() == arguments["ids"][range(rows), 0, expected].tolist()


@FORMS
def test_slot_s_draws_with_the_counter_plus_s(form, device):
    # equal scores: candidate 3 of 4 is drawn by a number in [1/2, 3/4), here at slot 2 alone
    for slot in range(3):
        arguments = inputs(rows=1, slots=3, candidates=4, temperature=torch.ones(1))
        arguments["unary"], arguments["gate"] = torch.zeros(1, 3, 4), torch.zeros(1, 3, 20)
        arguments |= {"keys": keys_for([0.6], 40 + slot), "counters": torch.tensor([40])}
        tokens, _ = run(form, device, arguments)
        assert tokens[0, slot] == arguments["ids"][0, slot, 2]


@FORMS
def test_views_with_gaps_between_the_rows_are_read_right(form, device):
    arguments = inputs(rows=2)
    wide = {
        "gate": torch.cat([torch.full((2, 1, 20), torch.nan), arguments["gate"]], 1)[:, 1:],
        "unary": torch.cat([arguments["unary"], torch.full((2, 5, 2), torch.nan)], -1)[..., :6],
        "ids": torch.cat([arguments["ids"], torch.full((2, 5, 3), -7)], -1)[..., :6],
    }
    assert torch.equal(run(form, device, arguments)[0], run(form, device, arguments | wide)[0])


def test_the_kernel_takes_32_bit_ids_and_counts_its_programs_anew_each_time(device):
    arguments = inputs(rows=2)
    narrow = {"ids": arguments["ids"].int(), "anchor": arguments["anchor"].int()}
    arrivals = torch.zeros(2, dtype=torch.int32, device=device)
    tokens, laws = run(select_triton, device, arguments)
    for _ in range(2):
        again = run(select_triton, device, arguments | narrow, arrivals=arrivals)
        assert torch.equal(again[0], tokens)
        assert torch.equal(again[1], laws)
        assert not arrivals.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", ["unary", "gate"])
@FORMS
def test_nan_ends_with_some_candidate(form, broken, temperature, device):
    arguments = inputs(rows=1, temperature=torch.full((1,), temperature))
    arguments[broken] = torch.full_like(arguments[broken], torch.nan)
    tokens, _ = run(form, device, arguments)
    assert (tokens[..., None] == arguments["ids"]).any(-1).all()


def test_codes_of_candidates_are_scored_in_fp32(device):
    # a pairwise term far below the spacing of bf16 at 24 decides
    arguments = inputs(rows=1, slots=1, candidates=2, rank=16, dtype=torch.bfloat16)
    arguments["unary"] = torch.full((1, 1, 2), 24.0).bfloat16()
    arguments["temperature"] = torch.zeros(1)
    codes = torch.zeros(50, 16).bfloat16()
    codes[arguments["ids"][0, 0, 1]] = 1.0
    codebook = torch.full((50, 16), 0.01).bfloat16()
    arguments["gate"] = torch.full_like(arguments["gate"], 0.01)
    arguments |= {"predecessor_codebook": codebook, "successor_codebook": codes}
    tokens, _ = run(select_triton, device, arguments)
    assert tokens[0, 0] == arguments["ids"][0, 0, 1]


@jit
def _numbers_kernel(keys_ptr, counters_ptr, numbers_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(numbers_ptr + at, uniform48(tl.load(keys_ptr + at), tl.load(counters_ptr + at)))


def test_numbers_of_the_kernels_are_those_of_the_references(device):
    keys, counters = torch.randint(-(2**63), 2**63 - 1, (1024,)), torch.arange(1024)
    found = torch.empty(1024, dtype=torch.float64, device=device)
    _numbers_kernel[(1,)](keys.to(device), counters.to(device), found, BLOCK=1024)
    assert torch.equal(found.cpu(), uniforms(keys, counters))
    numbers = [0.0, 0.25, 1 - 2.0**-48]
    assert uniforms(keys_for(numbers, 5), torch.tensor([5, 5, 5])).tolist() == numbers


def test_the_processor_takes_the_reference(monkeypatch):
    def kernel(*_args, **_options):
        raise AssertionError("launched")

    monkeypatch.setattr(candidate_selector, "select_triton", kernel)
    arguments = inputs()
    assert torch.equal(select(**arguments)[0], select_reference(**arguments)[0])


@pytest.mark.parametrize("name", ["unary", "gate", "successor_codebook", "keys", "anchor"])
def test_shapes_that_do_not_fit_are_named(name, device):
    arguments = inputs()
    arguments[name] = arguments[name][..., 1:]
    with pytest.raises(ValueError, match=f"{name}: found shape"):
        run(select_triton, device, arguments)
