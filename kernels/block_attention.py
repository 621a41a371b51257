"""Attention of a short block of query rows per sequence over a static cache, split over its length.

Row g of sequence b sits at position start[b] + g. Its query and the block's keys are normed per
head (optional) and rotated in the half-split layout,

    n = w x / rms(x),    (n1, n2) -> (n1 cos - n2 sin, n2 cos + n1 sin),

in fp32 and rounded once to the model dtype, as the keys in the cache are. The row sees the cache
before start[b] and its own block, each within the window if there is one. One launch does it all:
a program takes the rows of query heads that share a kv head against every n-th tile of the
cache with an online softmax (maximum m, sum l and output o of what it has seen, in powers of two);
the last program of that head to finish merges the n partial results,

    m = max_i m_i,   l = sum_i 2^(m_i - m) l_i,   out = sum_i 2^(m_i - m) o_i / l.

How many tiles there are follows from start[b] on the device, so a captured graph serves any length.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .attention_plan import (
    MERGE_UNROLL,
    UNITS_PER_SPLIT,
    Workspace,
    default_splits,
    head_groups,
    make_workspace,
    tiling,
)
from .rotary import check, load_halves, rotate, rotated
from .tools import jit, last_to_arrive, launches_early, next_power_of_2, on_gpu, tl, triton


def block_attention_reference(
    qkv: Float[Tensor, "B G W"],
    cache_k: Float[Tensor, "B KV S D"],
    cache_v: Float[Tensor, "B KV S D"],
    start: Int[Tensor, " B"],
    cos: Float[Tensor, "N D"],
    sin: Float[Tensor, "N D"],
    num_heads: int,
    q_norm: Float[Tensor, " D"] | None = None,
    k_norm: Float[Tensor, " D"] | None = None,
    eps: float = 1e-6,
    causal: bool = True,
    window: int | None = None,
    write: bool = True,
    num_splits: int | None = None,
    shares: bool = False,
    workspace: Workspace | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """One masked softmax over [cache, block] in fp32; neither splits nor workspace matter."""
    batch, kv_heads, _, width = cache_k.shape
    rows = qkv.shape[1]
    offset = torch.arange(rows, device=qkv.device)
    position = start[:, None] + offset
    table = position.clamp(max=len(cos) - 1)
    query, key, value = qkv.unflatten(-1, (-1, width)).split([num_heads, kv_heads, kv_heads], dim=2)
    query = rotated(query, q_norm, eps, cos[table], sin[table])
    key = rotated(key, k_norm, eps, cos[table], sin[table])

    length = min(int(start.max()), cache_k.shape[2])
    cached = torch.arange(length, device=qkv.device)
    stored = cached < start[:, None]
    # What lies behind may be NaN, which a weight of zero would not remove.
    old_keys, old_values = (
        cache[:, :, :length].masked_fill(~stored[:, None, :, None], 0.0)
        for cache in (cache_k, cache_v)
    )
    distance = offset[:, None] - offset
    own = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    seen = stored[:, None].expand(-1, rows, -1)
    if window is not None:
        own = own & (distance.abs() < window)
        seen = seen & (position[..., None] - cached < window)
    visible = torch.cat([seen, own.expand(batch, -1, -1)], dim=-1)

    wide = torch.promote_types(qkv.dtype, torch.float32)
    keys = torch.cat([old_keys, key.movedim(1, 2)], dim=2).to(wide)
    values = torch.cat([old_values, value.movedim(1, 2)], dim=2).to(wide)
    grouped = query.to(wide).unflatten(2, (kv_heads, -1))
    scores = torch.einsum("bgvrd,bvsd->bvrgs", grouped, keys) * width**-0.5
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = scores.softmax(-1)
    out = torch.einsum("bvrgs,bvsd->bgvrd", weights, values).flatten(2).to(qkv.dtype)
    if write:
        sequence = torch.arange(batch, device=qkv.device)[:, None]
        cache_k[sequence, :, position], cache_v[sequence, :, position] = key, value
    if not shares:
        return out
    groups = weights.flatten(1, 2).tensor_split((length, length + 1), dim=-1)
    mass = torch.stack([group.sum(-1) for group in groups], dim=-1)
    return out, scores.logsumexp(-1).flatten(1, 2).float(), mass.float()


@jit
def _load_tile(keys, values, position, end, stride, half, column, D: tl.constexpr):
    """Keys and values at positions before `end`; zero behind it, where a cache may hold NaN."""
    there = (position < end)[:, None]
    at = (position * stride)[:, None]
    k1, k2 = load_halves(keys + at + half, half < D // 2, there, D)
    return k1, k2, tl.load(values + at + column, mask=there & (column < D), other=0.0)


@jit
def _attend(
    q1, q2, k1, k2, v, visible, scale, high, acc, MODEL: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """One tile into the running maximum and output; its weights, and how much older sums shrink."""
    scores = tl.dot(q1, tl.trans(k1.to(DOT)), input_precision="ieee")
    scores = tl.dot(q2, tl.trans(k2.to(DOT)), scores, input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_high = tl.maximum(high, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_high[:, None])
    shrink = tl.exp2(high - new_high)
    rounded = weights.to(MODEL).to(DOT)
    acc = tl.dot(rounded, v.to(DOT), acc * shrink[:, None], input_precision="ieee")
    return new_high, acc, weights, shrink


@jit
def _finish(
    out, lse, mass, high, total, acc, own_high, anchor, drafted, at, mask, row_at, row_mask,
    SHARES: tl.constexpr,
):  # fmt: skip
    """Stores output rows and, with shares, log-sum-exp and masses (`total` is then the context)."""
    if SHARES:
        own = tl.exp2(own_high - high)
        context, anchor, drafted = total, anchor * own, drafted * own
        total = context + anchor + drafted
        tl.store(lse + row_at, (high + tl.log2(total)) * 0.6931471805599453, mask=row_mask)
        tl.store(mass + row_at * 3, context / total, mask=row_mask)
        tl.store(mass + row_at * 3 + 1, anchor / total, mask=row_mask)
        tl.store(mass + row_at * 3 + 2, drafted / total, mask=row_mask)
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@jit
def _block_attention_kernel(
    qkv, cache_k, cache_v, start, cos, sin, q_norm, k_norm, out, lse, mass, partial, stats,
    counters, eps, scale, S, N, qkv_b, qkv_g, cache_b, cache_h, cache_s, table_n, KV: tl.constexpr,
    REPEAT: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr, WRITE: tl.constexpr, SHARES: tl.constexpr,
    MODEL: tl.constexpr, DOT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_HALF: tl.constexpr, UNITS: tl.constexpr, UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, kv, group; split): the rows of HEADS query heads of a kv head against the split's
    share."""
    head, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    GROUPS: tl.constexpr = (REPEAT + HEADS - 1) // HEADS
    group, kv = head % GROUPS, (head // GROUPS) % KV
    b = head // (GROUPS * KV)
    H: tl.constexpr = KV * REPEAT
    R: tl.constexpr = G * HEADS
    BLOCK_D: tl.constexpr = 2 * BLOCK_HALF

    # Rows are (g, query head of this group), so that a g's heads lie side by side in memory.
    # Rows that only fill up to a power of two see what the last real ones see.
    row = tl.arange(0, BLOCK_R)
    own_head = group * HEADS + row % HEADS
    row_mask = (row < R) & (own_head < REPEAT)
    g = tl.minimum(row // HEADS, G - 1)
    query_head = kv * REPEAT + tl.minimum(own_head, REPEAT - 1)
    o_block = tl.arange(0, BLOCK_G)
    block_mask = (o_block < G)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    column = tl.arange(0, BLOCK_D)[None, :]

    # Units of work: the tiles of the visible cache, then the block itself; unit u goes to split
    # u % active. What there is to do follows from start[b], so it is known here and not before.
    first_position = tl.load(start + b).to(tl.int32)
    end = tl.minimum(first_position, S)
    low = tl.maximum(first_position - (WINDOW - 1), 0) if WINDOW else 0
    tiles = tl.cdiv(tl.maximum(end - low, 0), BLOCK_S)
    active = tl.minimum(num_splits, tl.cdiv(tiles + 1, UNITS))
    if split >= active:
        return
    own = split == tiles % active
    tile = split

    # All is asked for before anything is waited for: at batch 1 latency is what counts. The cache
    # before `start` is older than the kernel before this one, which may still run.
    p_cache = b.to(tl.int64) * cache_b + kv.to(tl.int64) * cache_h
    p_cache_k, p_cache_v = cache_k + p_cache, cache_v + p_cache
    position = low + tile * BLOCK_S + tl.arange(0, BLOCK_S)
    k1, k2, v = _load_tile(p_cache_k, p_cache_v, position, end, cache_s, half, column, D)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_qkv = qkv + b.to(tl.int64) * qkv_b
    p_query = p_qkv + (g * qkv_g + query_head * D)[:, None] + half
    query1, query2 = load_halves(p_query, half < D // 2, row_mask[:, None], D)
    p_block = p_qkv + (o_block * qkv_g)[:, None]
    p_key = p_block + (H + kv) * D + half
    key1, key2 = load_halves(p_key, half < D // 2, block_mask, D)
    p_value = p_block + (H + KV + kv) * D + column
    value = tl.load(p_value, mask=block_mask & (column < D), other=0.0)

    o_query = tl.minimum(first_position + g, N - 1)
    q1, q2 = rotate(query1, query2, q_norm, cos, sin, o_query, table_n, half, eps, D, MODEL)
    q1, q2 = q1.to(DOT), q2.to(DOT)

    # -1e30 is below every score and, unlike -inf, may be subtracted from itself.
    high = tl.full([BLOCK_R], -1e30, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    own_high, anchor, drafted = high, total, total

    if own:
        o_own = first_position + o_block
        o_key = tl.minimum(o_own, N - 1)
        own_k1, own_k2 = rotate(key1, key2, k_norm, cos, sin, o_key, table_n, half, eps, D, MODEL)
        if WRITE:
            own_at = (o_own * cache_s)[:, None]
            own_mask = block_mask & (o_own < tl.where(group == 0, S, 0))[:, None]
            tl.store(p_cache_k + own_at + half, own_k1, mask=own_mask & (half < D // 2))
            tl.store(p_cache_k + own_at + D // 2 + half, own_k2, mask=own_mask & (half < D // 2))
            tl.store(p_cache_v + own_at + column, value, mask=own_mask & (column < D))
        distance = g[:, None] - o_block[None, :]
        near = (o_block < G)[None, :] & (g >= 0)[:, None]
        if CAUSAL:
            near = near & (distance >= 0)
        if WINDOW:
            near = near & (distance < WINDOW) & (distance > -WINDOW)
        high, acc, own_weights, _own_shrink = _attend(
            q1, q2, own_k1, own_k2, value, near, scale, high, acc, MODEL, DOT
        )
        if SHARES:
            is_anchor = (o_block == 0)[None, :]
            anchor = tl.sum(tl.where(is_anchor, own_weights, 0.0), axis=1)
            drafted = tl.sum(tl.where(is_anchor, 0.0, own_weights), axis=1)
            own_high = high
        else:
            total = tl.sum(own_weights, axis=1)

    # The sum over a tile's columns crosses warps, so it waits until all tiles are through.
    sums = tl.zeros([BLOCK_R, BLOCK_S], tl.float32)
    for _ in range(tile, tiles, active):
        next_position = position + active * BLOCK_S
        next_k1, next_k2, next_v = _load_tile(
            p_cache_k, p_cache_v, next_position, end, cache_s, half, column, D
        )
        visible = (position < end)[None, :] & (g >= 0)[:, None]
        if WINDOW:
            visible = visible & ((first_position + g)[:, None] - position[None, :] < WINDOW)
        high, acc, weights, shrink = _attend(
            q1, q2, k1, k2, v, visible, scale, high, acc, MODEL, DOT
        )
        total *= shrink
        sums = sums * shrink[:, None] + weights
        position, k1, k2, v = next_position, next_k1, next_k2, next_v
    total += tl.sum(sums, axis=1)

    at = ((b * G + g) * H + query_head)[:, None] * D + column
    mask = row_mask[:, None] & (column < D)
    row_at = (b * H + query_head) * G + g
    if active == 1:
        if own:
            _finish(
                out, lse, mass, high, total, acc, own_high, anchor, drafted, at, mask, row_at,
                row_mask, SHARES,
            )  # fmt: skip
    elif partial is not None:
        # Of a split: high, total, acc. Of the head: the block's own high, anchor, drafted.
        p_stats = stats + head.to(tl.int64) * (2 * num_splits + 3) * R + row
        p_shares = p_stats + 2 * num_splits * R
        p_partial = partial + head.to(tl.int64) * num_splits * R * D + row[:, None] * D + column
        tl.store(p_stats + 2 * split * R, high, mask=row_mask)
        tl.store(p_stats + (2 * split + 1) * R, total, mask=row_mask)
        tl.store(p_partial + split * R * D, acc, mask=mask)
        if SHARES and own:
            tl.store(p_shares, own_high, mask=row_mask)
            tl.store(p_shares + R, anchor, mask=row_mask)
            tl.store(p_shares + 2 * R, drafted, mask=row_mask)
        if last_to_arrive(counters + head, active):
            sum_high = tl.full([BLOCK_R], -1e30, tl.float32)
            sum_total = tl.zeros([BLOCK_R], tl.float32)
            sum_acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
            for first in range(0, active, UNROLL):
                for i in tl.static_range(UNROLL):
                    part = first + i
                    here = row < tl.where(part < active, R, 0)
                    p_part = p_stats + 2 * part * R
                    part_high = tl.load(p_part, mask=here, other=-1e30)
                    part_total = tl.load(p_part + R, mask=here, other=1.0)
                    part_mask = here[:, None] & (column < D)
                    part_acc = tl.load(p_partial + part * R * D, mask=part_mask, other=0.0)
                    new_high = tl.maximum(sum_high, part_high)
                    old_share = tl.exp2(sum_high - new_high)
                    part_share = tl.exp2(part_high - new_high)
                    sum_total = sum_total * old_share + part_total * part_share
                    sum_acc = sum_acc * old_share[:, None] + part_acc * part_share[:, None]
                    sum_high = new_high
            if SHARES:
                own_high = tl.load(p_shares, mask=row_mask, other=-1e30)
                anchor = tl.load(p_shares + R, mask=row_mask, other=0.0)
                drafted = tl.load(p_shares + 2 * R, mask=row_mask, other=1.0)
            _finish(
                out, lse, mass, sum_high, sum_total, sum_acc, own_high, anchor, drafted, at,
                mask, row_at, row_mask, SHARES,
            )  # fmt: skip


def block_attention_triton(
    qkv: Float[Tensor, "B G W"],
    cache_k: Float[Tensor, "B KV S D"],
    cache_v: Float[Tensor, "B KV S D"],
    start: Int[Tensor, " B"],
    cos: Float[Tensor, "N D"],
    sin: Float[Tensor, "N D"],
    num_heads: int,
    q_norm: Float[Tensor, " D"] | None = None,
    k_norm: Float[Tensor, " D"] | None = None,
    eps: float = 1e-6,
    causal: bool = True,
    window: int | None = None,
    write: bool = True,
    num_splits: int | None = None,
    shares: bool = False,
    workspace: Workspace | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """One launch, no synchronisation. Only the last dimension of each tensor must be contiguous."""
    B, G, W = qkv.shape
    _, KV, S, D = cache_k.shape
    repeat = num_heads // KV
    check(W, (repeat * KV + 2 * KV) * D, "width of qkv")
    check(num_heads % KV, 0, "query heads modulo kv heads")
    check((len(cache_k), len(start), cache_v.shape), (B, B, cache_k.shape), "cache and start")
    check(start.is_contiguous(), True, "start contiguous")
    check((cache_k.dtype, cache_v.dtype), (qkv.dtype, qkv.dtype), "dtype of the cache")
    check(
        (cache_v.stride(), sin.stride()), (cache_k.stride(), cos.stride()), "cache_v, sin strides"
    )
    check((qkv.stride(-1), cache_k.stride(-1), cos.stride(-1)), (1, 1, 1), "last strides")
    if num_splits is None:
        num_splits = default_splits(B, KV, G, num_heads, S, qkv.device)
    if num_splits > 1 and workspace is None:
        workspace = make_workspace(B, KV, G, num_heads, D, num_splits, qkv.device)
    scratch = (None, None, None)
    heads, groups = head_groups(B, KV, G, num_heads)
    programs = B * KV * groups
    if num_splits > 1:
        scratch = workspace.partial, workspace.stats, workspace.counters
        rows = programs * G * heads
        needed = (rows * num_splits * D, rows * (2 * num_splits + 3), programs)
        if any(len(part) < size for part, size in zip(scratch, needed, strict=True)):
            raise ValueError(f"workspace too small for {num_splits} splits of {tuple(qkv.shape)}")
    out = torch.empty(B, G, num_heads * D, dtype=qkv.dtype, device=qkv.device)
    lse = mass = None
    if shares:
        lse = torch.empty(B, num_heads, G, dtype=torch.float32, device=qkv.device)
        mass = torch.empty(B, num_heads, G, 3, dtype=torch.float32, device=qkv.device)

    native = isinstance(_block_attention_kernel, triton.JITFunction)
    early = launches_early(qkv)
    model = getattr(tl, str(qkv.dtype).removeprefix("torch."))
    block_half = max(16, next_power_of_2(D // 2))
    block_rows = max(16, next_power_of_2(G * heads))
    tile_rows, num_warps = tiling(block_rows, block_half, qkv.element_size())
    _block_attention_kernel[(programs, num_splits)](
        *(qkv, cache_k, cache_v, start, cos, sin, q_norm, k_norm, out, lse, mass, *scratch),
        *(eps, D**-0.5 / math.log(2), S, len(cos)),
        *(*qkv.stride()[:2], *cache_k.stride()[:3], cos.stride(0)),
        KV=KV,
        REPEAT=repeat,
        HEADS=heads,
        G=G,
        D=D,
        WINDOW=window or 0,
        CAUSAL=causal,
        WRITE=write,
        SHARES=shares,
        MODEL=model,
        DOT=model if native else tl.float32,  # the interpreter multiplies bf16 as integers
        BLOCK_R=block_rows,
        BLOCK_G=max(16, next_power_of_2(G)),
        BLOCK_S=tile_rows,
        BLOCK_HALF=block_half,
        UNITS=UNITS_PER_SPLIT,
        UNROLL=MERGE_UNROLL,
        PDL=early,
        num_warps=num_warps,
        **({"launch_pdl": True} if early else {}),
    )
    return (out, lse, mass) if shares else out


def block_attention(
    qkv: Float[Tensor, "B G W"],
    cache_k: Float[Tensor, "B KV S D"],
    cache_v: Float[Tensor, "B KV S D"],
    start: Int[Tensor, " B"],
    cos: Float[Tensor, "N D"],
    sin: Float[Tensor, "N D"],
    num_heads: int,
    q_norm: Float[Tensor, " D"] | None = None,
    k_norm: Float[Tensor, " D"] | None = None,
    eps: float = 1e-6,
    causal: bool = True,
    window: int | None = None,
    write: bool = True,
    num_splits: int | None = None,
    shares: bool = False,
    workspace: Workspace | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Output [B, G, H D] of a block after start[b] cached rows; with `shares` also lse and mass.

    `qkv` holds the raw projections, W = (H + 2 KV) D: query heads, key heads, value heads. `cos`
    and `sin` are indexed by absolute position (past their end the last row is taken) and repeat
    their first half. Cache rows from start[b] on may hold anything. A cached key is seen if
    position(query) - position(key) < window; a row of the block if it is not later (`causal`) and
    less than `window` away. `write` stores the block's rotated keys and its values at start[b] to
    start[b] + G - 1, which must lie in the cache; without it nothing is kept.

    `shares` gives lse [B, H, G] (natural logarithm, fp32) and the mass [B, H, G, 3] of each row on
    the context, the anchor (block row 0) and the drafted rows. More `num_splits` shorten a call
    that would leave multiprocessors idle (default: `default_splits`); `workspace` is what they
    write to, allocated here if missing. Shapes that do not fit are a ValueError on the GPU.
    """
    form = block_attention_triton if on_gpu(qkv) else block_attention_reference
    return form(
        *(qkv, cache_k, cache_v, start, cos, sin, num_heads, q_norm, k_norm, eps, causal, window),
        *(write, num_splits, shares, workspace),
    )
