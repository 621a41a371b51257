"""Faults of the catalogue inside the reference engine: what `verify --inject NAME` decodes with.

Names and formulas are those of `faults`; here each replaces one hook of a decode with the real
models. A fault is planted in what the verifier does, never in what it is held against.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dflash2_lab.decoding.requests import Request
from dflash2_lab.decoding.steps import (
    Accepted,
    DrafterRow,
    Proposal,
    TargetRow,
    at_tokens,
    excess,
)
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.losslessness.witness import Witness
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.target import Target

Rows = Float[Tensor, "P1 V"]


@dataclass(frozen=True)
class Hooks:
    """What a decode does at each stage; the defaults are right."""

    proposal: Callable[[Proposal, Tensor, float], Proposal] = lambda proposal, _u, _t: proposal
    rows: Callable[[Rows, float], Rows] = lambda p, _t: p
    chance: Callable[[Rows, Proposal], Tensor] = lambda p, x: _ratio(p, x)
    count: Callable[[Bool[Tensor, " P"]], Tensor] = lambda passed: passed.cumprod(-1).sum()
    residual: Callable[[Rows, Proposal, int], Tensor] = lambda p, x, n: excess(p[n], _q(p, x, n))
    bonus: Callable[[Rows], Tensor] = lambda p: p[-1]
    final_from_test: bool = False
    test_from_draft: bool = False


def _ratio(p: Rows, x: Proposal) -> Float[Tensor, " P"]:
    return at_tokens(p, x) / x.mass()


def _q(p: Rows, x: Proposal, slot: int) -> Float[Tensor, " V"]:
    return x.dense(min(slot, len(x.tokens) - 1), p.shape[-1])


def _is_top(p: Rows, x: Proposal) -> Bool[Tensor, " P"]:
    return x.tokens == p[:-1].argmax(-1)


def _first(p: Rows, x: Proposal) -> Float[Tensor, " P"]:
    ratio = _ratio(p, x)
    ratio[:1] = 1.0
    return ratio


def _typical(p: Rows, x: Proposal) -> Float[Tensor, " P"]:
    entropy = -torch.special.xlogy(p[:-1], p[:-1]).sum(-1).double()
    return (at_tokens(p, x) > (0.3 * (-entropy).exp()).clamp_max(0.09)).double()


def _tempered(law: Float[Tensor, "P N"], power: float) -> Float[Tensor, "P N"]:
    return (law.double().log() * power).softmax(-1)


def _cut(law: Float[Tensor, "P N"], top_p: float = 0.9) -> Float[Tensor, "P N"]:
    values, order = law.double().sort(dim=-1, descending=True, stable=True)
    kept = values.masked_fill(values.cumsum(-1) - values >= top_p, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def _drawn(x: Proposal, law: Float[Tensor, "P N"], uniform: Float[Tensor, " P"]) -> Tensor:
    choice = inverse_cdf(law, uniform[: len(law)])
    return choice if x.ids is None else x.ids.gather(-1, choice[:, None])[:, 0]


def _best(x: Proposal) -> Tensor:
    choice = x.law.argmax(-1)
    return choice if x.ids is None else x.ids.gather(-1, choice[:, None])[:, 0]


def _only_candidates(p: Rows, x: Proposal, num: int) -> Float[Tensor, " V"]:
    q = _q(p, x, num)
    left = excess(p[num], q) * (q > 0)
    return left if left.sum() > 0 else p[num]


def _argmax(p: Rows, x: Proposal, num: int) -> Float[Tensor, " V"]:
    left = excess(p[num], _q(p, x, num))
    return torch.zeros_like(left).index_fill_(0, left.argmax(), 1.0)


def _without_draft(p: Rows, x: Proposal, num: int) -> Float[Tensor, " V"]:
    left = p[num].double().index_fill(0, x.tokens[num], 0.0)
    return left if left.sum() > 0 else p[num]


INJECTED: Mapping[str, Hooks] = {
    "target-rows-off-by-one": Hooks(rows=lambda p, _t: torch.cat([p[1:], p[-1:]])),
    "p-untempered": Hooks(rows=lambda p, t: _tempered(p, t)),
    "bonus-off-by-one": Hooks(bonus=lambda p: p[max(len(p) - 2, 0)]),
    "q-reported-uniform": Hooks(
        lambda x, _u, _t: replace(x, law=torch.full_like(x.law, 1 / x.law.shape[-1]))
    ),
    "argmax-draw-soft-q": Hooks(lambda x, _u, _t: replace(x, tokens=_best(x))),
    "q-untempered": Hooks(lambda x, _u, t: replace(x, law=_tempered(x.law, t))),
    "draft-untempered": Hooks(lambda x, u, t: replace(x, tokens=_drawn(x, _tempered(x.law, t), u))),
    "q-unfiltered": Hooks(lambda x, u, _t: replace(x, tokens=_drawn(x, _cut(x.law), u))),
    "q-bfloat16": Hooks(lambda x, _u, _t: replace(x, law=x.law.bfloat16().float())),
    "accept-inverted": Hooks(chance=lambda p, x: 1 / _ratio(p, x)),
    "accept-typical": Hooks(chance=_typical),
    "accept-p-alone": Hooks(chance=at_tokens),
    "accept-target-argmax": Hooks(chance=lambda p, x: _is_top(p, x).double()),
    "no-cumulative-stop": Hooks(count=lambda passed: passed.sum()),
    "first-token-unverified": Hooks(chance=_first),
    "ratio-times-1.3": Hooks(chance=lambda p, x: 1.3 * _ratio(p, x)),
    "accept-target-top": Hooks(chance=lambda p, x: _ratio(p, x) + _is_top(p, x)),
    "ratio-power-0.9": Hooks(chance=lambda p, x: _ratio(p, x) ** 0.9),
    "ratio-times-1.05": Hooks(chance=lambda p, x: 1.05 * _ratio(p, x)),
    "residual-next-position": Hooks(
        residual=lambda p, x, n: excess(p[min(n + 1, len(p) - 1)], _q(p, x, n))
    ),
    "residual-absolute": Hooks(residual=lambda p, x, n: (p[n].double() - _q(p, x, n)).abs()),
    "residual-candidates-only": Hooks(residual=_only_candidates),
    "residual-is-p": Hooks(residual=lambda p, _x, n: p[n]),
    "residual-q-wrong-position": Hooks(
        residual=lambda p, x, n: excess(p[n], _q(p, x, n + 1 if n + 1 < len(x.tokens) else 0))
    ),
    "residual-argmax": Hooks(residual=_argmax),
    "residual-p-without-draft": Hooks(residual=_without_draft),
    "uniform-shared-draft-acceptance": Hooks(test_from_draft=True),
    "uniform-shared-acceptance-residual": Hooks(final_from_test=True),
    # Harmless: a run with one of these has to pass.
    "correct": Hooks(),
    "one-hot-consistent": Hooks(lambda x, _u, _t: Proposal(x.tokens)),
    "filtered-q-consistent": Hooks(
        lambda x, u, _t: replace(x, law=_cut(x.law), tokens=_drawn(x, _cut(x.law), u))
    ),
}


class Injected(Witness):
    """A witness whose decode has one fault of `INJECTED`."""

    def __init__(self, target: Target, drafter: Drafter, policy: str, arm: str, name: str):
        if name not in INJECTED:
            raise LabError(f"inject: found {name!r}, expected one of {', '.join(sorted(INJECTED))}")
        super().__init__(target, drafter, policy, arm)
        self.hooks = INJECTED[name]

    def _draft(
        self, row: TargetRow, drafts: DrafterRow | None, request: Request, anchor: int, last: int
    ) -> Proposal:
        proposal = super()._draft(row, drafts, request, anchor, last)
        if proposal.law is None:
            return proposal
        return self.hooks.proposal(proposal, self.uniform, request.sampling.temperature)

    def _verdict(
        self, request: Request, anchor: int, p: Rows, proposal: Proposal
    ) -> tuple[Accepted, Rows]:
        hooks, slots = self.hooks, len(proposal.tokens)
        p = hooks.rows(p, request.sampling.temperature)
        uniform = self._draws(request, "accept", anchor)[:slots]
        final = self._uniforms(request.keys["final"], anchor, 1)[0]
        if hooks.test_from_draft:
            uniform = self._draws(request, self.policy, anchor)[:slots]
        num = int(hooks.count(uniform < hooks.chance(p, proposal)))
        if hooks.final_from_test and num < slots:
            final = self._draws(request, "accept", anchor)[num]
        law = hooks.bonus(p) if num == slots else hooks.residual(p, proposal, num)
        if not law.sum() > 0:
            law = p[num]
        return Accepted(num, int(inverse_cdf(law, final))), p

    def left(self, p: Float[Tensor, " V"], q: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """The verifier's residual law as a function of one p and q."""
        rows = torch.stack([p, p])
        law = self.hooks.residual(rows, Proposal(q.argmax()[None], q[None]), 0).double()
        return law / law.sum() if law.sum() > 0 else p
