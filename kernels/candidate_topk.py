"""The K best tokens of each row of draft logits, ordered by (logit descending, id ascending).

Ties matter: bf16 logits tie often, and `torch.topk` leaves the order of equal values, and which of
them it keeps at the K-th place, undefined. Here both are fixed by the lowest id.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def candidate_topk(
    logits: Float[Tensor, "rows V"], num_candidates: int
) -> tuple[Float[Tensor, "rows K"], Int[Tensor, "rows K"]]:
    """Values (in the dtype of `logits`) and ids (int64). K is cut to V when V is smaller."""
    vocab = logits.shape[-1]
    wanted = min(num_candidates, vocab)
    values, ids = torch.topk(logits, min(wanted + 1, vocab), dim=-1)
    if wanted < vocab:
        # A tie across the K-th place: redo those few rows with the id as the second key.
        tied = (values[:, wanted - 1] == values[:, wanted]).nonzero()[:, 0]
        if tied.numel():
            kept = torch.sort(logits[tied], dim=-1, descending=True, stable=True)
            values[tied, :wanted] = kept.values[:, :wanted]
            ids[tied, :wanted] = kept.indices[:, :wanted]
        values, ids = values[:, :wanted], ids[:, :wanted]
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)
