"""The Triton rank against sorting each row by (logit descending, id ascending)."""

import pytest
import torch

from dflash2_lab.kernels import token_rank as kernel
from dflash2_lab.kernels.token_rank import token_rank, token_rank_reference, token_rank_triton


@pytest.fixture
def small(monkeypatch):
    """Tiles of 32 entries: short rows then have several."""
    monkeypatch.setattr(kernel, "COLUMNS", 32)


def expected_ranks(logits, token):
    order = logits.double().sort(dim=-1, descending=True, stable=True).indices
    return (order == token[:, None]).int().argmax(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [1, 31, 32, 77])
def test_every_token_of_a_ragged_row(dtype, vocab, device, small):
    logits = torch.randn(vocab, vocab).to(device, dtype)
    token = torch.arange(vocab, device=device)
    found = token_rank_triton(logits, token)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected_ranks(logits, token))


def test_ties_go_by_id_over_tiles(device, small):
    logits = torch.randn(20, 150).round().to(device, torch.bfloat16)
    token = torch.randint(150, (20,)).to(device)
    assert torch.equal(token_rank_triton(logits, token), expected_ranks(logits, token))


def test_infinities(device, small):
    logits = torch.full((4, 70), -torch.inf, device=device)
    logits[1:, 40] = torch.inf
    logits[2:, 69] = 0.0
    token = torch.tensor([69, 40, 69, 68], device=device)
    assert token_rank_triton(logits, token).tolist() == [69, 0, 1, 69]


def test_zeros_of_both_signs_are_equal(device, small):
    logits = torch.tensor([0.0, -0.0]).repeat(2, 20).to(device)
    token = torch.tensor([1, 38], device=device)
    assert token_rank_triton(logits, token).tolist() == [1, 38]


def test_nan_comes_before_nothing_and_nothing_before_it(device, small):
    logits = torch.zeros(2, 50, device=device)
    logits[:, 7] = float("nan")
    token = torch.tensor([49, 7], device=device)
    assert token_rank_triton(logits, token).tolist() == [48, 0]
    assert token_rank_reference(logits, token).tolist() == [48, 0]


@pytest.mark.parametrize("view", ["rows apart", "entries apart", "expanded"])
def test_rows_need_not_be_contiguous(view, device, small):
    logits = torch.randn(4, 80).to(device)
    view = {
        "rows apart": logits[:, :45],
        "entries apart": logits[:, ::2],
        "expanded": logits[:1].expand(4, -1),
    }[view]
    token = torch.randint(40, (4, 3)).to(device)[:, 1]
    assert torch.equal(token_rank_triton(view, token), expected_ranks(view, token))


def test_the_size_of_tile_in_use(device):
    logits = torch.randn(2, 9001).to(device, torch.bfloat16)
    token = torch.tensor([0, 9000], device=device)
    assert torch.equal(token_rank_triton(logits, token), expected_ranks(logits, token))


def test_no_rows(device):
    token = torch.empty(0, dtype=torch.int64, device=device)
    assert token_rank_triton(torch.empty(0, 40, device=device), token).shape == (0,)


def test_the_library_compares_float64_in_float64(device):
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64, device=device)
    assert token_rank(logits, torch.tensor([0], device=device)).tolist() == [1]
