"""What both rules of acceptance share: q in its forms, and the draw that ends a step.

After n accepted drafts of those offered the next token is drawn from (w p_n+1 - q_n+1)+ normalised,
after all of them from p there (the bonus). The weight w is 1 where each draft is tested alone
(`verify`), and at most 1 where the block is (`block_verify`).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .draw import draw_from, pick, probs_of
from .row_law import Law, check_rows, law_probs, probability
from .tools import check_shape, jit, last_to_arrive, tl


class CandidateLaw(NamedTuple):
    """A q that lives on K candidates a slot; ids may repeat where the probability is 0."""

    ids: Int[Tensor, "B P K"]
    probs: Float[Tensor, "B P K"]  # fp32


class FullLaw(NamedTuple):
    """A q over the whole vocabulary: draft logits, and the law of their B * P rows."""

    logits: Float[Tensor, "B P V"]
    law: Law


def check_arguments(
    logits: Float[Tensor, "B S V"],
    law: Law,
    draft: Int[Tensor, "B P"],
    q: CandidateLaw | FullLaw | None,
    temperature: Float[Tensor, " B"],
    **per_row: Int[Tensor, " B"] | None,
) -> None:
    """Raise `ValueError` for shapes that do not fit."""
    num_rows, num_slots, vocab = logits.shape
    num_draft = draft.shape[1]
    check_rows(logits[:, 0], temperature, **per_row)
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


def kernel_arguments(
    q: CandidateLaw | FullLaw | None,
) -> tuple[tuple[Tensor | None, ...], tuple[int, int], int]:
    """The pointers of a q of `at_drafts`, strides of its logits, and K (0: none)."""
    if isinstance(q, CandidateLaw):
        return (*q, None, None, None, None), (0, 0), q.ids.shape[-1]
    if isinstance(q, FullLaw):
        return (None, None, q.logits, *q.law[1:4]), q.logits.stride()[:2], 0
    return (None,) * 6, (0, 0), 0


def launch_memory(
    num_rows: int, chunks: int, arrivals: Int[Tensor, " B"] | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Masses by chunk of what `draw_final` draws from, arrivals, and what comes out: accepted slots
    and the tokens that follow."""
    if arrivals is None:
        arrivals = torch.zeros(num_rows, dtype=torch.int32, device=device)
    masses = torch.empty((num_rows, 2, chunks), dtype=torch.float64, device=device)
    following = torch.empty(num_rows, dtype=torch.int64, device=device)
    return masses, arrivals, torch.empty_like(following), following


# Plain torch.


def by_request(law: Law, num_rows: int) -> Law:
    """The law of all rows as one [B, S] tensor a part."""
    return Law(*(part.view(num_rows, -1) for part in law))


def target_mass(
    logits: Float[Tensor, "B S V"],
    by_slot: Law,
    draft: Int[Tensor, "B P"],
    temperature: Float[Tensor, " B"],
) -> Float[Tensor, "B P"]:
    """p of each drafted token."""
    num_draft = draft.shape[1]
    drafted = logits[:, :num_draft].gather(-1, draft[..., None])[..., 0]
    parts = (part[:, :num_draft] for part in by_slot[1:4])
    return probability(drafted, draft, temperature[:, None], *parts)


def draft_mass(
    draft: Int[Tensor, "B P"],
    q: CandidateLaw | FullLaw | None,
    temperature: Float[Tensor, " B"],
) -> Float[Tensor, "B P"]:
    """q of each drafted token."""
    if q is None:
        return torch.ones(draft.shape, device=draft.device)
    if isinstance(q, CandidateLaw):
        return (q.probs * (q.ids == draft[..., None])).sum(-1)
    drafted = q.logits.gather(-1, draft[..., None])[..., 0]
    parts = (part.view(draft.shape) for part in q.law[1:4])
    return probability(drafted, draft, temperature[:, None], *parts)


def dense_q(
    draft: Int[Tensor, "B P"],
    q: CandidateLaw | FullLaw | None,
    temperature: Float[Tensor, " B"],
    vocab: int,
    rows: Int[Tensor, " n"],
    slots: Int[Tensor, " n"],
) -> Float[Tensor, "n V"]:
    """q of the given slots of the given rows, over the vocabulary."""
    if isinstance(q, FullLaw):
        law = Law(*(part.view(draft.shape)[rows, slots] for part in q.law))
        return law_probs(q.logits[rows, slots], law, temperature[rows])
    dense = torch.zeros(len(rows), vocab, device=draft.device)
    if q is None:
        return dense.scatter_(1, draft[rows, slots, None], 1.0)
    return dense.scatter_add_(1, q.ids[rows, slots].long(), q.probs[rows, slots])


def draw_final_reference(
    logits: Float[Tensor, "B S V"],
    by_slot: Law,
    draft: Int[Tensor, "B P"],
    q: CandidateLaw | FullLaw | None,
    temperature: Float[Tensor, " B"],
    num_offered: Int[Tensor, " B"],
    accepted: Int[Tensor, " B"],
    weight: Float[Tensor, " B"],
    uniform: Float[Tensor, " B"],
) -> Int[Tensor, " B"]:
    """The token after the `accepted` ones, from dense laws; `weight` is w there."""
    following = by_slot.argmax.gather(1, accepted[:, None])[:, 0]
    rows = (temperature > 0).nonzero()[:, 0]
    if len(rows):
        at = accepted[rows]
        final = Law(*(part[rows, at] for part in by_slot))
        probs = law_probs(logits[rows, at], final, temperature[rows])
        refused, residual = at < num_offered[rows], probs.clone()
        spent = dense_q(draft, q, temperature, logits.shape[-1], rows[refused], at[refused])
        weighted = weight[rows[refused], None].float() * residual[refused]
        residual[refused] = (weighted - spent).clamp_min(0.0)
        probs = torch.where(residual.sum(-1, keepdim=True) > 0, residual, probs)
        following[rows] = draw_from(probs, final.argmax, uniform[rows])
    return following


# Triton. A row is cut into chunks, one program each; the row's last program to finish goes on with
# what needs the whole row.


@jit
def at_drafts(
    drafted, slots, live, logits_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, q_ids_ptr,
    q_probs_ptr, q_logits_ptr, q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr,
    inverse_temperature, logits_slot, q_slot, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """p and q of the drafted tokens of one request, whose pointers these are, T > 0."""
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
        q = tl.full(slots.shape, 1.0, tl.float32)
    return p, q


@jit
def final_weights(
    logits_ptr, chunk, V, inverse_temperature, log_total, threshold, threshold_id, refused, weight,
    token, q_ids_ptr, q_probs_ptr, q_logits_ptr, q_log_total, q_threshold, q_threshold_id,
    K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Token ids of a chunk, their p, and after a refusal (weight p - q)+, else p."""
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
        rest = tl.maximum(weight * p - q, 0.0)
    return ids, p, rest


@jit
def draw_final(
    row, chunk, n, weight, offered, uniform, inverse, greedy, logits_ptr, argmax_ptr, log_total_ptr,
    threshold_ptr, threshold_id_ptr, draft_ptr, q_ids_ptr, q_probs_ptr, q_logits_ptr,
    q_log_total_ptr, q_threshold_ptr, q_threshold_id_ptr, masses_ptr, arrivals_ptr, accepted_ptr,
    next_ptr, logits_slot, q_slot, V, C: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store n, the accepted drafts of request `row`, and the token after them. Logits, laws, draft
    and q are those of the request."""
    refused = n < offered
    # The refused slot's q; after a bonus it is loaded but not used.
    slot = tl.minimum(n, P - 1)
    token = tl.load(draft_ptr + slot).to(tl.int32)
    q_log_total = 0.0
    q_threshold = 0.0
    q_threshold_id = 0
    if K > 0:
        q_ids_ptr += slot * K
        q_probs_ptr += slot * K
    if q_logits_ptr is not None:
        q_logits_ptr += slot * q_slot
        q_log_total = tl.load(q_log_total_ptr + slot)
        q_threshold = tl.load(q_threshold_ptr + slot)
        q_threshold_id = tl.load(q_threshold_id_ptr + slot)

    if chunk == 0:
        tl.store(accepted_ptr + row, n)
    best = tl.load(argmax_ptr + n)
    if greedy:
        tl.store(next_ptr + row, best)
    else:
        final = logits_ptr + n * logits_slot
        log_total = tl.load(log_total_ptr + n)
        threshold = tl.load(threshold_ptr + n)
        threshold_id = tl.load(threshold_id_ptr + n)
        ids, p, rest = final_weights(
            final, chunk, V, inverse, log_total, threshold, threshold_id, refused, weight, token,
            q_ids_ptr, q_probs_ptr, q_logits_ptr, q_log_total, q_threshold, q_threshold_id, K,
            BLOCK, BLOCK_K,
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
            ids, p, rest = final_weights(
                final, picked, V, inverse, log_total, threshold, threshold_id, refused, weight,
                token, q_ids_ptr, q_probs_ptr, q_logits_ptr, q_log_total, q_threshold,
                q_threshold_id, K, BLOCK, BLOCK_K,
            )  # fmt: skip
            weights = tl.where(left, rest, p).to(tl.float64)
            following, _ = pick(weights, ids, level - before, 2**30)
            # A row without mass is not finite; its argmax is a token at least.
            following = tl.where(whole > 0, following.to(tl.int64), best)
            tl.store(next_ptr + row, following)
