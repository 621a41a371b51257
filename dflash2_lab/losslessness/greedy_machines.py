"""The engines of a greedy verification: one for each drafter arm, decoding a known text."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dflash2_lab.agreement.block_comparison import run_engine
from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.requests import Decoded, Request
from dflash2_lab.decoding.steps import DrafterRow, Proposal, TargetRow
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.arms import check_arms, draft
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.target import Target

ROWS = {"eager": 4, "graph": 8}  # rows that are read together
_RIGHT = 0.8  # of the near-perfect arm's drafts


class ArmEngine(EagerEngine):
    """The reference engine under one arm's drafter. `texts`, by prompt, is what the near-perfect
    arm drafts from; `num_offered` counts drafts."""

    def __init__(
        self, target: Target, drafter: Drafter, policy: str, arm: str, acceptance: str = "token"
    ):
        super().__init__(target, drafter, policy, acceptance=acceptance)
        self.arm, self.num_offered = arm, 0
        self.texts: Mapping[tuple[int, ...], Sequence[int]] = {}

    def _draft(
        self, row: TargetRow, drafts: DrafterRow | None, request: Request, anchor: int, last: int
    ) -> Proposal:
        uniform = self._draws(request, self.policy, anchor)
        if self.arm == "near-perfect":
            found = self._known(request, anchor, uniform)
        else:
            found = draft(self.arm, row, drafts, last, self.policy, request.sampling, uniform)
        self.num_offered += len(found.tokens)
        return found

    def _known(self, request: Request, anchor: int, uniform: Float[Tensor, " P"]) -> Proposal:
        text = self.texts[request.prompt_ids][anchor + 1 :][: len(uniform)]
        tokens = torch.tensor(text, dtype=torch.long, device=self.device)
        wrong = uniform[: len(tokens)] >= _RIGHT
        return Proposal(torch.where(wrong, (tokens + 1) % self.target.vocab_size, tokens))


Machine = ArmEngine | GraphEngine


def fitting_arms(arms: Sequence[str], policy: str) -> tuple[str, ...]:
    """The arms without an opposite that the policy does not have."""
    found = []
    for arm in arms:
        try:
            check_arms((arm,), policy)
        except LabError:
            if arm != "opposite":
                raise
        else:
            found.append(arm)
    check_arms(found, policy)
    return tuple(found)


def make_machines(
    target: Target,
    drafter: Drafter,
    policy: str,
    acceptance: str,
    arms: Sequence[str],
    engine: str,
    requests: Sequence[Request],
) -> dict[str, Machine]:
    """An engine for each arm, with room for these requests: "eager", or "graph", which has one arm.
    Raises `LabError` for another engine, and what the engine raises."""
    if engine == "eager":
        return {arm: ArmEngine(target, drafter, policy, arm, acceptance) for arm in arms}
    if engine != "graph":
        raise LabError(f"engine: found {engine!r}, expected 'eager' or 'graph'")
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    rows = min(ROWS["graph"], len(requests))
    made = GraphEngine(target, drafter, policy, rows, longest, acceptance=acceptance)
    return {arms[0]: made}


def decode_texts(
    machine: Machine | EagerEngine, requests: Sequence[Request], texts: Sequence[Sequence[int]]
) -> list[Decoded]:
    """Responses; `texts` are the target's own. Raises `LabError` when no step had a draft."""
    if isinstance(machine, ArmEngine):
        pairs = zip(requests, texts, strict=True)
        machine.texts = {request.prompt_ids: text for request, text in pairs}
        machine.num_offered = 0
    answers = run_engine(f"decode {getattr(machine, 'arm', '')}".rstrip(), machine, requests)
    steps = sum(len(answer.accepted_raw) for answer in answers)
    if isinstance(machine, ArmEngine) and steps and not machine.num_offered:
        raise LabError(
            f"drafter {machine.drafter.name}: no drafts proposed in {steps} steps, so that nothing "
            "was verified"
        )
    return answers


def anchors_of(answer: Decoded) -> list[int]:
    """Anchors of a response's verify steps."""
    return [0, *np.cumsum(np.array(answer.accepted_raw[:-1], dtype=int) + 1).tolist()]


def first_difference(own: Sequence[int], ids: Sequence[int], offset: int) -> int | None:
    """Position in a response where a decode of it from `offset` on leaves it."""
    pairs = zip(own[offset:], ids, strict=True)
    return next((offset + at for at, (a, b) in enumerate(pairs) if a != b), None)
