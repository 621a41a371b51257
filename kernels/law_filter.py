"""The thresholds of filtered row laws: the last token that top-k and top-p keep, exactly.

The tokens that may be kept are collected in id order (`row_law` knows from counts how many there
are and where each chunk's begin); the threshold is found by bisection on the ordered bits of their
logits, straight from one value that occurs to the next, and ties at it are cut by id.
"""

from .tools import jit, last_to_arrive, tl


@jit
def bin_of(x, per_unit):
    """Bins of equal width over the real line, in the order of x."""
    return tl.floor(tl.minimum(tl.maximum(x * per_unit, -5e8), 5e8)).to(tl.int32)


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
    values_ptr, count, low, high, target, by_count, peak, inverse, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
def filter_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, facts_ptr, edge_ptr, listed_ptr, starts_ptr,
    list_ptr, list_ids_ptr, arrivals_ptr, log_total_ptr, threshold_ptr, threshold_id_ptr,
    logits_row, V, C: tl.constexpr, LIST: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_LIST: tl.constexpr,
):  # fmt: skip
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
            possible = (bin_of(x.to(tl.float32), per_unit) >= edge) & (ids < V)
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
