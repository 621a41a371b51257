"""Random drafters for the tiny targets of `helpers`, with every part awake."""

import torch
from helpers import MASK_ID, tiny_target

from dflash2_lab.models.config import DrafterConfig
from dflash2_lab.models.drafter import Drafter, build_drafter

KIND_SETTINGS = {
    "dflash": {},
    "dflash2": {
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 6,
        "selector_top_k": 5,
    },
    "dspark": {"markov_rank": 6, "sample_from_anchor": True},
}


def tiny_config(kind: str = "dflash2", **changes: object) -> DrafterConfig:
    """A two-layer drafter for `tiny_target`: windowed, then full attention; blocks of 4 rows."""
    values = {
        "kind": kind,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 264,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "num_target_layers": 4,
        "target_layer_ids": (1, 2),
        "mask_token_id": MASK_ID,
        "block_size": 4,
        "windows": (6, None),
    }
    return DrafterConfig(**(values | KIND_SETTINGS[kind] | changes))


def tiny_drafter(
    kind: str = "dflash2",
    seed: int = 0,
    own_embedding: bool = False,
    own_head: bool = False,
    **changes: object,
) -> Drafter:
    """A drafter whose every weight, convs and selector included, is random and matters."""
    drafter = build_drafter(tiny_config(kind, **changes), own_embedding, own_head)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise)
    return drafter.eval().requires_grad_(False)


def drafted(drafter: Drafter, features, embeds, anchors, **kwargs: object):
    """Hidden states of blocks from target features and block embeddings."""
    with torch.no_grad():
        return drafter(embeds, drafter.context_keys(features), anchors, **kwargs)


def random_blocks(drafter: Drafter, anchors, length: int = 20, seed: int = 0):
    """Features [B, S, N H], block embeddings [B, A, G, H] and anchors [B, A]."""
    anchors = torch.tensor(anchors)
    settings, generator = drafter.settings, torch.Generator().manual_seed(seed)
    features = torch.randn(len(anchors), length, drafter.fc.in_features, generator=generator)
    shape = (*anchors.shape, settings.block_size, settings.hidden_size)
    return features, torch.randn(shape, generator=generator), anchors


__all__ = ["drafted", "random_blocks", "tiny_config", "tiny_drafter", "tiny_target"]
