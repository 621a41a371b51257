"""Tiny drafter checkpoints, written file by file so that tests can break any part of them."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from dflash2_lab.models.config import read_config
from dflash2_lab.models.tensors import expected_tensors

BODY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
METHOD = {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [1, 3]}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
MARKOV = {
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def zlab(kind="dflash2", **top):
    """A z-lab config.json of a tiny drafter; keyword arguments replace top-level keys."""
    raw = {
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"],
        **copy.deepcopy(BODY),
        "num_target_layers": 6,
        "is_causal": False,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "dflash_config": {**METHOD, **(SELECTOR if kind == "dflash2" else {})},
    }
    return raw | top


def deepspec(**top):
    """DeepSpec's flat DSpark config.json."""
    raw = {"architectures": ["Qwen3DSparkModel"], **copy.deepcopy(BODY), **METHOD, **MARKOV}
    return raw | {"num_target_layers": 6, "num_anchors": 16} | top


def speculators(kind="dflash", **top):
    """A speculators config.json: nested body, flat method keys, layer ids one higher."""
    heads = {"dflash": {}, "dflash2": SELECTOR, "dspark": MARKOV}[kind]
    names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
    raw = {
        "architectures": [names.get(kind, "DSparkDraftModel")],
        "speculators_model_type": kind,
        "transformer_layer_config": copy.deepcopy(BODY),
        "block_size": 4,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [2, 4],
        "draft_vocab_size": 64,
        "speculators_config": {"algorithm": kind},
        **heads,
    }
    return raw | top


def nested(raw, **keys):
    """The same config with other keys in `dflash_config`; None removes a key."""
    merged = {**raw["dflash_config"], **keys}
    return raw | {"dflash_config": {k: v for k, v in merged.items() if v is not None}}


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


def random_tensors(raw, own_embedding=False, own_head=False, seed=0):
    """Seeded values for every tensor that a config asks for, bf16-representable."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(read_config(raw, "test"), own_embedding, own_head)
    return {
        name: torch.zeros(shape, dtype=torch.long)
        if name == "d2t"
        else torch.randn(shape, generator=generator).mul(0.3).bfloat16()
        for name, shape in shapes.items()
    }


def write(folder: Path, raw, tensors=None) -> Path:
    """Write config.json and model.safetensors; by default the tensors that the config asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(random_tensors(raw) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def target_like(hidden_size=32, vocab_size=64, num_layers=6, name="tiny-target"):
    """The sizes of a target that the tiny drafters fit."""
    return SimpleNamespace(
        hidden_size=hidden_size, vocab_size=vocab_size, num_layers=num_layers, name=name
    )


PROJECTED = nested(zlab(), selector_parametrization="projected")


def assert_same(state, tensors):
    assert set(state) == set(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(state[name], tensor.to(state[name].dtype), rtol=0, atol=0)


def shards(folder, raw, parts=2):
    """A sharded checkpoint with its index; returns the shard of the first tensor."""
    tensors = random_tensors(raw)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    names, weight_map = sorted(tensors), {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        here = names[part::parts]
        save_file({name: tensors[name] for name in here}, folder / file)
        weight_map |= dict.fromkeys(here, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder / weight_map[names[0]]
