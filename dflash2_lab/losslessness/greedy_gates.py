"""What a greedy verification measures before it decodes, and the gates of one arm.

At T = 0 only rounding may part two right decodes, so its size is measured, not assumed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from dflash2_lab.agreement.block_comparison import behind
from dflash2_lab.agreement.forward_noise import (
    Choices,
    ForwardNoise,
    choices,
    delta,
    in_blocks,
    in_graph_blocks,
    in_padded_blocks,
    joined,
    one_by_one,
)
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.requests import Decoded, Request
from dflash2_lab.losslessness.certificate import Check
from dflash2_lab.losslessness.flips import flip_chances, flip_tail, most_flips
from dflash2_lab.losslessness.greedy_certificate import GreedyArm, Place
from dflash2_lab.losslessness.greedy_machines import (
    ROWS,
    Machine,
    anchors_of,
    decode_texts,
    first_difference,
)
from dflash2_lab.target import Target


@dataclass(frozen=True, eq=False)
class Calibration:
    """The target's own greedy responses, the noise of its block passes on them, and where
    (response, position) those change its choice, and to which token."""

    own: Sequence[Choices]
    noise: tuple[ForwardNoise, ...]
    control: Mapping[tuple[int, int], int]

    @property
    def eps(self) -> float:
        """Twice the largest move of any logit."""
        return 2 * max(one.largest for one in self.noise)

    @property
    def band(self) -> float:
        """Largest gap of a tie."""
        return 2 * self.eps

    @property
    def law(self) -> Float[np.ndarray, " m"]:
        """Measured differences of the moves of the two best tokens."""
        return np.concatenate([one.delta.pair for one in self.noise])


@dataclass(frozen=True, eq=False)
class Case:
    """What is verified: prompts with their requests, decoded by `machines`, one an arm."""

    target: Target
    ids: Sequence[str]
    requests: Sequence[Request]
    machines: Mapping[str, Machine]

    @property
    def width(self) -> int:
        """Rows of a block: the anchor and its drafts."""
        return next(iter(self.machines.values())).num_draft + 1


def calibrate(case: Case) -> Calibration:
    """Noise of block passes on the target's own greedy text."""
    target, width, machine = case.target, case.width, next(iter(case.machines.values()))
    is_graph = isinstance(machine, GraphEngine)
    other, rows = ("graph", machine.batch_size) if is_graph else ("batch", ROWS["eager"])
    own, control, size = [], {}, 0.0
    found: dict[str, list] = {"blocks": [], other: []}
    total = sum(request.max_new_tokens for request in case.requests)
    with tqdm(total=total, desc="noise band", unit="token", delay=2.0) as bar:
        for first in range(0, len(case.requests), rows):
            group, singles = case.requests[first : first + rows], []
            for request in group:
                text, logits = one_by_one(target, request.prompt_ids, request.max_new_tokens)
                singles.append(logits)
                size = max(size, float(logits[logits.isfinite()].abs().max()))
                alone = in_blocks(target, request.prompt_ids, text, width)
                found["blocks"].append(delta(logits, alone))
                control |= _changed(len(own), logits, alone)
                own.append(choices(text, logits))
                bar.update(len(text))
            texts = [one.tokens for one in own[first:]]
            if is_graph:
                blocks = in_graph_blocks(machine, group, texts)
            else:
                prompts = [request.prompt_ids for request in group]
                blocks = in_padded_blocks(target, prompts, texts, width)
            for number, pair in enumerate(zip(singles, blocks, strict=True), start=first):
                found[other].append(delta(*pair))
                control |= _changed(number, *pair)
    batches = {"blocks": 1, other: min(rows, len(case.requests))}
    return Calibration(own, joined(found, batches, size, target.dtype), control)


def _changed(
    number: int, single: Float[Tensor, "n V"], block: Float[Tensor, "n V"]
) -> dict[tuple[int, int], int]:
    """Where a response's best token changes when it is read in blocks, and to which one."""
    chosen = block.argmax(-1)
    changed = (chosen != single.argmax(-1)) & ~block[:, 0].isnan()
    return {(number, at): int(chosen[at]) for at in changed.nonzero()[:, 0].tolist()}


def judge(
    case: Case, found: Calibration, arm: str, answers: Sequence[Decoded], alpha: float
) -> GreedyArm:
    """All gates of one arm, from its responses to the requests of the case."""
    target, machine, band = case.target, case.machines[arm], found.band
    scored, unexplained = [], 0
    for request, own, answer in zip(case.requests, found.own, answers, strict=True):
        prompt, ids = request.prompt_ids, answer.response_ids
        one = own if ids == own.tokens else choices(*one_by_one(target, prompt, ids))
        scored.append(one)
        if (one.best != ids).any():
            logits = in_blocks(target, prompt, ids, case.width, anchors_of(answer))
            blocks, has_kernels = choices(ids, logits), isinstance(machine, GraphEngine)
            # The reference engine takes these very passes; the other one's kernels round otherwise.
            other = blocks.regret > band if has_kernels else blocks.best != ids
            unexplained += int(other.sum())
    worst = max(
        (_worst(case, one, number) for number, one in enumerate(scored)),
        key=lambda place: place.gap,
    )
    parted = list(_divergences(case, found, machine, answers))
    outside = sum(place not in found.control and one.gap > band for place, one in parted)
    chances = flip_chances(np.concatenate([one.gap for one in scored]), found.law, band)
    flips = sum(int((one.best != one.tokens).sum()) for one in scored)
    gap = max((one.gap for _, one in parted), default=0.0)
    steps = sum(len(answer.accepted_raw) for answer in answers)
    tokens = sum(len(answer.response_ids) for answer in answers)
    return GreedyArm(
        arm=arm,
        tokens=tokens,
        num_steps=steps,
        acceptance_length=(tokens - len(answers)) / steps,
        num_flips=flips,
        expected_flips=float(chances.sum()),
        flip_tail=flip_tail(chances, flips),
        worst=worst,
        divergences=tuple(one for _, one in parted),
        checks=(
            Check("regret", worst.gap, band, "worst distance below the target's best token"),
            Check("prefix", gap, band, "widest gap of the two best tokens at a divergence"),
            Check("flips", flips, most_flips(chances, alpha), "tokens that are not the best one"),
            Check("control", outside, 0, "divergences that blocks alone do not give: logic"),
            Check("blocks", unexplained, 0, "tokens that the same blocks alone do not give"),
        ),
    )


def _worst(case: Case, one: Choices, number: int) -> Place:
    at = int(one.regret.argmax())
    gap = float(one.regret[at])
    return Place(case.ids[number], at, one.tokens[at], int(one.best[at]), gap)


def parting(case: Case, own: Choices, number: int, at: int, token: int) -> Place:
    """A token that is not the target's own one, with the gap of the two best."""
    return Place(case.ids[number], at, token, own.tokens[at], float(own.gap[at]))


def _divergences(
    case: Case, found: Calibration, machine: Machine, answers: Sequence[Decoded]
) -> Iterator[tuple[tuple[int, int], Place]]:
    """Where the decode leaves the target's own text: (response, position) and the token. Behind a
    tie it is taken up again on the target's token; after a bug the rest cannot be learned from."""
    pending = [(number, 0, answer.response_ids) for number, answer in enumerate(answers)]
    while pending:
        later = []
        for number, offset, ids in pending:
            own = found.own[number]
            place = first_difference(own.tokens, ids, offset)
            if place is None:
                continue
            one = parting(case, own, number, place, ids[place - offset])
            yield (number, place), one
            if one.gap <= found.band and place + 1 < len(own.tokens):
                later.append((number, place + 1))
        asked = [behind(case.requests[n], found.own[n].tokens[:at]) for n, at in later]
        texts = [found.own[n].tokens[at:] for n, at in later]
        again = decode_texts(machine, asked, texts) if later else []
        pending = [(*pair, answer.response_ids) for pair, answer in zip(later, again, strict=True)]
