"""One plain pass over a response and what it says: the independent logits, and the caches of the
committed tokens alone."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dflash2_lab.decoding.steps import DrafterRow, TargetRow
from dflash2_lab.losslessness.witness import Testimony


class Plain(NamedTuple):
    """Logits of every response token, float64, and how far the response's caches are from those of
    this pass: the largest difference relative to the largest entry of each."""

    logits: Float[Tensor, "n V"]
    state_error: float


@torch.inference_mode()
def plain_pass(found: Testimony) -> Plain:
    """Pass prompt and response through the target, with nothing of what the decode left."""
    row, drafts = found.rows
    ids = [*found.request.prompt_ids, *found.response]
    fresh = TargetRow(row.target, row.layer_ids)
    logits, features = fresh.extend(ids, logits_to_keep=len(found.response) + 1)
    fresh.roll_back(len(ids) - row.length)
    again = DrafterRow(drafts.drafter, drafts.target)
    again.commit(features[: row.length])
    pairs = [*zip(_tensors(row), _tensors(fresh), strict=True)]
    for kept, new in zip(drafts.keys, again.keys, strict=True):
        pairs += zip(kept, new, strict=True)
    error = np.max([_relative(kept, new) for kept, new in pairs])  # a NaN stays
    return Plain(logits[:-1].double(), float(error))


def _tensors(row: TargetRow) -> list[Tensor]:
    layers = row.cache.layers
    return [x for layer in layers for x in (layer.keys, layer.values)]


def _relative(kept: Tensor, new: Tensor) -> float:
    if kept.shape != new.shape:
        return float("inf")
    return float((kept - new).abs().max() / new.abs().max().clamp_min(1e-9))
