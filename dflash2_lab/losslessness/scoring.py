"""What the tests need to know of a token and its law: one pass over rows of laws, no sorting.

The vocabulary has two orders: p descending, and the drafter's direction w = (q - p) / (q + p)
descending (0 where both are 0); ties by token id. F(x^-) is the mass before x. Both orders, and all
cells, depend on the prefix alone, so that under the law p the scores below have known moments.
"""

from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash2_lab.errors import LabError

Joined = TypeVar("Joined", bound=tuple)

_RANKS = (0, 1, 2, 3, 5, 9)  # first rank of each cell: 1, 2, 3, 4-5, 6-9, >= 10
_SUM_TOLERANCE = 1e-6
_DRAFTER = (
    *("below_drafter", "mass_drafter", "drafter_cells", "drafter_cell"),
    *("drafter_score", "drafter_variance", "drafter_third"),
)


class Scores(NamedTuple):
    """One entry a token; all numpy. What needs a drafter is None without q.

    Attributes:
        p: p(x); exactly 0 is a token outside the support.
        below, mass: F(x^-) and p(x) in the order of p.
        below_drafter, mass_drafter: the same in the drafter's direction.
        rank_cells, rank_cell: probabilities of ranks 1, 2, 3, 4-5, 6-9, >= 10; the one of x.
        drafter_cells, drafter_cell: probabilities of {q's first choice, q > p, 0 < q <= p, q = 0};
            the one of x.
        drafter_score, drafter_variance: w(x) - E_p w and Var_p w.
        heat_score, heat_variance: log p(x) + H(p) (0 outside the support) and Var_p log p.
        drafter_third, heat_third: third central moments of w and of log p under p.
    """

    p: Float[np.ndarray, " n"]
    below: Float[np.ndarray, " n"]
    mass: Float[np.ndarray, " n"]
    below_drafter: Float[np.ndarray, " n"] | None
    mass_drafter: Float[np.ndarray, " n"] | None
    rank_cells: Float[np.ndarray, "n 6"]
    rank_cell: Int[np.ndarray, " n"]
    drafter_cells: Float[np.ndarray, "n 4"] | None
    drafter_cell: Int[np.ndarray, " n"] | None
    drafter_score: Float[np.ndarray, " n"] | None
    drafter_variance: Float[np.ndarray, " n"] | None
    heat_score: Float[np.ndarray, " n"]
    heat_variance: Float[np.ndarray, " n"]
    drafter_third: Float[np.ndarray, " n"] | None
    heat_third: Float[np.ndarray, " n"]


def score(
    tokens: Int[Tensor, " n"], p: Float[Tensor, "n V"], q: Float[Tensor, "n V"] | None = None
) -> Scores:
    """Score tokens under their laws p, and in the directions of the proposals q.

    Where a token had no proposal (a bonus token), q = p says nothing about the drafter. The caller
    bounds the number of rows: a few temporaries of the size of p are made.

    Args:
        tokens: ids in 0..V-1.
        p, q: float64, each row a law.

    Raises:
        LabError: shapes that do not fit, another dtype, ids outside the vocabulary, no law.
    """
    _check(tokens, p, "p")
    own = p.gather(-1, tokens[:, None])
    before = _before(tokens, p)
    logs = p.clamp_min(torch.finfo(p.dtype).tiny).log()  # finite, and p log p = 0 where p = 0
    heat, variance, third = _moments(logs, p, tokens)
    heat = heat.masked_fill(own[:, 0] == 0, 0.0)
    ranks = before.sum(-1)
    starts = torch.tensor(_RANKS[1:], device=p.device)
    rank_cell = torch.bucketize(ranks, starts, right=True)
    drafter = dict.fromkeys(_DRAFTER) if q is None else _drafter_scores(tokens, p, q)
    found = {
        "p": own[:, 0],
        "below": _mass(p, before),
        "mass": own[:, 0],
        "rank_cells": _rank_cells(p),
        "rank_cell": rank_cell,
        "heat_score": heat,
        "heat_variance": variance,
        "heat_third": third,
        **drafter,
    }
    return Scores(**{name: None if x is None else x.cpu().numpy() for name, x in found.items()})


def residual_pit(
    tokens: Int[Tensor, " n"],
    p: Float[Tensor, "n V"],
    q: Float[Tensor, "n V"],
    weight: Float[Tensor, " n"] | None = None,
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Return F(x^-) and the mass of x under (w p - q)+, normalised, the vocabulary ordered by q.

    The weight w is 1 but for block verification. Where nothing is left (p = q) both are 0.
    """
    _check(tokens, p, "p")
    _check(tokens, q, "q")
    residual = (p if weight is None else weight[:, None] * p) - q
    residual = residual.clamp_min(0.0)
    law = residual / residual.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    below = _mass(law, _before(tokens, q))
    return below.cpu().numpy(), law.gather(-1, tokens[:, None])[:, 0].cpu().numpy()


def concat(parts: list[Joined]) -> Joined:
    """Join named tuples of arrays (`Scores`, `Emitted`, `Drafted`) along their tokens.

    Raises:
        LabError: nothing to join, or some parts with a drafter and some without.
    """
    if not parts:
        raise LabError("nothing to join: found no scores, expected at least one part")
    columns = []
    for name, column in zip(parts[0]._fields, zip(*parts, strict=True), strict=True):
        missing = [value is None for value in column]
        if any(missing) and not all(missing):
            raise LabError(f"{name}: found in some parts only, expected in all or in none")
        if missing[0]:
            columns.append(None)
        elif isinstance(column[0], tuple):
            columns.append(concat(list(column)))
        else:
            columns.append(np.concatenate(column))
    return type(parts[0])(*columns)


def _check(tokens: Int[Tensor, " n"], law: Float[Tensor, "n V"], name: str) -> None:
    if law.ndim != 2 or tokens.shape != law.shape[:1] or law.dtype != torch.float64:
        raise LabError(
            f"{name}: found {law.dtype} {tuple(law.shape)} for tokens {tuple(tokens.shape)}, "
            "expected float64 [n, V] for tokens [n]"
        )
    if ((tokens < 0) | (tokens >= law.shape[1])).any():
        raise LabError(
            f"tokens: found {int(tokens.min())}..{int(tokens.max())}, "
            f"expected ids of the {law.shape[1]} tokens"
        )
    total = law.sum(-1)
    bad = ~((total - 1).abs() <= _SUM_TOLERANCE) | (law < 0).any(-1)  # NaN fails the first
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise LabError(
            f"{name}: row {row} is no law, found sum {total[row].item()} and least entry "
            f"{law[row].min().item()}, expected 1 and at least 0"
        )


def _before(tokens: Int[Tensor, " n"], key: Float[Tensor, "n V"]) -> Tensor:
    """Which of the vocabulary come before each token by (key descending, id ascending), [n, V]."""
    own = key.gather(-1, tokens[:, None])
    smaller = torch.arange(key.shape[1], device=key.device) < tokens[:, None]
    return (key > own) | ((key == own) & smaller)


def _moments(
    values: Float[Tensor, "n V"], p: Float[Tensor, "n V"], tokens: Int[Tensor, " n"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Value of the token less its mean under p, and the second and third central moment, [n]."""
    away = values - (p * values).sum(-1, keepdim=True)
    weighted = p * away * away
    return away.gather(-1, tokens[:, None])[:, 0], weighted.sum(-1), (weighted * away).sum(-1)


def _drafter_scores(
    tokens: Int[Tensor, " n"], p: Float[Tensor, "n V"], q: Float[Tensor, "n V"]
) -> dict[str, Tensor]:
    """What of `Scores` needs q."""
    _check(tokens, q, "q")
    if q.shape != p.shape:
        raise LabError(f"q: found shape {tuple(q.shape)}, expected p's, {tuple(p.shape)}")
    direction = ((q - p) / (q + p)).masked_fill(q + p == 0, 0.0)
    values = (
        _mass(p, _before(tokens, direction)),
        p.gather(-1, tokens[:, None])[:, 0],
        *_drafter_cells(tokens, p, q),
        *_moments(direction, p, tokens),
    )
    return dict(zip(_DRAFTER, values, strict=True))


def _rank_cells(p: Float[Tensor, "n V"]) -> Float[Tensor, "n 6"]:
    best = p.topk(min(_RANKS[-1], p.shape[1])).values
    parts = [best[:, i:j].sum(-1) for i, j in pairwise(_RANKS)]
    return torch.stack([*parts, (1 - best.sum(-1)).clamp_min(0.0)], dim=-1)


def _drafter_cells(
    tokens: Int[Tensor, " n"], p: Float[Tensor, "n V"], q: Float[Tensor, "n V"]
) -> tuple[Float[Tensor, "n 4"], Int[Tensor, " n"]]:
    """Probabilities of q's first choice, q > p, 0 < q <= p, q = 0, and the cell of the token."""
    top = q.argmax(-1, keepdim=True)
    first, better = p.gather(-1, top), q > p
    over = _mass(p, better)[:, None] - first * better.gather(-1, top)
    missing = _mass(p, q == 0)[:, None]
    cells = torch.cat([first, over, p.sum(-1, keepdim=True) - first - over - missing, missing], -1)
    own_p, own_q = (law.gather(-1, tokens[:, None]) for law in (p, q))
    cell = torch.where(own_q > own_p, 1, torch.where(own_q > 0, 2, 3))
    return cells.clamp_min(0.0), cell.masked_fill(tokens[:, None] == top, 0)[:, 0]


def _mass(p: Float[Tensor, "n V"], inside: Bool[Tensor, "n V"]) -> Float[Tensor, " n"]:
    return torch.where(inside, p, 0.0).sum(-1)
