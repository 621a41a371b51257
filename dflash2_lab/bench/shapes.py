"""Targets and drafters of published shapes with random weights: time needs no more than the shapes.

Weights are drawn on the device itself, normal with variance 1 / fan-in, so that hidden states and
logits stay of order one. Drafters have the target's widths and read the target's layers at the
published even spread.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash2_lab.models.config import DrafterConfig
from dflash2_lab.models.drafter import Drafter, build_drafter
from dflash2_lab.target import Target, wrap_target

DTYPE = torch.bfloat16
_FAMILIES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


@dataclass(frozen=True)
class Shape:
    """Sizes of a target, and of the drafters that are timed with it.

    `block_size` counts the anchor; `deep_layers` is the depth of the deeper DFlash drafter.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_layers: int = 5
    deep_layers: int = 15
    block_size: int = 8
    conv_group_size: int = 16
    rank: int = 256
    top_k: int = 16


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-4b", "qwen3", 36, 2560, 32, 8, 128, 9728, 151936),
        Shape("smollm2-135m", "llama", 30, 576, 9, 3, 64, 1536, 49152),
        Shape(
            *("tiny", "qwen3", 6, 32, 4, 2, 8, 48, 264),
            draft_layers=2,
            deep_layers=3,
            block_size=4,
            conv_group_size=8,
            rank=8,
            top_k=4,
        ),
    )
}


def shape_of(target: Target) -> Shape:
    """The shape of a target that exists, for random drafters beside it."""
    config = target.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        target.name,
        config.model_type,
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.intermediate_size,
        config.vocab_size,
    )


def random_target(shape: Shape, device: torch.device, seed: int = 0) -> Target:
    """A target with tied embeddings and no text: its tokenizer knows no more than an end token."""
    config_class, model_class = _FAMILIES[shape.family]
    config = config_class(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        eos_token_id=0,
        attn_implementation="sdpa",
        dtype=DTYPE,
    )
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)
    _fill(model, device, seed)
    model.tie_weights()
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)
    tokenizer = SimpleNamespace(eos_token_id=0)
    name = f"{shape.name} shapes, random weights"
    return wrap_target(model.eval().requires_grad_(False), tokenizer, name)


def drafter_config(shape: Shape, kind: str, num_layers: int | None = None) -> DrafterConfig:
    """A drafter of this kind with the shape's widths; DSpark's block has no leading anchor."""
    layers = num_layers or shape.draft_layers
    extras: Mapping[str, object] = {
        "dflash": {},
        "dflash2": {
            "conv_kernel_size": 2,
            "conv_group_size": shape.conv_group_size,
            "selector_rank": shape.rank,
            "selector_top_k": shape.top_k,
        },
        "dspark": {
            "markov_rank": shape.rank,
            "sample_from_anchor": True,
            "block_size": shape.block_size - 1,
        },
    }[kind]
    values = {
        "kind": kind,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_target_layers": shape.num_layers,
        "target_layer_ids": even_spread(shape.num_layers, layers),
        "mask_token_id": shape.vocab_size - 1,
        "block_size": shape.block_size,
    }
    return DrafterConfig(**(values | extras))


def random_drafter(
    shape: Shape,
    kind: str,
    device: torch.device,
    num_layers: int | None = None,
    dtype: torch.dtype = DTYPE,
    seed: int = 0,
) -> Drafter:
    """A drafter of this kind whose every part is awake."""
    with torch.device("meta"):
        drafter = build_drafter(drafter_config(shape, kind, num_layers))
    _fill(drafter, device, seed, dtype)
    drafter.rotary_emb = type(drafter.rotary_emb)(drafter.config).to(device)
    return drafter.eval().requires_grad_(False)


def even_spread(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Target layers that a drafter of so many layers reads: the rule of the package `dflash`, each
    layer once where the target has few."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = max(0, num_target_layers - 4)
    spread = (round(1 + i * span / (num_layers - 1)) for i in range(num_layers))
    return tuple(dict.fromkeys(spread))


def _fill(module: nn.Module, device: torch.device, seed: int, dtype: torch.dtype = DTYPE) -> None:
    """Give a module of the meta device its weights; the same tensor name has the same numbers."""
    state: dict[str, Tensor] = {}
    for name, meta in module.state_dict().items():
        weight = torch.empty(meta.shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        else:
            source = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            weight.normal_(0.0, meta.shape[-1] ** -0.5, generator=source)
        if name.endswith("base_kernel"):
            weight[:, 0] += 1.0
        state[name] = weight
    module.load_state_dict(state, strict=True, assign=True)
