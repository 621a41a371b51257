"""White-box checks of a decode: no statistics, and one response is enough to fail them.

- Every draft is what its reported law gives with the number that was used, and every reported law
  sums to 1: q is the law drawn from (a q rounded to bfloat16 fails, which no sample of any size
  that one could draw would show).
- No random number is used twice, in whatever role.
- The rule with the verifier's own p and q gives that p, and that p is the independent one up to the
  target's rounding.
- The caches at the end are those of the committed tokens alone.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dflash2_lab.decoding.steps import DrafterRow, Proposal, TargetRow
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.losslessness.certificate import Check
from dflash2_lab.losslessness.witness import Evidence, Testimony

_RULE_LIMIT = 1e-6  # total variation, for laws in float32
_LAW_SUM = 1e-6
_LAW_LIMIT = 1e-3  # total variation of float32 passes of two shapes; measured: 1e-5
_STATE_LIMIT = 2e-4  # of float32 caches, relative to their largest entry; measured: 1e-5


def audit(
    testimonies: Sequence[Testimony], evidence: Sequence[Evidence], state: float
) -> list[Check]:
    """The gates of a decode. `state` is the largest `state_error`."""
    implied = np.concatenate([part.implied for part in evidence])
    moved = np.concatenate([part.moved for part in evidence])
    steps = [step for found in testimonies for step in found.steps]
    wrong = sum(wrong_draws(step.proposal, step.uniform) for step in steps)
    sums = max((law_error(step.proposal) for step in steps), default=0.0)
    used = Counter(key for found in testimonies for key in found.keys)
    twice = sum(count - 1 for count in used.values())
    return [
        Check("draws", wrong, 0, "drafts that are not what the reported q gives"),
        Check("q sums", sums, _LAW_SUM, "largest distance of a reported q's sum from 1"),
        Check("random numbers", twice, 0, "random numbers used more than once"),
        Check("rule", _largest(implied), _RULE_LIMIT, "TV of the rule's law, verifier's p and q"),
        Check("target", _largest(moved), _LAW_LIMIT, "TV of the verifier's p, independent p"),
        Check("state", state, _STATE_LIMIT, "caches against the committed tokens alone"),
    ]


def _largest(values: Float[np.ndarray, " n"]) -> float:
    return float(values.max()) if len(values) else 0.0


def wrong_draws(proposal: Proposal, uniform: Float[Tensor, " P"]) -> int:
    """Drafted tokens that the reported law does not give with the numbers that drove them."""
    if proposal.law is None:
        return 0  # one-hot on what was drawn, however it was drawn
    choice = inverse_cdf(proposal.law, uniform[: len(proposal.tokens)])
    if proposal.ids is not None:
        choice = proposal.ids.gather(-1, choice.clamp_max(proposal.ids.shape[-1] - 1)[:, None])[
            :, 0
        ]
    return int((choice != proposal.tokens).sum())


def law_error(proposal: Proposal) -> float:
    """Largest distance of a slot's reported q from a sum of 1."""
    if proposal.law is None or not len(proposal.tokens):
        return 0.0
    return float((proposal.law.double().sum(-1) - 1).abs().max())


@torch.inference_mode()
def state_error(found: Testimony) -> float:
    """Largest difference between the caches after the last step and those of one plain pass over
    the committed tokens, relative to the largest entry of each."""
    row, drafts = found.rows
    ids = [*found.request.prompt_ids, *found.response][: row.length]
    fresh = TargetRow(row.target, row.layer_ids)
    _, features = fresh.extend(ids)
    errors = [
        _relative(kept, new) for kept, new in zip(_tensors(row), _tensors(fresh), strict=True)
    ]
    again = DrafterRow(drafts.drafter, drafts.target)
    again.commit(features)
    for kept, new in zip(drafts.keys, again.keys, strict=True):
        errors += [_relative(*pair) for pair in zip(kept, new, strict=True)]
    return max(errors)


def _tensors(row: TargetRow) -> list[Tensor]:
    layers = row.cache.layers
    return [x for layer in layers for x in (layer.keys, layer.values)]


def _relative(kept: Tensor, new: Tensor) -> float:
    if kept.shape != new.shape:
        return float("inf")
    return float((kept - new).abs().max() / new.abs().max().clamp_min(1e-9))
