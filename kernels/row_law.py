"""Row laws, and draws from them.

The law of a row of logits l at temperature T: softmax(l / T), cut to the top_k best tokens (ties by
lowest id), renormalised, cut to the shortest prefix of the ranking whose mass reaches top_p (the
token that crosses it stays), renormalised; at T = 0 one-hot on the argmax. Both cuts keep a prefix
of the ranking by (logit descending, id ascending), so a law is four numbers beside its logits: the
last token kept, as its logit `threshold` and its id `threshold_id`, and the normaliser:

    p(v) = exp(l[v] / T - log_total)   where l[v] > threshold, or l[v] = threshold and
                                       v <= threshold_id; 0 elsewhere

A draw walks the CDF in the order of the token ids.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .candidate_selector import inverse_cdf
from .candidate_topk import candidate_topk
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
    for rows in _blocks((~greedy).nonzero()[:, 0], vocab):
        weight = ((x[rows] - peak[rows, None]) / temperature[rows, None]).exp_()
        log_total[rows] = peak[rows].double() / temperature[rows].double()
        log_total[rows] += weight.sum(-1).double().log()
    limit = torch.zeros_like(argmax) if top_k is None else top_k.long()
    limit = torch.where(limit > 0, limit, vocab).clamp_max(vocab)
    nucleus = torch.ones_like(peak) if top_p is None else top_p
    filtered = finite & ~greedy & ((limit < vocab) | (nucleus < 1))
    for rows in _blocks(filtered.nonzero()[:, 0], vocab):
        cut = _cut(x[rows], temperature[rows], limit[rows], nucleus[rows], log_total[rows])
        log_total[rows], threshold[rows], threshold_id[rows] = cut
    return Law(argmax, log_total, threshold, threshold_id.int(), finite)


def _blocks(rows: Tensor, vocab: int) -> tuple[Tensor, ...]:
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


def draw_reference(
    logits: Float[Tensor, "R V"],
    law: Law,
    temperature: Float[Tensor, " R"],
    keys: Int[Tensor, " R"],
    counters: Int[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """`draw` from dense laws."""
    tokens = law.argmax.clone()
    for rows in _blocks((temperature > 0).nonzero()[:, 0], logits.shape[-1]):
        probs = law_probs(logits[rows], Law(*(part[rows] for part in law)), temperature[rows])
        tokens[rows] = draw_from(probs, law.argmax[rows], uniforms(keys[rows], counters[rows]))
    return tokens


def draw_from(probs: Tensor, argmax: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF; a row without mass, which is not finite, gives its argmax."""
    tokens = inverse_cdf(probs, uniform).clamp_max(probs.shape[-1] - 1)
    return torch.where(probs.sum(-1) > 0, tokens, argmax)


# Triton. A row is cut into chunks, one program each; the row's last program to finish goes on with
# what needs the whole row.


@jit
def probs_of(x, ids, inverse_temperature, log_total, threshold, threshold_id):
    """p of logits x (fp32) of tokens `ids`, T > 0."""
    kept = (x > threshold) | ((x == threshold) & (ids <= threshold_id))
    # The difference of two large numbers: in float64 until it is the log of a probability.
    log_p = (x.to(tl.float64) * inverse_temperature - log_total).to(tl.float32)
    return tl.where(kept & (x > float("-inf")), tl.exp(log_p), 0.0)


@jit
def _bin(x, per_unit):
    """Bins of equal width over the real line, in the order of x."""
    return tl.floor(tl.minimum(tl.maximum(x * per_unit, -5e8), 5e8)).to(tl.int32)


@jit
def _law_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    peaks_ptr,
    firsts_ptr,
    sums_ptr,
    histograms_ptr,
    arrivals_ptr,
    argmax_ptr,
    log_total_ptr,
    threshold_ptr,
    threshold_id_ptr,
    finite_ptr,
    facts_ptr,
    edge_ptr,
    listed_ptr,
    starts_ptr,
    logits_row,
    V,
    C: tl.constexpr,
    LIST: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = (tl.program_id(0) // C).to(tl.int64)
    chunk = tl.program_id(0) % C
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    limit = V
    nucleus = 1.0
    if top_k_ptr is not None:
        limit = tl.load(top_k_ptr + row).to(tl.int32)
        limit = tl.where((limit <= 0) | (limit > V), V, limit)
    if top_p_ptr is not None:
        nucleus = tl.load(top_p_ptr + row)
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
            below = _bin(peak, per_unit) - _bin(x, per_unit)
            tally = tl.histogram(tl.minimum(below, BINS - 1), BINS)
            tl.store(histograms_ptr + place * BINS + g, tally)

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
                top_bin = _bin(top, per_unit)
                own = g[None, :] - (top_bin - _bin(peaks, per_unit))[:, None]
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


@jit
def _order(x, SHIFT: tl.constexpr):
    """An int32 for each fp32, in the same order; SHIFT drops the bits that its type never had."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@jit
def _value(order, SHIFT: tl.constexpr):
    """The fp32 of an `_order`."""
    high = order << SHIFT
    bits = tl.where(order < 0, (high | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, high)
    return bits.to(tl.float32, bitcast=True)


@jit
def _split(
    values_ptr, count, order, by_count, peak, inverse, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Of the values above the one of this order, how many there are, or the sum of their weights
    exp((x - peak) / T), and the lowest order; of the others the highest order."""
    found = tl.zeros([BLOCK], tl.float32)
    over = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    under = tl.full([BLOCK], -0x7FFFFFFF, tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(values_ptr + at, mask=at < count, other=float("-inf")).to(tl.float32)
        weight = tl.where(by_count, 1.0, tl.exp((x - peak) * inverse))
        own = _order(x, SHIFT)
        above = (own > order) & (at < count)
        found += tl.where(above, weight, 0.0)
        over = tl.minimum(over, tl.where(above, own, 0x7FFFFFFF))
        under = tl.maximum(under, tl.where((own <= order) & (at < count), own, -0x7FFFFFFF))
    found = tl.sum(found.to(tl.float64), axis=0)
    return found, tl.min(over, axis=0), tl.max(under, axis=0)


@jit
def _search(
    values_ptr,
    count,
    low,
    high,
    target,
    by_count,
    peak,
    inverse,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest order above which there is less than `target`, and what there is. There is less
    above `high`, which is the order of the largest value, and not above `low`."""
    at_high = tl.full((), 0.0, tl.float64)
    while high > low + 1:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        found, over, under = _split(
            values_ptr, count, middle, by_count, peak, inverse, SHIFT, BLOCK
        )
        less = found < target
        # Straight to the next value there is, however far it may be from the middle.
        high = tl.where(less, tl.maximum(under, low + 1), high)
        low = tl.where(less, low, over - 1)
        at_high = tl.where(less, found, at_high)
    return high, at_high


@jit
def _filter_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    facts_ptr,
    edge_ptr,
    listed_ptr,
    starts_ptr,
    list_ptr,
    list_ids_ptr,
    arrivals_ptr,
    log_total_ptr,
    threshold_ptr,
    threshold_id_ptr,
    logits_row,
    V,
    C: tl.constexpr,
    LIST: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LIST: tl.constexpr,
):
    row = (tl.program_id(0) // C).to(tl.int64)
    chunk = tl.program_id(0) % C
    listed = tl.load(listed_ptr + row)
    if listed >= 0:
        temperature = tl.load(temperature_ptr + row)
        inverse = 1.0 / temperature
        edge = tl.load(edge_ptr + row)
        per_unit = tl.load(facts_ptr + row * 3 + 2)

        # What can be kept, in the order of the ids.
        if listed <= LIST:
            ids = chunk * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + row * logits_row + ids, mask=ids < V, other=float("-inf"))
            possible = (_bin(x.to(tl.float32), per_unit) >= edge) & (ids < V)
            start = tl.load(starts_ptr + row * C + chunk)
            at = start + tl.cumsum(possible.to(tl.int32), axis=0) - 1
            tl.store(list_ptr + row * LIST + at, x, mask=possible)
            tl.store(list_ids_ptr + row * LIST + at, ids, mask=possible)

        if last_to_arrive(arrivals_ptr + row, C):
            peak = tl.load(facts_ptr + row * 3)
            whole = tl.load(facts_ptr + row * 3 + 1).to(tl.float64)
            limit = V
            nucleus = 1.0
            if top_k_ptr is not None:
                limit = tl.load(top_k_ptr + row).to(tl.int32)
                limit = tl.where((limit <= 0) | (limit > V), V, limit)
            if top_p_ptr is not None:
                nucleus = tl.load(top_p_ptr + row)
            if listed <= LIST:
                values = list_ptr + row * LIST
                count = listed
            else:
                values = logits_ptr + row * logits_row
                count = V
            everything = edge == -(2**30)
            floor = tl.where(everything, float("-inf"), (edge - 1).to(tl.float32) / per_unit)
            low = _order(floor, SHIFT) - 1
            high = _order(peak, SHIFT)
            cut = low
            above = whole
            ties = count
            if limit < V:
                wanted = limit.to(tl.float64)
                cut, before = _search(
                    values, count, low, high, wanted, True, peak, inverse, SHIFT, BLOCK_LIST
                )
                ties = limit - before.to(tl.int32)
                above, _, _ = _split(values, count, cut, False, peak, inverse, SHIFT, BLOCK_LIST)
                weight = tl.exp((_value(cut, SHIFT) - peak) * inverse)
                whole = above + ties.to(tl.float64) * weight.to(tl.float64)
                low = cut - 1
            if nucleus < 1:
                target = nucleus.to(tl.float64) * whole
                new_cut, above = _search(
                    values, count, low, high, target, False, peak, inverse, SHIFT, BLOCK_LIST
                )
                weight = tl.exp((_value(new_cut, SHIFT) - peak) * inverse)
                # Of the ties at the cut, those before which there is less than the target.
                missing = tl.ceil((target - above) / tl.maximum(weight.to(tl.float64), 1e-300))
                missing = tl.minimum(tl.maximum(missing, 1.0), count.to(tl.float64)).to(tl.int32)
                ties = tl.where(new_cut == cut, tl.minimum(ties, missing), missing)
                cut = new_cut

            # The id of the last tie that stays.
            last = -1
            seen = 0
            for start in range(0, count, BLOCK_LIST):
                at = start + tl.arange(0, BLOCK_LIST)
                x = tl.load(values + at, mask=at < count, other=float("-inf")).to(tl.float32)
                ids = tl.load(
                    list_ids_ptr + row * LIST + at,
                    mask=at < tl.where(listed <= LIST, count, 0),
                    other=0,
                )
                ids = tl.where(listed <= LIST, ids, at)
                equal = (_order(x, SHIFT) == cut) & (at < count)
                rank = seen + tl.cumsum(equal.to(tl.int32), axis=0)
                stays = equal & (rank <= ties)
                last = tl.maximum(last, tl.max(tl.where(stays, ids, -1), axis=0))
                seen += tl.sum(equal.to(tl.int32), axis=0)
            weight = tl.exp((_value(cut, SHIFT) - peak) * inverse)
            kept = above + tl.minimum(ties, seen).to(tl.float64) * weight.to(tl.float64)
            log_total = peak.to(tl.float64) / temperature.to(tl.float64)
            tl.store(log_total_ptr + row, log_total + tl.log(kept))
            tl.store(threshold_ptr + row, _value(cut, SHIFT))
            tl.store(threshold_id_ptr + row, last)


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
    logits_ptr,
    argmax_ptr,
    log_total_ptr,
    threshold_ptr,
    threshold_id_ptr,
    temperature_ptr,
    keys_ptr,
    counters_ptr,
    masses_ptr,
    arrivals_ptr,
    tokens_ptr,
    logits_row,
    V,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
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


def row_law_triton(
    logits: Float[Tensor, "R V"],
    temperature: Float[Tensor, " R"],
    top_k: Int[Tensor, " R"] | None = None,
    top_p: Float[Tensor, " R"] | None = None,
    *,
    arrivals: Int[Tensor, " R"] | None = None,
    block: int = 4096,
    list_size: int = 8192,
    num_warps: int = 4,
) -> Law:
    """`row_law` in one launch, two where `top_k` or `top_p` is given.

    The second collects the tokens that may be kept, known from counts of the first, and searches
    the thresholds among them, on the bits of their logits. `list_size` bounds how many are
    collected; a law flatter than that is searched in the whole row, right but slow.

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
        num_warps=num_warps,
    )
    if filtered:
        _filter_kernel[grid](
            logits,
            temperature,
            top_k,
            top_p,
            facts,
            edge,
            listed,
            starts,
            rows(logits.dtype, list_size),
            rows(torch.int32, list_size),
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
            BLOCK_LIST=min(2048, block),
            num_warps=2 * num_warps,
        )
    return law


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


def check_rows(logits: Tensor, temperature: Tensor, **per_row: Tensor | None) -> None:
    check_shape("logits", logits, *logits.shape)
    check_shape("temperature", temperature, len(logits))
    for name, tensor in per_row.items():
        if tensor is not None:
            check_shape(name, tensor, len(logits))
