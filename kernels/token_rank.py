"""Rank of one token in each row of logits: 0 for the first choice, ties by lowest id.

    rank = #{j : logits[j] > logits[token]} + #{j < token : logits[j] = logits[token]}

The kernel counts tiles of rows in parallel and adds the counts with integer atomics, whose sum does
not depend on their order.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .tools import jit, on_gpu, tl

COLUMNS = 4096  # a program: four accesses of 16 bytes a thread in bf16
ROWS = 8  # on a CPU few rows at a time, so that their masks stay in its cache: twice as fast


def token_rank_reference(
    logits: Float[Tensor, "rows V"], token: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Plain torch form."""
    if logits.device.type != "cpu" or len(logits) <= ROWS:
        return _rank(logits, token)
    parts = zip(logits.split(ROWS), token.split(ROWS), strict=True)
    return torch.cat([_rank(*part) for part in parts])


def _rank(logits: Float[Tensor, "rows V"], token: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    value = logits.gather(-1, token[:, None])
    # int32 sums, since the default would first copy each mask to int64, eight times its size.
    rank = (logits > value).sum(-1, dtype=torch.int32)
    tied = ((logits >= value).sum(-1, dtype=torch.int32) - rank > 1).nonzero()[:, 0]
    if tied.numel():
        ids = torch.arange(logits.shape[-1], device=logits.device)
        equal = (logits[tied] == value[tied]) & (ids < token[tied, None])
        rank[tied] += equal.sum(-1, dtype=torch.int32)
    return rank.long()


@jit
def _count_kernel(logits_ptr, token_ptr, rank_ptr, row_stride, vocab, COLUMNS: tl.constexpr):
    i_row = tl.program_id(0) // tl.cdiv(vocab, COLUMNS)
    i_tile = tl.program_id(0) % tl.cdiv(vocab, COLUMNS)
    p_row = logits_ptr + i_row.to(tl.int64) * row_stride
    o_id = i_tile * COLUMNS + tl.arange(0, COLUMNS)
    b_values = tl.load(p_row + o_id, o_id < vocab, -float("inf")).to(tl.float32)
    token = tl.load(token_ptr + i_row).to(tl.int32)
    value = tl.load(p_row + token).to(tl.float32)
    # What lies behind the row is -inf and has a higher id than any token: it counts for none.
    b_before = (b_values > value) | ((b_values == value) & (o_id < token))
    tl.atomic_add(rank_ptr + i_row, tl.sum(b_before.to(tl.int32), axis=0).to(tl.int64))


def token_rank_triton(
    logits: Float[Tensor, "rows V"], token: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Triton form of `token_rank_reference`, one pass. Tokens must lie in the vocabulary."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    rank = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    grid = (len(logits) * -(-logits.shape[-1] // COLUMNS),)
    _count_kernel[grid](
        *(logits, token.contiguous(), rank, logits.stride(0), logits.shape[-1]),
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return rank


def token_rank(
    logits: Float[Tensor, "rows V"], token: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Number of tokens that come before `token` in the order (logit descending, id ascending).

    Comparisons with NaN are false: it comes before nothing, and nothing before it. By Triton on a
    GPU; float64 is for the reference, since the kernel compares in fp32.
    """
    if on_gpu(logits) and logits.dtype != torch.float64:
        return token_rank_triton(logits, token)
    return token_rank_reference(logits, token)
