"""The low-rank path selector: score(j | i) = unary[j] + <A[i] * g, B[j]> over K candidates a slot.

A and B are the predecessor and successor codes of tokens i and j, g = W h is the gate of the slot's
hidden state h. The walk starts at the anchor and takes the argmax of each slot, or draws from
softmax(score / T). All of it in fp32: in bf16 the pairwise term vanishes in the rounding of the
unary logits (their spacing at 16 to 32 is 0.125).
Source: Inco AI, "DFlash 2: Keep Drafting Parallel" (2026-08-18); reference `dflash` 0.1.0.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def pairwise_scores(
    predecessor: Float[Tensor, "*rows r"],
    gate: Float[Tensor, "*rows r"],
    successors: Float[Tensor, "*rows K r"],
) -> Float[Tensor, "*rows K"]:
    """<A[prev] * g, B[cand]> for one predecessor a row, in fp32."""
    return torch.einsum("...r,...kr->...k", predecessor.float() * gate.float(), successors.float())


def lattice_scores(
    predecessors: Float[Tensor, "rows Kp r"],
    gate: Float[Tensor, "rows r"],
    successors: Float[Tensor, "rows K r"],
) -> Float[Tensor, "rows Kp K"]:
    """Pairwise scores of every candidate after every predecessor, in fp32."""
    return torch.einsum(
        "rpc,rkc->rpk", predecessors.float() * gate.float()[:, None], successors.float()
    )


def inverse_cdf(
    probs: Float[Tensor, "*rows V"], uniform: Float[Tensor, "*rows"]
) -> Int[Tensor, "*rows"]:
    """First entry whose running total exceeds `uniform`, in [0, 1), of the row's whole.

    An entry of probability zero is never drawn: a number of 48 bits times the row's total stays
    below that total in float64, and at a flat stretch of the CDF the search goes past it.
    """
    cdf = probs.double().cumsum(dim=-1)
    level = uniform.double()[..., None] * cdf[..., -1:]
    return torch.searchsorted(cdf, level, right=True).squeeze(-1)


def walk(
    unary: Float[Tensor, "rows P K"],
    ids: Int[Tensor, "rows P K"],
    first: Float[Tensor, "rows K"],
    lattice: Float[Tensor, "rows P1 K K"],
    temperature: float,
    uniforms: Float[Tensor, "rows P"] | None = None,
) -> tuple[Int[Tensor, "rows P"], Float[Tensor, "rows P K"]]:
    """The path's tokens and the law q of each step over the slot's candidates (one-hot at T = 0).

    `first` scores the first slot after the anchor, `lattice[:, s]` slot s + 2 after slot s + 1
    (P1 = P - 1). At T > 0 `uniforms` in [0, 1) drive an inverse-CDF draw.
    """
    pairwise, tokens, laws = first, [], []
    for slot in range(ids.shape[1]):
        scores = unary[:, slot].float() + pairwise
        if temperature > 0:
            law = torch.softmax(scores / temperature, dim=-1)
            choice = inverse_cdf(law, uniforms[:, slot])
        else:
            choice = scores.argmax(-1)
            law = torch.nn.functional.one_hot(choice, ids.shape[-1]).float()
        laws.append(law)
        tokens.append(ids[:, slot].gather(-1, choice[:, None])[:, 0])
        if slot + 1 < ids.shape[1]:
            pairwise = lattice[torch.arange(len(ids), device=ids.device), slot, choice]
    return torch.stack(tokens, 1), torch.stack(laws, 1)
