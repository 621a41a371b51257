"""Attention of packed draft blocks: each block sees the context strictly before its anchor, and
itself.

Two forms with the same result. `dense_attention` is one masked call over [context | all blocks],
differentiable, for training. `merged_attention` attends to the context and to the own block apart
and merges the two by their log-sum-exp, so a block never meets another block's keys and the mass on
each key group falls out of the merge without any attention weight being stored:

    out = sum_g exp(lse_g - lse) out_g,   lse = log sum_g exp(lse_g),   mass_g = exp(lse_g - lse)
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

NUM_GROUPS = 3  # context, anchor, drafted: the order of every mass


def context_visible(
    anchors: Int[Tensor, "B A"], rows: int, context: int, window: int | None
) -> Bool[Tensor, "B A G S"]:
    """Context keys that each block row sees: before the anchor and, if windowed, near enough."""
    position = torch.arange(context, device=anchors.device)
    before = position < anchors[..., None, None]
    if window is None:
        return before.expand(*anchors.shape, rows, context)
    query = anchors[..., None] + torch.arange(rows, device=anchors.device)
    return before & (query[..., None] - position < window)


def block_visible(
    rows: int, window: int | None, causal: bool, device: torch.device
) -> Bool[Tensor, "G G"]:
    """Rows of the own block that each row sees: all, or the earlier ones when causal."""
    offset = torch.arange(rows, device=device)
    distance = offset[:, None] - offset
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        visible = visible & (distance < window)
        if not causal:
            visible = visible & (-distance < window)
    return visible


def dense_attention(
    query: Float[Tensor, "B H A G D"],
    context: tuple[Float[Tensor, "B KV S D"], Float[Tensor, "B KV S D"]],
    block: tuple[Float[Tensor, "B KV A G D"], Float[Tensor, "B KV A G D"]],
    anchors: Int[Tensor, "B A"],
    window: int | None,
    causal: bool,
) -> Float[Tensor, "B H A G D"]:
    """One masked softmax over the context and all blocks; memory grows with (A G)(S + A G)."""
    batch, heads, num_blocks, rows, _ = query.shape
    length = context[0].shape[2]
    repeat = heads // block[0].shape[1]
    keys, values = (
        torch.cat([c, b.flatten(2, 3)], dim=2).repeat_interleave(repeat, dim=1)
        for c, b in zip(context, block, strict=True)
    )
    seen = context_visible(anchors, rows, length, window).flatten(1, 2)
    own = torch.eye(num_blocks, dtype=torch.bool, device=query.device)[:, None, :, None]
    own = own & block_visible(rows, window, causal, query.device)[None, :, None, :]
    own = own.reshape(num_blocks * rows, num_blocks * rows)
    mask = torch.cat([seen, own.expand(batch, -1, -1)], dim=-1)[:, None]
    out = F.scaled_dot_product_attention(query.flatten(2, 3), keys, values, attn_mask=mask)
    return out.unflatten(2, (num_blocks, rows))


def attend_with_lse(
    query: Float[Tensor, "B KV R D"],
    keys: Float[Tensor, "B KV S D"],
    values: Float[Tensor, "B KV S D"],
    visible: Bool[Tensor, "B R S"],
) -> tuple[Float[Tensor, "B KV R D"], Float[Tensor, "B KV R"]]:
    """Fused attention and its fp32 log-sum-exp (-inf for a row that sees nothing)."""
    bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    bias = bias.masked_fill_(~visible, float("-inf"))[:, None]
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=bias
        )
    else:
        # The fused kernel wants a bias whose rows are 16-byte aligned: pad, then cut the view.
        short = -bias.shape[-1] % 8
        bias = F.pad(bias, (0, short))[..., : keys.shape[2]] if short else bias
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, bias.expand(-1, query.shape[1], -1, -1), True
        )[:2]
    lse = lse[..., : query.shape[2]].float()
    # A row without visible keys: the CPU kernel says 0, others NaN or -inf.
    empty = ~visible.any(-1)[:, None]
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf"))


def merged_attention(
    query: Float[Tensor, "B H A G D"],
    context: tuple[Float[Tensor, "B KV S D"], Float[Tensor, "B KV S D"]],
    block: tuple[Float[Tensor, "B KV A G D"], Float[Tensor, "B KV A G D"]],
    anchors: Int[Tensor, "B A"],
    window: int | None,
    causal: bool,
) -> tuple[Float[Tensor, "B H A G D"], Float[Tensor, "B H A G groups"]]:
    """Output and the mass of every row on (context, anchor, drafted); no gradient.

    Memory grows with (A G) S for the mask alone, so callers cut A into tiles. Context beyond the
    last anchor is never read.
    """
    _, heads, num_blocks, rows, width = query.shape
    kv_heads = block[0].shape[1]
    repeat = heads // kv_heads
    length = min(context[0].shape[2], int(anchors.max()))
    # Query heads that share a kv head become rows of it, so keys and values are never repeated.
    grouped = query.unflatten(1, (kv_heads, repeat))
    visible = context_visible(anchors, rows, length, window).flatten(1, 2)
    context_out, context_lse = attend_with_lse(
        grouped.flatten(2, 4),
        context[0][:, :, :length],
        context[1][:, :, :length],
        visible.repeat(1, repeat, 1),
    )
    context_out = context_out.unflatten(2, (repeat, num_blocks, rows))
    context_lse = context_lse.unflatten(2, (repeat, num_blocks, rows))

    scores = torch.einsum("bvragd,bvahd->bvragh", grouped.float(), block[0].float()) * width**-0.5
    scores = scores.masked_fill(~block_visible(rows, window, causal, query.device), float("-inf"))
    total = torch.logaddexp(context_lse, scores.logsumexp(-1))
    weights = torch.exp(scores - total[..., None])
    out = torch.einsum("bvragh,bvahd->bvragd", weights, block[1].float())
    context_mass = torch.exp(context_lse - total)
    out = out + context_mass[..., None] * context_out.float()
    mass = torch.stack([context_mass, weights[..., 0], weights[..., 1:].sum(-1)], dim=-1)
    return out.flatten(1, 2).to(query.dtype), mass.flatten(1, 2)


def uniform_share(
    anchors: Int[np.ndarray, " A"], rows: int, window: int | None, causal: bool
) -> Float[np.ndarray, "A G"]:
    """Visible block keys over visible keys: the within-block share of attention without taste."""
    own = block_visible(rows, window, causal, torch.device("cpu")).sum(-1).numpy()
    seen = np.broadcast_to(anchors[:, None], (len(anchors), rows))
    if window is not None:
        seen = np.minimum(seen, np.maximum(window - 1 - np.arange(rows), 0))
    return own / (own + seen)
