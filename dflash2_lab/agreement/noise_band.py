"""How far rounding moves a greedy choice: a noise band, measured on teacher-forced traces.

The margins of the same text (see `margins`) are computed in several ways: `whole`, `eager` and
`graph` in the models' own dtype, and as the reference in one pass with the weights in float32
(`whole` itself, if they are). The noise of a way is |margin - the reference's|. Two ways choose
differently only where the reference's gap between the tokens is within their noise. So a difference
is a tie when that gap is at most twice the band, the largest noise of all ways; else it is a bug. A
way much noisier than the others has a bug of its own, and does not widen the band.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from dflash2_lab.agreement.margins import (
    Margins,
    Subject,
    draft_margins,
    eager_margins,
    graph_margins,
    whole_margins,
    whole_pass,
)
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.requests import Request

WAYS = ("whole", "eager", "graph")
_LEEWAY = 4.0  # how much noisier than the ways before it one may be
_UNITS = 4.0  # of the largest score, in the last place: few scores may all come out nearly exact


@dataclass(frozen=True)
class Noise:
    """Noise of one way over `num` margins: the largest, the 99 % quantile, how many margins changed
    their sign, and the most that rounding explains."""

    largest: float
    quantile_99: float
    num: int
    num_flips: int
    limit: float

    @property
    def is_rounding(self) -> bool:
        return self.largest <= self.limit


@dataclass(frozen=True, eq=False)
class Band:
    """Noise by way of the target's and the policy's margins; `margins` are the reference's."""

    target_noise: Mapping[str, Noise]
    draft_noise: Mapping[str, Noise]
    margins: Sequence[Margins]

    @property
    def target(self) -> float:
        """Largest noise of the target's margins."""
        return _band(self.target_noise)

    @property
    def draft(self) -> float:
        """Largest noise of the policy's margins."""
        return _band(self.draft_noise)


def _band(noise: Mapping[str, Noise]) -> float:
    return max((part.largest for part in noise.values() if part.is_rounding), default=0.0)


@torch.inference_mode()
def measure_band(
    subject: Subject,
    reference: Subject,
    rows: Sequence[Any],
    requests: Sequence[Request],
    engine: GraphEngine | None,
) -> Band:
    """Score all traces in every way. `reference` is `subject.widened()`; `requests` are those of
    the traces; `engine` None leaves the graph engine out."""
    ways: dict[str, list[Margins]] = {"eager": []}
    if reference.target is not subject.target or reference.drafter is not subject.drafter:
        ways["whole"] = []
    wide, sizes = [], []
    for row in tqdm(rows, desc="noise band", unit="response", delay=2.0):
        found, size = whole_margins(reference, row)
        wide.append(found)
        sizes.append(size)
        ways["eager"].append(eager_margins(subject, row))
        if "whole" in ways:
            ways["whole"].append(whole_margins(subject, row)[0])
    if engine is not None:
        ways["graph"] = graph_margins(subject, engine, rows, requests)
    noise = []
    for side, models in enumerate((subject.target, subject.drafter)):
        eps, size = torch.finfo(models.dtype).eps, max(pair[side] for pair in sizes)
        scored = {way: _joined(found, side) for way, found in ways.items()}
        noise.append(_noise(_joined(wide, side), scored, eps, size))
    return Band(*noise, wide)


def _joined(found: Sequence[Margins], side: int) -> Float[np.ndarray, " N"]:
    return np.concatenate([part[side].ravel() for part in found])


def _noise(
    reference: Float[np.ndarray, " N"],
    ways: Mapping[str, Float[np.ndarray, " N"]],
    eps: float,
    size: float,
) -> dict[str, Noise]:
    """Noise of each way. `whole` is the yardstick: the other ways may be four times as noisy as
    those before them. Where it is the reference itself, `eager` keeps half of the digits of the
    largest score, `size`."""
    found: dict[str, Noise] = {}
    for way in sorted(ways, key=WAYS.index):
        known = np.isfinite(ways[way]) & np.isfinite(reference)
        own, wide = ways[way][known], reference[known]
        away = np.abs(own - wide) if known.any() else np.zeros(1)
        limit = np.inf if way == "whole" else size * eps**0.5
        if found:
            limit = most_explained([part.largest for part in found.values()], size, eps)
        flips = int(((own < 0) != (wide < 0)).sum())
        quantile = float(np.quantile(away, 0.99))
        found[way] = Noise(float(away.max()), quantile, int(known.sum()), flips, float(limit))
    return found


def most_explained(before: Sequence[float], size: float, eps: float) -> float:
    """How far rounding may move scores of at most `size`, by what it did in other ways."""
    return _LEEWAY * max(_UNITS * size * eps, *before)


class Judge:
    """Says how far apart choices are under the reference, and whether that is a tie."""

    def __init__(self, reference: Subject, rows: Sequence[Any], band: Band):
        self.reference, self.rows, self.band = reference, rows, band
        self._left: dict[tuple[int, int, int], float] = {}  # gaps of tokens that left the trace
        self._drafts: dict[tuple[int, int, int], float] = {}
        self._logits: tuple[int, Float[Tensor, "n V"]] | None = None

    def token_gap(self, response: int, index: int, tokens: Sequence[int]) -> float:
        """Largest distance of these tokens below the best one of their position."""
        return max(self._regret(response, index, token) for token in tokens)

    def _regret(self, response: int, index: int, token: int) -> float:
        if token == self.rows[response].response_ids[index]:
            return max(0.0, -float(self.band.margins[response].target[index]))
        key = (response, index, token)
        if key not in self._left:
            logits = self._whole(response)[index]
            self._left[key] = float(logits.max() - logits[token])
        return self._left[key]

    @torch.inference_mode()
    def _whole(self, response: int) -> Float[Tensor, "n V"]:
        if self._logits is None or self._logits[0] != response:
            none = np.arange(0)
            logits, _ = whole_pass(self.reference, self.rows[response], none)
            self._logits = (response, logits.float())
        return self._logits[1]

    @torch.inference_mode()
    def draft_gap(self, response: int, anchor: int, slot: int) -> float:
        """Distance of a slot's draft from flipping between the trace's token and another one."""
        key = (response, anchor, slot)
        if key not in self._drafts:
            _, block = whole_pass(self.reference, self.rows[response], np.array([anchor]))
            margin = draft_margins(block, self.reference.policy)[0, slot - 1]
            self._drafts[key] = abs(float(margin))
        return self._drafts[key]

    def verdict(self, kind: str, gap: float) -> str:
        """ "tie" for a gap inside twice the band of that kind, else "bug"."""
        band = self.band.target if kind == "target" else self.band.draft
        return "tie" if gap <= 2 * band else "bug"

    def worst(self) -> dict[str, Any]:
        """The emitted token that is farthest below the best one of its position, of all ways."""
        found = dict(self._left)
        for response, margins in enumerate(self.band.margins):
            index = int(np.argmin(margins.target))
            token = int(self.rows[response].response_ids[index])
            found[response, index, token] = max(0.0, -float(margins.target[index]))
        (response, index, token), gap = max(found.items(), key=lambda pair: pair[1])
        best = int(self._whole(response)[index].argmax())
        return {
            "gap": gap,
            **key_of(self.rows[response]),
            "position": index,
            "token": token,
            "best_token": best,
            "verdict": self.verdict("target", gap),
        }


def key_of(row: Any) -> dict[str, Any]:
    """The columns that name a trace."""
    return {"prompt_id": row.prompt_id, "turn": int(row.turn), "sample": int(row.sample)}
