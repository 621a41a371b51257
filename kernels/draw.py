"""Draws from row laws: the CDF is walked in the order of the token ids.

A row's token is the first whose running total exceeds u times the whole; one of probability zero is
never drawn. At T = 0 it is the argmax.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .candidate_selector import inverse_cdf
from .row_law import Law, check_rows, few_rows, law_probs
from .tools import jit, last_to_arrive, next_power_of_2, on_gpu, tl, triton, uniform48, uniforms


def draw(
    logits: Float[Tensor, "R V"],
    law: Law,
    temperature: Float[Tensor, " R"],
    keys: Int[Tensor, " R"],
    counters: Int[Tensor, " R"],
    *,
    arrivals: Int[Tensor, " R"] | None = None,
) -> Int[Tensor, " R"]:
    """A token of each row: the argmax at T = 0, else the first token, by id, whose running total
    exceeds u times the whole, u the uniform number of (key, counter). `arrivals`: see `row_law`."""
    if on_gpu(logits):
        return draw_triton(logits, law, temperature, keys, counters, arrivals=arrivals)
    return draw_reference(logits, law, temperature, keys, counters)


def draw_reference(
    logits: Float[Tensor, "R V"],
    law: Law,
    temperature: Float[Tensor, " R"],
    keys: Int[Tensor, " R"],
    counters: Int[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """`draw` from dense laws."""
    tokens = law.argmax.clone()
    for rows in few_rows((temperature > 0).nonzero()[:, 0], logits.shape[-1]):
        probs = law_probs(logits[rows], Law(*(part[rows] for part in law)), temperature[rows])
        tokens[rows] = draw_from(probs, law.argmax[rows], uniforms(keys[rows], counters[rows]))
    return tokens


def draw_from(probs: Tensor, argmax: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF; a row without mass, which is not finite, gives its argmax."""
    tokens = inverse_cdf(probs, uniform).clamp_max(probs.shape[-1] - 1)
    return torch.where(probs.sum(-1) > 0, tokens, argmax)


@jit
def probs_of(x, ids, inverse_temperature, log_total, threshold, threshold_id):
    """p of logits x (fp32) of tokens `ids`, T > 0."""
    kept = (x > threshold) | ((x == threshold) & (ids <= threshold_id))
    # The difference of two large numbers: in float64 until it is the log of a probability.
    log_p = (x.to(tl.float64) * inverse_temperature - log_total).to(tl.float32)
    return tl.where(kept & (x > float("-inf")), tl.exp(log_p), 0.0)


@jit
def pick(weights, index, level, END: tl.constexpr):
    """First entry whose running total exceeds `level`, and the total before it; never one of weight
    zero, so that rounding at the end of the row gives its last possible entry."""
    possible = weights > 0
    reached = tl.cumsum(weights, axis=0)
    picked = tl.min(tl.where(possible & (reached > level), index, END), axis=0)
    picked = tl.minimum(picked, tl.max(tl.where(possible, index, 0), axis=0))
    return picked, tl.sum(tl.where(index < picked, weights, 0.0), axis=0)


@jit
def _draw_kernel(
    logits_ptr, argmax_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, temperature_ptr,
    keys_ptr, counters_ptr, masses_ptr, arrivals_ptr, tokens_ptr, logits_row, V, C: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // C).to(tl.int64)
    chunk = tl.program_id(0) % C
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0
    # A greedy row needs no pass over its logits: one program does it all.
    if (temperature > 0) | (chunk == 0):
        inverse = 1.0 / tl.where(greedy, 1.0, temperature).to(tl.float64)
        uniform = uniform48(tl.load(keys_ptr + row), tl.load(counters_ptr + row))
        best = tl.load(argmax_ptr + row)
        if greedy:
            tl.store(tokens_ptr + row, best)
        else:
            logits_ptr += row * logits_row
            log_total = tl.load(log_total_ptr + row)
            threshold = tl.load(threshold_ptr + row)
            threshold_id = tl.load(threshold_id_ptr + row)
            ids = chunk * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
            p = probs_of(x, ids, inverse, log_total, threshold, threshold_id)
            masses = masses_ptr + row * C
            tl.store(masses + chunk, tl.sum(p.to(tl.float64), axis=0))

            if last_to_arrive(arrivals_ptr + row, C):
                c = tl.arange(0, BLOCK_C)
                by_chunk = tl.load(masses + c, mask=c < C, other=0.0)
                whole = tl.sum(by_chunk, axis=0)
                level = uniform * whole
                picked, before = pick(by_chunk, c, level, BLOCK_C)
                ids = picked * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
                p = probs_of(x, ids, inverse, log_total, threshold, threshold_id)
                token, _ = pick(p.to(tl.float64), ids, level - before, 2**30)
                # A row without mass is not finite; its argmax is a token at least.
                tl.store(tokens_ptr + row, tl.where(whole > 0, token.to(tl.int64), best))


def draw_triton(
    logits: Float[Tensor, "R V"],
    law: Law,
    temperature: Float[Tensor, " R"],
    keys: Int[Tensor, " R"],
    counters: Int[Tensor, " R"],
    *,
    arrivals: Int[Tensor, " R"] | None = None,
    block: int = 2048,
) -> Int[Tensor, " R"]:
    """`draw` in one launch. Each program finds the mass of one chunk of a row; the row's last to
    finish picks the chunk, then the token.

    Raises:
        ValueError: shapes that do not fit.
    """
    num_rows, vocab = logits.shape
    check_rows(logits, temperature, keys=keys, counters=counters, argmax=law.argmax)
    device = logits.device
    if arrivals is None:
        arrivals = torch.zeros(num_rows, dtype=torch.int32, device=device)
    chunks = triton.cdiv(vocab, block)
    masses = torch.empty((num_rows, chunks), dtype=torch.float64, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    _draw_kernel[(num_rows * chunks,)](
        logits,
        *law[:4],
        temperature,
        keys,
        counters,
        masses,
        arrivals,
        tokens,
        logits.stride(0),
        vocab,
        C=chunks,
        BLOCK=block,
        BLOCK_C=next_power_of_2(chunks),
        num_warps=4,
    )
    return tokens
