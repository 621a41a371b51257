"""The graph engine's testimony: its cycle keeps what it drafted, judged and drew.

The kept tensors are the captured cycle's own memory, which every replay writes anew; the host reads
them after each cycle. What is drafted and how it is judged is the code that `decode` runs; only the
drafters of the arms "opposite" and "near-perfect" are others.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.decoding.cycle import Cycle
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.requests import Request
from dflash2_lab.decoding.steps import (
    DrafterRow,
    Proposal,
    TargetRow,
    block_chances,
    residual,
)
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_topk import candidate_topk
from dflash2_lab.kernels.commit import BROKEN, FULL, RUNNING
from dflash2_lab.kernels.draw import draw
from dflash2_lab.kernels.row_law import Law, law_probs, row_law
from dflash2_lab.kernels.stream import Rows
from dflash2_lab.kernels.tools import uniforms
from dflash2_lab.kernels.verify import CandidateLaw, FullLaw
from dflash2_lab.losslessness.arms import OWN_SHARE
from dflash2_lab.losslessness.witness import Step, Testimony, check_drafts
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.policies import NUM_CANDIDATES
from dflash2_lab.target import Target


class Seen(NamedTuple):
    """One cycle of all places; counters and offered slots as they were before it moved them."""

    draft: Int[Tensor, "B P"]
    q: CandidateLaw | FullLaw | None
    logits: Float[Tensor, "BG V"]
    law: Law
    accepted: Int[Tensor, " B"]
    following: Int[Tensor, " B"]
    offered: Int[Tensor, " B"]
    draft_counter: Int[Tensor, " B"]
    final_counter: Int[Tensor, " B"]


class WitnessedCycle(Cycle):
    """A cycle under one arm's drafter that keeps what it did in `seen`."""

    def __init__(self, arm: str, *sizes: object):
        super().__init__(*sizes)
        self.arm = arm
        self.seen: Seen | None = None

    def _accept(
        self,
        logits: Float[Tensor, "BG V"],
        draft: Int[Tensor, "B P"],
        q: CandidateLaw | FullLaw | None,
    ) -> tuple[Law, Int[Tensor, " B"], Int[Tensor, " B"]]:
        at = self.progress
        before = [x.clone() for x in (at.offered, at.draft_counter, at.final_counter)]
        found = super()._accept(logits, draft, q)
        self.seen = Seen(draft, q, logits, *found, *before)
        return found

    def _propose(self) -> tuple[Int[Tensor, "B P"], CandidateLaw | FullLaw | None]:
        if self.arm == "near-perfect":
            return self._near_perfect()
        if self.arm == "opposite" and self.policy == "top1":
            num = self.drafter.settings.selector_top_k or NUM_CANDIDATES
            last = candidate_topk(self.draft_pass()[1], num)[1][:, -1].contiguous()
            return self._slots(last)[:, : self.num_draft], None
        return super()._propose()

    def candidates(self, rows: Rows, logits: Float[Tensor, "BG V"]) -> tuple[Tensor, ...]:
        """As the cycle's own, for the opposite drafter with all scores negated."""
        unary, ids, gate = super().candidates(rows, logits)
        return (-unary, ids, -gate) if self.arm == "opposite" else (unary, ids, gate)

    def _sampled(self, logits: Tensor) -> tuple[Tensor, FullLaw]:
        if self.arm != "opposite":
            return super()._sampled(logits)
        slots = self._slots(-logits)[:, : self.num_draft].float()
        return self._walk(lambda slot, _draft: slots[:, slot])

    def _near_perfect(self) -> tuple[Tensor, FullLaw]:
        """Drafts of the target itself, as `arms.near_perfect`; what its cache sees of them is
        written over by the verified block."""
        laws, own = self.laws, self._slots(self.draft_pass()[1])
        scale = torch.where(laws.temperature == 0, 1.0, laws.temperature)[:, None]

        def mixed(slot: int, draft: Tensor) -> Tensor:
            logits = self.target_logits(self.target_rows(draft, None))
            logits = logits.unflatten(0, (-1, self.rows))[:, slot].contiguous()
            law = row_law(logits, laws.temperature, laws.top_k, laws.top_p, arrivals=self.arrivals)
            p = law_probs(logits, law, laws.temperature)
            q = (own[:, slot].float() / scale).softmax(-1)
            return (OWN_SHARE * p + (1 - OWN_SHARE) * q).log() * scale

        return self._walk(mixed)

    def _walk(self, scores: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, FullLaw]:
        """Slot by slot from softmax(scores(slot, drafts so far) / T) over the vocabulary."""
        laws, at = self.laws, self.progress
        draft = torch.zeros(len(at.anchor), self.num_draft, dtype=torch.int64,
                            device=at.anchor.device)  # fmt: skip
        rows, found = [], []
        for slot in range(self.num_draft):
            rows.append(scores(slot, draft).contiguous())
            found.append(row_law(rows[-1], laws.temperature, arrivals=self.arrivals))
            draft[:, slot] = draw(
                rows[-1], found[-1], laws.temperature, laws.draft_key, at.draft_counter + slot,
                arrivals=self.arrivals,
            )  # fmt: skip
        parts = (torch.stack(part, 1).flatten() for part in zip(*found, strict=True))
        return draft, FullLaw(torch.stack(rows, 1), Law(*parts))


class GraphWitness(GraphEngine):
    """The graph engine under one arm's drafter, with a testimony of every response."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: str,
        arm: str,
        batch_size: int,
        max_total: int,
        acceptance: str = "token",
    ):
        self.arm, self.acceptance = arm, acceptance
        super().__init__(target, drafter, policy, batch_size, max_total, acceptance=acceptance)

    def _make_cycle(self, capacity: int, max_tokens: int) -> Cycle:
        return WitnessedCycle(
            self.arm, self.target, self.drafter, self.policy, self.num_draft, self.batch_size,
            capacity, max_tokens, self.acceptance,
        )  # fmt: skip

    @torch.inference_mode()
    def testimonies(self, requests: Sequence[Request]) -> Iterator[tuple[int, Testimony]]:
        """Decode the requests; each one's index and testimony as it ends.

        Raises:
            LabError: as `run` does, and for a drafter that proposes nothing.
        """
        for request in requests:
            self._check(request)
        waiting = list(enumerate(requests))[::-1]
        places: list[tuple[int, Testimony] | None] = [None] * self.batch_size
        self.cycle.progress.status.fill_(FULL)
        self.cycle.laws.forced.fill_(-1)
        while waiting or any(places):
            free = [row for row, place in enumerate(places) if place is None][: len(waiting)]
            if free:
                chosen = [waiting.pop() for _ in free]
                self.admit(free, [request for _, request in chosen])
                for row, (index, request) in zip(free, chosen, strict=True):
                    places[row] = index, Testimony(request, keys=[(request.keys["prefill"], 0)])
            anchors = (self.cycle.progress.length - 1).tolist()
            active = self._running(places)
            self.step()
            self._hear(active, anchors, places)
            running = set(self._running(places))
            for row, place in enumerate(places):
                if place is not None and row not in running:
                    places[row] = None
                    yield place[0], self._end(row, place[1])

    def left(self, p: Float[Tensor, "n V"], q: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """The verifier's residual laws as a function of p and q."""
        return residual(p, q)

    def _running(self, places: Sequence[tuple[int, Testimony] | None]) -> list[int]:
        status = self.cycle.progress.status.tolist()
        if BROKEN in status:
            raise LabError(
                f"target {self.target.name}: logits that are not finite in {self.target.dtype}"
            )
        return [row for row, place in enumerate(places) if place and status[row] == RUNNING]

    def _hear(
        self,
        active: Sequence[int],
        anchors: Sequence[int],
        places: Sequence[tuple[int, Testimony] | None],
    ) -> None:
        """Add the step of every active place to its testimony."""
        cycle, seen = self.cycle, self.cycle.seen
        keys = torch.stack([cycle.laws.draft_key, cycle.laws.accept_key, cycle.laws.final_key])
        columns = (seen.accepted, seen.following, seen.offered, seen.draft_counter,
                   seen.final_counter, *keys)  # fmt: skip
        numbers = torch.stack([column.long() for column in columns], 1).tolist()
        slots = self.drafter.settings.num_draft
        counters = seen.draft_counter[:, None] + torch.arange(slots, device=keys.device)
        drafted, tests = (uniforms(key[:, None].expand_as(counters), counters) for key in keys[:2])
        final = uniforms(keys[2], seen.final_counter)
        offers = self._offers()
        laws = law_probs(seen.logits, seen.law, cycle.laws.row_temperature)
        laws = laws.unflatten(0, (-1, cycle.rows))
        for row in active:
            num, token, offered, first, last, draft_key, accept_key, final_key = numbers[row]
            proposal = Proposal(*(None if x is None else x[row, :offered] for x in offers))
            whole = self.acceptance == "block"
            step = Step(
                anchor=anchors[row],
                proposal=proposal,
                laws=laws[row, : num + 1].clone(),  # the others are not kept
                num=num,
                token=token,
                uniform=drafted[row],
                tests=tests[row, :offered],
                final=final[row],
                chances=block_chances(laws[row, : offered + 1], proposal) if whole else None,
            )
            testimony = places[row][1]
            testimony.steps.append(step)
            for key in (draft_key, accept_key):
                testimony.keys += [(key, first + slot) for slot in range(slots)]
            testimony.keys.append((final_key, last))

    def _offers(self) -> tuple[Int[Tensor, "B P"], Tensor | None, Tensor | None]:
        """Drafts, q and its ids of all places, of which the next cycle leaves nothing."""
        draft, q = self.cycle.seen.draft.clone(), self.cycle.seen.q
        if q is None:
            return draft, None, None
        if isinstance(q, CandidateLaw):
            return draft, q.probs.clone(), q.ids.clone().long()
        temperature = self.cycle.laws.temperature.repeat_interleave(self.num_draft)
        law = law_probs(q.logits.flatten(0, 1), q.law, temperature)
        return draft, law.unflatten(0, draft.shape), None

    def _end(self, row: int, found: Testimony) -> Testimony:
        """Response and caches of a place whose response has ended."""
        length = int(self.cycle.progress.length[row])
        found.response = self.cycle.progress.tokens[row, :length].tolist()
        kept = len(found.request.prompt_ids) + length - 1
        large, small = self.cycle.large, self.cycle.small
        target = TargetRow(self.target, self.drafter.settings.target_layer_ids)
        for layer, pair in enumerate(zip(large.keys, large.values, strict=True)):
            target.cache.update(*(part[row : row + 1, :, :kept].clone() for part in pair), layer)
        drafts = DrafterRow(self.drafter, self.target)
        drafts.keys = [
            tuple(part[row : row + 1, :, :kept].clone() for part in pair)
            for pair in zip(small.keys, small.values, strict=True)
        ]
        target.length = drafts.length = kept
        found.rows = target, drafts
        check_drafts(found, self.drafter)
        return found
