"""The catalogue inside the reference engine: what `verify --inject NAME` decodes with.

Names are those of `faults`, and every one of them is here; each replaces one hook of a decode with
the real models. A fault is planted in what the decoder does, never in what it is held against.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dflash2_lab.decoding.requests import Request
from dflash2_lab.decoding.steps import Accepted, DrafterRow, Proposal, TargetRow, at_tokens
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.losslessness import injection_proposer as proposer
from dflash2_lab.losslessness import injection_verifier as verifier
from dflash2_lab.losslessness.injection_proposer import PAIRWISE, Draft
from dflash2_lab.losslessness.injection_rows import DrafterContext, TargetContext
from dflash2_lab.losslessness.injection_verifier import Pass, Rows, ratio
from dflash2_lab.losslessness.witness import Witness
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.sampling import Sampling
from dflash2_lab.target import Target


@dataclass(frozen=True)
class Hooks:
    """What a decode does at each stage; the defaults are right.

    Attributes:
        needs: without one of these it changes nothing: "soft q" (a q that is not one-hot),
            "pairwise q" (one that depends on the token before the slot), "temperature" (not 1),
            "filter" (top-k or top-p).
        speaks: gates that speak though the law of the tokens is right.
        draft: (right proposal) -> proposal.
        rows: (target pass) -> the laws that the verifier uses.
        chance: (p, drafts) -> what a slot's number is held against.
        count: (tests that passed) -> accepted drafts.
        residual, bonus: laws of the token that follows, not normalised.
        stale_slot: after a refusal the refused draft stays in the target's cache.
        stale_features: after a refusal the drafter's context ends with the refused draft's feature.
        reseeds: every block draws the numbers of the first.
        tests_by: the role whose numbers the acceptance tests use.
        final_by: the role whose number of the refused slot picks its replacement.
        matches: token matching in place of the test.
        drops_bonus: a block accepted in full ends without its bonus token.
        acceptance: the engine's rule, where that is all there is to it.
    """

    needs: tuple[str, ...] = ()
    speaks: frozenset[str] = frozenset()
    draft: Callable[[Draft], Proposal] = lambda draft: draft.proposal
    rows: Callable[[Pass], Rows] = lambda seen: seen.p
    chance: Callable[[Rows, Proposal], Tensor] = ratio
    count: Callable[[Bool[Tensor, " P"]], Tensor] = lambda passed: passed.cumprod(-1).sum()
    residual: Callable[[Rows, Proposal, int], Tensor] = verifier.left_over
    bonus: Callable[[Rows], Tensor] = lambda p: p[-1]
    stale_slot: bool = False
    stale_features: bool = False
    reseeds: bool = False
    tests_by: str = "accept"
    final_by: str = "final"
    matches: bool = False
    drops_bonus: bool = False
    acceptance: str = "token"


SOFT, DRAFT = ("soft q",), "the policy's own"  # the role of the numbers that drive the drafts

INJECTED: Mapping[str, Hooks] = MappingProxyType(
    {
        "target-rows-off-by-one": Hooks(rows=verifier.later_rows),
        "stale-kv-slot": Hooks(stale_slot=True),
        "p-untempered": Hooks(("temperature",), rows=verifier.untempered),
        "p-unfiltered": Hooks(("filter",), rows=verifier.unfiltered),
        "rows-swapped": Hooks(rows=verifier.swapped),
        "bonus-off-by-one": Hooks(bonus=lambda p: p[-2]),
        "q-reported-uniform": Hooks(SOFT, draft=proposer.q_uniform),
        "q-unary-only": Hooks(("pairwise q",), draft=proposer.q_unary),
        "argmax-draw-soft-q": Hooks(SOFT, draft=proposer.draws_best),
        "wrong-anchor-draw": Hooks(("pairwise q",), draft=proposer.draws_astray),
        "q-untempered": Hooks(("temperature", *SOFT), draft=proposer.q_tempered_twice),
        "draft-untempered": Hooks(("temperature", *SOFT), draft=proposer.draws_at_1),
        "q-unfiltered": Hooks(SOFT, draft=proposer.draws_filtered),
        "q-bfloat16": Hooks(SOFT, draft=proposer.q_bfloat16),
        "accept-inverted": Hooks(chance=lambda p, x: 1 / ratio(p, x)),
        "accept-typical": Hooks(chance=verifier.typical),
        "accept-p-alone": Hooks(SOFT, chance=at_tokens),
        "accept-target-argmax": Hooks(chance=verifier.is_top),
        "no-cumulative-stop": Hooks(count=lambda passed: passed.sum()),
        "first-token-unverified": Hooks(chance=verifier.first_unverified),
        "ratio-times-1.3": Hooks(chance=lambda p, x: 1.3 * ratio(p, x)),
        "accept-target-top": Hooks(chance=lambda p, x: ratio(p, x) + verifier.is_top(p, x)),
        "ratio-power-0.9": Hooks(chance=lambda p, x: ratio(p, x) ** 0.9),
        "ratio-times-1.05": Hooks(chance=lambda p, x: 1.05 * ratio(p, x)),
        "residual-next-position": Hooks(residual=verifier.left_of_next),
        "residual-unnormalised": Hooks(residual=verifier.runs_off),
        "residual-absolute": Hooks(
            residual=lambda p, x, n: (p[n].double() - verifier.q_at(p, x, n)).abs()
        ),
        "residual-candidates-only": Hooks(residual=verifier.on_candidates),
        "residual-is-p": Hooks(residual=lambda p, _x, n: p[n]),
        "residual-q-wrong-position": Hooks(residual=verifier.left_by_wrong_q),
        "residual-argmax": Hooks(residual=verifier.best_left),
        "residual-p-without-draft": Hooks(SOFT, residual=verifier.without_draft),
        "reseed-every-block": Hooks(reseeds=True),
        "uniform-shared-draft-acceptance": Hooks(SOFT, tests_by=DRAFT),
        "uniform-shared-acceptance-residual": Hooks(final_by="accept"),
        # Draws are by the inverse cdf here, so that what they share is the number, not Gumbel noise
        "gumbel-shared-draft-residual": Hooks(SOFT, final_by=DRAFT),
        # Harmless: the law of the tokens is right.
        "correct": Hooks(),
        "block-verification": Hooks(acceptance="block"),
        "token-matching": Hooks(draft=proposer.one_hot, matches=True),
        "bonus-dropped": Hooks(drops_bonus=True),
        "one-hot-consistent": Hooks(SOFT, draft=proposer.one_hot),
        "wrong-anchor-consistent": Hooks(("pairwise q",), draft=proposer.walks_astray),
        "stale-features-consistent": Hooks(speaks=frozenset({"state"}), stale_features=True),
        "filtered-q-consistent": Hooks(SOFT, draft=proposer.filtered),
    }
)


def hooks_of(name: str) -> Hooks:
    """The hooks of a name of the catalogue. Raises `LabError` for another one."""
    if name not in INJECTED:
        raise LabError(f"inject: found {name!r}, expected one of {', '.join(sorted(INJECTED))}")
    return INJECTED[name]


def why_not(name: str, policy: str, arm: str, sampling: Sampling) -> str:
    """Why a fault or control changes nothing in such a decode; "" where it does."""
    near, pairwise = arm == "near-perfect", policy in PAIRWISE
    missing = {
        "soft q": not (near or pairwise or policy == "sampled")
        and f"q is one-hot by policy {policy}",
        "pairwise q": (near or not pairwise) and "q does not depend on the token before the slot",
        "temperature": sampling.temperature == 1.0 and "T is 1",
        "filter": sampling.top_p == 1.0 and not sampling.top_k and "there is no top-k or top-p",
    }
    return next((missing[need] for need in hooks_of(name).needs if missing[need]), "")


class Injected(Witness):
    """A witness whose decode has one fault of `INJECTED`."""

    def __init__(self, target: Target, drafter: Drafter, policy: str, arm: str, name: str):
        self.name, self.hooks = name, hooks_of(name)
        super().__init__(target, drafter, policy, arm, self.hooks.acceptance)
        self.laws: Rows | None = None
        self.neighbour: Rows | None = None

    def _rows(self) -> tuple[TargetRow, DrafterRow]:
        self.neighbour, self.laws = self.laws, None
        row = TargetContext(self.target, self.layer_ids)
        drafts = DrafterContext(self.drafter, self.target, row, self.hooks.stale_features)
        self.found.rows = row, drafts
        return self.found.rows

    def _draws(self, request: Request, role: str, anchor: int) -> Tensor:
        return super()._draws(request, role, 0 if self.hooks.reseeds else anchor)

    def _draft(
        self, row: TargetContext, drafts: DrafterContext, request: Request, anchor: int, last: int
    ) -> Proposal:
        proposal = super()._draft(row, drafts, request, anchor, last)
        if why_not(self.name, self.policy, self.arm, request.sampling):
            return proposal
        return self.hooks.draft(Draft(proposal, drafts.last, self.arm, self.policy, row.ids[-1]))

    def _accept(self, request: Request, anchor: int, p: Rows, proposal: Proposal) -> Accepted:
        found = super()._accept(request, anchor, p, proposal)
        slots = len(proposal.tokens)
        if self.hooks.stale_slot and found.num < slots:
            place = len(request.prompt_ids) + anchor + 1 + found.num
            self.found.rows[0].stale = place, int(proposal.tokens[found.num])
        if self.hooks.drops_bonus and found.num == slots:
            step = self.found.steps[-1]
            self.found.steps[-1] = step._replace(laws=step.laws[:slots])
            return Accepted(slots - 1, int(proposal.tokens[-1]))
        return found

    def _verdict(
        self, request: Request, anchor: int, p: Rows, proposal: Proposal
    ) -> tuple[Accepted, Rows]:
        if self.acceptance == "block":
            return super()._verdict(request, anchor, p, proposal)
        hooks, slots = self.hooks, len(proposal.tokens)
        p = hooks.rows(Pass(p, self.found.rows[0].logits, request, anchor, self.neighbour))
        self.laws = p
        tests, final = self._numbers(request, anchor, slots)
        if hooks.matches:
            num, tests, final = verifier.match(p, proposal, tests, final)
        else:
            num = int(hooks.count(tests < hooks.chance(p, proposal)))
            if num < slots and hooks.final_by != "final":
                final = self._shared(request, anchor, hooks.final_by)[num]
        # The log has the numbers that were used.
        self.used[request.keys["accept"]], self.used[request.keys["final"]] = tests, final[None]
        law = hooks.bonus(p) if num == slots else hooks.residual(p, proposal, num)
        if not law.sum() > 0:
            law = p[num]
        return Accepted(num, int(inverse_cdf(law, final))), p

    def _numbers(
        self, request: Request, anchor: int, slots: int
    ) -> tuple[Float[Tensor, " P"], Float[Tensor, ""]]:
        at = 0 if self.hooks.reseeds else anchor
        final = self._uniforms(request.keys["final"], at, 1)[0]
        return self._shared(request, anchor, self.hooks.tests_by)[:slots], final

    def _shared(self, request: Request, anchor: int, role: str) -> Tensor:
        return self._draws(request, self.policy if role == DRAFT else role, anchor)

    def left(self, p: Float[Tensor, "n V"], q: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """The verifier's residual laws as a function of p and q."""
        if self.acceptance == "block":
            return super().left(p, q)
        return torch.stack([self._left(*pair) for pair in zip(p, q, strict=True)])

    def _left(self, p: Float[Tensor, " V"], q: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        rows = torch.stack([p, p])
        law = self.hooks.residual(rows, Proposal(q.argmax()[None], q[None]), 0).double()
        return law / law.sum() if law.sum() > 0 else p
