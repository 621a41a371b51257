"""A lean forward pass of target and drafter: the modules' own weights, a few launches a layer.

Projections that read the same input are stored behind one another (the Hugging Face modules then
hold views of them, so nothing is kept twice), keys and values live in a static cache with positions
of its own, and each layer is four products and one attention (see `kernels.linear`). Dense Llama,
Qwen2 and Qwen3 models, and every drafter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash2_lab.errors import LabError
from dflash2_lab.kernels.attention_plan import Workspace as AttentionWorkspace
from dflash2_lab.kernels.attention_plan import default_splits
from dflash2_lab.kernels.attention_plan import make_workspace as attention_workspace
from dflash2_lab.kernels.block_attention import block_attention
from dflash2_lab.kernels.conv_project import conv_project
from dflash2_lab.kernels.linear import linear, linear_add
from dflash2_lab.kernels.linear_plan import Workspace, make_workspace
from dflash2_lab.kernels.stream import Norm, Rows, Stream
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.target import Target

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of one decoder layer; convs are (projection, base kernels) pairs."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    input_norm: Norm
    post_norm: Norm
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_conv: tuple[Tensor, Tensor] | None = None
    mlp_conv: tuple[Tensor, Tensor] | None = None
    window: int | None = None
    causal: bool = True


@dataclass(frozen=True, eq=False)
class Trunk:
    """The layers of a model with what they share: rotary tables [N, D] and head counts."""

    layers: tuple[Layer, ...]
    final_norm: Norm
    cos: Float[Tensor, "N D"]
    sin: Float[Tensor, "N D"]
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, eq=False)
class Scratch:
    """Memory that all layers share, since their launches follow one another."""

    product: Workspace
    attention: AttentionWorkspace
    num_splits: int


def make_scratch(trunk: Trunk, batch: int, rows: int, capacity: int) -> Scratch:
    """Scratch for `batch` blocks of `rows` rows over a cache of `capacity` positions."""
    device = trunk.cos.device
    block = (batch, trunk.num_kv_heads, rows, trunk.num_heads)
    splits = default_splits(*block, capacity, device)
    workspace = attention_workspace(*block, trunk.head_dim, splits, device)
    return Scratch(make_workspace(device, batch * rows), workspace, splits)


def refusal(target: Target) -> str | None:
    """Why this target has no lean forward, or None."""
    config = target.config
    if config.model_type not in FAMILIES:
        return f"architecture {config.model_type!r}, expected one of {', '.join(FAMILIES)}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"layers of type {', '.join(sorted(kinds))}, expected full_attention only"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r}, expected 'silu'"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        return f"rotary embedding {rope!r}, whose angles change with the length"
    layer = target.layers[0]
    plain = all(isinstance(part, nn.Linear) for part in _projections(layer))
    if not plain:
        return "projections that are no plain linear layers (quantised weights?)"
    if not isinstance(target.head, nn.Linear):
        return f"an output head of type {type(target.head).__name__}, expected a linear layer"
    return None


def lean_target(target: Target, capacity: int) -> Trunk:
    """The trunk of a target with rotary tables for `capacity` positions.

    Raises `LabError` for a model that is not a dense Llama, Qwen2 or Qwen3.
    """
    why = refusal(target)
    if why:
        raise LabError(f"graph engine: target {target.name} has {why}; use engine='eager'")
    config = target.config
    layers = tuple(_layer(layer, config.rms_norm_eps) for layer in target.layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Trunk(
        layers,
        Norm(target.decoder.norm.weight, config.rms_norm_eps),
        *rotary_tables(target.decoder.rotary_emb, capacity, target.embed_weight),
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
    )


def lean_drafter(drafter: Drafter, capacity: int) -> Trunk:
    """The trunk of a drafter."""
    settings = drafter.settings
    if settings.hidden_act != "silu":
        raise LabError(
            f"graph engine: drafter {drafter.name} has activation {settings.hidden_act!r}, "
            "expected 'silu'; use engine='eager'"
        )
    layers = tuple(_layer(layer, settings.rms_norm_eps) for layer in drafter.layers)
    return Trunk(
        layers,
        Norm(drafter.norm.weight, settings.rms_norm_eps),
        *rotary_tables(drafter.rotary_emb, capacity, drafter.fc.weight),
        settings.num_attention_heads,
        settings.num_key_value_heads,
        settings.head_dim,
    )


@torch.no_grad()
def rotary_tables(
    rotary: nn.Module, capacity: int, like: Tensor
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
    """cos and sin of every position, as the model's own module rounds them."""
    positions = torch.arange(capacity, device=like.device)[None]
    cos, sin = rotary(like[:1, :1], positions)
    return cos[0].contiguous(), sin[0].contiguous()


def _projections(layer: nn.Module) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
            mlp.gate_proj, mlp.up_proj, mlp.down_proj]  # fmt: skip


def _layer(layer: nn.Module, eps: float) -> Layer:
    query, key, value, out, gate, up, down = _projections(layer)
    attention = layer.self_attn
    convs = {}
    for name in ("attention_conv", "mlp_conv"):
        conv = getattr(layer, name, None)
        if conv is not None:
            convs[name] = (conv.kernel_projection.weight, conv.base_kernel)
    return Layer(
        *_fused(query, key, value),
        out.weight,
        out.bias,
        *_fused(gate, up),
        down.weight,
        down.bias,
        Norm(layer.input_layernorm.weight, eps),
        Norm(layer.post_attention_layernorm.weight, eps),
        *(getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")),
        **convs,
        window=getattr(layer, "window", None),
        causal=getattr(layer, "causal", True),
    )


@torch.no_grad()
def _fused(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weights and biases behind one another; the modules become views, unless they are already."""
    sizes = [part.weight.shape[0] for part in parts]
    fused = []
    for name in ("weight", "bias"):
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is None:
            fused.append(None)
            continue
        whole = _adjacent(tensors)
        if whole is None:
            whole = torch.cat([tensor.detach() for tensor in tensors])
            for tensor, view in zip(tensors, whole.split(sizes), strict=True):
                tensor.data = view
        fused.append(whole)
    return tuple(fused)


def _adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor that these are consecutive parts of, if an earlier engine has fused them."""
    first, places = tensors[0], []
    for tensor in tensors:
        places.append(tensor.storage_offset())
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if not tensor.is_contiguous():
            return None
    ends = [place + tensor.numel() for place, tensor in zip(places, tensors, strict=True)]
    if places[1:] != ends[:-1]:
        return None
    rows = sum(tensor.shape[0] for tensor in tensors)
    shape = (rows, *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), places[0])


def run_layers(
    trunk: Trunk,
    stream: Stream,
    keys: Float[Tensor, "L B KV S D"],
    values: Float[Tensor, "L B KV S D"],
    start: Int[Tensor, " B"],
    write: bool,
    scratch: Scratch,
    taps: Mapping[int, Tensor] | None = None,
) -> Rows:
    """All layers over the block rows of every sequence: the input of the output head, [B G, H].

    `start` are the positions of the first rows; cache rows before them are the context. With
    `write` the block's keys and values are stored. The output of layer i is written to `taps[i]`.
    """
    batch = len(start)
    rows = stream.residual.shape[0] // batch
    last = len(trunk.layers) - 1
    for index, layer in enumerate(trunk.layers):
        following = trunk.layers[index + 1] if index < last else None
        x, conv = _before(stream, layer.attention_conv, rows)
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        mixed = block_attention(
            qkv.unflatten(0, (batch, rows)),
            keys[index],
            values[index],
            start,
            trunk.cos,
            trunk.sin,
            trunk.num_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=trunk.final_norm.eps,
            causal=layer.causal,
            window=layer.window,
            write=write,
            num_splits=scratch.num_splits,
            workspace=scratch.attention,
        ).flatten(0, 1)
        stream = linear_add(
            mixed, layer.out, stream.residual, layer.post_norm, layer.out_bias, conv,
            workspace=scratch.product,
        )  # fmt: skip
        x, conv = _before(stream, layer.mlp_conv, rows)
        inner = linear(x, layer.gate_up, layer.gate_up_bias, gated=True)
        norm = following.input_norm if following else trunk.final_norm
        stream = linear_add(
            inner, layer.down, stream.residual, norm, layer.down_bias, conv,
            out=None if taps is None else taps.get(index), workspace=scratch.product,
        )  # fmt: skip
    return stream.normed


def _before(stream: Stream, conv: tuple[Tensor, Tensor] | None, rows: int):
    """The sublayer's input, convolved if the drafter has convs, and the conv of its output."""
    if conv is None:
        return stream.normed, None
    value, after = conv_project(stream.normed, *conv, rows)
    return Rows(value), after
