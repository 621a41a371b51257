"""Drafter layers: Qwen3 attention that reads the target's context features, MLP, grouped conv.

Context rows enter only as keys and values and never pass through a convolution; block rows are
queries, keys and values. Shapes follow `B A G H`: batch, blocks, rows of a block, hidden.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from dflash2_lab.kernels.grouped_conv import grouped_conv
from dflash2_lab.models.config import DrafterConfig

Rotary = tuple[Float[Tensor, "B *rows D"], Float[Tensor, "B *rows D"]]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean square in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(
    x: Float[Tensor, "B heads *rows D"],
    cos: Float[Tensor, "B *rows D"],
    sin: Float[Tensor, "B *rows D"],
) -> Float[Tensor, "B heads *rows D"]:
    """Rotary embedding in the half-split layout of Llama and Qwen."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


class Attention(nn.Module):
    """Grouped-query attention with per-head RMS norms on queries and keys."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, query_width, bias=bias)
        self.k_proj = nn.Linear(hidden, key_width, bias=bias)
        self.v_proj = nn.Linear(hidden, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, hidden, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def heads(self, x: Float[Tensor, "B *rows width"]) -> Float[Tensor, "B heads *rows D"]:
        return x.unflatten(-1, (-1, self.head_dim)).movedim(-2, 1)

    def keys_values(
        self, x: Float[Tensor, "B *rows H"], rotary: Rotary
    ) -> tuple[Float[Tensor, "B KV *rows D"], Float[Tensor, "B KV *rows D"]]:
        keys = self.k_norm(self.heads(self.k_proj(x)))
        return rotate(keys, *rotary), self.heads(self.v_proj(x))

    def queries(
        self, x: Float[Tensor, "B A G H"], rotary: Rotary
    ) -> Float[Tensor, "B heads A G D"]:
        return rotate(self.q_norm(self.heads(self.q_proj(x))), *rotary)


class MLP(nn.Module):
    """Gated linear unit: down(act(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class GroupedConv(nn.Module):
    """Dynamic convolutions before and after one sublayer, both predicted from its normed input.

    Starts as the identity: base tap 0 is one, every other tap and the projection are zero.
    """

    def __init__(self, hidden: int, taps: int, group_size: int):
        super().__init__()
        self.shape = (2, taps, hidden // group_size)
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group_size), bias=False)

    def around(
        self,
        x: Float[Tensor, "B A G H"],
        sublayer: Callable[[Float[Tensor, "B A G H"]], Float[Tensor, "B A G H"]],
    ) -> Float[Tensor, "B A G H"]:
        before, after = self.kernel_projection(x).unflatten(-1, self.shape).unbind(-3)
        out = sublayer(grouped_conv(x, before, self.base_kernel[0]))
        return grouped_conv(out, after, self.base_kernel[1])


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP, each wrapped in a grouped conv for DFlash 2."""

    def __init__(self, config: DrafterConfig, index: int):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.window, self.causal = config.windows[index], config.causal[index]
        self.attention_conv = self.mlp_conv = None
        if config.conv_kernel_size is not None:
            conv = (config.hidden_size, config.conv_kernel_size, config.conv_group_size)
            self.attention_conv, self.mlp_conv = GroupedConv(*conv), GroupedConv(*conv)

    def forward(
        self,
        x: Float[Tensor, "B A G H"],
        context: tuple[Float[Tensor, "B KV S D"], Float[Tensor, "B KV S D"]],
        anchors: Int[Tensor, "B A"],
        rotary: Rotary,
        attend: Callable,
    ) -> Float[Tensor, "B A G H"]:
        def attention(rows: Float[Tensor, "B A G H"]) -> Float[Tensor, "B A G H"]:
            block = self.self_attn.keys_values(rows, rotary)
            query = self.self_attn.queries(rows, rotary)
            out = attend(query, context, block, anchors, self.window, self.causal)
            return self.self_attn.o_proj(out.movedim(1, -2).flatten(-2))

        normed = self.input_layernorm(x)
        conv = self.attention_conv
        x = x + (attention(normed) if conv is None else conv.around(normed, attention))
        normed, conv = self.post_attention_layernorm(x), self.mlp_conv
        return x + (self.mlp(normed) if conv is None else conv.around(normed, self.mlp))


def softcap(logits: Float[Tensor, "*rows V"], cap: float | None) -> Float[Tensor, "*rows V"]:
    """cap * tanh(logits / cap); None leaves the logits alone."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def embed_rows(
    weight: Float[Tensor, "V H"], ids: Int[Tensor, "*rows"], scale: float
) -> Float[Tensor, "*rows H"]:
    """Rows of the target's raw embedding table times the checkpoint's input scale."""
    return F.embedding(ids, weight) * scale
