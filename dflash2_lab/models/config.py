"""The drafter's configuration: one frozen record for every published layout.

`DrafterConfig` holds what a DFlash, DFlash 2 or DSpark drafter is built from, in one vocabulary:
layer ids are 0-based decoder layers of the target whose *output* is read, windows and in-block
causality are spelled out per layer, and `num_draft` follows from `block_size` and the layout
(`sample_from_anchor`), never from a guess. `read_config` makes it from any published config.json
(see `layouts`), `to_zlab` writes the published z-lab form.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dflash2_lab.errors import LabError
from dflash2_lab.models.checks import value_problems
from dflash2_lab.models.layouts import SELECTOR_KEYS, read_layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrafterConfig:
    """Everything needed to build a drafter. Sizes are counts; windows are in tokens.

    `target_layer_ids` are decoder layers of the target, 0-based; the feature is that layer's
    output (-1: the embedding output). `windows[i]` is layer i's sliding window (None: full
    attention) and `causal[i]` says whether its block rows see only earlier rows; an empty tuple
    means no window, not causal, for every layer. `draft_vocab_size` is None unless the drafter has
    a smaller vocabulary of its own. Raises `LabError` naming every value that cannot be right.
    """

    kind: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    max_position_embeddings: int
    rope_parameters: dict[str, Any] = field(hash=False)
    num_target_layers: int | None
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    sample_from_anchor: bool = False
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    selector_parametrization: str = "free"
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    markov_rank: int | None = None
    markov_head_type: str = "vanilla"
    confidence_head: bool = False
    confidence_head_with_markov: bool = False
    draft_vocab_size: int | None = None
    layout: str = "z-lab"

    def __post_init__(self) -> None:
        windows = tuple(self.windows) or (None,) * self.num_hidden_layers
        causal = tuple(self.causal) or (False,) * self.num_hidden_layers
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "windows", windows)
        object.__setattr__(self, "causal", causal)
        problems = value_problems(vars(self))
        if problems:
            raise LabError("drafter config: " + "; ".join(problems))

    @property
    def num_draft(self) -> int:
        """Drafted slots per block: all rows when anchor-first, all but the anchor's otherwise."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


@dataclass(frozen=True)
class ResolvedConfig:
    """A config.json as far as it could be read: the values, all problems, all warnings.

    `config` is None when there are problems; `values` then holds what was readable.
    """

    config: DrafterConfig | None
    values: dict[str, Any]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def resolve_config(
    raw: Mapping[str, Any], source: str, num_target_layers: int | None = None
) -> ResolvedConfig:
    """Read any published layout without raising: every problem is collected."""
    reading = read_layout(raw, source, num_target_layers)
    problems = [*reading.problems, *value_problems(reading.values)]
    config = None if problems else DrafterConfig(**reading.values)
    return ResolvedConfig(config, reading.values, tuple(problems), tuple(reading.warnings))


def read_config(
    raw: Mapping[str, Any], source: str, num_target_layers: int | None = None
) -> DrafterConfig:
    """`DrafterConfig` of a published config.json (z-lab, speculators or DeepSpec layout).

    `source` names the file in messages. `num_target_layers` is the target's, when known: it stands
    in for a missing key. Warnings are logged; raises `LabError` naming all problems at once.
    """
    resolved = resolve_config(raw, source, num_target_layers)
    for warning in resolved.warnings:
        logger.warning("%s: %s", source, warning)
    if resolved.config is None:
        raise LabError(f"{source}: " + "; ".join(resolved.problems))
    return resolved.config


def to_zlab(config: DrafterConfig) -> dict[str, Any]:
    """The published z-lab config.json, as the `dflash` 0.1.0 package reads it.

    Keys that the published form does not know (projected selector, anchor-first, DSpark heads,
    draft vocabulary) are written only when they differ from it. Raises `LabError` for mixed windows
    or causality that the form cannot say.
    """
    names = {
        "dflash": "DFlashDraftModel",
        "dflash2": "DFlash2DraftModel",
        "dspark": "DSparkDraftModel",
    }
    body = {f.name: getattr(config, f.name) for f in fields(config) if f.name in _BODY_KEYS}
    nested: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        **{key: getattr(config, key) for key in SELECTOR_KEYS if config.kind == "dflash2"},
    }
    for key in _OPTIONAL_KEYS:
        default = DrafterConfig.__dataclass_fields__[key].default
        if getattr(config, key) != default:
            nested[key] = getattr(config, key)
    if config.kind == "dspark":
        nested |= {
            "sample_from_anchor": config.sample_from_anchor,
            "markov_rank": config.markov_rank or 0,
            "markov_head_type": config.markov_head_type,
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_head_with_markov,
        }
    optional = {
        "num_target_layers": config.num_target_layers,
        "draft_vocab_size": config.draft_vocab_size,
    }
    return {
        "architectures": [names[config.kind]],
        "model_type": "qwen3",
        **body,
        "rope_parameters": dict(config.rope_parameters),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        **{key: value for key, value in optional.items() if value is not None},
        **_mask_keys(config),
        "dflash_config": nested,
    }


_BODY_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "max_position_embeddings",
)
_OPTIONAL_KEYS = (
    "selector_parametrization",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "sample_from_anchor",
)


def _mask_keys(config: DrafterConfig) -> dict[str, Any]:
    windows = sorted({window for window in config.windows if window is not None})
    if len(windows) > 1:
        raise LabError(f"the z-lab layout has one sliding_window, this drafter has {windows}")
    sliding = tuple(window is not None for window in config.windows)
    keys: dict[str, Any] = {
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "use_sliding_window": bool(windows),
        "sliding_window": windows[0] if windows else None,
    }
    if len(set(config.causal)) == 1:
        return keys | {"is_causal": config.causal[0]}
    if config.causal == sliding:
        return keys  # the published default: sliding layers causal, full layers bidirectional
    raise LabError(f"the z-lab layout cannot say is_causal per layer: {list(config.causal)}")


def target_problems(
    values: Mapping[str, Any], hidden_size: int, vocab_size: int, num_layers: int, name: str
) -> list[str]:
    """Why a drafter with these config values cannot draft for the target called `name`."""
    problems = []
    for key, found, what in (
        ("hidden_size", hidden_size, "hidden size"),
        ("vocab_size", vocab_size, "embedding rows"),
        ("num_target_layers", num_layers, "layers"),
    ):
        expected = values.get(key)
        if expected is not None and expected != found:
            problems.append(f"{key} {expected} does not fit target {name}: {what} {found}")
    wrong = [i for i in values.get("target_layer_ids", ()) if i >= num_layers]
    if wrong:
        problems.append(f"target_layer_ids {wrong} do not exist in {name} ({num_layers} layers)")
    return problems


def check_against_target(
    config: DrafterConfig, hidden_size: int, vocab_size: int, num_layers: int, name: str
) -> None:
    """Raises `LabError` when the drafter cannot draft for this target (width, rows, layers)."""
    problems = target_problems(vars(config), hidden_size, vocab_size, num_layers, name)
    if problems:
        raise LabError("wrong target for this drafter: " + "; ".join(problems))


def component(name: str) -> str:
    """Which part of a drafter a tensor belongs to, for parameter counts."""
    if name.startswith("layers."):
        part = name.split(".")[2]
        return {"self_attn": "attention", "mlp": "mlp"}.get(
            part, "conv" if part.endswith("_conv") else "norms"
        )
    parts = {
        "fc": "context fusion",
        "candidate_selector": "selector",
        "markov_head": "markov head",
        "confidence_head": "confidence head",
        "embed_tokens": "embedding",
        "lm_head": "output head",
        "d2t": "vocabulary map",
    }
    return parts.get(name.split(".")[0], "norms")
