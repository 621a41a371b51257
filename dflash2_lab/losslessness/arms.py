"""Drafters that a decoder is tried with: the real one, its opposite, and one close to the target.

A fault shows only where the verifier does the thing that is faulty. The real drafter is what users
run; the opposite one is refused nearly always, so that most tokens come from the residual; the
near-perfect one is accepted nearly always, so that bonus tokens and whole blocks are frequent.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dflash2_lab.decoding.steps import DrafterRow, Proposal, TargetRow, target_law
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import inverse_cdf, walk
from dflash2_lab.policies import Block, candidates
from dflash2_lab.sampling import Sampling, filter_logits

ARMS = ("realistic", "opposite", "near-perfect")
OWN_SHARE = 0.8  # of the target's p in the near-perfect proposal


def check_arms(arms: Sequence[str], policy: str) -> None:
    """Raise `LabError` for an unknown arm, or one that this policy has no opposite for."""
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown or not arms or len(set(arms)) < len(arms):
        raise LabError(f"arms: found {list(arms)}, expected some of {', '.join(ARMS)}, each once")
    if "opposite" in arms and policy not in ("selector", "sampled", "top1"):
        raise LabError(
            f"arm 'opposite': found policy {policy!r}, expected selector, sampled or top1"
        )


def opposite(block: Block, policy: str) -> Proposal:
    """The policy's proposal from negated scores: the worst candidates first."""
    sampling, uniform = block.sampling, block.uniforms[policy]
    if policy == "sampled":
        law = filter_logits(-block.logits[0], sampling.temperature)
        return Proposal(inverse_cdf(law, uniform[0]), law)
    found = candidates(block)
    if policy == "top1":
        return Proposal(found.ids[0, :, -1])
    tokens, law = walk(
        -found.unary, found.ids, -found.first, -found.lattice, sampling.temperature, uniform
    )
    return Proposal(tokens[0], law[0], found.ids[0])


def near_perfect(
    row: TargetRow, block: Block, anchor_id: int, uniform: Float[Tensor, " P"]
) -> Proposal:
    """Drafts of the target itself, token by token: q = 0.8 p + 0.2 (the drafter's own law).

    `row` is at the anchor's place; what it sees of the drafts is taken back.
    """
    sampling, previous, tokens, laws = block.sampling, anchor_id, [], []
    for slot in range(len(uniform)):
        logits, _ = row.extend([previous])
        p = target_law(row.target, logits, sampling)[0].double()
        p /= p.sum()
        own = filter_logits(block.logits[0, slot].double(), sampling.temperature)
        laws.append(OWN_SHARE * p + (1 - OWN_SHARE) * own)
        previous = int(inverse_cdf(laws[-1], uniform[slot]))
        tokens.append(previous)
        row.roll_back(0)
    row.roll_back(len(tokens))
    return Proposal(torch.tensor(tokens, device=uniform.device), torch.stack(laws))


def draft(
    arm: str,
    row: TargetRow,
    drafts: DrafterRow,
    anchor_id: int,
    policy: str,
    sampling: Sampling,
    uniform: Float[Tensor, " P"],
) -> Proposal:
    """The proposal of an arm after the committed context."""
    if arm == "realistic":
        return drafts.draft(anchor_id, policy, sampling, uniform)
    block = drafts.block(anchor_id, policy, sampling, uniform)
    if arm == "opposite":
        return opposite(block, policy)
    return near_perfect(row, block, anchor_id, uniform)
