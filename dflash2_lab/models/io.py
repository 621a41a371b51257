"""Loading and saving drafters: folders, hub ids and the zoo; every tensor accounted for.

A checkpoint loads whole or not at all: `LabError` lists the missing, unused, misshapen, non-finite
and wrongly typed tensors. Saving writes the published z-lab layout, which the `dflash` 0.1.0
package loads as it is.
"""

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash2_lab.errors import LabError, first_line
from dflash2_lab.models.config import DrafterConfig, check_against_target, read_config, to_zlab
from dflash2_lab.models.drafter import Drafter, build_drafter
from dflash2_lab.models.tensors import (
    INDEX,
    WEIGHTS,
    StoredTensor,
    expected_tensors,
    scan_checkpoint,
    tensor_problems,
)
from dflash2_lab.provenance import check_device, weights_hash
from dflash2_lab.tables import file_hash

if TYPE_CHECKING:
    from dflash2_lab.target import Target

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG = "config.json"
ZOO = Path(__file__).parents[1] / "zoo"


def load_drafter(
    name: str | Path,
    target: "Target | None" = None,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
) -> Drafter:
    """A drafter in evaluation mode from a folder, a hub id or `zoo:NAME`.

    With a `target`, its width, embedding rows and layer count are checked first. Raises `LabError`
    that names every problem of the config or of the tensors.
    """
    check_device(device)
    folder = find_checkpoint(name)
    layers = None if target is None else target.num_layers
    config = read_config(read_raw_config(folder), f"{name}: {CONFIG}", layers)
    if target is not None:
        size = (target.hidden_size, target.vocab_size, target.num_layers)
        check_against_target(config, *size, target.name)
    stored, problems = scan_checkpoint(folder)
    problems = problems or tensor_problems(vars(config), stored)
    if problems:
        raise LabError(f"{name}: " + "; ".join(problems))
    keys = {tensor.key for tensor in stored}
    own = ("embed_tokens.weight" in keys, "lm_head.weight" in keys)
    wanted = expected_tensors(config, *own)
    tensors = {tensor.key: values for tensor, values in iterate_tensors(stored)}
    broken = [key for key in wanted if not is_finite(tensors[key])]
    if broken:
        problems.append(f"NaN or infinite values in {', '.join(broken)}")
    problems += map_problems(tensors.get("d2t"), tensors.get("t2d"), config.vocab_size)
    cast = {key: _cast(tensors.pop(key), torch_dtype(dtype)) for key in wanted}
    overflown = [key for key in wanted if key not in broken and not is_finite(cast[key])]
    if overflown:
        problems.append(f"values beyond the range of {dtype}: {', '.join(overflown)}")
    if problems:
        raise LabError(f"{name}: " + "; ".join(problems))
    sources = ["the checkpoint's" if present else "the target's" for present in own]
    logger.info("%s: input embedding %s, output head %s", name, *sources)
    drafter = _assemble(config, own, cast).to(device)
    drafter.name_or_path = str(name)
    return drafter.eval()


def _assemble(config: DrafterConfig, own: tuple[bool, bool], tensors: dict[str, Tensor]) -> Drafter:
    """The module around given tensors, without allocating or initialising weights of its own."""
    with torch.device("meta"):
        drafter = build_drafter(config, *own)
    # Its frequencies are no part of any checkpoint, so they are made again with real values.
    drafter.rotary_emb = type(drafter.rotary_emb)(drafter.config)
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return drafter


def save_drafter(drafter: Drafter, folder: str | Path, dtype: str | None = None) -> None:
    """Write `config.json` and `model.safetensors` in the z-lab layout, all or nothing.

    Weights are stored as `dtype` ("bfloat16", "float32", "float16"; None: as they are). Other files
    of an existing folder, a model card say, are kept. Raises `LabError` when writing fails.
    """
    folder = Path(folder).resolve()
    kept = drafter.dtype if dtype is None else torch_dtype(dtype)
    state = {
        key: _cast(tensor.detach(), kept).cpu().contiguous()
        for key, tensor in drafter.state_dict().items()
    }
    config = to_zlab(drafter.settings) | {"dtype": str(kept).removeprefix("torch.")}
    text = json.dumps(config, indent=1) + "\n"
    prefix = f".{folder.name}.save-"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            _write_checkpoint(scratch / "new", state, text)
            _swap_in(scratch, folder, text)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise LabError(f"cannot write drafter {folder}: {error}") from error
    # A writer that was killed leaves its scratch folder; the finished drafter makes it useless.
    for stale in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)


def _write_checkpoint(folder: Path, state: dict[str, Tensor], config: str) -> None:
    folder.mkdir()
    (folder / CONFIG).write_text(config, encoding="utf-8")
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors writes through a private temporary file and keeps its mode.
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)
    for name in (CONFIG, WEIGHTS):
        with (folder / name).open("rb") as handle:
            os.fsync(handle.fileno())


def _swap_in(scratch: Path, folder: Path, config: str) -> None:
    """Put `scratch/new` where `folder` is, keeping the files there that are no checkpoint."""
    new, old = scratch / "new", scratch / "old"
    if not folder.is_dir():
        new.replace(folder)
        return
    present = folder / CONFIG
    if (folder / WEIGHTS).is_file() and present.is_file() and present.read_text() == config:
        (new / WEIGHTS).replace(folder / WEIGHTS)  # one rename: never without a whole drafter
        return
    ignore = shutil.ignore_patterns("*.safetensors", INDEX, CONFIG)
    shutil.copytree(folder, new, ignore=ignore, dirs_exist_ok=True)
    folder.replace(old)
    try:
        new.replace(folder)
    except OSError:
        old.replace(folder)
        raise


def find_checkpoint(name: str | Path) -> Path:
    """The folder of a drafter: a path, `zoo:NAME` of this package, or a hub id (fetched once)."""
    text = str(name)
    if text.startswith("zoo:"):
        shipped = sorted(path.parent.name for path in ZOO.glob(f"*/{CONFIG}"))
        if text.removeprefix("zoo:") not in shipped:
            raise LabError(f"no zoo drafter {text!r}, this package has {shipped}")
        return ZOO / text.removeprefix("zoo:")
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise LabError(f"drafter {text} is a file, expected a folder with {CONFIG}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.startswith("."):
        return _snapshot(text)
    raise LabError(f"drafter {text!r} not found: no such folder, no zoo: name and no hub id")


def _snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=[CONFIG, "*.safetensors", INDEX]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise LabError(
            f"drafter {hub_id!r} is no folder and no reachable hub id: {first_line(error)}"
        ) from error


def read_raw_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder. Raises `LabError` unless a JSON object."""
    path = folder / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise LabError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise LabError(f"{path} holds a {type(raw).__name__}, expected a JSON object")
    return raw


def drafter_identity(name: str | Path) -> dict[str, Any]:
    """Name and sha256 of the config and every weight file, for `run.json`."""
    folder = find_checkpoint(name)
    files = [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]
    return {"name": str(name), "files": {path.name: file_hash(path) for path in files}}


def drafter_info(drafter: Drafter) -> dict[str, Any]:
    """What `run.json` says of the drafter of a run: files if it came from any, weights, shape."""
    settings = drafter.settings
    identity = drafter_identity(drafter.name_or_path) if drafter.name_or_path else {}
    return identity | {
        "name": drafter.name,
        "weights_hash": weights_hash(drafter),
        "kind": settings.kind,
        "num_draft": settings.num_draft,
        "block_size": settings.block_size,
        "num_layers": settings.num_hidden_layers,
        "selector_top_k": settings.selector_top_k,
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }


def iterate_tensors(stored: Sequence[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
    """The values of stored tensors, one at a time, file by file."""
    for file in sorted({tensor.file for tensor in stored}):
        with safe_open(file, framework="pt") as weights:
            for tensor in stored:
                if tensor.file == file:
                    yield tensor, weights.get_tensor(tensor.name)


def is_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity (integers have none)."""
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def map_problems(
    d2t: Int[Tensor, "V0"] | None, t2d: Bool[Tensor, "V"] | None, vocab_size: int
) -> list[str]:
    """What is wrong with a draft vocabulary's maps: `d2t` holds offsets, id + d2t[id] = target id.

    `t2d` (True where a target token has a draft id) is redundant and must agree.
    """
    if d2t is None:
        return []
    targets = torch.arange(len(d2t)) + d2t.long()
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= vocab_size:
        return [
            f"d2t maps draft ids to target ids {low}..{high}, expected 0..{vocab_size - 1} "
            "(d2t holds offsets: target id = draft id + d2t[draft id])"
        ]
    problems = []
    if len(targets.unique()) < len(targets):
        problems.append("d2t maps two draft ids to one target id")
    if len(d2t) == vocab_size and bool(d2t.any()):
        problems.append("d2t permutes a full vocabulary, expected zeros (the identity)")
    if t2d is not None and len(t2d) != vocab_size:
        problems.append(f"t2d has {len(t2d)} entries, expected {vocab_size}")
    elif t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], targets.sort().values):
        problems.append("t2d and d2t disagree on which target tokens have a draft id")
    return problems


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a float type's name. Raises `LabError` for any other name."""
    if name not in DTYPES:
        raise LabError(f"dtype is {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor.long()
