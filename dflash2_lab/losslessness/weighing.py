"""What a witnessed decode says of the emitted tokens, and of the stages that made them.

The laws p that the tokens are held against are not the verifier's: they come from one plain pass
over prompt and response, with a softmax in float64.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.decoding.steps import Proposal
from dflash2_lab.losslessness.battery import Drafted, Emitted
from dflash2_lab.losslessness.edges import law_at, law_of
from dflash2_lab.losslessness.plain import plain_pass
from dflash2_lab.losslessness.scoring import residual_pit, score
from dflash2_lab.losslessness.step_log import ROWS, StepLog, final_weights
from dflash2_lab.losslessness.witness import Testimony
from dflash2_lab.sampling import uniforms
from dflash2_lab.target import Target

_BAND = 1e-4  # rounding of a difference of float32 logits; measured: 6e-5


class Engine(Protocol):
    """What has to be known of the engine that testified."""

    target: Target
    acceptance: str

    def left(self, p: Float[Tensor, "n V"], q: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """The verifier's residual laws as a function of p and q."""


class Evidence(NamedTuple):
    """A response against the target's own laws: for the batteries, and [n] numbers of the audit.

    Attributes:
        emitted, drafted: as the batteries take them.
        implied: total variation between the law that the rule "token" gives with the verifier's own
            p and q, and that p; empty for the rule "block", whose slots are not judged alone.
        moved: total variation between the verifier's p and the independent one.
        first: distance of the first token's number from the numbers that give it, by that p.
        num_edge: tokens at the edge of a filter.
        state: see `Plain.state_error`.
    """

    emitted: Emitted
    drafted: Drafted
    implied: Float[np.ndarray, " m"]
    moved: Float[np.ndarray, " m"]
    first: float
    num_edge: int
    state: float


def weigh(engine: Engine, found: Testimony, log: StepLog, stream: int) -> Evidence:
    """Hold a response of `engine` against its target; `log` has the response's steps."""
    tokens = torch.tensor(found.response, device=engine.target.device)
    sampling = found.request.sampling
    logits, state = plain_pass(found)
    p, num_edge = law_at(logits, tokens, sampling, _BAND)
    q, slot = p.clone(), torch.full_like(tokens, -1)
    implied, moved, filtered = [], [], sampling.top_p < 1 or sampling.top_k > 0
    at = log.anchor[log.owner] + 1 + log.place
    inside = (at < len(tokens)).nonzero()[:, 0]  # a bonus may have been cut by the length limit
    slot[at[inside]] = log.place[inside]
    for rows in inside.split(ROWS):
        own, here = log.laws[rows].double(), at[rows]
        away = _distance(own, p[here])
        for row in (away > _BAND).nonzero()[:, 0].tolist() if filtered else ():
            law = law_of(own[row] > 0, logits[here[row]], sampling, _BAND)
            away[row] = _distance(own[row], law)
        moved.append(away)
        drafted = log.place[rows] < log.slots[log.owner[rows]]
        rows, own, here = rows[drafted], own[drafted], here[drafted]
        draft = log.draft_at(log.owner[rows], log.place[rows])
        reported = log.drafts.dense(draft, p.shape[-1])
        # as a direction; its sum is a gate of the audit
        q[here] = reported / reported.sum(-1, keepdim=True)
        if engine.acceptance == "token":
            implied.append(_rule_error(engine, own, reported))
    num = len(tokens)
    emitted = Emitted(
        score(tokens, p, q), np.full(num, stream), np.arange(num), slot.cpu().numpy()
    )  # fmt: skip
    numbers = _numbers(implied), _numbers(moved)
    first = _first_distance(found, p[0])
    return Evidence(emitted, _drafted(log, tokens, p, q), *numbers, first, num_edge, state)


def _first_distance(found: Testimony, p: Float[Tensor, " V"]) -> float:
    token, key = found.response[0], torch.tensor(found.request.keys["prefill"])
    uniform = float(uniforms(key, torch.zeros_like(key)))
    upper = float(p[: token + 1].sum())
    return float(np.max([0.0, uniform - upper, upper - float(p[token]) - uniform]))


def _rule_error(
    engine: Engine, p: Float[Tensor, "n V"], q: Float[Tensor, "n V"]
) -> Float[Tensor, " n"]:
    # A float32 law of a large vocabulary sums to 1 up to 1e-5: `moved` counts that.
    p = p / p.sum(-1, keepdim=True)
    taken = torch.minimum(p, q)
    return _distance(taken + (1 - taken.sum(-1, keepdim=True)) * engine.left(p, q), p)


def _distance(a: Float[Tensor, "*n V"], b: Float[Tensor, "*n V"]) -> Float[Tensor, "*n"]:
    return (a - b).abs().sum(-1) / 2


def _numbers(parts: list[Tensor]) -> Float[np.ndarray, " n"]:
    return torch.cat(parts).cpu().numpy() if parts else np.zeros(0)


def _drafted(
    log: StepLog, tokens: Int[Tensor, " n"], p: Float[Tensor, "n V"], q: Float[Tensor, "n V"]
) -> Drafted:
    """The verifier's log, of either rule."""
    heat, variance, third, below, mass = _draws(log.drafts)
    ratio = _ratios(log, tokens, p)
    by_block = log.chances is not None
    tests = _block_tests(log) if by_block else _token_tests(log, ratio, len(tokens))
    last = log.anchor + 1 + log.num
    # The others were cut off by the length limit, or end with their drafts.
    ended = (last < len(tokens)) & (log.kept > log.num)
    bonus, refused = last[ended & (log.num == log.slots)], ended & (log.num < log.slots)
    weight = final_weights(log, ratio) if by_block else torch.ones_like(log.final)
    at = last[refused]
    pit = residual_pit(tokens[at], p[at], q[at], weight[refused])
    plain = score(tokens[bonus], p[bonus]) if len(bonus) else None
    columns = (heat, variance, below, mass, *tests)
    return Drafted(
        *(column.cpu().numpy() for column in columns),
        *pit,
        np.zeros(0) if plain is None else plain.below,
        np.zeros(0) if plain is None else plain.mass,
        third.cpu().numpy(),
    )


def _draws(drafts: Proposal) -> list[Float[Tensor, " M"]]:
    """Of every draft: log q(x) + H(q), second and third central moment of log q, and the pieces of
    its integral transform."""
    mass = drafts.mass()
    laws = torch.ones_like(mass)[:, None] if drafts.law is None else drafts.law
    found = []
    for own, law in zip(mass.split(ROWS), laws.split(ROWS), strict=True):
        law = law.double()
        logs = law.clamp_min(torch.finfo(law.dtype).tiny).log()
        mean = (law * logs).sum(-1)
        away = logs - mean[:, None]
        below = (law * (law > own[:, None])).sum(-1)
        # Equal masses lie side by side: their order does not matter to a randomised transform.
        same = (law * (law == own[:, None])).sum(-1)
        moments = (law * away.square()).sum(-1), (law * away**3).sum(-1)
        found.append((own.log() - mean, *moments, below, same))
    return [torch.cat(column) for column in zip(*found, strict=True)]


def _ratios(
    log: StepLog, tokens: Int[Tensor, " n"], p: Float[Tensor, "n V"]
) -> Float[Tensor, " M"]:
    """p(x) / q(x) of the drafts up to the first refused one, whose p the emitted tokens give."""
    place = log.anchor[log.step] + 1 + torch.minimum(log.slot, log.num[log.step])
    return p[place.clamp_max(len(tokens) - 1), log.drafts.tokens] / log.drafts.mass()


Tests = tuple[Tensor, Tensor, Tensor]


def _token_tests(log: StepLog, ratio: Float[Tensor, " M"], length: int) -> Tests:
    """Which slots were looked at, which passed, and with what probability: from the first slot to
    the first refused one, and in a response of `length` tokens none behind the token that stopped
    it, where p is not known."""
    num = log.num[log.step]
    reached = (log.slot <= num) & (log.anchor[log.step] + 1 + log.slot < length)
    return reached, log.slot < num, torch.where(reached, ratio.clamp_max(1.0), 0.0)


def _block_tests(log: StepLog) -> Tests:
    """The same for block verification, whose last slot that passes counts: from the last slot
    down to that one. Tests of slots before it left no trace."""
    number, num = log.slot + 1, log.num[log.step]
    reached = number >= num
    return reached, number == num, torch.where(reached, log.chances, 0.0)
