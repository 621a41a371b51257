"""The Triton top-K against sorting each row by (value descending, id ascending)."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2_lab.kernels import candidate_topk as kernel
from dflash2_lab.kernels.candidate_topk import candidate_topk, candidate_topk_triton

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INF = float("inf")


@pytest.fixture
def small(monkeypatch):
    """Groups of 16 entries and parts of 4: short rows then have more groups and parts than K."""
    monkeypatch.setattr(kernel, "COLUMNS", 16)
    monkeypatch.setattr(kernel, "PART", 4)
    monkeypatch.setattr(kernel, "GROUPS", 8)


def ranking(row):
    """Ids by (logit descending, id ascending); NaN first."""
    return sorted(range(len(row)), key=lambda i: (0, i) if math.isnan(row[i]) else (1, -row[i], i))


def assert_ranked(logits, num_candidates):
    wanted = min(num_candidates, logits.shape[-1])
    values, ids = candidate_topk_triton(logits, num_candidates)
    assert values.dtype == logits.dtype and ids.dtype == torch.int64
    assert ids.tolist() == [ranking(row)[:wanted] for row in logits.tolist()]
    expected = logits.gather(-1, ids)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("vocab", [1, 15, 16, 203])
@pytest.mark.parametrize("num_candidates", [1, 5, 16])
def test_ragged_rows(vocab, num_candidates, device, small, poisoned):
    assert_ranked(torch.randn(2, vocab).to(device, torch.bfloat16), num_candidates)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, device, small, poisoned):
    assert_ranked(torch.randn(2, 97).to(device, dtype), 6)


@pytest.mark.parametrize("num_candidates", [1, 3, 17])
def test_the_groups_of_a_real_vocabulary(num_candidates, device, poisoned):
    assert_ranked(torch.randn(1, 1001).to(device, torch.bfloat16), num_candidates)


@pytest.mark.parametrize("num_candidates", [1, 4, 64])
def test_rows_where_almost_all_are_tied(num_candidates, device, small, poisoned):
    assert_ranked((torch.randn(2, 200) / 2).round().to(device, torch.bfloat16), num_candidates)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_are_ordered_by_id(dtype, device, small, poisoned):
    logits = torch.full((4, 130), -INF)
    logits[1, [3, 77, 129]] = torch.tensor([-1.0, 2.0, -1.0])  # fewer finite entries than K
    logits[2, 40:] = INF
    logits[3, 64] = torch.finfo(dtype).min
    assert_ranked(logits.to(device, dtype), 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(dtype, device, small):
    info = torch.finfo(dtype)
    edge = torch.tensor([info.max, info.min, info.tiny, -info.tiny, 0.0, INF, -INF, 1.0, -1.0])
    logits = torch.stack([edge.repeat(11)[torch.randperm(99)] for _ in range(2)]).to(device, dtype)
    assert_ranked(logits, 30)


def test_zeros_of_both_signs_are_equal(device, small):
    logits = torch.tensor([0.0, -0.0, -0.0, 0.0]).repeat(2, 20).to(device, torch.bfloat16)
    logits[1] = -logits[1]
    values, ids = candidate_topk_triton(logits, 16)
    assert ids.tolist() == [list(range(16))] * 2
    assert not values.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_of_either_sign_comes_first(dtype, sign, device, small, poisoned):
    nan = torch.copysign(torch.tensor(float("nan")), torch.tensor(sign))
    logits = torch.randn(3, 100)
    logits[0, 70] = logits[0, 20] = nan
    logits[0, 3] = INF
    logits[1] = nan
    assert_ranked(logits.to(device, dtype), 6)


@pytest.mark.parametrize("view", ["rows apart", "channels apart", "expanded"])
def test_rows_need_not_be_contiguous(view, device, small):
    logits = torch.randn(3, 120).to(device, torch.bfloat16)
    views = {
        "rows apart": logits[:, :77],
        "channels apart": logits[:, ::2],
        "expanded": logits[:1].expand(3, -1),
    }
    assert_ranked(views[view], 5)


def test_the_input_is_left_alone(device, small):
    logits = torch.randn(2, 60).to(device, torch.bfloat16)
    before = logits.clone()
    candidate_topk_triton(logits, 5)
    assert torch.equal(logits, before)


def test_no_rows(device):
    values, ids = candidate_topk_triton(torch.empty(0, 40, device=device), 5)
    assert values.shape == ids.shape == (0, 5)


@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    row=st.lists(st.sampled_from([-INF, -1.0, -0.0, 0.0, 0.5, 2.0]), min_size=70, max_size=70),
    num_candidates=st.integers(1, 20),
)
def test_any_pattern_of_ties_over_groups(row, num_candidates, device, small):
    assert_ranked(torch.tensor([row], device=device, dtype=torch.bfloat16), num_candidates)


def test_what_the_kernel_does_not_take_is_told_and_left_to_the_reference(device):
    logits = torch.randn(2, 100, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match="num_candidates: found 65, expected 1 to 64"):
        candidate_topk_triton(logits.float(), 65)
    with pytest.raises(ValueError, match=r"logits: found torch\.float64"):
        candidate_topk_triton(logits, 5)
    for dtype, num_candidates in ((torch.float64, 5), (torch.float32, 65)):
        _, ids = candidate_topk(logits.to(dtype), num_candidates)
        assert ids.tolist() == [ranking(row)[:num_candidates] for row in logits.to(dtype).tolist()]
