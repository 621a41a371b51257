"""Row laws: temperature, top-k and top-p.

The law of a row of logits l at temperature T: softmax(l / T), cut to the top_k best tokens (ties by
lowest id), renormalised, cut to the shortest prefix of the ranking whose mass reaches top_p (the
token that crosses it stays), renormalised; at T = 0 one-hot on the argmax. Both cuts keep a prefix
of the ranking by (logit descending, id ascending), so a law is four numbers beside its logits: the
last token kept, as its logit `threshold` and its id `threshold_id`, and the normaliser:

    p(v) = exp(l[v] / T - log_total)   where l[v] > threshold, or l[v] = threshold and
                                       v <= threshold_id; 0 elsewhere
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .candidate_topk import candidate_topk
from .law_filter import bin_of, filter_kernel, filters_of
from .tools import (
    check_shape,
    jit,
    last_to_arrive,
    launches_early,
    next_power_of_2,
    on_gpu,
    tl,
    triton,
)


class Law(NamedTuple):
    """The laws of R rows of logits, beside the logits themselves.

    `argmax` is the lowest id of the largest logit; `log_total` the log of the sum of exp(logit / T)
    over the tokens kept (0 at T = 0); `threshold` and `threshold_id` name the last token kept.
    `finite` is False for a row with NaN, +inf, or no finite logit: its law means nothing, though a
    draw from it still gives some token of the vocabulary.
    """

    argmax: Int[Tensor, " R"]  # int64
    log_total: Float[Tensor, " R"]  # float64
    threshold: Float[Tensor, " R"]  # fp32
    threshold_id: Int[Tensor, " R"]  # int32
    finite: Bool[Tensor, " R"]


def row_law(
    logits: Float[Tensor, "R V"],
    temperature: Float[Tensor, " R"],
    top_k: Int[Tensor, " R"] | None = None,
    top_p: Float[Tensor, " R"] | None = None,
    *,
    arrivals: Int[Tensor, " R"] | None = None,
) -> Law:
    """The law of each row: temperature (0 = greedy), then top_k (0 = off), then top_p (1 = off).

    Without `top_k` and `top_p` no row is filtered. `arrivals` is int32 memory for the GPU, all zero
    and left so; give it where a CUDA graph is captured, so that no launch is spent on clearing it.
    """
    if on_gpu(logits):
        return row_law_triton(logits, temperature, top_k, top_p, arrivals=arrivals)
    return row_law_reference(logits, temperature, top_k, top_p)


# Plain torch.


def law_probs(
    logits: Float[Tensor, "R V"], law: Law, temperature: Float[Tensor, " R"]
) -> Float[Tensor, "R V"]:
    """p as a dense tensor, in fp32."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return probability(logits, ids, temperature[:, None], *(part[:, None] for part in law[1:4]))


def probability(
    logits: Tensor,
    ids: Tensor,
    temperature: Tensor,
    log_total: Tensor,
    threshold: Tensor,
    threshold_id: Tensor,
) -> Tensor:
    x = logits.float()
    scale = torch.where(temperature == 0, 1.0, temperature)
    # The difference of two large numbers: in float64 until it is the log of a probability.
    log_p = torch.addcmul(-log_total, x.double(), 1.0 / scale.double()).float()
    kept = (x > threshold) | ((x == threshold) & (ids <= threshold_id))
    p = torch.where(temperature == 0, 1.0, log_p.exp())
    return torch.where(kept & (x > float("-inf")), p, 0.0)


def row_law_reference(
    logits: Float[Tensor, "R V"],
    temperature: Float[Tensor, " R"],
    top_k: Int[Tensor, " R"] | None = None,
    top_p: Float[Tensor, " R"] | None = None,
) -> Law:
    """`row_law` by ranking the best tokens of the filtered rows."""
    num_rows, vocab = logits.shape
    x = logits.float()
    peak, argmax = x.amax(-1), x.argmax(-1)  # torch gives the first of equal ones
    finite, greedy = peak.isfinite(), temperature == 0
    threshold = torch.where(greedy, peak, float("-inf"))
    threshold_id = torch.where(greedy, argmax, vocab - 1)
    log_total = torch.zeros(num_rows, dtype=torch.float64, device=x.device)
    for rows in few_rows((~greedy).nonzero()[:, 0], vocab):
        weight = ((x[rows] - peak[rows, None]) / temperature[rows, None]).exp_()
        log_total[rows] = peak[rows].double() / temperature[rows].double()
        log_total[rows] += weight.sum(-1, dtype=torch.float64).log()
    limit = torch.zeros_like(argmax) if top_k is None else top_k.long()
    limit = torch.where(limit > 0, limit, vocab).clamp_max(vocab)
    nucleus = torch.ones_like(peak) if top_p is None else top_p
    filtered = finite & ~greedy & ((limit < vocab) | (nucleus < 1))
    for rows in few_rows(filtered.nonzero()[:, 0], vocab):
        cut = _cut(x[rows], temperature[rows], limit[rows], nucleus[rows], log_total[rows])
        log_total[rows], threshold[rows], threshold_id[rows] = cut
    return Law(argmax, log_total, threshold, threshold_id.int(), finite)


def few_rows(rows: Tensor, vocab: int) -> tuple[Tensor, ...]:
    """Few rows at a time, so that on a CPU their temporaries stay in its cache."""
    return rows.split(max(1, 400_000 // vocab)) if len(rows) else ()


_PREFIX = 1024  # ranked tokens that top-p looks at before it sorts the whole vocabulary


def _cut(
    x: Tensor, temperature: Tensor, limit: Tensor, nucleus: Tensor, log_total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Normaliser, logit and id of the last token kept, of rows that are filtered."""
    vocab = x.shape[-1]
    limited = limit < vocab
    width = int(torch.where(limited, limit, min(_PREFIX, vocab)).max())
    while True:
        values, ids = candidate_topk(x, width)
        log_p = values.double() / temperature.double()[:, None] - log_total[:, None]
        in_limit = torch.arange(width, device=x.device) < limit[:, None]
        mass = log_p.exp().masked_fill(~in_limit, 0.0)
        whole = torch.where(limited, mass.sum(-1), 1.0)
        ranked_enough = limited | (mass.sum(-1) >= nucleus * whole)
        if width == vocab or bool(ranked_enough.all()):
            break
        width = min(8 * width, vocab)
    # A token stays while the mass before it has not reached top_p: the crossing one does.
    before = mass.cumsum(-1) - mass
    stays = in_limit & ((nucleus >= 1)[:, None] | (before < (nucleus * whole)[:, None]))
    last = stays.sum(-1, keepdim=True) - 1
    kept = (mass * stays).sum(-1).log() + log_total
    return kept, values.gather(-1, last)[:, 0], ids.gather(-1, last)[:, 0]


# Triton. A row is cut into chunks, one program each; the row's last program to finish goes on with
# what needs the whole row.


@jit
def _law_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, peaks_ptr, firsts_ptr, sums_ptr,
    histograms_ptr, arrivals_ptr, argmax_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr,
    finite_ptr, facts_ptr, edge_ptr, listed_ptr, starts_ptr, logits_row, V, C: tl.constexpr,
    LIST: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // C).to(tl.int64)
    chunk = tl.program_id(0) % C
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    limit, nucleus = filters_of(top_k_ptr, top_p_ptr, row, V)
    limited = limit < V
    filtered = (limited | (nucleus < 1)) & (temperature > 0)
    # Top-k counts tokens, over a span of logits that is the same at any temperature; top-p
    # measures masses, whose span is that of logits / T: ln(V / (1 - top_p)) and a little.
    per_unit = tl.where(limited, 2.0, 3.0 * inverse)

    # The chunk: largest logit, its first token, sum of weights (NaN where a logit is not usable).
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * logits_row + ids, mask=ids < V, other=float("-inf"))
    x = x.to(tl.float32)
    unusable = (x != x) | (x == float("inf"))
    x = tl.where(unusable, float("-inf"), x)
    peak = tl.max(x, axis=0)
    first = tl.min(tl.where(x == peak, ids, V - 1), axis=0)
    total = 0.0
    if temperature > 0:
        total = tl.sum(tl.exp((x - tl.where(peak == float("-inf"), 0.0, peak)) * inverse), axis=0)
    total = tl.where(tl.max(unusable.to(tl.int32), axis=0) > 0, float("nan"), total)
    place = row * C + chunk
    tl.store(peaks_ptr + place, peak)
    tl.store(firsts_ptr + place, first)
    tl.store(sums_ptr + place, total)
    if BINS > 0:
        g = tl.arange(0, BINS)
        if filtered:
            # Tokens by their distance below the chunk's largest, in bins that are the same for all
            # chunks; the last one holds whatever is further down.
            below = bin_of(peak, per_unit) - bin_of(x, per_unit)
            tally = tl.histogram(tl.minimum(below, BINS - 1), BINS)
            tl.store(histograms_ptr + place * BINS + g, tally)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    if last_to_arrive(arrivals_ptr + row, C):
        c = tl.arange(0, BLOCK_C)
        in_c = c < C
        peaks = tl.load(peaks_ptr + row * C + c, mask=in_c, other=float("-inf"))
        sums = tl.load(sums_ptr + row * C + c, mask=in_c, other=0.0)
        firsts = tl.load(firsts_ptr + row * C + c, mask=in_c, other=V - 1)
        top = tl.max(peaks, axis=0)
        best = tl.min(tl.where(peaks == top, firsts, V - 1), axis=0)
        broken = sums != sums
        finite = (tl.max(broken.to(tl.int32), axis=0) == 0) & (top > float("-inf"))
        safe_top = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.sum(tl.where(broken, 0.0, sums) * tl.exp((peaks - safe_top) * inverse), axis=0)
        log_total = safe_top.to(tl.float64) / tl.where(greedy, 1.0, temperature).to(tl.float64)
        log_total += tl.log(tl.where(mass > 0, mass, 1.0)).to(tl.float64)
        tl.store(argmax_ptr + row, best.to(tl.int64))
        tl.store(finite_ptr + row, finite)
        # Of a filtered row these are written once more, by the kernel that finds its threshold.
        tl.store(log_total_ptr + row, tl.where(greedy, 0.0, log_total))
        tl.store(threshold_ptr + row, tl.where(greedy, top, float("-inf")))
        tl.store(threshold_id_ptr + row, tl.where(greedy, best, V - 1))
        if BINS > 0:
            listed = -1
            if filtered & finite:
                # All that can be kept lies in the first bins of the row. In bin g no logit is above
                # (top_bin - g + 1) / per_unit, but for the rounding of `_bin`.
                top_bin = bin_of(top, per_unit)
                own = g[None, :] - (top_bin - bin_of(peaks, per_unit))[:, None]
                known = (own >= 0) & (own < BINS - 1) & in_c[:, None]
                at = (row * C + c)[:, None] * BINS + own
                counts = tl.load(histograms_ptr + at, mask=known, other=0)
                counts = tl.where((g < BINS - 1)[None, :], counts, 0)
                in_bin = tl.sum(counts, axis=0)
                reached = tl.cumsum(in_bin, axis=0)
                slack = 1.0 + tl.abs(top_bin.to(tl.float32)) * 2.4e-7
                roof = ((top_bin - g).to(tl.float32) + slack) / per_unit
                rest = V - tl.sum(in_bin, axis=0)
                weight = tl.exp(tl.where(limited, 0.0, (roof - top) * inverse))
                tail = tl.where(g < BINS - 1, in_bin, rest) * weight
                tail = tl.cumsum(tail, axis=0, reverse=True) - tail
                droppable = (0.99 * (1 - nucleus) - 1e-5) * mass
                enough = tl.where(limited, reached >= limit, tail <= droppable)
                last = tl.min(tl.where(enough & (g < BINS - 1), g, BINS), axis=0)
                listed = tl.sum(tl.where(g == last, reached, 0), axis=0)
                # A list that would be too long is not made: the search then reads the whole row.
                listed = tl.where(last == BINS, LIST + 1, listed)
                mine = tl.sum(tl.where((g <= last)[None, :], counts, 0), axis=1)
                tl.store(starts_ptr + row * C + c, tl.cumsum(mine, axis=0) - mine, mask=in_c)
                tl.store(edge_ptr + row, tl.where(last == BINS, -(2**30), top_bin - last))
                tl.store(facts_ptr + row * 3, top)
                tl.store(facts_ptr + row * 3 + 1, mass)
                tl.store(facts_ptr + row * 3 + 2, per_unit)
            tl.store(listed_ptr + row, listed)


def row_law_triton(
    logits: Float[Tensor, "R V"],
    temperature: Float[Tensor, " R"],
    top_k: Int[Tensor, " R"] | None = None,
    top_p: Float[Tensor, " R"] | None = None,
    *,
    arrivals: Int[Tensor, " R"] | None = None,
    block: int = 4096,
    list_size: int = 8192,
    sorted_sizes: tuple[int, int] = (256, 1024),
    num_warps: int = 4,
) -> Law:
    """`row_law` in one launch, two where `top_k` or `top_p` is given.

    The second collects the tokens that may be kept, known from counts of the first, and sorts them
    where they are no more than one of the two `sorted_sizes`, powers of two; of more it searches
    the thresholds, on the bits of their logits. `list_size` bounds how many are collected; a law
    flatter than that is searched in the whole row, right but slow.

    Raises:
        ValueError: shapes that do not fit.
    """
    num_rows, vocab = logits.shape
    check_rows(logits, temperature, top_k=top_k, top_p=top_p)
    device = logits.device
    filtered = top_k is not None or top_p is not None
    chunks = triton.cdiv(vocab, block)
    bins = 64 if filtered else 0

    def rows(dtype: torch.dtype, *per_row: int) -> Tensor:
        return torch.empty((num_rows, *per_row), dtype=dtype, device=device)

    law = Law(
        argmax=rows(torch.int64),
        log_total=rows(torch.float64),
        threshold=rows(torch.float32),
        threshold_id=rows(torch.int32),
        finite=rows(torch.bool),
    )
    if arrivals is None:
        arrivals = torch.zeros(num_rows, dtype=torch.int32, device=device)
    peaks, sums = rows(torch.float32, chunks), rows(torch.float32, chunks)
    firsts, starts = rows(torch.int32, chunks), rows(torch.int32, chunks)
    histograms = rows(torch.int32, chunks, bins)
    facts, edge, listed = rows(torch.float32, 3), rows(torch.int32), rows(torch.int32)
    grid = (num_rows * chunks,)
    early = filtered and launches_early(logits)
    _law_kernel[grid](
        logits,
        temperature,
        top_k,
        top_p,
        peaks,
        firsts,
        sums,
        histograms,
        arrivals,
        *law,
        facts,
        edge,
        listed,
        starts,
        logits.stride(0),
        vocab,
        C=chunks,
        LIST=list_size,
        BINS=bins,
        BLOCK=block,
        BLOCK_C=next_power_of_2(chunks),
        PDL=early,
        num_warps=num_warps,
    )
    if filtered:
        filter_kernel[grid](
            logits,
            temperature,
            top_k,
            top_p,
            facts,
            edge,
            listed,
            starts,
            rows(torch.int64, list_size),
            arrivals,
            law.log_total,
            law.threshold,
            law.threshold_id,
            logits.stride(0),
            vocab,
            C=chunks,
            LIST=list_size,
            SHIFT=16 if logits.dtype == torch.bfloat16 else 0,
            BLOCK=block,
            FEW=sorted_sizes[0],
            MANY=sorted_sizes[1],
            PIECE=1024,
            PDL=early,
            num_warps=2 * num_warps,
            maxnreg=64,  # with more, most programs would wait for room
            **({"launch_pdl": True} if early else {}),
        )
    return law


def check_rows(logits: Tensor, temperature: Tensor, **per_row: Tensor | None) -> None:
    check_shape("logits", logits, *logits.shape)
    check_shape("temperature", temperature, len(logits))
    for name, tensor in per_row.items():
        if tensor is not None:
            check_shape(name, tensor, len(logits))
