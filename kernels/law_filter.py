"""The thresholds of filtered row laws: the last token that top-k and top-p keep, exactly.

The tokens that may be kept are listed (`row_law` knows from counts how many there are and where
each chunk's begin), each as one int64 that sorts by (logit descending, id ascending). Few of them,
as there nearly always are, are sorted in registers, and one running sum of their weights gives both
cuts and the ties. More of them, listed in id order, or a row for which no list was made, are
searched: each round reads them once and quarters the span of the threshold's ordered bits, and a
last reading cuts the ties by id.
"""

from .tools import jit, last_to_arrive, tl


@jit
def bin_of(x, per_unit):
    """Bins of equal width over the real line, in the order of x."""
    return tl.floor(tl.minimum(tl.maximum(x * per_unit, -5e8), 5e8)).to(tl.int32)


@jit
def filters_of(top_k_ptr, top_p_ptr, row, V):
    """How many tokens top-k keeps (V where it is off), and the share that top-p keeps."""
    limit = V
    nucleus = 1.0
    if top_k_ptr is not None:
        limit = tl.load(top_k_ptr + row).to(tl.int32)
        limit = tl.where((limit <= 0) | (limit > V), V, limit)
    if top_p_ptr is not None:
        nucleus = tl.load(top_p_ptr + row)
    return limit, nucleus


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
def _cut_sorted(
    list_ptr, listed, limit, nucleus, whole, V, peak, inverse, TILE: tl.constexpr
):  # fmt: skip
    """Of a list of 1 to TILE tokens: logit and id of the last one that stays, and the sum of the
    weights exp((x - peak) / T) of those that do."""
    at = tl.arange(0, TILE)
    # No key is higher than those beyond the list: they stay behind it.
    key = tl.sort(tl.load(list_ptr + at, mask=at < listed, other=0x7FFFFFFFFFFFFFFF))
    count = tl.minimum(listed, limit)
    x = _value((~(key >> 32)).to(tl.int32), 0)
    weight = tl.where(at < count, tl.exp((x - peak) * inverse), 0.0).to(tl.float64)
    reached = tl.cumsum(weight, axis=0)
    if limit < V:
        whole = tl.max(reached, axis=0)
    # A token stays while the weight before it is less than top-p's share: the crossing one does.
    share = tl.where(nucleus < 1, nucleus.to(tl.float64) * whole, float("inf"))
    stays = (at < count) & ((reached - weight < share) | (at == 0))
    kept = tl.max(tl.where(stays, reached, 0.0), axis=0)
    last = tl.max(tl.where(stays, key, -0x7FFFFFFFFFFFFFFF), axis=0)
    return _value((~(last >> 32)).to(tl.int32), 0), last.to(tl.int32), kept


@jit
def _read(list_ptr, listed, row_ptr, width, at, SHIFT: tl.constexpr):
    """Orders and ids at some places of the list, or of the row where `listed` is 0."""
    key = tl.load(list_ptr + at, mask=at < listed, other=0)
    x = tl.load(row_ptr + at, mask=at < width, other=float("-inf")).to(tl.float32)
    order = tl.where(at < listed, (~(key >> 32)).to(tl.int32) >> SHIFT, _order(x, SHIFT))
    return order, tl.where(at < listed, key.to(tl.int32), at)


@jit
def _above(
    list_ptr, listed, row_ptr, width, orders, by_count, peak, inverse, SHIFT: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """For each of 4 orders: of the tokens above it how many there are, or the sum of weights."""
    found = tl.zeros([PIECE, 4], tl.float32)
    # Unrolled, so that a thread does not wait for one reading at a time.
    for start in tl.range(0, tl.maximum(listed, width), PIECE, loop_unroll_factor=4):
        at = start + tl.arange(0, PIECE)
        order, _ = _read(list_ptr, listed, row_ptr, width, at, SHIFT)
        weight = tl.where(by_count, 1.0, tl.exp((_value(order, SHIFT) - peak) * inverse))
        found += tl.where(order[:, None] > orders[None, :], weight[:, None], 0.0)
    return tl.sum(found.to(tl.float64), axis=0)


@jit
def _search(
    list_ptr, listed, row_ptr, width, low, high, target, by_count, peak, inverse,
    SHIFT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The lowest order above which there is less than `target`, and what there is. There is less
    above `high`, which is the order of the largest logit, and not above `low`."""
    at_high = tl.full((), 0.0, tl.float64)
    step = tl.arange(0, 4) + 1
    while high > low + 1:
        span = high.to(tl.int64) - low  # of fp32 it may need 33 bits
        orders = (low + ((span * step + 3) >> 2)).to(tl.int32)  # rises to `high`
        found = _above(
            list_ptr, listed, row_ptr, width, orders, by_count, peak, inverse, SHIFT, PIECE
        )
        less = (found < target) | (step == 4)
        low = tl.max(tl.where(less, low, orders), axis=0)
        high = tl.min(tl.where(less, orders, high), axis=0)
        at_high = tl.max(tl.where(orders == high, found, 0.0), axis=0)
    return high, at_high


@jit
def _cut_searched(
    list_ptr, listed, row_ptr, width, limit, nucleus, whole, V, floor, peak, inverse,
    SHIFT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """What `_cut_sorted` finds, of any list whose logits are `floor` and more; or of the row of
    that width where `listed` is 0."""
    low = _order(floor, SHIFT) - 1
    high = _order(peak, SHIFT)
    cut = low
    above = whole
    ties = V
    if limit < V:
        cut, before = _search(
            list_ptr, listed, row_ptr, width, low, high, limit.to(tl.float64), True, peak, inverse,
            SHIFT, PIECE,
        )  # fmt: skip
        ties = limit - before.to(tl.int32)
        at_cut = tl.full([4], 0, tl.int32) + cut
        sums = _above(list_ptr, listed, row_ptr, width, at_cut, False, peak, inverse, SHIFT, PIECE)
        above = tl.max(sums, axis=0)
        weight = tl.exp((_value(cut, SHIFT) - peak) * inverse)
        whole = above + ties.to(tl.float64) * weight.to(tl.float64)
        low = cut - 1
    if nucleus < 1:
        target = nucleus.to(tl.float64) * whole
        new_cut, above = _search(
            list_ptr, listed, row_ptr, width, low, high, target, False, peak, inverse, SHIFT, PIECE
        )
        weight = tl.exp((_value(new_cut, SHIFT) - peak) * inverse)
        # Of the ties at the cut, those before which there is less than the target.
        missing = tl.ceil((target - above) / tl.maximum(weight.to(tl.float64), 1e-300))
        missing = tl.minimum(tl.maximum(missing, 1.0), V).to(tl.int32)
        ties = tl.where(new_cut == cut, tl.minimum(ties, missing), missing)
        cut = new_cut

    # The id of the last tie that stays.
    last = -1
    seen = 0
    count = tl.maximum(listed, width)
    for start in range(0, count, PIECE):
        at = start + tl.arange(0, PIECE)
        order, ids = _read(list_ptr, listed, row_ptr, width, at, SHIFT)
        equal = (order == cut) & (at < count)
        rank = seen + tl.cumsum(equal.to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(equal & (rank <= ties), ids, -1), axis=0))
        seen += tl.sum(equal.to(tl.int32), axis=0)
    weight = tl.exp((_value(cut, SHIFT) - peak) * inverse)
    kept = above + tl.minimum(ties, seen).to(tl.float64) * weight.to(tl.float64)
    return _value(cut, SHIFT), last, kept


@jit
def filter_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, facts_ptr, edge_ptr, listed_ptr, starts_ptr,
    list_ptr, arrivals_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr, logits_row, V,
    C: tl.constexpr, LIST: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
    FEW: tl.constexpr, MANY: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FEW and MANY: the two sizes that are sorted; PIECE: what a search reads at once."""
    row = (tl.program_id(0) // C).to(tl.int64)
    chunk = tl.program_id(0) % C
    temperature = tl.load(temperature_ptr + row)
    limit, nucleus = filters_of(top_k_ptr, top_p_ptr, row, V)
    # The logits are older than the kernel before this one, which may still run.
    asked = tl.where(((limit < V) | (nucleus < 1)) & (temperature > 0), V, 0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    p_logits = logits_ptr + row * logits_row
    x = tl.load(p_logits + ids, mask=ids < asked, other=float("-inf")).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    listed = tl.load(listed_ptr + row)
    if listed >= 0:
        inverse = 1.0 / temperature
        edge = tl.load(edge_ptr + row)
        per_unit = tl.load(facts_ptr + row * 3 + 2)
        p_list = list_ptr + row * LIST

        # What can be kept: in any order if it is going to be sorted, else in that of the ids.
        possible = (bin_of(x, per_unit) >= edge) & (ids < V)
        key = (~_order(x, 0)).to(tl.int64) << 32 | ids
        p_start = starts_ptr + row * C + chunk
        if listed <= MANY and listed <= LIST:
            at = tl.atomic_add(p_start + tl.zeros_like(ids), 1, mask=possible, sem="relaxed")
            tl.store(p_list + at, key, mask=possible)
        elif listed <= LIST:
            at = tl.load(p_start) + tl.cumsum(possible.to(tl.int32), axis=0) - 1
            tl.store(p_list + at, key, mask=possible)

        if last_to_arrive(arrivals_ptr + row, C):
            peak = tl.load(facts_ptr + row * 3)
            whole = tl.load(facts_ptr + row * 3 + 1).to(tl.float64)
            if listed <= FEW and listed <= LIST:
                threshold, last, kept = _cut_sorted(
                    p_list, listed, limit, nucleus, whole, V, peak, inverse, FEW
                )
            elif listed <= MANY and listed <= LIST:
                threshold, last, kept = _cut_sorted(
                    p_list, listed, limit, nucleus, whole, V, peak, inverse, MANY
                )
            else:
                floor = (edge - 1).to(tl.float32) / per_unit
                floor = tl.where(edge == -(2**30), float("-inf"), floor)  # everything may stay
                in_list = tl.where(listed <= LIST, listed, 0)
                in_row = tl.where(listed <= LIST, 0, V)
                threshold, last, kept = _cut_searched(
                    p_list, in_list, p_logits, in_row, limit, nucleus, whole, V, floor, peak,
                    inverse, SHIFT, PIECE,
                )  # fmt: skip
            log_total = peak.to(tl.float64) / temperature.to(tl.float64)
            tl.store(log_total_ptr + row, log_total + tl.log(kept))
            tl.store(threshold_ptr + row, threshold)
            tl.store(threshold_id_ptr + row, last)
