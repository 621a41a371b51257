"""The sampling law against hand numbers, and draws that depend on nothing but their key."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.sampling import (
    Sampling,
    choose,
    filter_logits,
    row_key,
    token_logprobs,
    uniforms,
)


def logits_of(*probs):
    return torch.tensor(probs, dtype=torch.float64).log()


def reference_law(logits, temperature, top_p, top_k):
    """The law token by token, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    if top_k:
        order, weight = order[:top_k], weight[:top_k]
    total = sum(weight)
    mass = [w / total for w in weight]
    kept, before = [], 0.0
    for index, m in zip(order, mass, strict=True):
        if before >= top_p:
            break
        kept.append((index, m))
        before += m
    law = np.zeros(len(logits))
    law[[index for index, _ in kept]] = [m for _, m in kept]
    return law / law.sum()


def test_temperature_divides_logits():
    law = filter_logits(torch.tensor([0.0, math.log(4.0)], dtype=torch.float64), temperature=2.0)
    assert law.tolist() == pytest.approx([1 / 3, 2 / 3])


def test_top_p_keeps_the_token_that_crosses_the_threshold():
    law = filter_logits(logits_of(0.5, 0.3, 0.15, 0.05), temperature=1.0, top_p=0.7)
    assert law.tolist() == pytest.approx([0.625, 0.375, 0.0, 0.0])


def test_top_p_stops_at_the_token_that_reaches_the_threshold_exactly():
    law = filter_logits(logits_of(0.5, 0.25, 0.125, 0.125), temperature=1.0, top_p=0.75)
    assert law.tolist() == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])


def test_top_p_is_taken_after_top_k_is_renormalised():
    # of 0.4, 0.4, 0.2 the first two make 0.5 + 0.5 under top-k 2, so top-p 0.5 leaves one
    law = filter_logits(logits_of(0.4, 0.4, 0.2), temperature=1.0, top_p=0.5, top_k=2)
    assert law.tolist() == pytest.approx([1.0, 0.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_id(dtype):
    logits = torch.zeros(2000, dtype=dtype)
    logits[5] = 1.0
    by_k = filter_logits(logits, temperature=1.0, top_k=3)
    assert by_k.nonzero().squeeze(1).tolist() == [0, 1, 5]
    share = torch.e / (torch.e + 1999)
    by_p = filter_logits(logits, temperature=1.0, top_p=share + 2.5 / 2001)
    assert by_p.nonzero().squeeze(1).tolist() == [0, 1, 2, 5]
    assert filter_logits(torch.zeros(9, dtype=dtype), 0.0).argmax() == 0


def test_zero_temperature_is_one_hot_whatever_the_filters():
    law = filter_logits(torch.tensor([[1.0, 3.0, 3.0]]), 0.0, top_p=0.2, top_k=1)
    assert law.tolist() == [[0.0, 1.0, 0.0]]


def test_law_is_float32_of_bf16_logits_and_sums_to_one():
    logits = (8 * torch.randn(16, 50_000)).to(torch.bfloat16)
    for options in ({}, {"top_p": 0.9}, {"top_k": 50}, {"top_p": 0.9, "top_k": 50}):
        law = filter_logits(logits, 0.7, **options)
        assert law.dtype == torch.float32
        assert (law.double().sum(-1) - 1).abs().max() < 1e-6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-4, 4), min_size=2, max_size=12),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0.05, 0.3, 0.62, 0.9, 1.0]),
    st.integers(0, 13),
)
def test_law_equals_the_plain_python_one(logits, temperature, top_p, top_k):
    found = filter_logits(torch.tensor(logits, dtype=torch.float64), temperature, top_p, top_k)
    expected = reference_law([float(x) for x in logits], temperature, top_p, top_k)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("scale", [0.01, 4.0])
def test_prefix_of_the_ranking_gives_the_law_of_the_full_sort(scale):
    # scale 4: the prefix is enough; scale 0.01: it is not and the whole vocabulary is sorted
    logits = scale * torch.randn(3, 5000, dtype=torch.float64)
    found = filter_logits(logits.float(), 1.0, top_p=0.9)
    for row in range(3):
        expected = reference_law(logits[row].float().double().tolist(), 1.0, 0.9, 0)
        np.testing.assert_allclose(found[row].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"temperature": -0.1}, {"temperature": 1e-30}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}],
)
def test_options_out_of_range_are_named(options):
    with pytest.raises(LabError, match=next(iter(options))):
        Sampling(**options)


def test_nan_temperature_is_refused():
    with pytest.raises(LabError, match="temperature"):
        Sampling(temperature=float("nan"))


def test_uniforms_are_uniform_and_uncorrelated():
    keys = torch.tensor([row_key(0, "prompt", i) for i in range(200)])
    grid = uniforms(keys.repeat_interleave(500), torch.arange(500).repeat(200)).view(200, 500)
    assert grid.min() >= 0.0
    assert grid.max() < 1.0
    assert stats.kstest(grid.flatten().numpy(), "uniform").pvalue > 1e-3
    for first, second in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        assert abs(np.corrcoef(first.flatten(), second.flatten())[0, 1]) < 0.015


def test_uniforms_depend_on_key_and_position_alone():
    keys, positions = torch.tensor([row_key(1, "a"), row_key(1, "b")]), torch.tensor([7, 9])
    alone = uniforms(keys[1:], positions[1:])
    assert torch.equal(uniforms(keys, positions)[1:], alone)
    assert row_key(1, "a", 23) != row_key(1, "a2", 3)
    assert row_key(1, "a") != row_key(2, "a")


def test_splitmix_output_is_the_published_one():
    # SplitMix64 from state 0: its first outputs, cut to 48 bits
    found = uniforms(torch.zeros(2, dtype=torch.long), torch.tensor([1, 2]))
    expected = [(x >> 16) / 2**48 for x in (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4)]
    assert found.tolist() == expected


def test_draws_follow_the_law():
    law = torch.tensor([0.05, 0.0, 0.45, 0.2, 0.3, 0.0]).expand(40_000, -1)
    keys = torch.full((40_000,), row_key(3))
    counts = torch.bincount(
        inverse_cdf(law, uniforms(keys, torch.arange(40_000))), minlength=6
    ).numpy()
    assert counts[[1, 5]].sum() == 0
    test = stats.chisquare(counts[[0, 2, 3, 4]], 40_000 * np.array([0.05, 0.45, 0.2, 0.3]))
    assert test.pvalue > 1e-3


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-48])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    law = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    tokens = inverse_cdf(law, torch.full((2,), uniform, dtype=torch.float64))
    assert (law.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0), Sampling(0.6, 0.8), Sampling(0.6, 0.8, 12)]
)
def test_chosen_tokens_carry_their_logprobs(sampling):
    logits = 3 * torch.randn(8, 300)
    tokens, filtered, plain = choose(logits, sampling, torch.rand(8))
    law = filter_logits(logits, sampling.temperature, sampling.top_p, sampling.top_k)
    scale = 1.0 if sampling.greedy else sampling.temperature
    rows = torch.arange(8)
    torch.testing.assert_close(filtered.exp(), law[rows, tokens].double(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        plain, (logits / scale).log_softmax(-1)[rows, tokens].double(), atol=1e-5, rtol=1e-5
    )
    again = token_logprobs(logits, tokens, sampling)
    assert torch.equal(torch.stack(again), torch.stack((filtered, plain)))


def test_a_token_outside_the_filters_has_no_probability():
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    filtered, plain = token_logprobs(logits, torch.tensor([2]), Sampling(1.0, top_k=2))
    assert filtered.item() == -math.inf
    assert plain.item() == pytest.approx(logits.log_softmax(-1)[0, 2].item())
