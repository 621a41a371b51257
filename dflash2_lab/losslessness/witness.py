"""A decode that keeps what its verifier saw and did, and what that says of the emitted tokens.

The reference engine decodes; its proposals, the verifier's laws and every random number that is
used are kept. The laws p that the tokens are held against come from elsewhere: one plain pass over
prompt and response, with a softmax in float64.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.decoding.requests import Request
from dflash2_lab.decoding.steps import Accepted, DrafterRow, Proposal, TargetRow, residual
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.arms import draft
from dflash2_lab.losslessness.battery import Drafted, Emitted
from dflash2_lab.losslessness.edges import law_at
from dflash2_lab.losslessness.scoring import residual_pit, score
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.target import Target

_BAND = 1e-4  # rounding of a difference of float32 logits; measured: 6e-5


class Step(NamedTuple):
    """One verify step: what was offered, the verifier's laws at the tokens that left it, how many
    drafts it took, and the numbers that drove the drafts."""

    anchor: int
    proposal: Proposal
    laws: Float[Tensor, "n V"]
    num: int
    uniform: Float[Tensor, " P"]


@dataclass
class Testimony:
    """What one response leaves behind. `keys` are the (key, counter) of all random numbers used."""

    request: Request
    response: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)
    rows: tuple[TargetRow, DrafterRow] | None = None


class Witness(EagerEngine):
    """The reference engine under one arm's drafter, with its testimony of the current response."""

    def __init__(
        self, target: Target, drafter: Drafter, policy: str, arm: str, acceptance: str = "token"
    ):
        super().__init__(target, drafter, policy, acceptance=acceptance)
        self.arm = arm

    def testify(self, request: Request) -> Testimony:
        """Decode one request. Raises `LabError` as `run` does."""
        self.found = Testimony(request)
        self.found.response = self.run([request])[0].response_ids
        if not any(len(step.proposal.tokens) for step in self.found.steps):
            raise LabError(
                f"drafter {self.drafter.name}: no drafts proposed in "
                f"{len(self.found.steps)} steps, so that nothing was verified"
            )
        return self.found

    def _rows(self) -> tuple[TargetRow, DrafterRow | None]:
        self.found.rows = super()._rows()
        return self.found.rows

    def _uniforms(self, key: int, first: int, num: int) -> Tensor:
        self.found.keys += [(key, first + index) for index in range(num)]
        return super()._uniforms(key, first, num)

    def _draft(
        self, row: TargetRow, drafts: DrafterRow | None, request: Request, anchor: int, last: int
    ) -> Proposal:
        self.uniform = self._draws(request, self.policy, anchor)
        return draft(self.arm, row, drafts, last, self.policy, request.sampling, self.uniform)

    def _accept(
        self, request: Request, anchor: int, p: Float[Tensor, "P1 V"], proposal: Proposal
    ) -> Accepted:
        found, laws = self._verdict(request, anchor, p, proposal)
        laws = laws[: found.num + 1].clone()
        self.found.steps.append(Step(anchor, proposal, laws, found.num, self.uniform))
        return found

    def _verdict(
        self, request: Request, anchor: int, p: Float[Tensor, "P1 V"], proposal: Proposal
    ) -> tuple[Accepted, Float[Tensor, "P1 V"]]:
        """What the verifier says, and the laws that it said it by."""
        return super()._accept(request, anchor, p, proposal), p

    def left(self, p: Float[Tensor, " V"], q: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """The verifier's residual law as a function of one p and q."""
        return residual(p, q)


class Evidence(NamedTuple):
    """A response against the target's own laws: for the batteries, and [n] numbers of the audit.

    Attributes:
        emitted, drafted: as the batteries take them.
        implied: total variation between the law that the rule gives with the verifier's own p and
            q, and that p.
        moved: total variation between the verifier's p and the independent one.
        num_edge: tokens at the edge of a filter.
    """

    emitted: Emitted
    drafted: Drafted
    implied: Float[np.ndarray, " m"]
    moved: Float[np.ndarray, " m"]
    num_edge: int


@torch.inference_mode()
def independent_laws(
    target: Target, request: Request, tokens: Int[Tensor, " n"]
) -> tuple[Float[Tensor, "n V"], int]:
    """p of every response token, float64, from one plain pass, and how many of the tokens are at
    the edge of a filter (see `law_at`)."""
    ids = torch.cat([torch.tensor(request.prompt_ids, device=target.device), tokens])[None]
    keep = len(tokens) + 1
    logits = target.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0, :-1]
    return law_at(logits.double(), tokens, request.sampling, _BAND)


def weigh(engine: Witness, found: Testimony, stream: int) -> Evidence:
    """Hold a response of `engine` against its target."""
    target = engine.target
    tokens = torch.tensor(found.response, device=target.device)
    p, num_edge = independent_laws(target, found.request, tokens)
    q, slot = p.clone(), torch.full_like(tokens, -1)
    implied, moved = [], []
    for step in found.steps:
        num_slots = len(step.proposal.tokens)
        for place, own in enumerate(step.laws):
            at = step.anchor + 1 + place
            if at >= len(tokens):
                break  # a bonus token that the length limit cut
            slot[at] = place
            own = own.double()
            moved.append(_distance(own, p[at]))
            if place == num_slots:
                continue
            reported = step.proposal.dense(place, p.shape[-1])
            q[at] = reported / reported.sum()  # as a direction; its sum is a gate of the audit
            # A float32 law of a large vocabulary sums to 1 up to 1e-5: `moved` counts that.
            own = own / own.sum()
            taken = torch.minimum(own, reported)
            law = taken + (1 - taken.sum()) * engine.left(own, reported)
            implied.append(_distance(law, own))
    num = len(tokens)
    emitted = Emitted(
        score(tokens, p, q), np.full(num, stream), np.arange(num), slot.cpu().numpy()
    )  # fmt: skip
    drafted = _drafted(found, tokens, p, q)
    return Evidence(emitted, drafted, np.array(implied), np.array(moved), num_edge)


def _distance(a: Float[Tensor, " V"], b: Float[Tensor, " V"]) -> float:
    return float((a - b).abs().sum()) / 2


def _drafted(
    found: Testimony, tokens: Int[Tensor, " n"], p: Float[Tensor, "n V"], q: Float[Tensor, "n V"]
) -> Drafted:
    """The verifier's log. A draft counts as reached when the token of its place was emitted."""
    heat, variance, third, below, mass, accepted, chance = ([] for _ in range(7))
    refused, bonus = [], []
    for step in found.steps:
        proposal = step.proposal
        own = proposal.mass()
        law = torch.ones_like(own)[:, None] if proposal.law is None else proposal.law.double()
        logs = law.clamp_min(torch.finfo(law.dtype).tiny).log()
        mean = (law * logs).sum(-1)
        heat.append(own.log() - mean)
        variance.append((law * (logs - mean[:, None]).square()).sum(-1))
        third.append((law * (logs - mean[:, None]) ** 3).sum(-1))
        below.append((law * (law > own[:, None])).sum(-1))
        # Equal masses lie side by side: their order does not matter to a randomised transform.
        mass.append((law * (law == own[:, None])).sum(-1))
        reached = torch.arange(len(own), device=own.device) <= step.num
        at = step.anchor + 1 + torch.arange(len(own), device=own.device).clamp_max(step.num)
        ratio = p[at.clamp_max(len(tokens) - 1)].gather(-1, proposal.tokens[:, None])[:, 0] / own
        chance.append(torch.where(reached, ratio.clamp_max(1.0), torch.nan))
        accepted.append(torch.arange(len(own), device=own.device) < step.num)
        last = step.anchor + 1 + step.num
        if last < len(tokens):
            (bonus if step.num == len(own) else refused).append(last)
    chances = torch.cat(chance)
    columns = (torch.cat(x).cpu().numpy() for x in (heat, variance, below, mass))
    pit = residual_pit(tokens[refused], p[refused], q[refused])
    plain = score(tokens[bonus], p[bonus]) if bonus else None
    empty = np.zeros(0)
    return Drafted(
        *columns,
        (~chances.isnan()).cpu().numpy(),
        torch.cat(accepted).cpu().numpy(),
        chances.nan_to_num(0.0).cpu().numpy(),
        *pit,
        empty if plain is None else plain.below,
        empty if plain is None else plain.mass,
        torch.cat(third).cpu().numpy(),
    )
