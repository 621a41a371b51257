"""Acceptance of drafted tokens, and the token that follows them.

Drafted token d_j, drawn from q_j, is accepted while u_j q_j(d_j) < p_j(d_j), p_j the target's law
at slot j. After a refusal at slot n the next token is drawn from (p_n - q_n)+ normalised, after the
last offered slot from p there (the bonus): each token emitted then has the law p. At T = 0 laws are
one-hot on the argmax, and a draft is accepted iff it is that token.
Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .draw import draw_from, pick, probs_of
from .row_law import Law, check_rows, law_probs, probability
from .tools import (
    check_shape,
    jit,
    last_to_arrive,
    next_power_of_2,
    on_gpu,
    tl,
    triton,
    uniform48,
    uniforms,
)


class CandidateLaw(NamedTuple):
    """A q that lives on K candidates a slot; ids may repeat where the probability is 0."""

    ids: Int[Tensor, "B P K"]
    probs: Float[Tensor, "B P K"]  # fp32


class FullLaw(NamedTuple):
    """A q over the whole vocabulary: draft logits, and the law of their B * P rows."""

    logits: Float[Tensor, "B P V"]
    law: Law


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
    by_slot = Law(*(part.view(num_rows, -1) for part in law))
    drafted = logits[:, :num_draft].gather(-1, draft[..., None])[..., 0]
    parts = (part[:, :num_draft] for part in by_slot[1:4])
    p = probability(drafted, draft, temperature[:, None], *parts)
    test = uniforms(accept_keys[:, None], accept_counters[:, None] + slots)
    passed = test * _draft_mass(draft, q, temperature).double() < p.double()
    same = draft == by_slot.argmax[:, :num_draft]
    greedy = temperature == 0
    passed = torch.where(greedy[:, None], same, passed) & (slots < num_offered[:, None])
    accepted = passed.long().cumprod(-1).sum(-1)
    if forced is not None:
        accepted = torch.where(forced >= 0, torch.minimum(forced, num_offered).long(), accepted)
    following = by_slot.argmax.gather(1, accepted[:, None])[:, 0]
    rows = (~greedy).nonzero()[:, 0]
    if len(rows):
        at = accepted[rows]
        final = Law(*(part[rows, at] for part in by_slot))
        probs = law_probs(logits[rows, at], final, temperature[rows])
        refused, residual = at < num_offered[rows], probs.clone()
        spent = _dense_q(draft, q, temperature, logits.shape[-1], rows[refused], at[refused])
        residual[refused] = (residual[refused] - spent).clamp_min(0.0)
        probs = torch.where(residual.sum(-1, keepdim=True) > 0, residual, probs)
        uniform = uniforms(final_keys[rows], final_counters[rows])
        following[rows] = draw_from(probs, final.argmax, uniform)
    return accepted, following


def _draft_mass(
    draft: Tensor, q: CandidateLaw | FullLaw | None, temperature: Tensor
) -> Float[Tensor, "B P"]:
    """q of each drafted token."""
    if q is None:
        return torch.ones(draft.shape, device=draft.device)
    if isinstance(q, CandidateLaw):
        return (q.probs * (q.ids == draft[..., None])).sum(-1)
    drafted = q.logits.gather(-1, draft[..., None])[..., 0]
    parts = (part.view(draft.shape) for part in q.law[1:4])
    return probability(drafted, draft, temperature[:, None], *parts)


def _dense_q(
    draft: Tensor,
    q: CandidateLaw | FullLaw | None,
    temperature: Tensor,
    vocab: int,
    rows: Tensor,
    slots: Tensor,
) -> Float[Tensor, "n V"]:
    """q of the given slots of the given rows, over the vocabulary."""
    if isinstance(q, FullLaw):
        law = Law(*(part.view(draft.shape)[rows, slots] for part in q.law))
        return law_probs(q.logits[rows, slots], law, temperature[rows])
    dense = torch.zeros(len(rows), vocab, device=draft.device)
    if q is None:
        return dense.scatter_(1, draft[rows, slots, None], 1.0)
    return dense.scatter_add_(1, q.ids[rows, slots].long(), q.probs[rows, slots])


# Triton. A row is cut into chunks, one program each; the row's last program to finish goes on with
# what needs the whole row.


@jit
def _final_weights(
    logits_ptr, chunk, V, inverse_temperature, log_total, threshold, threshold_id, refused, token,
    q_ids_ptr, q_probs_ptr, q_logits_ptr, q_log_total, q_threshold, q_threshold_id, K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Token ids of a chunk, their p, and after a refusal (p - q)+, else p."""
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    p = probs_of(x, ids, inverse_temperature, log_total, threshold, threshold_id)
    rest = p
    if refused:
        if K > 0:
            q = tl.zeros([BLOCK], tl.float32)
            k = tl.arange(0, BLOCK_K)
            candidates = tl.load(q_ids_ptr + k, mask=k < K, other=2**30).to(tl.int32)
            if tl.max((candidates // BLOCK == chunk).to(tl.int32), axis=0) > 0:
                for j in range(K):
                    here = ids == tl.load(q_ids_ptr + j).to(tl.int32)
                    q += tl.where(here, tl.load(q_probs_ptr + j), 0.0)
        elif q_logits_ptr is not None:
            y = tl.load(q_logits_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
            q = probs_of(y, ids, inverse_temperature, q_log_total, q_threshold, q_threshold_id)
        else:
            q = (ids == token).to(tl.float32)
        rest = tl.maximum(p - q, 0.0)
    return ids, p, rest


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
    log_total = tl.load(log_total_ptr + slots, mask=live, other=0.0)
    threshold = tl.load(threshold_ptr + slots, mask=live, other=0.0)
    threshold_id = tl.load(threshold_id_ptr + slots, mask=live, other=0)
    x = tl.load(logits_ptr + slots * logits_slot + drafted, mask=live, other=float("-inf"))
    p = probs_of(x.to(tl.float32), drafted, inverse_temperature, log_total, threshold, threshold_id)
    if K > 0:
        k = tl.arange(0, BLOCK_K)
        in_k = live[:, None] & (k < K)[None, :]
        at = slots[:, None] * K + k[None, :]
        same = tl.load(q_ids_ptr + at, mask=in_k, other=-1) == drafted[:, None]
        q = tl.sum(tl.where(same, tl.load(q_probs_ptr + at, mask=in_k, other=0.0), 0.0), axis=1)
    elif q_logits_ptr is not None:
        y = tl.load(q_logits_ptr + slots * q_slot + drafted, mask=live, other=float("-inf"))
        log_total = tl.load(q_log_total_ptr + slots, mask=live, other=0.0)
        threshold = tl.load(q_threshold_ptr + slots, mask=live, other=0.0)
        threshold_id = tl.load(q_threshold_id_ptr + slots, mask=live, other=0)
        q = probs_of(
            y.to(tl.float32), drafted, inverse_temperature, log_total, threshold, threshold_id
        )
    else:
        q = tl.full([BLOCK_P], 1.0, tl.float32)
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
        q_ids = q_ids_ptr
        q_probs = q_probs_ptr
        q_logits = q_logits_ptr
        q_log_total = 0.0
        q_threshold = 0.0
        q_threshold_id = 0
        if K > 0:
            q_ids += row * P * K
            q_probs += row * P * K
        if q_logits_ptr is not None:
            q_logits += row * q_row
            q_log_total_ptr += row * P
            q_threshold_ptr += row * P
            q_threshold_id_ptr += row * P
        offered = tl.load(offered_ptr + row).to(tl.int32)
        # Every program finds the number of accepted slots for itself.
        n = _count_accepted(
            logits_ptr + row * logits_row,
            argmax_ptr + row * S,
            log_total_ptr + row * S,
            threshold_ptr + row * S,
            threshold_id_ptr + row * S,
            draft_ptr + row * draft_row,
            q_ids,
            q_probs,
            q_logits,
            q_log_total_ptr,
            q_threshold_ptr,
            q_threshold_id_ptr,
            tl.load(accept_keys_ptr + row),
            tl.load(accept_counters_ptr + row),
            offered,
            inverse,
            greedy,
            logits_slot,
            q_slot,
            P,
            K,
            BLOCK_P,
            BLOCK_K,
        )
        if forced_ptr is not None:
            forced = tl.load(forced_ptr + row).to(tl.int32)
            n = tl.where(forced >= 0, tl.minimum(forced, offered), n)
        refused = n < offered
        # The refused slot's q; after a bonus it is loaded but not used.
        slot = tl.minimum(n, P - 1)
        token = tl.load(draft_ptr + row * draft_row + slot).to(tl.int32)
        if K > 0:
            q_ids += slot * K
            q_probs += slot * K
        if q_logits_ptr is not None:
            q_logits += slot * q_slot
            q_log_total = tl.load(q_log_total_ptr + slot)
            q_threshold = tl.load(q_threshold_ptr + slot)
            q_threshold_id = tl.load(q_threshold_id_ptr + slot)

        if chunk == 0:
            tl.store(accepted_ptr + row, n)
        best = tl.load(argmax_ptr + row * S + n)
        if greedy:
            tl.store(next_ptr + row, best)
        else:
            final = logits_ptr + row * logits_row + n * logits_slot
            log_total = tl.load(log_total_ptr + row * S + n)
            threshold = tl.load(threshold_ptr + row * S + n)
            threshold_id = tl.load(threshold_id_ptr + row * S + n)
            ids, p, rest = _final_weights(
                final, chunk, V, inverse, log_total, threshold, threshold_id, refused, token, q_ids,
                q_probs, q_logits, q_log_total, q_threshold, q_threshold_id, K, BLOCK, BLOCK_K,
            )  # fmt: skip
            masses = masses_ptr + row * 2 * C
            tl.store(masses + chunk, tl.sum(rest.to(tl.float64), axis=0))
            tl.store(masses + C + chunk, tl.sum(p.to(tl.float64), axis=0))

            if last_to_arrive(arrivals_ptr + row, C):
                c = tl.arange(0, BLOCK_C)
                by_chunk = tl.load(masses + c, mask=c < C, other=0.0)
                p_by_chunk = tl.load(masses + C + c, mask=c < C, other=0.0)
                # Where p = q up to rounding the residual has no mass: draw from p.
                left = tl.sum(by_chunk, axis=0) > 0
                by_chunk = tl.where(left, by_chunk, p_by_chunk)
                whole = tl.sum(by_chunk, axis=0)
                level = uniform * whole
                picked, before = pick(by_chunk, c, level, BLOCK_C)
                ids, p, rest = _final_weights(
                    final, picked, V, inverse, log_total, threshold, threshold_id, refused, token,
                    q_ids, q_probs, q_logits, q_log_total, q_threshold, q_threshold_id, K, BLOCK,
                    BLOCK_K,
                )  # fmt: skip
                weights = tl.where(left, rest, p).to(tl.float64)
                following, _ = pick(weights, ids, level - before, 2**30)
                # A row without mass is not finite; its argmax is a token at least.
                following = tl.where(whole > 0, following.to(tl.int64), best)
                tl.store(next_ptr + row, following)


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
    check_rows(
        logits[:, 0],
        temperature,
        accept_keys=accept_keys,
        accept_counters=accept_counters,
        final_keys=final_keys,
        final_counters=final_counters,
        num_offered=num_offered,
        forced=forced,
    )
    check_shape("law.argmax", law.argmax, num_rows * num_slots)
    check_shape("draft", draft, num_rows, num_draft)
    if not 0 < num_draft < num_slots:
        raise ValueError(f"logits: found {num_slots} rows a request for {num_draft} slots")
    if isinstance(q, CandidateLaw):
        check_shape("q.ids", q.ids, num_rows, num_draft, q.ids.shape[-1], contiguous=True)
        check_shape("q.probs", q.probs, *q.ids.shape, contiguous=True)
    elif q is not None:
        check_shape("q.logits", q.logits, num_rows, num_draft, vocab)
        check_shape("q.law.argmax", q.law.argmax, num_rows * num_draft)
    device = logits.device
    if arrivals is None:
        arrivals = torch.zeros(num_rows, dtype=torch.int32, device=device)
    chunks = triton.cdiv(vocab, block)
    masses = torch.empty((num_rows, 2, chunks), dtype=torch.float64, device=device)
    following = torch.empty(num_rows, dtype=torch.int64, device=device)
    accepted = torch.empty_like(following)
    candidates = q if isinstance(q, CandidateLaw) else (None, None)
    full = (q.logits, *q.law[1:4]) if isinstance(q, FullLaw) else (None, None, None, None)
    num_candidates = q.ids.shape[-1] if isinstance(q, CandidateLaw) else 0
    _verify_kernel[(num_rows * chunks,)](
        logits,
        *law[:4],
        draft,
        *candidates,
        *full,
        temperature,
        accept_keys,
        accept_counters,
        final_keys,
        final_counters,
        num_offered,
        forced,
        masses,
        arrivals,
        accepted,
        following,
        *logits.stride()[:2],
        draft.stride(0),
        *(q.logits.stride()[:2] if isinstance(q, FullLaw) else (0, 0)),
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
    return accepted, following
