"""A decode that keeps what its verifier saw and did.

The engine decodes; its proposals, the verifier's laws and every random number that is used are
kept. `Witness` is the reference engine, `graph_witness` has the other one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.decoding.requests import Request
from dflash2_lab.decoding.steps import (
    Accepted,
    DrafterRow,
    Proposal,
    TargetRow,
    block_chances,
    residual,
)
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.arms import draft
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.target import Target


class Step(NamedTuple):
    """One verify step after the response token `anchor`.

    Attributes:
        proposal: what was offered, P drafts.
        laws: the verifier's at the tokens that left the step, drafts and last one.
        num, token: accepted drafts, and the token that followed them.
        uniform: the numbers that drove the drafts of the trained block.
        tests, final: those of the acceptance tests, and of the token that followed.
        chances: by block verification, of each slot's test; else None.
    """

    anchor: int
    proposal: Proposal
    laws: Float[Tensor, "n V"]
    num: int
    token: int
    uniform: Float[Tensor, " T"]
    tests: Float[Tensor, " P"]
    final: Float[Tensor, ""]
    chances: Float[Tensor, " P"] | None


@dataclass
class Testimony:
    """What one response leaves behind. `keys` are the (key, counter) of all random numbers used,
    `rows` the caches after the last step."""

    request: Request
    response: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)
    rows: tuple[TargetRow, DrafterRow] | None = None


def check_drafts(found: Testimony, drafter: Drafter) -> None:
    """Raise `LabError` for a response whose drafter proposed nothing."""
    if not any(len(step.proposal.tokens) for step in found.steps):
        raise LabError(
            f"drafter {drafter.name}: no drafts proposed in {len(found.steps)} steps, so that "
            "nothing was verified"
        )


class Witness(EagerEngine):
    """The reference engine under one arm's drafter, with its testimony of the current response."""

    def __init__(
        self, target: Target, drafter: Drafter, policy: str, arm: str, acceptance: str = "token"
    ):
        super().__init__(target, drafter, policy, acceptance=acceptance)
        self.arm = arm

    def testimonies(self, requests: Sequence[Request]) -> Iterator[tuple[int, Testimony]]:
        """Decode the requests; each one's index and testimony as it ends. Raises as `testify`."""
        for index, request in enumerate(requests):
            yield index, self.testify(request)

    def testify(self, request: Request) -> Testimony:
        """Decode one request. Raises `LabError` as `run` does."""
        self.found, self.used = Testimony(request), {}
        self.found.response = self.run([request])[0].response_ids
        check_drafts(self.found, self.drafter)
        return self.found

    def _rows(self) -> tuple[TargetRow, DrafterRow | None]:
        self.found.rows = super()._rows()
        return self.found.rows

    def _uniforms(self, key: int, first: int, num: int) -> Tensor:
        self.found.keys += [(key, first + index) for index in range(num)]
        self.used[key] = super()._uniforms(key, first, num)
        return self.used[key]

    def _draft(
        self, row: TargetRow, drafts: DrafterRow | None, request: Request, anchor: int, last: int
    ) -> Proposal:
        uniform = self._draws(request, self.policy, anchor)
        return draft(self.arm, row, drafts, last, self.policy, request.sampling, uniform)

    def _accept(
        self, request: Request, anchor: int, p: Float[Tensor, "P1 V"], proposal: Proposal
    ) -> Accepted:
        found, laws = self._verdict(request, anchor, p, proposal)
        keys, slots = request.keys, len(proposal.tokens)
        step = Step(
            anchor,
            proposal,
            laws[: found.num + 1].clone(),
            found.num,
            found.token,
            self.used[keys[self.policy]],
            self.used[keys["accept"]][:slots],
            self.used[keys["final"]][0],
            block_chances(laws, proposal) if self.acceptance == "block" else None,
        )
        self.found.steps.append(step)
        return found

    def _verdict(
        self, request: Request, anchor: int, p: Float[Tensor, "P1 V"], proposal: Proposal
    ) -> tuple[Accepted, Float[Tensor, "P1 V"]]:
        """What the verifier says, and the laws that it said it by."""
        return super()._accept(request, anchor, p, proposal), p

    def left(self, p: Float[Tensor, "n V"], q: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """The verifier's residual laws as a function of p and q."""
        return residual(p, q)
