"""What a drafter checkpoint holds and everything that is wrong with it, without building it.

So it works on a checkpoint that does not load, and tells every fault of it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_lab.errors import LabError
from dflash2_lab.models.config import (
    DrafterConfig,
    ResolvedConfig,
    component,
    resolve_config,
    target_problems,
)
from dflash2_lab.models.tensors import SPARE, StoredTensor, scan_checkpoint, tensor_problems

if TYPE_CHECKING:
    from dflash2_lab.target import Target


@dataclass(frozen=True)
class Inspection:
    """The findings on one checkpoint.

    `config` holds the resolved values as far as they could be read, `tensors` one entry a tensor,
    `parameters` the number of values by component, `shared` what the drafter takes from its target
    and why, `problems` all faults (empty: the checkpoint loads), `warnings` what was overruled or
    ignored.
    """

    name: str
    config: dict[str, Any]
    tensors: tuple[StoredTensor, ...]
    parameters: dict[str, int]
    shared: dict[str, str]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain JSON values."""
        return {
            "name": self.name,
            "loads": not self.problems,
            "config": self.config,
            "parameters": {**self.parameters, "total": sum(self.parameters.values())},
            "shared_with_target": self.shared,
            "tensors": [
                {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype}
                for tensor in self.tensors
            ],
            "problems": list(self.problems),
            "warnings": list(self.warnings),
        }

    def to_text(self) -> str:
        """The findings as a readable page, problems last."""
        lines = [f"drafter {self.name}", "", "config"]
        lines += [f"  {key:<28} {value}" for key, value in self.config.items()]
        lines += ["", f"tensors ({len(self.tensors)})"]
        width = max((len(tensor.name) for tensor in self.tensors), default=0)
        for tensor in self.tensors:
            lines.append(f"  {tensor.name:<{width}}  {tensor.dtype:<5} {list(tensor.shape)}")
        total = sum(self.parameters.values())
        lines += ["", "parameters"]
        for part, count in [*self.parameters.items(), ("total", total)]:
            lines.append(f"  {part:<28} {count:>15,}")
        lines += ["", "shared with the target"]
        lines += [f"  {part:<28} {why}" for part, why in self.shared.items()]
        for title, entries in (("warnings", self.warnings), ("problems", self.problems)):
            lines += ["", f"{title} ({len(entries)})"] + [f"  - {entry}" for entry in entries]
        return "\n".join(lines)


def inspect_checkpoint(path: str | Path, target: Target | None = None) -> Inspection:
    """Look at a checkpoint (folder, `zoo:NAME` or hub id), collecting every problem.

    With a `target`, whether the drafter fits it is part of the findings. Raises `LabError` only
    when there is no such checkpoint at all.
    """
    from dflash2_lab.models.io import CONFIG, find_checkpoint, read_raw_config

    folder = find_checkpoint(path)
    resolved, problems = ResolvedConfig(None, {}, (), ()), []
    try:
        raw = read_raw_config(folder)
        layers = None if target is None else target.num_layers
        resolved = resolve_config(raw, f"{path}: {CONFIG}", layers)
        problems += resolved.problems
    except LabError as error:
        problems.append(str(error))
    stored, trouble = scan_checkpoint(folder)
    problems += trouble
    problems += _shape_problems(resolved, stored, incomplete=bool(trouble))
    problems += _value_problems(resolved, stored)
    if target is not None:
        size = (target.hidden_size, target.vocab_size, target.num_layers)
        problems += target_problems(resolved.values, *size, target.name)
    return Inspection(
        name=str(path),
        config=_plain_config(resolved),
        tensors=tuple(stored),
        parameters=_parameters(stored),
        shared=_shared({tensor.key for tensor in stored}, resolved.values),
        problems=tuple(problems),
        warnings=resolved.warnings,
    )


def _shape_problems(
    resolved: ResolvedConfig, stored: list[StoredTensor], incomplete: bool
) -> list[str]:
    """Tensors against the config; with an unreadable size there is nothing to compare them to."""
    values = dict(resolved.values)
    fusion = next((tensor for tensor in stored if tensor.key == "fc.weight"), None)
    if "target_layer_ids" not in values and fusion is not None and values.get("hidden_size"):
        # The ids are missing, but their number shows in the tensors: compare all the others.
        values["target_layer_ids"] = range(fusion.shape[-1] // values["hidden_size"])
    try:
        values["kind"]
        problems = tensor_problems(values, stored)
    except (KeyError, ZeroDivisionError) as error:
        return [f"tensors not compared with the config: {error} is missing or wrong there"]
    # Tensors of a file that cannot be read are not missing: the file is, and it is listed.
    return [p for p in problems if not (incomplete and p.startswith("missing tensors"))]


def _value_problems(resolved: ResolvedConfig, stored: list[StoredTensor]) -> list[str]:
    from dflash2_lab.models.io import is_finite, iterate_tensors, map_problems

    broken, maps = [], {}
    for tensor, values in iterate_tensors(stored):
        if not is_finite(values) and tensor.key not in SPARE:
            broken.append(tensor.name)
        if tensor.key in ("d2t", "t2d"):
            maps[tensor.key] = values
    problems = [f"NaN or infinite values in {', '.join(broken)}"] if broken else []
    vocab_size = resolved.values.get("vocab_size")
    if vocab_size is None:
        return problems
    return problems + map_problems(maps.get("d2t"), maps.get("t2d"), vocab_size)


def _plain_config(resolved: ResolvedConfig) -> dict[str, Any]:
    """Values in the order of `DrafterConfig`, tuples as lists, with the derived num_draft."""
    source = resolved.values if resolved.config is None else vars(resolved.config)
    plain = {f.name: source[f.name] for f in fields(DrafterConfig) if f.name in source}
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in plain.items()}
    if resolved.config is not None:
        plain["num_draft"] = resolved.config.num_draft
    return plain


def _parameters(stored: list[StoredTensor]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tensor in stored:
        if tensor.key not in ("d2t", "t2d"):
            part = component(tensor.key)
            counts[part] = counts.get(part, 0) + tensor.num_values
    return dict(sorted(counts.items()))


def _shared(keys: set[str], values: dict[str, Any]) -> dict[str, str]:
    if not values:
        return {}
    scale = values.get("input_embedding_scale", 1.0)
    taps = list(values.get("target_layer_ids", ()))
    theirs = "the target's"
    own = "its own, in the checkpoint"
    return {
        "input embedding": f"{own if 'embed_tokens.weight' in keys else theirs}, scale {scale}",
        "output head": own if "lm_head.weight" in keys else theirs,
        "context features": f"outputs of target layers {taps}",
    }
