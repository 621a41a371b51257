"""Margins: how far a greedy choice is from flipping, along a trace, by every way to compute it.

A margin is the score of the trace's token minus that of the best other one: the token is chosen
where it is positive. The target has one at every token of a response, a policy one in every slot
(after the trace's own tokens). The ways differ in rounding alone:

    whole   one pass over the sequence, as a recording takes it
    eager   blocks of num_draft + 1 rows on growing caches, drafts one block at a time
    graph   the graph engine's own draft and verify passes on its static caches
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.decoding.cycle import Cycle
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.requests import Request
from dflash2_lab.decoding.steps import DrafterRow, TargetRow
from dflash2_lab.kernels.candidate_selector import pairwise_scores
from dflash2_lab.kernels.candidate_topk import candidate_topk
from dflash2_lab.kernels.stream import finish_norm
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.policies import Block, candidates, markov_logits
from dflash2_lab.recording import draft_tile
from dflash2_lab.sampling import Sampling
from dflash2_lab.target import Target, features


@dataclass(frozen=True, eq=False)
class Subject:
    """What is verified: models, policy, and a verify window of `num_draft` slots."""

    target: Target
    drafter: Drafter
    policy: str
    num_draft: int

    def widened(self) -> "Subject":
        """The same in float32 (copies, where the weights are narrower)."""
        target, drafter = self.target, self.drafter
        if target.dtype.itemsize < 4:
            target = replace(target, model=copy.deepcopy(target.model).float())
        if drafter.dtype.itemsize < 4:
            drafter = copy.deepcopy(drafter).float()
        return replace(self, target=target, drafter=drafter)

    def anchors(self, length: int) -> Int[np.ndarray, " A"]:
        """Anchors of consecutive full blocks of a response, so that no token is in two of them."""
        return np.arange(0, length - 1, self.num_draft + 1)


class Margins(NamedTuple):
    """Margins of one response: of the target at its n tokens, and of the policy in the slots of the
    blocks at `Subject.anchors`; NaN where there is nothing to score."""

    target: Float[np.ndarray, " n"]
    draft: Float[np.ndarray, "A P"]


def margins(
    scores: Float[Tensor, "*rows V"], tokens: Int[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """Score of each token minus the best other score, float32."""
    scores, index = scores.float(), tokens[..., None]
    others = scores.scatter(-1, index, -torch.inf).amax(-1)
    return scores.gather(-1, index)[..., 0] - others


def draft_margins(block: Block, policy: str) -> Float[Tensor, "n P"]:
    """Margins of a greedy policy's choice in every slot, after the trace's token before it.

    With a selector a token must also be a candidate: the smaller one of the two margins counts.
    """
    targets = block.targets
    if policy.startswith("markov"):
        slots = range(targets.shape[1])
        forced = (markov_logits(block, slot, block.before[:, slot]) for slot in slots)
        return margins(torch.stack(list(forced), 1), targets)
    if not policy.startswith("selector"):
        return margins(block.logits, targets)
    selector, found, scores = block.drafter.candidate_selector, candidates(block), block.logits
    unary = scores.gather(-1, targets[..., None])[..., 0].float()
    pairwise = pairwise_scores(
        selector.predecessor(block.before, block.embedding),
        selector.hidden_projection(block.hidden),
        selector.successor(targets[..., None], block.embedding),
    )[..., 0]
    is_target = found.ids == targets[..., None]
    others = (found.unary + found.forced).masked_fill(is_target, -torch.inf).amax(-1)
    chosen = unary + pairwise - others
    num = found.ids.shape[-1]
    if num == scores.shape[-1]:
        return chosen
    ranked = candidate_topk(scores.flatten(0, 1), num + 1)[0].unflatten(0, targets.shape)
    last_other = torch.where(is_target.any(-1), ranked[..., num], ranked[..., num - 1])
    return torch.minimum(chosen, unary - last_other.float())


def whole_pass(
    subject: Subject, row: Any, anchors: Int[np.ndarray, " A"]
) -> tuple[Float[Tensor, "n V"], Block | None]:
    """Target logits of every response token of a trace, and the blocks at some anchors (None when
    there are none), from one pass over the sequence."""
    target, drafter = subject.target, subject.drafter
    num_prompt, length = len(row.prompt_ids), len(row.response_ids)
    ids = torch.tensor([*row.prompt_ids, *row.response_ids], device=target.device)
    layers = drafter.settings.target_layer_ids
    context, logits = features(target, ids[None], layers, logits_to_keep=length + 1)
    if not len(anchors):
        return logits[0, :-1], None
    keys = drafter.context_keys(context.to(drafter.dtype))
    return logits[0, :-1], _block(
        subject, draft_tile(target, drafter, ids, keys, num_prompt + anchors)
    )


def _block(subject: Subject, drafted: Mapping[str, Tensor]) -> Block:
    return Block(drafter=subject.drafter, sampling=Sampling(), uniforms={}, **drafted)


def _as_margins(
    subject: Subject,
    length: int,
    target: Float[Tensor, " n"],
    drafts: Sequence[Float[Tensor, "A P"]],
) -> Margins:
    """Cut to the verify window and to the response."""
    anchors, slots = subject.anchors(length), np.arange(1, subject.num_draft + 1)
    draft = np.full((len(anchors), len(slots)), np.nan)
    if drafts:
        draft[:] = torch.cat(list(drafts))[: len(anchors), : len(slots)].double().cpu().numpy()
    draft[anchors[:, None] + slots >= length] = np.nan
    return Margins(target[:length].double().cpu().numpy(), draft)


def whole_margins(subject: Subject, row: Any) -> tuple[Margins, tuple[float, float]]:
    """Margins of one pass over the sequence; and the largest logits of target and drafter."""
    length = len(row.response_ids)
    logits, block = whole_pass(subject, row, subject.anchors(length))
    target = margins(logits, torch.tensor([*row.response_ids], device=logits.device))
    drafts = [] if block is None else [draft_margins(block, subject.policy)]
    sizes = [_size(part) for part in (logits, *([] if block is None else [block.logits]))]
    return _as_margins(subject, length, target, drafts), (sizes[0], sizes[-1])


def _size(logits: Tensor) -> float:
    return float(logits.masked_fill(~logits.isfinite(), 0.0).abs().max())


def eager_margins(subject: Subject, row: Any) -> Margins:
    """Margins by the steps of the eager engine, led along the trace."""
    target, drafter, response = subject.target, subject.drafter, list(row.response_ids)
    ids = torch.tensor([*row.prompt_ids, *response], device=target.device)
    side = TargetRow(target, drafter.settings.target_layer_ids)
    drafts = DrafterRow(drafter, target)
    logits, drafted = [], []

    def extend(span: Sequence[int], keep: int) -> None:
        found, context = side.extend(span, logits_to_keep=keep)
        side.roll_back(0)
        drafts.commit(context)
        logits.append(found)

    extend(row.prompt_ids, 1)
    for anchor in subject.anchors(len(response)):
        place = np.array([side.length])
        block = _block(subject, draft_tile(target, drafter, ids, drafts.keys, place))
        drafted.append(draft_margins(block, subject.policy))
        extend(response[anchor : anchor + subject.num_draft + 1], 0)
    scores = torch.cat(logits)[: len(response)]
    found = margins(scores, ids[len(row.prompt_ids) :][: len(scores)])
    return _as_margins(subject, len(response), found, drafted)


def graph_margins(
    subject: Subject, engine: GraphEngine, rows: Sequence[Any], requests: Sequence[Request]
) -> list[Margins]:
    """Margins by the passes of the graph engine, led along the traces, a batch at a time."""
    found = []
    for first in range(0, len(rows), engine.batch_size):
        part = slice(first, first + engine.batch_size)
        found += _graph_batch(subject, engine, rows[part], requests[part])
    return found


def _graph_batch(
    subject: Subject, engine: GraphEngine, rows: Sequence[Any], requests: Sequence[Request]
) -> list[Margins]:
    cycle, width = engine.cycle, engine.num_draft + 1
    lengths = [len(row.response_ids) for row in rows]
    first = torch.full((engine.batch_size, 1), torch.nan, device=engine.target.device)
    targets, drafts = [first], []  # the first token is the prefill's
    for text in lead(engine, requests, [row.response_ids for row in rows]):
        block = _block(subject, _lean_draft(cycle, text[:, :-1]))
        drafts.append(draft_margins(block, subject.policy))
        logits = cycle.verify_pass(text[:, 1:width].contiguous())
        cycle.extend_context()
        targets.append(margins(logits.unflatten(0, (-1, width)), text[:, 1 : 1 + width]))
    target, draft = torch.cat(targets, 1), torch.stack(drafts, 1) if drafts else None
    return [
        _as_margins(subject, length, target[place], [] if draft is None else [draft[place]])
        for place, length in enumerate(lengths)
    ]


def lead(
    engine: GraphEngine, requests: Sequence[Request], responses: Sequence[Sequence[int]]
) -> Iterator[Int[Tensor, "B P2"]]:
    """Lead the engine's places along given responses, block by block: before each of its cycles,
    the text from the anchors on, two tokens more than its drafter has slots."""
    device, width = engine.target.device, engine.num_draft + 1
    slots, progress = engine.drafter.settings.num_draft, engine.cycle.progress
    # A place without a request stays at an anchor of its own in an empty cache.
    spare = [0] * (engine.batch_size - len(requests))
    lengths = [len(response) for response in responses]
    text = torch.zeros(engine.batch_size, max(lengths) + width + slots, dtype=torch.long)
    for place, response in enumerate(responses):
        text[place, : lengths[place]] = torch.tensor([*response])
    text = text.to(device)
    starts = [len(request.prompt_ids) for request in requests]
    starts = torch.tensor([*starts, *spare], device=device)
    last = torch.tensor([*(length - 1 for length in lengths), *spare], device=device)
    engine.admit(range(len(requests)), requests)
    for anchor in range(0, max(lengths) - 1, width):
        # A response that has ended is scored again at its last token, and that is cut off.
        progress.start.copy_(starts + last.clamp(max=anchor))
        progress.anchor.copy_(text[:, anchor])
        yield text[:, anchor : anchor + slots + 2]


def _lean_draft(cycle: Cycle, tokens: Int[Tensor, "B P1"]) -> dict[str, Tensor]:
    """The engine's draft pass at the anchors of `cycle.progress`, as parts of a `Block`."""
    drafter = cycle.drafter
    rows, logits = cycle.draft_pass()
    hidden = finish_norm(rows)
    hidden, logits = (
        drafter.slot_rows(part.unflatten(0, (len(tokens), -1))[:, None])[:, 0]
        for part in (hidden, logits)
    )
    return {
        "embedding": drafter.input_embedding(cycle.target.embed_weight),
        "hidden": hidden,
        "logits": logits,
        "before": tokens[:, :-1],
        "targets": tokens[:, 1:],
    }
