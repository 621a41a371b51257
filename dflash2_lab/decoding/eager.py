"""The reference engine: plain draft-verify loops in torch, any Hugging Face causal LM, any device.

One row at a time with caches of its own, so a batch gives every row exactly what it gets alone.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from dflash2_lab.decoding.requests import (
    Decoded,
    Request,
    check_request,
    cut_at_end,
    finish_reason,
    verify_window,
)
from dflash2_lab.decoding.steps import (
    Accepted,
    DrafterRow,
    Proposal,
    TargetRow,
    accept,
    check_acceptance,
    check_row,
    draws,
    target_law,
)
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.target import Target


class EagerEngine:
    """Decodes requests one after the other; without a drafter, token by token.

    The full trained block is always drafted; `num_draft` is how many of its slots are verified
    (None: all), by the rule `acceptance` of `steps`. Raises `LabError` for a drafter, policy or
    window that does not fit, an unknown rule, and a target whose cache cannot be rolled back.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: str | None,
        num_draft: int | None = None,
        acceptance: str = "token",
    ):
        check_acceptance(acceptance)
        self.num_draft = verify_window(target, drafter, policy, num_draft)
        self.target, self.drafter, self.policy = target, drafter, policy
        self.acceptance = acceptance
        self.layer_ids = () if drafter is None else drafter.settings.target_layer_ids
        self.device = target.device
        with torch.inference_mode():
            check_row(target, self.layer_ids, rolls_back=drafter is not None)

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[Decoded]:
        """Decode all requests; `on_tokens(index, tokens)` is told what each step of a row emits.

        Raises:
            LabError: a request that does not fit (before any is decoded), or values of target or
                drafter that are not finite.
        """
        for request in requests:
            check_request(self.target, request, self.policy)
        tell = on_tokens or (lambda _row, _tokens: None)
        return [self._decode(request, partial(tell, row)) for row, request in enumerate(requests)]

    def _decode(self, request: Request, emit: Callable[[list[int]], None]) -> Decoded:
        row, drafts = self._rows()
        logits, features = row.extend(request.prompt_ids, logits_to_keep=1)
        row.roll_back(0)
        if drafts is not None:
            drafts.commit(features)
        law = target_law(self.target, logits, request.sampling)[0]
        first = self._uniforms(request.keys["prefill"], 0, 1)[0]
        response, accepted_raw = [int(inverse_cdf(law, first))], []
        emit(response[:])
        while not (finish := finish_reason(response, request)):
            anchor, last = len(response) - 1, response[-1]
            proposal = self._draft(row, drafts, request, anchor, last)
            proposal = proposal.first(min(self.num_draft, request.max_new_tokens - len(response)))
            span = proposal.tokens.tolist()
            logits, features = row.extend([last, *span])
            laws = target_law(self.target, logits, request.sampling)
            num, token = self._accept(request, anchor, laws, proposal)
            tokens = cut_at_end([*span[:num], token], request, len(response))
            # The last emitted token is the next anchor, which neither side has seen yet.
            row.roll_back(1 + len(span) - len(tokens))
            if drafts is not None:
                drafts.commit(features[: len(tokens)])
            accepted_raw.append(num)
            response += tokens
            emit(tokens)
        return Decoded(response, accepted_raw, finish)

    def _rows(self) -> tuple[TargetRow, DrafterRow | None]:
        if self.drafter is None:
            return TargetRow(self.target, rolls_back=False), None
        return TargetRow(self.target, self.layer_ids), DrafterRow(self.drafter, self.target)

    def _draft(
        self, row: TargetRow, drafts: DrafterRow | None, request: Request, anchor: int, last: int
    ) -> Proposal:
        if drafts is None:
            return Proposal(torch.empty(0, dtype=torch.long, device=self.device))
        uniform = self._draws(request, self.policy, anchor)
        return drafts.draft(last, self.policy, request.sampling, uniform)

    def _accept(
        self, request: Request, anchor: int, p: torch.Tensor, proposal: Proposal
    ) -> Accepted:
        """Verify the proposal by the target's laws `p` [P + 1, V] at its slots and after them."""
        uniform = self._draws(request, "accept", anchor)[: len(proposal.tokens)]
        final = self._uniforms(request.keys["final"], anchor, 1)[0]
        return accept(p, proposal, uniform, final, self.acceptance)

    def _draws(self, request: Request, role: str, anchor: int) -> torch.Tensor:
        """One number for each slot of the trained block, whatever the window."""
        slots = 0 if self.drafter is None else self.drafter.settings.num_draft
        return self._uniforms(request.keys[role], anchor * slots, slots)

    def _uniforms(self, key: int, first: int, num: int) -> torch.Tensor:
        return draws(key, first, num, self.device)
