"""What a witnessed decode says of the emitted tokens, and of the stages that made them.

The laws p that the tokens are held against are not the verifier's: they come from one plain pass
over prompt and response, with a softmax in float64.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.losslessness.battery import Drafted, Emitted
from dflash2_lab.losslessness.edges import law_at, law_of
from dflash2_lab.losslessness.plain import plain_pass
from dflash2_lab.losslessness.scoring import residual_pit, score
from dflash2_lab.losslessness.witness import Step, Testimony
from dflash2_lab.target import Target

_BAND = 1e-4  # rounding of a difference of float32 logits; measured: 6e-5


class Engine(Protocol):
    """What has to be known of the engine that testified."""

    target: Target
    acceptance: str

    def left(self, p: Float[Tensor, " V"], q: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """The verifier's residual law as a function of one p and q."""


class Evidence(NamedTuple):
    """A response against the target's own laws: for the batteries, and [n] numbers of the audit.

    Attributes:
        emitted, drafted: as the batteries take them.
        implied: total variation between the law that the rule "token" gives with the verifier's own
            p and q, and that p; empty for the rule "block", whose slots are not judged alone.
        moved: total variation between the verifier's p and the independent one.
        num_edge: tokens at the edge of a filter.
        state: see `Plain.state_error`.
    """

    emitted: Emitted
    drafted: Drafted
    implied: Float[np.ndarray, " m"]
    moved: Float[np.ndarray, " m"]
    num_edge: int
    state: float


def weigh(engine: Engine, found: Testimony, stream: int) -> Evidence:
    """Hold a response of `engine` against its target."""
    target = engine.target
    tokens = torch.tensor(found.response, device=target.device)
    sampling = found.request.sampling
    logits, state = plain_pass(found)
    p, num_edge = law_at(logits, tokens, sampling, _BAND)
    q, slot = p.clone(), torch.full_like(tokens, -1)
    implied, moved, filtered = [], [], sampling.top_p < 1 or sampling.top_k > 0
    for step in found.steps:
        num_slots = len(step.proposal.tokens)
        # A bonus token may have been cut by the length limit.
        for place, own in enumerate(step.laws[: len(tokens) - step.anchor - 1]):
            at = step.anchor + 1 + place
            slot[at] = place
            own = own.double()
            away = _distance(own, p[at])
            if filtered and away > _BAND:
                away = _distance(own, law_of(own > 0, logits[at], sampling, _BAND))
            moved.append(away)
            if place == num_slots:
                continue
            reported = step.proposal.dense(place, p.shape[-1])
            q[at] = reported / reported.sum()  # as a direction; its sum is a gate of the audit
            if engine.acceptance == "token":
                implied.append(_rule_error(engine, own, reported))
    num = len(tokens)
    emitted = Emitted(
        score(tokens, p, q), np.full(num, stream), np.arange(num), slot.cpu().numpy()
    )  # fmt: skip
    drafted = _drafted(found, tokens, p, q)
    numbers = _numbers(implied), _numbers(moved)
    return Evidence(emitted, drafted, *numbers, num_edge, state)


def _rule_error(engine: Engine, p: Float[Tensor, " V"], q: Float[Tensor, " V"]) -> Tensor:
    # A float32 law of a large vocabulary sums to 1 up to 1e-5: `moved` counts that.
    p = p / p.sum()
    taken = torch.minimum(p, q)
    return _distance(taken + (1 - taken.sum()) * engine.left(p, q), p)


def _distance(a: Float[Tensor, " V"], b: Float[Tensor, " V"]) -> Float[Tensor, ""]:
    return (a - b).abs().sum() / 2


def _numbers(values: list[Tensor]) -> Float[np.ndarray, " n"]:
    return torch.stack(values).cpu().numpy() if values else np.zeros(0)


def _drafted(
    found: Testimony, tokens: Int[Tensor, " n"], p: Float[Tensor, "n V"], q: Float[Tensor, "n V"]
) -> Drafted:
    """The verifier's log, of either rule."""
    draws, tests, refused, weights, bonus = [], [], [], [], []
    for step in found.steps:
        num_slots = len(step.proposal.tokens)
        draws.append(_draws(step))
        ratio = _ratios(step, tokens, p)
        tests.append(_token_tests(step, ratio) if step.chances is None else _block_tests(step))
        last = step.anchor + 1 + step.num
        if last >= len(tokens) or len(step.laws) <= step.num:
            continue  # cut off by the length limit, or a step that ends with its drafts
        if step.num == num_slots:
            bonus.append(last)
            continue
        refused.append(last)
        weights.append(1.0 if step.chances is None else _weight(ratio[: step.num]))
    heat, variance, third, below, mass = (torch.cat(part) for part in zip(*draws, strict=True))
    reached, accepted, chance = (torch.cat(part) for part in zip(*tests, strict=True))
    weight = torch.tensor(weights, dtype=p.dtype, device=p.device)
    pit = residual_pit(tokens[refused], p[refused], q[refused], weight)
    plain = score(tokens[bonus], p[bonus]) if bonus else None
    columns = (heat, variance, below, mass, reached, accepted, chance)
    return Drafted(
        *(column.cpu().numpy() for column in columns),
        *pit,
        np.zeros(0) if plain is None else plain.below,
        np.zeros(0) if plain is None else plain.mass,
        third.cpu().numpy(),
    )


def _draws(step: Step) -> tuple[Tensor, ...]:
    """Of every draft: log q(x) + H(q), second and third central moment of log q, and the pieces of
    its integral transform."""
    own, law = step.proposal.mass(), step.proposal.law
    law = torch.ones_like(own)[:, None] if law is None else law.double()
    logs = law.clamp_min(torch.finfo(law.dtype).tiny).log()
    mean = (law * logs).sum(-1)
    away = logs - mean[:, None]
    below = (law * (law > own[:, None])).sum(-1)
    # Equal masses lie side by side: their order does not matter to a randomised transform.
    mass = (law * (law == own[:, None])).sum(-1)
    moments = (law * away.square()).sum(-1), (law * away**3).sum(-1)
    return own.log() - mean, *moments, below, mass


def _ratios(step: Step, tokens: Int[Tensor, " n"], p: Float[Tensor, "n V"]) -> Float[Tensor, " P"]:
    """p(x) / q(x) of the drafts up to the first refused one, whose p the emitted tokens give."""
    drafts = step.proposal.tokens
    places = torch.arange(len(drafts), device=p.device).clamp_max(step.num) + step.anchor + 1
    law = p[places.clamp_max(len(tokens) - 1)]
    return law.gather(-1, drafts[:, None])[:, 0] / step.proposal.mass()


def _weight(ratios: Float[Tensor, " n"]) -> float:
    """w_n of block verification."""
    weight = 1.0
    for ratio in ratios.tolist():
        weight = min(weight * ratio, 1.0)
    return weight


Tests = tuple[Tensor, Tensor, Tensor]


def _token_tests(step: Step, ratio: Float[Tensor, " P"]) -> Tests:
    """Which slots were looked at, which passed, and with what probability: from the first slot to
    the first refused one."""
    slots = torch.arange(len(ratio), device=ratio.device)
    reached = slots <= step.num
    return reached, slots < step.num, torch.where(reached, ratio.clamp_max(1.0), 0.0)


def _block_tests(step: Step) -> Tests:
    """The same for block verification, whose last slot that passes counts: from the last slot
    down to that one. Tests of slots before it left no trace."""
    slots = torch.arange(1, len(step.chances) + 1, device=step.chances.device)
    reached = slots >= step.num
    return reached, slots == step.num, torch.where(reached, step.chances, 0.0)
