"""Acceptance of drafted tokens by the block, and the token that follows them.

With p_i and q_i the laws of target and draft at slot i after x_1..i-1, w_0 = 1 and
w_i = min(1, w_i-1 p_i(x_i) / q_i(x_i)), the drafts x_1..n are accepted, n the last i of those
offered with u_i < h_i (none: 0), where

    h_i = s_i / (s_i + 1 - w_i),   s_i = sum over x of (w_i p_i+1(x) - q_i+1(x))+,

and s_i = w_i after the last offered slot, where h_i = w_i. Then the next token is drawn from
(w_n p_n+1 - q_n+1)+ normalised, or from p after all of them: each token emitted then has the law p,
and more drafts are accepted than one by one. At T = 0 laws are one-hot on the argmax, and a draft
is accepted iff it and those before it are that token.
Source: Sun et al. 2024 (arXiv 2403.10444, algorithm 2).

Where q lives on few tokens, s_i = w_i - sum over these of min(w_i p_i+1, q_i+1), as p sums to 1: no
other logit is read. w, s and h are float64, p is fp32 and sums to 1 up to an error e of about 1e-7,
which turns a decision over with probability e: h_i is off by e / (s_i + 1 - w_i), but test i counts
only where those of all later slots fail, and that denominator is the probability that they do.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .draw import probs_of
from .final_draw import (
    CandidateLaw,
    FullLaw,
    at_drafts,
    by_request,
    check_arguments,
    dense_q,
    draft_mass,
    draw_final,
    draw_final_reference,
    final_weights,
    kernel_arguments,
    launch_memory,
    target_mass,
)
from .row_law import Law, few_rows, law_probs, probability
from .tools import jit, next_power_of_2, on_gpu, tl, triton, uniform48, uniforms


def block_verify(
    logits: Float[Tensor, "B S V"],
    law: Law,
    draft: Int[Tensor, "B P"],
    q: CandidateLaw | FullLaw | None,
    temperature: Float[Tensor, " B"],
    accept_keys: Int[Tensor, " B"],
    accept_counters: Int[Tensor, " B"],
    final_keys: Int[Tensor, " B"],
    final_counters: Int[Tensor, " B"],
    num_offered: Int[Tensor, " B"],
    forced: Int[Tensor, " B"] | None = None,
    *,
    arrivals: Int[Tensor, " B"] | None = None,
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Accepted slots of each request, and the token that follows them; arguments as of `verify`.

    The test of the i-th draft takes the uniform number of (key, counter + i - 1).
    """
    inputs = (logits, law, draft, q, temperature, accept_keys, accept_counters, final_keys)
    if on_gpu(logits):
        rest = (final_counters, num_offered, forced)
        return block_verify_triton(*inputs, *rest, arrivals=arrivals)
    return block_verify_reference(*inputs, final_counters, num_offered, forced)


# Plain torch.


def block_verify_reference(
    logits: Float[Tensor, "B S V"],
    law: Law,
    draft: Int[Tensor, "B P"],
    q: CandidateLaw | FullLaw | None,
    temperature: Float[Tensor, " B"],
    accept_keys: Int[Tensor, " B"],
    accept_counters: Int[Tensor, " B"],
    final_keys: Int[Tensor, " B"],
    final_counters: Int[Tensor, " B"],
    num_offered: Int[Tensor, " B"],
    forced: Int[Tensor, " B"] | None = None,
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """`block_verify` from dense laws, also for s_i where q is one of the vocabulary."""
    num_draft = draft.shape[1]
    by_slot = by_request(law, len(draft))
    ends = num_offered.long()[:, None]
    ratios = target_mass(logits, by_slot, draft, temperature).double()
    ratios = ratios / draft_mass(draft, q, temperature).double()
    running = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios.unbind(1):  # a NaN (a token that neither law has) stays, and fails tests
        running.append(torch.minimum(running[-1] * ratio, running[0]))
    weights = torch.stack(running, 1)
    left = torch.zeros_like(weights)
    left[:, 1:-1] = _left(logits, by_slot, draft, q, temperature, weights)
    left = left.scatter(1, ends, weights.gather(1, ends))
    slots = torch.arange(num_draft, device=draft.device)
    test = uniforms(accept_keys[:, None], accept_counters[:, None] + slots)
    passed = test * (left + 1 - weights)[:, 1:] < left[:, 1:]
    hits = (draft == by_slot.argmax[:, :num_draft]).cumprod(-1) > 0
    greedy = temperature == 0
    passed = torch.where(greedy[:, None], hits, passed) & (slots < ends)
    accepted = torch.where(passed, slots + 1, 0).amax(-1)
    if forced is not None:
        accepted = torch.where(forced >= 0, torch.minimum(forced, num_offered).long(), accepted)
    weight = weights.gather(1, accepted[:, None])[:, 0]
    following = draw_final_reference(
        logits,
        by_slot,
        draft,
        q,
        temperature,
        num_offered,
        accepted,
        weight,
        uniforms(final_keys, final_counters),
    )
    return accepted, following


def _left(
    logits: Float[Tensor, "B S V"],
    by_slot: Law,
    draft: Int[Tensor, "B P"],
    q: CandidateLaw | FullLaw | None,
    temperature: Float[Tensor, " B"],
    weights: Float[Tensor, "B P1"],
) -> Float[Tensor, "B P2"]:
    """s_1..s_P-1, as if all slots were offered."""
    num_draft = draft.shape[1]
    inner = slice(1, num_draft)
    weights = weights[:, inner]
    if isinstance(q, FullLaw):
        left = torch.zeros_like(weights)
        for rows in few_rows((temperature > 0).nonzero()[:, 0], logits.shape[-1]):
            for slot in range(1, num_draft):
                at = torch.full_like(rows, slot)
                one = Law(*(part[rows, slot] for part in by_slot))
                p = law_probs(logits[rows, slot], one, temperature[rows])
                spent = dense_q(draft, q, temperature, logits.shape[-1], rows, at)
                weighted = weights[rows, slot - 1, None].float() * p
                left[rows, slot - 1] = (weighted - spent).clamp_min(0.0).double().sum(-1)
        return left
    ids = draft[:, inner, None] if q is None else q.ids[:, inner].long()
    mass = 1.0 if q is None else q.probs[:, inner].double()
    parts = (part[:, inner, None] for part in by_slot[1:4])
    x = logits[:, inner].gather(-1, ids)
    p = probability(x, ids, temperature[:, None, None], *parts).double()
    shared = (weights[..., None] * p).clamp_max(mass)
    return (weights - shared.sum(-1)).clamp_min(0.0)


# Triton. As in `verify`, a row is cut into chunks, one program each, which all find the number of
# accepted slots for themselves; w of all slots costs them one gather a slot.


@jit
def _then(roof, slope, next_roof, next_slope):
    """Map w -> min(roof, slope w) followed by another one, for roofs in [0, 1]. Slopes end far
    above all that matters, so that none is infinite."""
    return tl.minimum(next_roof, next_slope * roof), tl.minimum(slope * next_slope, 1e150)


@jit
def _block_weights(
    j, logits_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr, q_ids_ptr,
    q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr,
    inverse_temperature, logits_slot, q_slot, P: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """w_j of one request, whose pointers these are, for j = 0, 1, ..."""
    slots = j - 1
    live = (j > 0) & (j <= P)
    drafted = tl.load(draft_ptr + slots, mask=live, other=0)
    p, q = at_drafts(
        drafted, slots, live, logits_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, q_ids_ptr,
        q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr,
        inverse_temperature, logits_slot, q_slot, K, BLOCK_K,
    )  # fmt: skip
    ratio = p.to(tl.float64) / tl.maximum(q.to(tl.float64), 1e-100)
    ratio = tl.where(live, tl.where(p > 0, ratio, 0.0), 1.0)
    weights, _ = tl.associative_scan((tl.full(j.shape, 1.0, tl.float64), ratio), 0, _then)
    return weights


@jit
def _left_kernel(
    logits_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr, q_logits_ptr,
    q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr, temperature_ptr, offered_ptr, left_ptr,
    logits_row, logits_slot, draft_row, q_row, q_slot, V, C: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """One chunk of the sum s_i, for i = 1..P - 1, of a q over the vocabulary."""
    row = (tl.program_id(0) // ((P - 1) * C)).to(tl.int64)
    slot = tl.program_id(0) // C % (P - 1) + 1
    chunk = tl.program_id(0) % C
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0) & (slot < tl.load(offered_ptr + row)):
        inverse = 1.0 / temperature.to(tl.float64)
        logits_ptr += row * logits_row
        log_total_ptr += row * S
        threshold_ptr += row * S
        threshold_id_ptr += row * S
        q_logits_ptr += row * q_row
        q_log_total_ptr += row * P
        q_threshold_ptr += row * P
        q_threshold_id_ptr += row * P
        j = tl.arange(0, BLOCK_J)
        weights = _block_weights(
            j, logits_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr,
            draft_ptr + row * draft_row, None, None, q_logits_ptr, q_log_total_ptr, q_threshold_ptr,
            q_threshold_id_ptr, inverse, logits_slot, q_slot, P, 0, 1,
        )  # fmt: skip
        weight = tl.sum(tl.where(j == slot, weights, 0.0), axis=0).to(tl.float32)
        _, _, rest = final_weights(
            logits_ptr + slot * logits_slot, chunk, V, inverse, tl.load(log_total_ptr + slot),
            tl.load(threshold_ptr + slot), tl.load(threshold_id_ptr + slot), True, weight, 0, None,
            None, q_logits_ptr + slot * q_slot, tl.load(q_log_total_ptr + slot),
            tl.load(q_threshold_ptr + slot), tl.load(q_threshold_id_ptr + slot), 0, BLOCK, 1,
        )  # fmt: skip
        place = (row * (P - 1) + slot - 1) * C + chunk
        tl.store(left_ptr + place, tl.sum(rest.to(tl.float64), axis=0))


@jit
def _count_accepted(
    logits_ptr, argmax_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr, q_ids_ptr,
    q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr, left_ptr, key,
    counter, offered, forced, inverse_temperature, greedy, logits_slot, q_slot, C: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Accepted slots n and w_n; the pointers are those of one request."""
    j = tl.arange(0, BLOCK_J)
    weights = _block_weights(
        j, logits_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr, q_ids_ptr,
        q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr,
        inverse_temperature, logits_slot, q_slot, P, K, BLOCK_K,
    )  # fmt: skip
    inner = (j > 0) & (j < offered)
    if left_ptr is not None:
        c = tl.arange(0, BLOCK_C)
        at = (j - 1)[:, None] * C + c[None, :]
        parts = tl.load(left_ptr + at, mask=inner[:, None] & (c < C)[None, :], other=0.0)
        left = tl.sum(parts, axis=1)
    else:
        log_total = tl.load(log_total_ptr + j, mask=inner, other=0.0)[:, None]
        threshold = tl.load(threshold_ptr + j, mask=inner, other=0.0)[:, None]
        threshold_id = tl.load(threshold_id_ptr + j, mask=inner, other=0)[:, None]
        if K > 0:
            k = tl.arange(0, BLOCK_K)[None, :]
            in_k = inner[:, None] & (k < K)
            ids = tl.load(q_ids_ptr + j[:, None] * K + k, mask=in_k, other=0)
            mass = tl.load(q_probs_ptr + j[:, None] * K + k, mask=in_k, other=0.0).to(tl.float64)
        else:
            in_k = inner[:, None]
            ids = tl.load(draft_ptr + j, mask=inner, other=0)[:, None]
            mass = 1.0
        x = tl.load(logits_ptr + j[:, None] * logits_slot + ids, mask=in_k, other=float("-inf"))
        x = x.to(tl.float32)
        p = probs_of(x, ids, inverse_temperature, log_total, threshold, threshold_id)
        shared = tl.minimum(weights[:, None] * p.to(tl.float64), mass)
        left = tl.maximum(weights - tl.sum(shared, axis=1), 0.0)
    left = tl.where(j == offered, weights, left)
    passed = uniform48(key, counter + j - 1) * (left + 1.0 - weights) < left
    tested = (j > 0) & (j <= offered)
    n = tl.max(tl.where(passed & tested, j, 0), axis=0)
    if greedy:
        drafted = tl.load(draft_ptr + j - 1, mask=tested, other=0)
        same = drafted == tl.load(argmax_ptr + j - 1, mask=tested, other=0)
        n = tl.min(tl.where(tested & (same == 0), j - 1, offered), axis=0)
    n = tl.where(forced >= 0, tl.minimum(forced, offered), n)
    return n, tl.sum(tl.where(j == n, weights, 0.0), axis=0).to(tl.float32)


@jit
def _block_verify_kernel(
    logits_ptr, argmax_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr, q_ids_ptr,
    q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr,
    temperature_ptr, accept_keys_ptr, accept_counters_ptr, final_keys_ptr, final_counters_ptr,
    offered_ptr, forced_ptr, left_ptr, masses_ptr, arrivals_ptr, accepted_ptr, next_ptr, logits_row,
    logits_slot, draft_row, q_row, q_slot, V, C: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // C).to(tl.int64)
    chunk = tl.program_id(0) % C
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0
    # A greedy row needs no pass over its logits: one program does it all.
    if (temperature > 0) | (chunk == 0):
        inverse = 1.0 / tl.where(greedy, 1.0, temperature).to(tl.float64)
        uniform = uniform48(tl.load(final_keys_ptr + row), tl.load(final_counters_ptr + row))
        logits_ptr += row * logits_row
        argmax_ptr += row * S
        log_total_ptr += row * S
        threshold_ptr += row * S
        threshold_id_ptr += row * S
        draft_ptr += row * draft_row
        if K > 0:
            q_ids_ptr += row * P * K
            q_probs_ptr += row * P * K
        if q_logits_ptr is not None:
            q_logits_ptr += row * q_row
            q_log_total_ptr += row * P
            q_threshold_ptr += row * P
            q_threshold_id_ptr += row * P
            left_ptr += row * (P - 1) * C
        offered = tl.load(offered_ptr + row).to(tl.int32)
        forced = -1
        if forced_ptr is not None:
            forced = tl.load(forced_ptr + row).to(tl.int32)
        n, weight = _count_accepted(
            logits_ptr, argmax_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr,
            q_ids_ptr, q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr,
            q_threshold_id_ptr, left_ptr, tl.load(accept_keys_ptr + row),
            tl.load(accept_counters_ptr + row), offered, forced, inverse, greedy, logits_slot,
            q_slot, C, P, K, BLOCK_C, BLOCK_J, BLOCK_K,
        )  # fmt: skip
        draw_final(
            row, chunk, n, weight, offered, uniform, inverse, greedy, logits_ptr, argmax_ptr,
            log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr, q_ids_ptr, q_probs_ptr,
            q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr, masses_ptr,
            arrivals_ptr, accepted_ptr, next_ptr, logits_slot, q_slot, V, C, P, K, BLOCK, BLOCK_C,
            BLOCK_K,
        )  # fmt: skip


def block_verify_triton(
    logits: Float[Tensor, "B S V"],
    law: Law,
    draft: Int[Tensor, "B P"],
    q: CandidateLaw | FullLaw | None,
    temperature: Float[Tensor, " B"],
    accept_keys: Int[Tensor, " B"],
    accept_counters: Int[Tensor, " B"],
    final_keys: Int[Tensor, " B"],
    final_counters: Int[Tensor, " B"],
    num_offered: Int[Tensor, " B"],
    forced: Int[Tensor, " B"] | None = None,
    *,
    arrivals: Int[Tensor, " B"] | None = None,
    block: int = 2048,
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """`block_verify` in one launch, built as that of `verify`; where q is one of the vocabulary,
    another one before it sums s_i over each chunk of each slot but the first.

    Raises:
        ValueError: shapes that do not fit.
    """
    num_rows, num_slots, vocab = logits.shape
    num_draft = draft.shape[1]
    check_arguments(
        logits,
        law,
        draft,
        q,
        temperature,
        accept_keys=accept_keys,
        accept_counters=accept_counters,
        final_keys=final_keys,
        final_counters=final_counters,
        num_offered=num_offered,
        forced=forced,
    )
    chunks = triton.cdiv(vocab, block)
    memory = launch_memory(num_rows, chunks, arrivals, logits.device)
    q_parts, q_strides, num_candidates = kernel_arguments(q)
    strides = (*logits.stride()[:2], draft.stride(0), *q_strides)
    sizes = {"C": chunks, "S": num_slots, "P": num_draft, "BLOCK": block}
    sizes |= {"BLOCK_J": next_power_of_2(num_draft + 1), "num_warps": 4}
    left = None
    if isinstance(q, FullLaw):
        shape = (num_rows, num_draft - 1, chunks)
        left = torch.empty(shape, dtype=torch.float64, device=logits.device)
        if num_draft > 1:
            _left_kernel[(left.numel(),)](
                logits,
                *law[1:4],
                draft,
                *q_parts[2:],
                temperature,
                num_offered,
                left,
                *strides,
                vocab,
                **sizes,
            )
    _block_verify_kernel[(num_rows * chunks,)](
        logits,
        *law[:4],
        draft,
        *q_parts,
        temperature,
        accept_keys,
        accept_counters,
        final_keys,
        final_counters,
        num_offered,
        forced,
        left,
        *memory,
        *strides,
        vocab,
        K=num_candidates,
        BLOCK_C=next_power_of_2(chunks),
        BLOCK_K=next_power_of_2(num_candidates),
        **sizes,
    )
    return memory[2:]
