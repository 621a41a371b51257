"""The published package `dflash` 0.1.0 as a yardstick: our drafters as its models, its draft-verify
cycle one anchor at a time.

Only the benchmark and the tests need that package, so it is imported inside the functions; without
it they raise `ImportError`.
"""

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from dflash2_lab.errors import LabError
from dflash2_lab.models.drafter import DFlash2Drafter, Drafter
from dflash2_lab.models.io import save_drafter
from dflash2_lab.models.layers import embed_rows
from dflash2_lab.target import Target, quiet_transformers


@dataclass(frozen=True, eq=False)
class Cycle:
    """What the package drafted at one anchor and how much of it the target accepted greedily.

    `ids` and `q` are the selector's candidates (in no order) and its law over them at T > 0.
    """

    hidden: Float[Tensor, "P H"]
    tokens: Int[Tensor, " P"]
    ids: Int[Tensor, "P K"] | None
    q: Float[Tensor, "P K"] | None
    num_accepted: int


def published_model(drafter: Drafter, embedding: Float[Tensor, "V H"]) -> nn.Module:
    """The package's model with the weights of `drafter`, a projected selector folded into tables.

    Raises `ImportError` without the package, `LabError` for a drafter that it has no model for.
    """
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    foreign = drafter.embed_tokens is not None or drafter.lm_head is not None
    if drafter.settings.kind == "dspark" or drafter.settings.sample_from_anchor or foreign:
        raise LabError(
            f"drafter {drafter.name}: the package dflash knows DFlash and DFlash 2 with a leading "
            "anchor and the target's own embedding and head only"
        )
    kind = DFlashDraftModel
    if isinstance(drafter, DFlash2Drafter):
        kind = DFlash2DraftModel
        if drafter.settings.selector_parametrization == "projected":
            drafter = drafter.fold(embedding)
    with tempfile.TemporaryDirectory(prefix="dflash2-lab-published-") as folder:
        save_drafter(drafter, folder)
        with quiet_transformers():
            model = kind.from_pretrained(folder, dtype=drafter.dtype, local_files_only=True)
        # A memory-mapped file would be gone with the folder.
        model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})
    return model.to(drafter.device).eval()


class PublishedDecoder:
    """Steps the package's cycle at every position of a known sequence, from the prompt's end on.

    Each call of `cycle` drafts and verifies one block at the present anchor, then crops both caches
    back to one token further, so the next anchor is the sequence's next token whatever was drafted.
    """

    def __init__(
        self, model: nn.Module, target: Target, ids: Int[Tensor, " S"], prompt_length: int
    ):
        self.model, self.target, self.ids = model, target, ids[None]
        self.start = prompt_length
        self.caches = [DynamicCache(config=config) for config in (target.config, model.config)]
        for cache in self.caches:
            cache.activate_past_recording()  # a windowed layer could not be cropped without it
        self.features = self._target_pass(self.ids[:, :prompt_length])[0]

    @torch.inference_mode()
    def cycle(self, temperature: float = 0.0) -> Cycle:
        """Draft at the present anchor, verify greedily, move on by one token."""
        from dflash.model import DFlash2DraftModel

        model, start = self.model, self.start
        rows = model.block_size
        block = torch.full((1, rows), model.mask_token_id, device=self.ids.device)
        block[:, 0] = self.ids[:, start]
        scale = getattr(model.config, "dflash_config", {}).get("input_embedding_scale", 1.0)
        first = start - self.features.shape[1]
        hidden = model(
            target_hidden=self.features,
            noise_embedding=embed_rows(self.target.embed_weight, block, scale),
            position_ids=torch.arange(first, start + rows, device=block.device)[None],
            past_key_values=self.caches[1],
            use_cache=True,
        )[:, 1:]
        self.caches[1].crop(-rows)
        ids = q = None
        if isinstance(model, DFlash2DraftModel):
            tokens, ids, q = model.propose(hidden, block[:, 0], self.target.head, temperature)
        else:
            tokens = model.compute_logits(hidden, self.target.head).argmax(-1)
        features, logits = self._target_pass(torch.cat([block[:, :1], tokens], dim=1))
        choices = logits.argmax(-1)[:, :-1]
        accepted = int((tokens == choices).cumprod(-1).sum())
        self.features = features[:, :1]
        self.start += 1
        self.caches[0].crop(1 - rows)
        return Cycle(hidden[0], tokens[0], _row(ids), _row(q), accepted)

    @torch.inference_mode()
    def _target_pass(self, ids: Int[Tensor, "1 n"]) -> tuple[Tensor, Tensor]:
        out = self.target.model(
            ids,
            past_key_values=self.caches[0],
            use_cache=True,
            output_hidden_states=True,
        )
        layers = self.model.target_layer_ids
        return torch.cat([out.hidden_states[layer + 1] for layer in layers], dim=-1), out.logits


def _row(value: Any) -> Any:
    return None if value is None else value[0]
