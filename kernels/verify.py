"""Acceptance of drafted tokens one by one, and the token that follows them.

Drafted token d_j, drawn from q_j, is accepted while u_j q_j(d_j) < p_j(d_j), p_j the target's law
at slot j. After a refusal at slot n the next token is drawn from (p_n - q_n)+ normalised, after the
last offered slot from p there (the bonus): each token emitted then has the law p. At T = 0 laws are
one-hot on the argmax, and a draft is accepted iff it is that token.
Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .final_draw import (
    CandidateLaw,
    FullLaw,
    at_drafts,
    by_request,
    check_arguments,
    draft_mass,
    draw_final,
    draw_final_reference,
    kernel_arguments,
    launch_memory,
    target_mass,
)
from .row_law import Law
from .tools import jit, next_power_of_2, on_gpu, tl, triton, uniform48, uniforms


def verify(
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
    """Accepted slots of each request, and the token that follows them, both int64.

    Args:
        logits: the target's; row j judges slot j, row `num_offered` gives the bonus.
        law: the laws of these B * S rows.
        draft: drafted tokens, all in [0, V); only the first `num_offered` (at most P) may be
            accepted.
        q: the law each was drawn from; None is one-hot (an argmax draft).
        accept_keys, accept_counters: slot j's test takes the uniform number of (key, counter + j).
        final_keys, final_counters: of the residual's or the bonus' draw.
        forced: where not negative, the number to accept whatever the laws say (for timing).
        arrivals: see `row_law`.
    """
    inputs = (logits, law, draft, q, temperature, accept_keys, accept_counters, final_keys)
    if on_gpu(logits):
        rest = (final_counters, num_offered, forced)
        return verify_triton(*inputs, *rest, arrivals=arrivals)
    return verify_reference(*inputs, final_counters, num_offered, forced)


# Plain torch.


def verify_reference(
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
    """`verify` from dense laws of the rows that are drawn from."""
    num_rows, num_draft = draft.shape
    slots = torch.arange(num_draft, device=draft.device)
    by_slot = by_request(law, num_rows)
    p = target_mass(logits, by_slot, draft, temperature)
    test = uniforms(accept_keys[:, None], accept_counters[:, None] + slots)
    passed = test * draft_mass(draft, q, temperature).double() < p.double()
    same = draft == by_slot.argmax[:, :num_draft]
    greedy = temperature == 0
    passed = torch.where(greedy[:, None], same, passed) & (slots < num_offered[:, None])
    accepted = passed.long().cumprod(-1).sum(-1)
    if forced is not None:
        accepted = torch.where(forced >= 0, torch.minimum(forced, num_offered).long(), accepted)
    following = draw_final_reference(
        logits,
        by_slot,
        draft,
        q,
        temperature,
        num_offered,
        accepted,
        torch.ones_like(temperature),
        uniforms(final_keys, final_counters),
    )
    return accepted, following


# Triton. A row is cut into chunks, one program each; the row's last program to finish goes on with
# what needs the whole row.


@jit
def _count_accepted(
    logits_ptr, argmax_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr, q_ids_ptr,
    q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr, key, counter,
    offered, inverse_temperature, greedy, logits_slot, q_slot, P: tl.constexpr, K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Accepted slots before the first refusal; the pointers are those of one request."""
    slots = tl.arange(0, BLOCK_P)
    live = slots < P
    drafted = tl.load(draft_ptr + slots, mask=live, other=0)
    best = tl.load(argmax_ptr + slots, mask=live, other=0)
    p, q = at_drafts(
        drafted, slots, live, logits_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, q_ids_ptr,
        q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr,
        inverse_temperature, logits_slot, q_slot, K, BLOCK_K,
    )  # fmt: skip
    passed = uniform48(key, counter + slots) * q.to(tl.float64) < p.to(tl.float64)
    passed = tl.where(greedy, drafted == best, passed) & (slots < offered)
    return tl.min(tl.where(passed, BLOCK_P, slots), axis=0)


@jit
def _verify_kernel(
    logits_ptr, argmax_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr, q_ids_ptr,
    q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr,
    temperature_ptr, accept_keys_ptr, accept_counters_ptr, final_keys_ptr, final_counters_ptr,
    offered_ptr, forced_ptr, masses_ptr, arrivals_ptr, accepted_ptr, next_ptr, logits_row,
    logits_slot, draft_row, q_row, q_slot, V, C: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
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
        if K > 0:
            q_ids_ptr += row * P * K
            q_probs_ptr += row * P * K
        if q_logits_ptr is not None:
            q_logits_ptr += row * q_row
            q_log_total_ptr += row * P
            q_threshold_ptr += row * P
            q_threshold_id_ptr += row * P
        offered = tl.load(offered_ptr + row).to(tl.int32)
        logits_ptr += row * logits_row
        argmax_ptr += row * S
        log_total_ptr += row * S
        threshold_ptr += row * S
        threshold_id_ptr += row * S
        draft_ptr += row * draft_row
        # Every program finds the number of accepted slots for itself.
        n = _count_accepted(
            logits_ptr, argmax_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr,
            q_ids_ptr, q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr,
            q_threshold_id_ptr, tl.load(accept_keys_ptr + row), tl.load(accept_counters_ptr + row),
            offered, inverse, greedy, logits_slot, q_slot, P, K, BLOCK_P, BLOCK_K,
        )  # fmt: skip
        if forced_ptr is not None:
            forced = tl.load(forced_ptr + row).to(tl.int32)
            n = tl.where(forced >= 0, tl.minimum(forced, offered), n)
        draw_final(
            row, chunk, n, 1.0, offered, uniform, inverse, greedy, logits_ptr, argmax_ptr,
            log_total_ptr, threshold_ptr, threshold_id_ptr, draft_ptr, q_ids_ptr, q_probs_ptr,
            q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr, masses_ptr,
            arrivals_ptr, accepted_ptr, next_ptr, logits_slot, q_slot, V, C, P, K, BLOCK, BLOCK_C,
            BLOCK_K,
        )  # fmt: skip


def verify_triton(
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
    """`verify` in one launch. Each program finds the number accepted and the mass of one chunk of
    the row to draw from; the request's last program to finish picks the chunk, then the token.

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
    _verify_kernel[(num_rows * chunks,)](
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
        *memory,
        *logits.stride()[:2],
        draft.stride(0),
        *q_strides,
        vocab,
        C=chunks,
        S=num_slots,
        P=num_draft,
        K=num_candidates,
        BLOCK=block,
        BLOCK_C=next_power_of_2(chunks),
        BLOCK_P=next_power_of_2(num_draft),
        BLOCK_K=next_power_of_2(num_candidates),
        num_warps=4,
    )
    return memory[2:]
