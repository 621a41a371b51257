"""Rank of one token in each row of logits: 0 for the first choice, ties by lowest id."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def token_rank(
    logits: Float[Tensor, "rows V"], token: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Number of tokens that come before `token` in the order (logit descending, id ascending)."""
    value = logits.gather(-1, token[:, None])
    before = (logits > value).sum(-1)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return before + ((logits == value) & (ids < token[:, None])).sum(-1)
