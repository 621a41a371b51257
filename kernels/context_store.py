"""New context rows of a drafter, normed and rotated, into the caches of all its layers.

One launch for all layers and sequences; rows beyond the cache's end are left out.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .rotary import check, load_halves, rotate, rotated
from .tools import jit, next_power_of_2, on_gpu, tl


@jit
def _store_context_kernel(
    kv, k_norm, keys, values, start, cos, sin, eps, G, S, N, kv_b, kv_g, norm_l, cache_l, cache_b,
    cache_h, cache_s, table_n, KV: tl.constexpr, D: tl.constexpr, MODEL: tl.constexpr,
    BLOCK_KV: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Program (b, g; layer): the heads of one context row in one layer."""
    b, g, layer = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    o_head = tl.arange(0, BLOCK_KV)
    half = tl.arange(0, BLOCK_HALF)[None, :]
    column = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    head = o_head[:, None]
    position = tl.load(start + b).to(tl.int32) + g

    p_row = kv + b.to(tl.int64) * kv_b + g.to(tl.int64) * kv_g + layer * 2 * KV * D
    k1, k2 = load_halves(p_row + head * D + half, half < D // 2, head < KV, D)
    v_mask = (head < KV) & (column < D)
    v = tl.load(p_row + KV * D + head * D + column, mask=v_mask, other=0.0)
    o_key = o_head * 0 + tl.minimum(position, N - 1)
    p_norm = k_norm + layer * norm_l
    k1, k2 = rotate(k1, k2, p_norm, cos, sin, o_key, table_n, half, eps, D, MODEL)

    p_cache = layer.to(tl.int64) * cache_l + b.to(tl.int64) * cache_b
    at = p_cache + head.to(tl.int64) * cache_h + position * cache_s
    kept = head < tl.where(position < S, KV, 0)
    tl.store(keys + at + half, k1, mask=kept & (half < D // 2))
    tl.store(keys + at + D // 2 + half, k2, mask=kept & (half < D // 2))
    tl.store(values + at + column, v, mask=kept & (column < D))


def store_context_reference(
    kv: Float[Tensor, "B G W"],
    k_norm: Float[Tensor, "L D"],
    eps: float,
    keys: Float[Tensor, "L B KV S D"],
    values: Float[Tensor, "L B KV S D"],
    start: Int[Tensor, " B"],
    cos: Float[Tensor, "N D"],
    sin: Float[Tensor, "N D"],
) -> None:
    """Plain torch form of `store_context`."""
    layers, _, kv_heads, length, width = keys.shape
    new_keys, new_values = kv.unflatten(-1, (layers, 2, kv_heads, width)).unbind(3)
    position = start[:, None] + torch.arange(kv.shape[1], device=kv.device)
    table = position.clamp(max=len(cos) - 1)[:, :, None]
    new_keys = rotated(new_keys, k_norm[:, None], eps, cos[table], sin[table])
    kept = position < length
    sequence, place = kept.nonzero()[:, 0], position[kept]
    keys[:, sequence, :, place] = new_keys[kept]
    values[:, sequence, :, place] = new_values[kept]


def store_context_triton(
    kv: Float[Tensor, "B G W"],
    k_norm: Float[Tensor, "L D"],
    eps: float,
    keys: Float[Tensor, "L B KV S D"],
    values: Float[Tensor, "L B KV S D"],
    start: Int[Tensor, " B"],
    cos: Float[Tensor, "N D"],
    sin: Float[Tensor, "N D"],
) -> None:
    """One launch, no synchronisation. Only the last dimension of each tensor must be contiguous."""
    B, G, W = kv.shape
    L, _, KV, S, D = keys.shape
    check(W, L * 2 * KV * D, "width of kv")
    check((keys.shape[1], len(start), k_norm.shape), (B, B, (L, D)), "keys, start and k_norm")
    check(start.is_contiguous(), True, "start contiguous")
    check((values.shape, keys.dtype), (keys.shape, kv.dtype), "values' shape, keys' dtype")
    check((values.stride(), sin.stride()), (keys.stride(), cos.stride()), "values, sin strides")
    last = (kv.stride(-1), keys.stride(-1), cos.stride(-1), k_norm.stride(-1))
    check(last, (1, 1, 1, 1), "last strides")
    block_heads, block_half = next_power_of_2(KV), max(16, next_power_of_2(D // 2))
    _store_context_kernel[(B * G, L)](
        *(kv, k_norm, keys, values, start, cos, sin, eps, G, S, len(cos)),
        *(*kv.stride()[:2], k_norm.stride(0), *keys.stride()[:4], cos.stride(0)),
        KV=KV,
        D=D,
        MODEL=getattr(tl, str(kv.dtype).removeprefix("torch.")),
        BLOCK_KV=block_heads,
        BLOCK_HALF=block_half,
        num_warps=max(1, min(4, block_heads * block_half // 128)),
    )


def store_context(
    kv: Float[Tensor, "B G W"],
    k_norm: Float[Tensor, "L D"],
    eps: float,
    keys: Float[Tensor, "L B KV S D"],
    values: Float[Tensor, "L B KV S D"],
    start: Int[Tensor, " B"],
    cos: Float[Tensor, "N D"],
    sin: Float[Tensor, "N D"],
) -> None:
    """Puts G new context rows into the caches of all L drafter layers at start[b] and behind.

    `kv` holds the raw projections, W = L 2 KV D: for each layer its key heads, then its value
    heads. Keys are normed and rotated, and rounded, as those of a block are. Rows that would pass
    the end of the cache are dropped. Shapes that do not fit are a ValueError on the GPU.
    """
    form = store_context_triton if on_gpu(kv) else store_context_reference
    form(kv, k_norm, eps, keys, values, start, cos, sin)
