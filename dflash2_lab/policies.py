"""How each policy proposes a path through a block, and the probability q it gives the trace's
token.

Two walks per block. The *self-conditioned* path follows the policy's own choices; its tokens say
where a greedy decode stops. The *teacher-forced* walk follows the trace; its q of each trace token
is what coupled replay divides by p. At T = 0 every law is one-hot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import (
    inverse_cdf,
    lattice_scores,
    pairwise_scores,
    walk,
)
from dflash2_lab.kernels.candidate_topk import candidate_topk
from dflash2_lab.models.drafter import DFlash2Drafter, Drafter, DSparkDrafter
from dflash2_lab.sampling import Sampling, filter_logits

POLICIES: Mapping[str, tuple[str, ...]] = {
    "dflash": ("top1", "sampled"),
    "dflash2": ("top1", "sampled", "selector", "selector_greedy"),
    "dspark": ("top1", "sampled", "markov", "markov_greedy"),
}
NUM_CANDIDATES = 16  # kept for drafters whose checkpoint names no number of its own


class Proposal(NamedTuple):
    """A policy's path through each block and its q of the trace's token, both [n, P]."""

    tokens: Int[Tensor, "n P"]
    q_target: Float[Tensor, "n P"]


@dataclass(frozen=True)
class Block:
    """What the drafter says about n blocks, and the trace they are held against.

    `before[:, s]` is the trace's token before slot s + 1: the anchor token for the first.
    """

    drafter: Drafter
    embedding: Float[Tensor, "V H"]
    hidden: Float[Tensor, "n P H"]
    logits: Float[Tensor, "n P V"]
    before: Int[Tensor, "n P"]
    targets: Int[Tensor, "n P"]
    sampling: Sampling
    uniforms: Mapping[str, Float[Tensor, "n P"]]


class Candidates(NamedTuple):
    """The K best unary tokens of each slot and, with a selector, their pairwise scores: `forced`
    after the trace's token, `lattice` after every candidate of the slot before."""

    ids: Int[Tensor, "n P K"]
    unary: Float[Tensor, "n P K"]
    forced: Float[Tensor, "n P K"] | None
    lattice: Float[Tensor, "n P1 K K"] | None

    @property
    def first(self) -> Float[Tensor, "n K"] | None:
        """Pairwise scores of the first slot, whose predecessor is the anchor in any walk."""
        return None if self.forced is None else self.forced[:, 0]


def check_policies(policies: Sequence[str], kind: str) -> None:
    """Raise `LabError` for a policy that this kind of drafter does not have."""
    unknown = [policy for policy in policies if policy not in POLICIES[kind]]
    if unknown or not policies:
        raise LabError(
            f"policies: found {list(policies)}, a {kind} drafter has {', '.join(POLICIES[kind])}"
        )
    if len(set(policies)) < len(policies):
        raise LabError(f"policies: found {list(policies)}, expected each one once")


def candidates(block: Block) -> Candidates:
    """Candidates in the order (logit descending, id ascending); scores in fp32."""
    settings = block.drafter.settings
    num_blocks, num_draft = block.targets.shape
    unary, ids = candidate_topk(
        block.logits.flatten(0, 1), settings.selector_top_k or NUM_CANDIDATES
    )
    unary, ids = (x.unflatten(0, (num_blocks, num_draft)) for x in (unary.float(), ids))
    if not isinstance(block.drafter, DFlash2Drafter):
        return Candidates(ids, unary, None, None)
    selector, embedding = block.drafter.candidate_selector, block.embedding
    gate = selector.hidden_projection(block.hidden)
    successors = selector.successor(ids, embedding)
    forced = pairwise_scores(selector.predecessor(block.before, embedding), gate, successors)
    lattice = lattice_scores(
        selector.predecessor(ids[:, :-1], embedding).flatten(0, 1),
        gate[:, 1:].flatten(0, 1),
        successors[:, 1:].flatten(0, 1),
    ).unflatten(0, (num_blocks, num_draft - 1))
    return Candidates(ids, unary, forced, lattice)


def propose(block: Block, found: Candidates, policy: str) -> Proposal:
    """One policy's proposal for every block of `block`."""
    greedy = block.sampling.greedy
    if policy == "top1" or (policy == "sampled" and greedy):
        best = found.ids[..., 0]
        return Proposal(best, (best == block.targets).double())
    if policy == "sampled":
        law = filter_logits(
            block.logits, block.sampling.temperature, block.sampling.top_p, block.sampling.top_k
        )
        q_target = law.gather(-1, block.targets[..., None])[..., 0]
        return Proposal(inverse_cdf(law, block.uniforms[policy]), q_target.double())
    temperature = 0.0 if policy.endswith("_greedy") else block.sampling.temperature
    if policy.startswith("selector"):
        return _selector(block, found, temperature, block.uniforms.get(policy))
    return _markov(block, temperature, block.uniforms.get(policy))


def _selector(
    block: Block, found: Candidates, temperature: float, uniforms: Tensor | None
) -> Proposal:
    tokens, _ = walk(found.unary, found.ids, found.first, found.lattice, temperature, uniforms)
    is_target = found.ids == block.targets[..., None]
    return Proposal(tokens, _target_mass(found.unary + found.forced, is_target, temperature))


def _markov(block: Block, temperature: float, uniforms: Tensor | None) -> Proposal:
    """Left to right over the full vocabulary: logits + W2 W1[previous token]."""
    tokens, q_target, previous = [], [], block.before[:, 0]
    for slot in range(block.targets.shape[1]):
        forced = markov_logits(block, slot, block.before[:, slot])
        is_target = torch.zeros_like(forced, dtype=torch.bool)
        is_target.scatter_(-1, block.targets[:, slot, None], True)
        q_target.append(_target_mass(forced, is_target, temperature))
        own = markov_logits(block, slot, previous)
        if temperature > 0:
            previous = inverse_cdf(filter_logits(own, temperature), uniforms[:, slot])
        else:
            previous = own.argmax(-1)
        tokens.append(previous)
    return Proposal(torch.stack(tokens, 1), torch.stack(q_target, 1))


def markov_logits(block: Block, slot: int, previous: Int[Tensor, " n"]) -> Float[Tensor, "n V"]:
    """fp32 logits of a slot after the given tokens; without a Markov head the block's own."""
    drafter = block.drafter
    logits = block.logits[:, slot].float()
    if not isinstance(drafter, DSparkDrafter) or drafter.markov_head is None:
        return logits
    return logits + drafter.to_target_vocab(drafter.markov_head(previous)).float()


def _target_mass(
    scores: Float[Tensor, "*rows K"], is_target: Tensor, temperature: float
) -> Float[Tensor, "*rows"]:
    """Mass of the law over the entries marked as the target: softmax, or one-hot at T = 0."""
    if temperature > 0:
        law = torch.softmax(scores.double() / temperature, dim=-1)
        return (law * is_target).sum(-1)
    return is_target.gather(-1, scores.argmax(-1, keepdim=True))[..., 0].double()
