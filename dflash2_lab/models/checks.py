"""Which values of a drafter's configuration cannot be right, alone or beside each other.

Each finding is one line of text; loading refuses a checkpoint that has one, and `inspect` lists
all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash2_lab.models.layouts import SELECTOR_KEYS

KINDS = ("dflash", "dflash2", "dspark")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "block_size",
)


def value_problems(values: Mapping[str, Any]) -> list[str]:
    """Every value that cannot be right, alone or beside the others; absent keys are not judged."""
    get = values.get
    problems = [
        f"{name} is {get(name)}, expected at least 1"
        for name in _POSITIVE
        if name in values and get(name) < 1
    ]
    if get("rms_norm_eps", 1.0) <= 0:
        problems.append(f"rms_norm_eps is {get('rms_norm_eps')}, expected a positive number")
    if get("hidden_act", "silu") not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        problems.append(f"hidden_act is {get('hidden_act')!r}, expected one of {known}")
    heads, kv_heads = get("num_attention_heads"), get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        problems.append(f"num_key_value_heads {kv_heads} does not divide {heads} attention heads")
    if (get("head_dim") or 0) % 2:
        problems.append(f"head_dim is {get('head_dim')}, rotary positions need an even one")
    if "block_size" in values and get("block_size") == 1 and not get("sample_from_anchor"):
        problems.append("block_size is 1: the anchor alone leaves nothing to draft")
    mask, vocab = get("mask_token_id"), get("vocab_size")
    if mask is not None and vocab is not None and not 0 <= mask < vocab:
        problems.append(f"mask_token_id {mask} is not a row of the {vocab} embeddings")
    problems += _tap_problems(get("target_layer_ids"), get("num_target_layers"))
    problems += _layer_problems(values)
    problems += _selector_problems(values)
    problems += _head_problems(values)
    return problems


def _tap_problems(ids: tuple[int, ...] | None, num_target_layers: int | None) -> list[str]:
    if ids is None:
        return []
    problems = [] if ids else ["target_layer_ids is empty"]
    if len(set(ids)) < len(ids):
        problems.append(f"target_layer_ids {list(ids)} names a layer twice")
    wrong = [i for i in ids if i < -1 or (num_target_layers and i >= num_target_layers)]
    if wrong:
        problems.append(
            f"target_layer_ids {wrong} do not exist in a target of {num_target_layers} layers"
        )
    return problems


def _layer_problems(values: Mapping[str, Any]) -> list[str]:
    problems = []
    layers = values.get("num_hidden_layers")
    for name in ("windows", "causal"):
        found = values.get(name)
        if found is not None and layers is not None and len(found) != layers:
            problems.append(f"{name} has {len(found)} entries for {layers} layers")
    return problems + [
        f"sliding_window is {window!r}, expected a positive integer"
        for window in values.get("windows") or ()
        if window is not None and window < 1
    ]


def _selector_problems(values: Mapping[str, Any]) -> list[str]:
    given = {key: values.get(key) for key in SELECTOR_KEYS if values.get(key) is not None}
    if values.get("kind") != "dflash2":
        return [f"{', '.join(given)} belong to kind dflash2"] if given else []
    missing = [key for key in SELECTOR_KEYS if key not in given and key in values]
    problems = [f"{key} is missing (kind dflash2)" for key in missing]
    problems += [
        f"{key} is {value}, expected at least 1" for key, value in given.items() if value < 1
    ]
    hidden, group = values.get("hidden_size"), given.get("conv_group_size")
    if hidden and group and group > 0 and hidden % group:
        problems.append(f"conv_group_size {group} does not divide hidden_size {hidden}")
    for key, limit in (("conv_kernel_size", "block_size"), ("selector_top_k", "vocab_size")):
        if key in given and values.get(limit) is not None and given[key] > values[limit]:
            problems.append(f"{key} {given[key]} is larger than {limit} {values[limit]}")
    if values.get("selector_parametrization", "free") not in ("free", "projected"):
        found = values["selector_parametrization"]
        problems.append(f"selector_parametrization is {found!r}, expected 'free' or 'projected'")
    if values.get("sample_from_anchor"):
        problems.append("sample_from_anchor true does not exist for kind dflash2")
    if values.get("draft_vocab_size") is not None:
        problems.append(
            f"draft_vocab_size {values['draft_vocab_size']}: a selector needs the full vocabulary"
        )
    return problems


def _head_problems(values: Mapping[str, Any]) -> list[str]:
    kind, problems = values.get("kind"), []
    if kind is not None and kind not in KINDS:
        problems.append(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    rank = values.get("markov_rank")
    if kind != "dspark" and (rank or values.get("confidence_head")):
        problems.append("markov_rank and confidence_head belong to kind dspark")
    if rank is not None and rank < 1:
        problems.append(f"markov_rank is {rank}, expected at least 1 (or none at all)")
    head = values.get("markov_head_type", "vanilla")
    if rank and head != "vanilla":
        problems.append(f"markov_head_type {head!r} is not supported, only 'vanilla' is")
    if values.get("confidence_head") and values.get("confidence_head_with_markov") and not rank:
        problems.append("confidence_head_with_markov needs a Markov head, but markov_rank is 0")
    draft, vocab = values.get("draft_vocab_size"), values.get("vocab_size")
    if draft is not None and vocab is not None and not 0 < draft < vocab:
        problems.append(f"draft_vocab_size {draft} is not between 1 and vocab_size {vocab}")
    return problems
