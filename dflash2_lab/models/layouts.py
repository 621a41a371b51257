"""Published config.json layouts -> the values of `DrafterConfig`, with every problem collected.

Three layouts are read. z-lab: a Qwen3 body at the top, the method's keys in `dflash_config` (older
files keep some of them at the top). speculators: the body in `transformer_layer_config`, the
method's keys at the top, `aux_hidden_state_layer_ids` one higher than z-lab's ids. DeepSpec: all
keys at the top, anchor-first blocks.

Precedence: a method key may live in `dflash_config` or at the top; two equal values are fine, two
different ones are a problem. RoPE is the exception: `rope_parameters` wins, with a warning.
Sources: the `dflash` 0.1.0 package; vllm-project/speculators (config classes of dflash, dflash2 and
dspark, and both converters); deepseek-ai/DeepSpec (dspark config builder).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash2_lab.models.rope import read_rope

ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
}
MAX_LAYERS = 1000
SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Keys that the reader uses or knows to be of no consequence inside dflash_config.
NESTED_KEYS = {
    *SELECTOR_KEYS,
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "selector_parametrization",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "sample_from_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "projector_type",
    "num_anchors",
}
_MISSING = object()
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


@dataclass
class ConfigReading:
    """What was made of one config.json: `DrafterConfig` values by name, problems and warnings.

    A value that could not be read is absent from `values`, and a problem says why.
    """

    raw: Mapping[str, Any]
    source: str
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def body(self) -> Mapping[str, Any]:
        """The Qwen3 part: `transformer_layer_config` in speculators files, the top elsewhere."""
        inner = self.raw.get("transformer_layer_config")
        return inner if isinstance(inner, Mapping) else self.raw

    @property
    def nested(self) -> Mapping[str, Any]:
        inner = self.raw.get("dflash_config")
        return inner if isinstance(inner, Mapping) else {}

    def method(self, key: str) -> Any:
        """A method key from `dflash_config` or the top level; null counts as not given."""
        nested, top = self.nested.get(key), self.raw.get(key)
        if nested is not None and top is not None and nested != top:
            self.problems.append(
                f"dflash_config.{key} = {nested!r} and top-level {key} = {top!r} contradict each "
                "other: keep one"
            )
        return nested if nested is not None else top

    def take(self, name: str, found: Any, kind: type, key: str, default: Any = _MISSING) -> None:
        """Check the type of one value and keep it under `name`, or record a problem."""
        if found is None:
            if default is _MISSING:
                self.problems.append(f"{key} is missing")
            else:
                self.values[name] = default
            return
        good = isinstance(found, (int, float) if kind is float else kind)
        if kind is float and good and not math.isfinite(found):
            good = False
        if not good or (isinstance(found, bool) and kind is not bool):
            self.problems.append(f"{key} is {found!r}, expected {_TYPE_NAMES[kind]}")
            return
        self.values[name] = float(found) if kind is float else found


def read_layout(
    raw: Mapping[str, Any], source: str, num_target_layers: int | None = None
) -> ConfigReading:
    """Read any published layout; `num_target_layers` is the target's layer count when known.

    Never raises for a bad file: `problems` of the result lists everything that is wrong.
    """
    reading = ConfigReading(raw, source)
    layout = _layout(reading)
    reading.values["layout"] = layout
    if not isinstance(raw.get("dflash_config", {}), Mapping | None):
        reading.problems.append(f"dflash_config is {raw['dflash_config']!r}, expected an object")
    kind = _kind(reading)
    _read_body(reading)
    _read_block(reading, kind)
    _read_taps(reading, layout, num_target_layers)
    rope, problems, warnings = read_rope(reading.body)
    reading.problems += problems
    reading.warnings += warnings
    if rope is not None:
        reading.values["rope_parameters"] = rope
    _read_masks(reading, kind, layout)
    _read_heads(reading, kind)
    unknown = sorted(set(reading.nested) - NESTED_KEYS)
    if unknown:
        reading.warnings.append(f"dflash_config keys without effect here: {', '.join(unknown)}")
    reading.problems[:] = dict.fromkeys(reading.problems)
    return reading


def _layout(reading: ConfigReading) -> str:
    raw = reading.raw
    if "transformer_layer_config" in raw or "speculators_model_type" in raw:
        if not isinstance(raw.get("transformer_layer_config"), Mapping):
            found = raw.get("transformer_layer_config")
            reading.problems.append(
                f"transformer_layer_config is {found!r}, expected the drafter's Qwen3 config"
            )
        return "speculators"
    return "deepspec" if raw.get("architectures") == ["Qwen3DSparkModel"] else "z-lab"


def _kind(reading: ConfigReading) -> str | None:
    """The drafter's kind from `architectures`, checked against every key that implies another."""
    raw = reading.raw
    known = ", ".join(ARCHITECTURES)
    names = raw.get("architectures")
    declared = raw.get("speculators_model_type")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if isinstance(name, str) and name in ARCHITECTURES:
        kind = ARCHITECTURES[name]
    elif names is None and declared in list(ARCHITECTURES.values()):
        kind = declared
    else:
        reading.problems.append(f"architectures is {names!r}, expected one of {known}")
        return None
    if declared is not None and declared != kind:
        reading.problems.append(
            f"speculators_model_type {declared!r} and architectures {names!r} contradict each other"
        )
    projector = reading.method("projector_type")
    if projector not in (None, "dflash", "dflash2", "dspark"):
        reading.problems.append(f"projector_type {projector!r} is not supported")
    if reading.method("shift_label"):
        reading.problems.append("shift_label true (Domino's label shift) is not supported")
    selector = [key for key in SELECTOR_KEYS if reading.method(key) is not None]
    if selector and kind != "dflash2":
        reading.problems.append(
            f"architectures {names!r} says {kind}, but {', '.join(selector)} belong to "
            "DFlash2DraftModel: correct one of them"
        )
    markov = reading.method("markov_rank")
    if markov and kind != "dspark":
        reading.problems.append(
            f"architectures {names!r} says {kind}, but markov_rank = {markov!r} belongs to "
            "DSparkDraftModel (with sample_from_anchor true or false): correct one of them"
        )
    reading.values["kind"] = kind
    return kind


def _read_body(reading: ConfigReading) -> None:
    """The Qwen3 body; the few defaults are those of Qwen3Config, which published files are."""
    body = reading.body
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ):
        reading.take(key, body.get(key), int, key)
    layers = reading.values.get("num_hidden_layers", 0)
    if layers > MAX_LAYERS:
        # Lists of this length are built below: a corrupt count must not take the memory.
        reading.problems.append(f"num_hidden_layers is {layers}, expected at most {MAX_LAYERS}")
        del reading.values["num_hidden_layers"]
    reading.take("head_dim", body.get("head_dim"), int, "head_dim", 128)
    if body.get("head_dim") is None:
        reading.warnings.append("head_dim is missing: 128, the default of Qwen3Config, is used")
    reading.take("rms_norm_eps", body.get("rms_norm_eps"), float, "rms_norm_eps", 1e-6)
    reading.take("hidden_act", body.get("hidden_act"), str, "hidden_act", "silu")
    reading.take("attention_bias", body.get("attention_bias"), bool, "attention_bias", False)
    reading.take(
        "max_position_embeddings",
        body.get("max_position_embeddings"),
        int,
        "max_position_embeddings",
        32768,
    )
    width = reading.raw.get("target_hidden_size")
    if width is not None and width != body.get("hidden_size"):
        reading.problems.append(
            f"target_hidden_size {width!r} differs from hidden_size {body.get('hidden_size')!r}: "
            "a drafter of another width than its target is not supported"
        )


def _read_block(reading: ConfigReading, kind: str | None) -> None:
    reading.take("block_size", reading.method("block_size"), int, "dflash_config.block_size")
    reading.take(
        "mask_token_id", reading.method("mask_token_id"), int, "dflash_config.mask_token_id"
    )
    # Anchor-first is the published convention of DSpark files (DeepSpec's only layout and the
    # default of speculators' DSpark config class); every other kind drops the anchor's row.
    reading.take(
        "sample_from_anchor",
        reading.method("sample_from_anchor"),
        bool,
        "sample_from_anchor",
        kind == "dspark",
    )
    for key in ("input_embedding_scale", "output_multiplier"):
        reading.take(key, reading.method(key), float, f"dflash_config.{key}", 1.0)
    cap = reading.method("final_logit_softcapping")
    reading.take("final_logit_softcapping", cap, float, "final_logit_softcapping", None)
    if (reading.values.get("final_logit_softcapping") or 0.0) <= 0.0:
        reading.values["final_logit_softcapping"] = None


def _read_taps(reading: ConfigReading, layout: str, num_target_layers: int | None) -> None:
    declared = reading.raw.get("num_target_layers")
    reading.take("num_target_layers", declared, int, "num_target_layers", num_target_layers)
    key = "aux_hidden_state_layer_ids" if layout == "speculators" else "target_layer_ids"
    shown = key if layout != "z-lab" else f"dflash_config.{key}"
    found = reading.raw.get(key) if layout == "speculators" else reading.method(key)
    if found is None:
        reading.problems.append(f"{shown} is missing (the target layers are never guessed)")
        return
    integers = isinstance(found, list) and all(type(item) is int for item in found)
    if not integers or not found:
        reading.problems.append(f"{shown} is {found!r}, expected a list of integers")
        return
    ids = [item - 1 for item in found] if layout == "speculators" else list(found)
    layers = num_target_layers or reading.values.get("num_target_layers")
    if layout == "speculators" and layers is not None and layers in found:
        # Their launcher appends the verifier's last layer for the training loss; it is split off
        # before the drafter sees the features, and their converter drops it too.
        reading.warnings.append(f"{key} names the target's last output ({layers}): dropped")
        ids = [item for item in ids if item + 1 != layers]
    reading.values["target_layer_ids"] = tuple(ids)


def _read_masks(reading: ConfigReading, kind: str | None, layout: str) -> None:
    """Per layer: the sliding window and whether the block's rows see only earlier rows."""
    body = reading.body
    layers = reading.values.get("num_hidden_layers", 0)
    window, use = body.get("sliding_window"), body.get("use_sliding_window")
    causal = body.get("is_causal", reading.raw.get("is_causal"))
    for key, found in (("use_sliding_window", use), ("is_causal", causal)):
        if found is not None and not isinstance(found, bool):
            reading.problems.append(f"{key} is {found!r}, expected true or false")
    types = body.get("layer_types")
    if types is None:
        # Qwen3Config's own rule when layer_types is absent.
        first = body.get("max_window_layers", 28) if use and window is not None else layers
        if type(first) is not int:
            reading.problems.append(f"max_window_layers is {first!r}, expected an integer")
            return
        types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(item not in allowed for item in types):
        reading.problems.append(f"layer_types is {types!r}, expected a list of {allowed}")
        return
    if len(types) != layers:
        reading.problems.append(f"layer_types has {len(types)} entries for {layers} layers")
    sliding = [item == "sliding_attention" for item in types]
    if any(sliding) and (type(window) is not int or window < 1):
        found = "null" if window is None else repr(window)
        reading.problems.append(
            f"sliding_window is {found}, but layer_types has sliding_attention: expected a "
            "positive integer"
        )
        return
    if any(sliding) and use is False:
        reading.problems.append(
            f"use_sliding_window is false, but layer_types has sliding_attention with "
            f"sliding_window {window!r}: correct one of them"
        )
    if layout == "speculators" and causal is None:
        free = reading.raw.get("sliding_window_non_causal", kind == "dflash2")
        in_block = [item and not free for item in sliding]
    elif causal is None:
        in_block = sliding
    else:
        in_block = [bool(causal)] * len(sliding)
    reading.values["windows"] = tuple(window if item else None for item in sliding)
    reading.values["causal"] = tuple(in_block)


def _read_heads(reading: ConfigReading, kind: str | None) -> None:
    """Convolution, selector, Markov and confidence heads, and the reduced draft vocabulary."""
    if kind == "dflash2":
        for key in SELECTOR_KEYS:
            reading.take(key, reading.method(key), int, f"dflash_config.{key}")
        form = reading.method("selector_parametrization")
        reading.take("selector_parametrization", form, str, "selector_parametrization", "free")
    if kind == "dspark":
        _read_dspark(reading)
    draft = reading.raw.get("draft_vocab_size")
    reading.take("draft_vocab_size", draft, int, "draft_vocab_size", None)
    if draft == reading.body.get("vocab_size"):
        reading.values["draft_vocab_size"] = None


def _read_dspark(reading: ConfigReading) -> None:
    reading.take("markov_rank", reading.method("markov_rank"), int, "markov_rank")
    head = reading.method("markov_head_type")
    reading.take("markov_head_type", head, str, "markov_head_type", "vanilla")
    enabled = reading.method("enable_confidence_head")
    reading.take("confidence_head", enabled, bool, "enable_confidence_head")
    if enabled is True:
        key = "confidence_head_with_markov"
        reading.take(key, reading.method(key), bool, key)
    if reading.values.get("markov_rank") == 0:
        reading.values["markov_rank"] = None
        if enabled is False:
            # DeepSpec's own DFlash models are its DSpark class with both heads off.
            reading.values["kind"] = "dflash"
