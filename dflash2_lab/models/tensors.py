"""The tensors of a drafter checkpoint: which a config asks for, and which a folder holds.

Names are z-lab's (the selector's codebooks without `.weight`); speculators and DeepSpec files use
the same ones and add their own embedding, head and vocabulary maps. Only headers are read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dflash2_lab.models.config import DrafterConfig

Shape = tuple[int, ...]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32")
# Speculators' training leaves its verifier's head and norm in the file, and older files store the
# rotary frequencies; `t2d` says again what `d2t` says. None of them is a weight of the drafter.
SPARE = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq", "t2d")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint as its header describes it; `key` is its z-lab name."""

    key: str
    name: str
    shape: Shape
    dtype: str
    file: Path

    @property
    def num_values(self) -> int:
        return prod(self.shape)


def expected_tensors(
    config: DrafterConfig, own_embedding: bool = False, own_head: bool = False
) -> dict[str, Shape]:
    """Name -> shape of every tensor that a drafter of this config has."""
    return expected_shapes(vars(config), own_embedding, own_head)


def expected_shapes(
    values: Mapping[str, Any], own_embedding: bool = False, own_head: bool = False
) -> dict[str, Shape]:
    """`expected_tensors` from bare config values. Raises `KeyError` when a size is absent."""
    hidden, vocab = values["hidden_size"], values["vocab_size"]
    taps = len(values["target_layer_ids"])
    draft_vocab = values.get("draft_vocab_size") or vocab
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(values["num_hidden_layers"]):
        for name, shape in _layer_shapes(values).items():
            shapes[f"layers.{layer}.{name}"] = shape
    if values.get("kind") == "dflash2":
        rank = values["selector_rank"]
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        for side in ("predecessor", "successor"):
            if values.get("selector_parametrization") == "projected":
                shapes[f"candidate_selector.{side}_projection.weight"] = (rank, hidden)
            else:
                shapes[f"candidate_selector.{side}_codebook"] = (vocab, rank)
    if values.get("markov_rank"):
        rank = values["markov_rank"]
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab, rank)
    if values.get("confidence_head"):
        extra = values.get("markov_rank") if values.get("confidence_head_with_markov") else 0
        shapes["confidence_head.proj.weight"] = (1, hidden + (extra or 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if own_head:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    if draft_vocab != vocab:
        shapes["d2t"] = (draft_vocab,)
    return shapes


def _layer_shapes(values: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, inner, head = values["hidden_size"], values["intermediate_size"], values["head_dim"]
    query, key = values["num_attention_heads"] * head, values["num_key_value_heads"] * head
    linear = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden)}
    linear["o_proj"] = (hidden, query)
    shapes: dict[str, Shape] = {}
    for name, shape in linear.items():
        shapes[f"self_attn.{name}.weight"] = shape
        if values.get("attention_bias"):
            shapes[f"self_attn.{name}.bias"] = shape[:1]
    shapes |= {
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if values.get("kind") == "dflash2":
        taps, groups = values["conv_kernel_size"], hidden // values["conv_group_size"]
        for side in ("attention_conv", "mlp_conv"):
            shapes[f"{side}.base_kernel"] = (2, taps, hidden)
            shapes[f"{side}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return shapes


def canonical_key(name: str) -> str:
    """The z-lab name of a stored tensor: codebooks may carry the `.weight` of an embedding."""
    return name.removesuffix(".weight") if name.endswith("_codebook.weight") else name


def scan_checkpoint(folder: Path) -> tuple[list[StoredTensor], list[str]]:
    """Headers of all tensors in the folder, and every problem with the files themselves."""
    files, problems = _weight_files(folder)
    stored: dict[str, StoredTensor] = {}
    for file, wanted in files.items():
        tensors, trouble = _read_header(file)
        problems += trouble
        names = {tensor.name for tensor in tensors}
        if tensors and wanted is not None and wanted - names:
            lost = ", ".join(sorted(wanted - names))
            problems.append(f"{file.name} lacks tensors that {INDEX} places there: {lost}")
        for tensor in tensors:
            if tensor.key in stored:
                other = stored[tensor.key]
                problems.append(
                    f"{tensor.key} is stored twice: {other.name} in {other.file.name} and "
                    f"{tensor.name} in {file.name}"
                )
            stored[tensor.key] = tensor
    return [stored[key] for key in sorted(stored)], problems


def _weight_files(folder: Path) -> tuple[dict[Path, set[str] | None], list[str]]:
    """Weight files, each with the tensor names that an index places in it (None: no index)."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}, []
    if not (folder / INDEX).is_file():
        kinds = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        found = sorted(path.name for path in folder.iterdir() if path.suffix in kinds)
        return {}, [f"no {WEIGHTS} and no {INDEX} in {folder}, found {found or 'no weights'}"]
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        shards: dict[Path, set[str] | None] = {}
        for name, shard in weight_map.items():
            shards.setdefault(folder / shard, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [f"{INDEX} is malformed: {error!r}, expected {{'weight_map': {{...}}}}"]
    problems = []
    for shard in [path for path in shards if not path.is_file()]:
        names = sorted(shards.pop(shard))
        problems.append(f"{INDEX} names a missing shard {shard.name} ({len(names)} tensors)")
    return shards, problems


def _read_header(file: Path) -> tuple[list[StoredTensor], list[str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as weights:
            tensors = []
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                part = weights.get_slice(name)
                shape = tuple(part.get_shape())
                tensors.append(
                    StoredTensor(canonical_key(name), name, shape, str(part.get_dtype()), file)
                )
    except (SafetensorError, OSError) as error:
        return [], [f"{file.name} is no readable safetensors file (truncated?): {error}"]
    return tensors, []


def tensor_problems(values: Mapping[str, Any], stored: list[StoredTensor]) -> list[str]:
    """Missing, unused, misshapen and wrongly typed tensors, for config values that are complete."""
    found = {tensor.key: tensor for tensor in stored}
    expected = expected_shapes(values, "embed_tokens.weight" in found, "lm_head.weight" in found)
    problems = []
    reduced = values.get("draft_vocab_size") is not None
    if reduced and "lm_head.weight" not in found:
        problems.append(
            f"lm_head.weight is missing: a draft vocabulary of {values['draft_vocab_size']} tokens "
            "needs a head of its own"
        )
    missing = [name for name in expected if name not in found]
    if missing:
        problems.append(f"missing tensors ({len(missing)}): {', '.join(missing)}")
    spare = {*SPARE, "d2t"}
    unused = [
        tensor.name for key, tensor in found.items() if key not in expected and key not in spare
    ]
    if unused:
        problems.append(f"unused tensors ({len(unused)}): {', '.join(unused)}")
    for key, shape in expected.items():
        tensor = found.get(key)
        if tensor is None:
            continue
        if tensor.shape != shape:
            problems.append(f"{tensor.name} has shape {tensor.shape}, expected {shape}")
        allowed = INTEGERS if key == "d2t" else FLOATS
        if tensor.dtype not in allowed:
            problems.append(
                f"{tensor.name} has dtype {tensor.dtype}, expected one of {', '.join(allowed)}"
            )
    return problems
