"""The low-rank path selector: score(j | i) = unary[j] + <A[i] * g, B[j]> over K candidates a slot.

A and B are the predecessor and successor codes of tokens i and j, g = W h is the gate of the slot's
hidden state h. The walk starts at the anchor and takes the argmax of each slot, or draws from
softmax(score / T). All of it in fp32: in bf16 the pairwise term vanishes in the rounding of the
unary logits (their spacing at 16 to 32 is 0.125).

On a GPU the walk is no chain of softmaxes. The random number of a slot does not depend on the path,
so what a slot chooses after each of the K tokens that may come before it is found for all slots at
once: a map of K entries a slot. What is left of the walk is to follow the maps.
Source: Inco AI, "DFlash 2: Keep Drafting Parallel" (2026-08-18); reference `dflash` 0.1.0.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .tools import (
    check_shape,
    jit,
    last_to_arrive,
    next_power_of_2,
    on_gpu,
    tl,
    uniform48,
    uniforms,
)


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


def select(
    unary: Float[Tensor, "B P K"],
    ids: Int[Tensor, "B P K"],
    anchor: Int[Tensor, " B"],
    gate: Float[Tensor, "B P r"],
    predecessor_codebook: Float[Tensor, "V r"],
    successor_codebook: Float[Tensor, "V r"],
    temperature: Float[Tensor, " B"],
    keys: Int[Tensor, " B"],
    counters: Int[Tensor, " B"],
    *,
    arrivals: Int[Tensor, " B"] | None = None,
) -> tuple[Int[Tensor, "B P"], Float[Tensor, "B P K"]]:
    """Walk from each request's anchor token: the path (int64) and the law q of each slot (fp32).

    A row of temperature 0 takes the argmax (of equal scores the first candidate) and its law is
    one-hot; any other draws from softmax(score / T) with the uniform number of (key, counter +
    slot), slots counted from 0. `ids` lie in [0, V); a candidate whose unary score is -inf has
    probability 0. `arrivals` is int32 memory for the GPU, all zero and left so; give it where a
    CUDA graph is captured, so that no launch is spent on clearing it.
    """
    inputs = (unary, ids, anchor, gate, predecessor_codebook, successor_codebook)
    if on_gpu(unary):
        return select_triton(*inputs, temperature, keys, counters, arrivals=arrivals)
    return select_reference(*inputs, temperature, keys, counters)


def select_reference(
    unary: Float[Tensor, "B P K"],
    ids: Int[Tensor, "B P K"],
    anchor: Int[Tensor, " B"],
    gate: Float[Tensor, "B P r"],
    predecessor_codebook: Float[Tensor, "V r"],
    successor_codebook: Float[Tensor, "V r"],
    temperature: Float[Tensor, " B"],
    keys: Int[Tensor, " B"],
    counters: Int[Tensor, " B"],
) -> tuple[Int[Tensor, "B P"], Float[Tensor, "B P K"]]:
    """`select` slot by slot in plain torch."""
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)[:, None]
    previous, tokens, laws = anchor.long(), [], []
    for slot in range(ids.shape[1]):
        found = ids[:, slot].long()
        scores = unary[:, slot].float() + pairwise_scores(
            predecessor_codebook[previous], gate[:, slot], successor_codebook[found]
        )
        law = torch.softmax(scores / scale, dim=-1)
        # A law of NaN ends behind the last candidate.
        drawn = inverse_cdf(law, uniforms(keys, counters + slot)).clamp_max(ids.shape[-1] - 1)
        choice = torch.where(greedy, scores.argmax(-1), drawn)
        one_hot = torch.nn.functional.one_hot(choice, ids.shape[-1]).float()
        laws.append(torch.where(greedy[:, None], one_hot, law))
        previous = found.gather(-1, choice[:, None])[:, 0]
        tokens.append(previous)
    return torch.stack(tokens, 1), torch.stack(laws, 1)


@jit
def _select_kernel(
    unary_ptr,
    ids_ptr,
    anchor_ptr,
    gate_ptr,
    predecessor_ptr,
    successor_ptr,
    temperature_ptr,
    keys_ptr,
    counters_ptr,
    laws_ptr,
    maps_ptr,
    arrivals_ptr,
    tokens_ptr,
    law_ptr,
    unary_row,
    unary_slot,
    ids_row,
    ids_slot,
    gate_row,
    gate_slot,
    V,
    P: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = (tl.program_id(0) // P).to(tl.int64)
    slot = tl.program_id(0) % P
    k = tl.arange(0, BLOCK_K)
    in_k = k < K

    # Small loads first: they arrive while the codes are on their way.
    now = tl.load(ids_ptr + row * ids_row + slot * ids_slot + k, mask=in_k, other=-1).to(tl.int64)
    previous = tl.maximum(slot - 1, 0)
    before = tl.load(ids_ptr + row * ids_row + previous * ids_slot + k, mask=in_k, other=-1)
    anchor = tl.load(anchor_ptr + row).to(tl.int64)
    unary = tl.load(
        unary_ptr + row * unary_row + slot * unary_slot + k, mask=in_k, other=float("-inf")
    )
    temperature = tl.load(temperature_ptr + row)
    uniform = uniform48(tl.load(keys_ptr + row), tl.load(counters_ptr + row).to(tl.int64) + slot)

    # The slot's K x K lattice. After the anchor, which stands before slot 0, its rows are the same.
    before = tl.where(slot == 0, anchor, before.to(tl.int64))
    known_now = ((now >= 0) & (now < V))[None, :, None]
    known_before = ((before >= 0) & (before < V))[None, :, None]
    scores = tl.zeros([BLOCK_K, BLOCK_K], tl.float32)
    for start in range(0, R, PARTS * BLOCK_R):
        # [PARTS, K, r / PARTS]: every warp has a part of the sum over r.
        r = start + tl.arange(0, PARTS)[:, None, None] * BLOCK_R + tl.arange(0, BLOCK_R)
        in_r = r < R
        gate = tl.load(gate_ptr + row * gate_row + slot * gate_slot + r, mask=in_r, other=0.0)
        predecessors = tl.load(
            predecessor_ptr + before[None, :, None] * R + r, mask=known_before & in_r, other=0.0
        )
        successors = tl.load(
            successor_ptr + now[None, :, None] * R + r, mask=known_now & in_r, other=0.0
        )
        gated = predecessors.to(tl.float32) * gate.to(tl.float32)
        codes = tl.permute(successors.to(tl.float32), (0, 2, 1))
        # Three products of TF32 halves: exact for bf16 codes, fp32 otherwise but for its last bits.
        scores += tl.sum(tl.dot(gated, codes, input_precision="tf32x3"), axis=0)
    scores += unary.to(tl.float32)[None, :]
    scores = tl.where(scores == scores, scores, float("-inf"))
    best = tl.max(scores, axis=1)

    # What this slot chooses after each predecessor, and the law it chooses by.
    if temperature == 0:
        choice = tl.min(tl.where(scores == best[:, None], k[None, :], K - 1), axis=1)
        law = (k[None, :] == choice[:, None]).to(tl.float32)
    else:
        finite_best = tl.where(best == float("-inf"), 0.0, best)
        weight = tl.exp((scores - finite_best[:, None]) / temperature)
        total = tl.sum(weight, axis=1)
        law = weight / tl.where(total > 0, total, 1.0)[:, None]
        cdf = tl.cumsum(law.to(tl.float64), axis=1)
        level = uniform * tl.max(cdf, axis=1)
        positive = law > 0
        last_positive = tl.max(tl.where(positive, k[None, :], 0), axis=1)
        above = positive & (cdf > level[:, None])
        choice = tl.min(tl.where(above, k[None, :], BLOCK_K), axis=1)
        choice = tl.minimum(choice, last_positive)
    place = (row * P + slot) * K
    tl.store(maps_ptr + place + k, choice, mask=in_k)
    tl.store(
        laws_ptr + (place + k[:, None]) * K + k[None, :], law, mask=in_k[:, None] & in_k[None, :]
    )

    if last_to_arrive(arrivals_ptr + row, P):
        p = tl.arange(0, BLOCK_P)
        in_p = p < P
        chosen = tl.zeros([BLOCK_P], tl.int32)
        came_from = tl.zeros([BLOCK_P], tl.int32)
        here = 0
        for step in tl.static_range(P):
            came_from = tl.where(p == step, here, came_from)
            onward = tl.load(maps_ptr + (row * P + step) * K + k, mask=in_k, other=0)
            here = tl.sum(tl.where(k == here, onward, 0))
            chosen = tl.where(p == step, here, chosen)
        token = tl.load(ids_ptr + row * ids_row + p * ids_slot + chosen, mask=in_p, other=0)
        tl.store(tokens_ptr + row * P + p, token.to(tl.int64), mask=in_p)
        at = (row * P + p) * K
        in_pk = in_p[:, None] & in_k[None, :]
        path_law = tl.load(laws_ptr + (at + came_from)[:, None] * K + k[None, :], mask=in_pk)
        tl.store(law_ptr + at[:, None] + k[None, :], path_law, mask=in_pk)


def select_triton(
    unary: Float[Tensor, "B P K"],
    ids: Int[Tensor, "B P K"],
    anchor: Int[Tensor, " B"],
    gate: Float[Tensor, "B P r"],
    predecessor_codebook: Float[Tensor, "V r"],
    successor_codebook: Float[Tensor, "V r"],
    temperature: Float[Tensor, " B"],
    keys: Int[Tensor, " B"],
    counters: Int[Tensor, " B"],
    *,
    arrivals: Int[Tensor, " B"] | None = None,
    num_warps: int = 8,
) -> tuple[Int[Tensor, "B P"], Float[Tensor, "B P K"]]:
    """`select` in one launch. A program a slot finds the slot's map; the request's last program to
    finish follows the maps.

    Raises:
        ValueError: shapes that do not fit, or a last axis that is not contiguous.
    """
    num_rows, num_slots, num_candidates = ids.shape
    vocab, rank = predecessor_codebook.shape
    check_shape("unary", unary, num_rows, num_slots, num_candidates)
    check_shape("ids", ids, num_rows, num_slots, num_candidates)
    check_shape("gate", gate, num_rows, num_slots, rank)
    check_shape("predecessor_codebook", predecessor_codebook, vocab, rank, contiguous=True)
    check_shape("successor_codebook", successor_codebook, vocab, rank, contiguous=True)
    for name, tensor in (("anchor", anchor), ("temperature", temperature), ("keys", keys)):
        check_shape(name, tensor, num_rows)
    check_shape("counters", counters, num_rows)
    if arrivals is None:
        arrivals = torch.zeros(num_rows, dtype=torch.int32, device=ids.device)
    lattice = (num_rows, num_slots, num_candidates, num_candidates)
    tokens = torch.empty(lattice[:2], dtype=torch.int64, device=ids.device)
    law = torch.empty(lattice[:3], dtype=torch.float32, device=ids.device)
    laws = torch.empty(lattice, dtype=torch.float32, device=ids.device)
    maps = torch.empty(lattice[:3], dtype=torch.int32, device=ids.device)
    block_k = max(16, next_power_of_2(num_candidates))  # the least that a tensor core takes
    parts = max(1, num_warps * 16**2 // block_k**2)
    _select_kernel[(num_rows * num_slots,)](
        unary,
        ids,
        anchor,
        gate,
        predecessor_codebook,
        successor_codebook,
        temperature,
        keys,
        counters,
        laws,
        maps,
        arrivals,
        tokens,
        law,
        *unary.stride()[:2],
        *ids.stride()[:2],
        *gate.stride()[:2],
        vocab,
        P=num_slots,
        K=num_candidates,
        R=rank,
        BLOCK_P=next_power_of_2(num_slots),
        BLOCK_K=block_k,
        BLOCK_R=max(16, min(next_power_of_2(rank) // parts, 4096 // (parts * block_k))),
        PARTS=parts,
        num_warps=num_warps,
    )
    return tokens, law
