"""Rotary positions of a drafter, from the three places where configs have kept them.

transformers 5 writes `rope_parameters`; older files have `rope_theta` at the top and, for scaled
types, `rope_scaling`. `rope_parameters` wins over the older keys, with a warning. A drafter uses
plain full rotary positions, so keys that leaked from its target (partial rotary, mRoPE) are
dropped with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Frequencies of the remaining types ("dynamic", "longrope") change with the length of the sequence
# in hand, so one recording pass and a step-by-step decode would not see the same angles.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
ROPE_REQUIRED = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def read_rope(body: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str], list[str]]:
    """`rope_parameters` (rope_type, rope_theta, ...) of a config body, problems, warnings.

    The first is None when there are problems. Theta has no default: a missing one is a problem.
    """
    parameters, scaling = body.get("rope_parameters"), body.get("rope_scaling")
    for key, found in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if found is not None and not isinstance(found, Mapping):
            return None, [f"{key} is {found!r}, expected an object"], []
    name = "rope_parameters" if parameters is not None else "rope_scaling"
    rope = dict(parameters if parameters is not None else scaling or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        return None, [f"{name} per layer type is not supported: {rope!r}"], []
    older = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or older or "default"
    warnings = _stale_values(name, rope, body)
    if rope.get("rope_theta") is None:
        nested = (scaling or {}).get("rope_theta")
        rope["rope_theta"] = body.get("rope_theta") if nested is None else nested
    dropped = [key for key in rope if key.startswith("mrope") or key == "partial_rotary_factor"]
    rope = {k: value for k, value in rope.items() if k not in dropped and value is not None}
    if body.get("partial_rotary_factor") is not None:
        dropped.append("top-level partial_rotary_factor")
    if rope["rope_type"] == "mrope":
        dropped.append("rope_type mrope")
        rope["rope_type"] = "default"
    if dropped:
        warnings.append(
            f"{', '.join(sorted(dropped))} dropped: a drafter uses plain full rotary positions"
        )
    problems = _rope_problems(rope)
    if problems:
        return None, problems, warnings
    return {**rope, "rope_theta": float(rope["rope_theta"])}, [], warnings


def _stale_values(name: str, rope: Mapping[str, Any], body: Mapping[str, Any]) -> list[str]:
    """Older keys that say something else than the winning `name`."""
    older = [("rope_theta", "rope_theta", body.get("rope_theta"))]
    scaling = body.get("rope_scaling")
    if name == "rope_parameters" and scaling is not None:
        older.append(("rope_scaling.rope_theta", "rope_theta", scaling.get("rope_theta")))
        kind = scaling.get("rope_type", scaling.get("type"))
        older.append(("rope_scaling.rope_type", "rope_type", kind))
    return [
        f"{name}.{key} = {rope[key]!r} wins over {shown} = {value!r}"
        for shown, key, value in older
        if value is not None and rope.get(key) is not None and rope[key] != value
    ]


def _rope_problems(rope: Mapping[str, Any]) -> list[str]:
    kind, theta = rope["rope_type"], rope.get("rope_theta")
    problems = []
    number = isinstance(theta, int | float) and not isinstance(theta, bool)
    if not number or not 0 < theta < math.inf:
        found = "missing" if theta is None else repr(theta)
        problems.append(
            f"rope_theta is {found} (looked in rope_parameters, rope_scaling and the top level)"
        )
    if kind not in ROPE_TYPES:
        problems.append(f"rope_type is {kind!r}, expected one of {', '.join(ROPE_TYPES)}")
    return problems + [
        f"{key} is missing from rope_parameters, rope_type {kind!r} needs it"
        for key in ROPE_REQUIRED.get(str(kind), ())
        if key not in rope
    ]
