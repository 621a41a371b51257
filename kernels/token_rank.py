"""Rank of one token in each row of logits: 0 for the first choice, ties by lowest id."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

ROWS = 8  # on a CPU few rows at a time, so that their masks stay in its cache: twice as fast


def token_rank(
    logits: Float[Tensor, "rows V"], token: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Number of tokens that come before `token` in the order (logit descending, id ascending)."""
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
