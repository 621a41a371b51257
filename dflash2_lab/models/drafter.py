"""DFlash, DFlash 2 and DSpark as Hugging Face models on the published tensor names.

A drafter fills a block of masks after the anchor in one pass. Its context is the target's hidden
states at a few layers, fused by `fc`; embeddings and output head are the target's own, unless the
checkpoint brings them. `context_keys` projects the context once, `forward` drafts any number of
blocks against it.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash2_lab.models import config as configs
from dflash2_lab.models.attention import dense_attention
from dflash2_lab.models.config import DrafterConfig
from dflash2_lab.models.heads import CandidateSelector, ConfidenceHead, MarkovHead
from dflash2_lab.models.layers import DraftLayer, RMSNorm, softcap

ContextKeys = Sequence[tuple[Float[Tensor, "B KV S D"], Float[Tensor, "B KV S D"]]]


def hub_config(config: DrafterConfig) -> Qwen3Config:
    """The published config.json as the Hugging Face object that `PreTrainedModel` wants."""
    return Qwen3Config(**configs.to_zlab(config))


class Rotary(Qwen3RotaryEmbedding):
    """Rotary tables whose frequencies stay fp32 when the model is cast: in bf16 positions past a
    few hundred would blur."""

    def _apply(self, fn: Callable, recurse: bool = True) -> "Rotary":
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self


class Drafter(PreTrainedModel):
    """The backbone that the three drafters share; see `build_drafter` and `load_drafter`."""

    config_class = Qwen3Config
    base_model_prefix = ""

    def __init__(self, config: DrafterConfig, own_embedding: bool = False, own_head: bool = False):
        super().__init__(hub_config(config))
        self.settings = config
        hidden = config.hidden_size
        self.layers = nn.ModuleList(
            DraftLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.rotary_emb = Rotary(self.config)
        draft_vocab = config.draft_vocab_size or config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if own_embedding else None
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False) if own_head else None
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.long))

    @property
    def name(self) -> str:
        """What the checkpoint was called, without its folder; the kind for a fresh drafter."""
        return (self.name_or_path or self.settings.kind).rstrip("/").split("/")[-1]

    @torch.no_grad()
    def reset_parameters(self, seed: int, std: float = 0.02) -> None:
        """Normal linear maps, unit norms, identity convs, a selector that scores zero.

        A tensor's numbers depend on (seed, its name) alone, so drafters of different kinds start
        from the same backbone.
        """
        silent = ("kernel_projection.weight", "successor_codebook", "successor_projection.weight")
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("base_kernel"):
                parameter.zero_()[:, 0] = 1.0
            elif name.endswith((*silent, "bias")):
                parameter.zero_()
            else:
                source = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=source) * std)

    def context_keys(
        self, features: Float[Tensor, "B S NH"], first_position: int = 0
    ) -> ContextKeys:
        """Rotated keys and values of the context rows, one pair a layer."""
        context = self.hidden_norm(self.fc(features))
        positions = torch.arange(features.shape[1], device=features.device) + first_position
        rotary = self.rotary_emb(context, positions[None])
        return [layer.self_attn.keys_values(context, rotary) for layer in self.layers]

    def block_ids(self, anchor_ids: Int[Tensor, "B A"]) -> Int[Tensor, "B A G"]:
        """[anchor token, mask x (G - 1)] for every block."""
        ids = anchor_ids.new_full((*anchor_ids.shape, self.settings.block_size), 0)
        ids[..., :] = self.settings.mask_token_id
        ids[..., 0] = anchor_ids
        return ids

    def forward(
        self,
        block_embeds: Float[Tensor, "B A G H"],
        context: ContextKeys,
        anchors: Int[Tensor, "B A"],
        attend: Callable | None = None,
    ) -> Float[Tensor, "B A G H"]:
        """Final-normed hidden states of every block row.

        `anchors` are positions in the context: the block at anchor a sees context rows before a
        and sits at positions a .. a + G - 1. `attend(layer, ...)` may replace the attention, for
        example to keep each layer's mass on context, anchor and drafted rows.
        """
        rows = torch.arange(block_embeds.shape[2], device=block_embeds.device)
        positions = anchors[..., None] + rows
        cos, sin = self.rotary_emb(block_embeds, positions.flatten(1))
        rotary = cos.unflatten(1, positions.shape[1:]), sin.unflatten(1, positions.shape[1:])
        hidden = block_embeds
        for index, layer in enumerate(self.layers):
            call = dense_attention if attend is None else _bind(attend, index)
            hidden = layer(hidden, context[index], anchors, rotary, call)
        return self.norm(hidden)

    def slot_rows(self, hidden: Float[Tensor, "B A G H"]) -> Float[Tensor, "B A P H"]:
        """Rows that are drafted slots: all when anchor-first, all but the anchor's otherwise."""
        return hidden if self.settings.sample_from_anchor else hidden[..., 1:, :]

    def logits(
        self, hidden: Float[Tensor, "*rows H"], target_head: nn.Module
    ) -> Float[Tensor, "*rows V"]:
        """Unary draft logits over the target's vocabulary, multiplied and capped as configured.

        Tokens outside a reduced draft vocabulary get -inf. `hidden` comes in the target's dtype.
        """
        if self.lm_head is not None:
            target_head, hidden = self.lm_head, hidden.to(self.dtype)
        # A strided view (slots without the anchor row) would become one small product a block.
        logits = target_head(hidden.contiguous())
        if self.settings.output_multiplier != 1.0:
            logits = logits * self.settings.output_multiplier
        return self.to_target_vocab(softcap(logits, self.settings.final_logit_softcapping))

    def to_target_vocab(self, logits: Float[Tensor, "*rows V0"]) -> Float[Tensor, "*rows V"]:
        if self.settings.draft_vocab_size is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.settings.vocab_size), float("-inf"))
        full[..., self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)] = logits
        return full

    def input_embedding(self, target_weight: Float[Tensor, "V H"]) -> Float[Tensor, "V H"]:
        """The table that block tokens are read from: the target's unless the checkpoint has one."""
        return target_weight if self.embed_tokens is None else self.embed_tokens.weight

    def first_bad_layer(
        self, block_embeds: Float[Tensor, "B A G H"], context: ContextKeys, anchors: Tensor
    ) -> str:
        """Name of the first part whose output is not finite on this input."""
        if not torch.isfinite(block_embeds).all():
            return "the input embedding"
        if not all(torch.isfinite(part).all() for pair in context for part in pair):
            return "the context projection (fc, hidden_norm or a k_proj)"
        bad: list[str] = []

        def watch(name: str) -> Callable:
            def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
                if not torch.isfinite(output).all():
                    bad.append(name)

            return hook

        handles = [
            layer.register_forward_hook(watch(f"layers.{index}"))
            for index, layer in enumerate(self.layers)
        ]
        self(block_embeds, context, anchors)
        for handle in handles:
            handle.remove()
        return bad[0] if bad else "norm"


def _bind(attend: Callable, index: int) -> Callable:
    return lambda *args: attend(index, *args)


class DFlashDrafter(Drafter):
    """DFlash: the block-parallel backbone and nothing else (arXiv 2602.06036)."""


class DFlash2Drafter(Drafter):
    """DFlash 2: grouped convs in every layer, and a path selector over the top candidates."""

    def __init__(self, config: DrafterConfig, own_embedding: bool = False, own_head: bool = False):
        super().__init__(config, own_embedding, own_head)
        self.candidate_selector = CandidateSelector(config)

    @torch.no_grad()
    def fold(self, embedding: Float[Tensor, "V H"]) -> "DFlash2Drafter":
        """A copy whose projected selector is written out as the published free tables."""
        settings = dataclasses.replace(self.settings, selector_parametrization="free")
        folded = DFlash2Drafter(settings, self.embed_tokens is not None, self.lm_head is not None)
        state = {
            name: tensor
            for name, tensor in self.state_dict().items()
            if not name.endswith(("predecessor_projection.weight", "successor_projection.weight"))
        }
        for name, table in self.candidate_selector.tables(embedding).items():
            state[f"candidate_selector.{name}"] = table
        folded.to(device=self.device, dtype=self.dtype).load_state_dict(state)
        return folded.eval()


class DSparkDrafter(Drafter):
    """DSpark: anchor-first backbone, Markov correction over the full vocabulary, confidence."""

    def __init__(self, config: DrafterConfig, own_embedding: bool = False, own_head: bool = False):
        super().__init__(config, own_embedding, own_head)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None


def build_drafter(
    config: DrafterConfig, own_embedding: bool = False, own_head: bool = False, seed: int = 0
) -> Drafter:
    """A freshly initialised drafter of the config's kind (shapes only on the meta device)."""
    kinds = {"dflash": DFlashDrafter, "dflash2": DFlash2Drafter, "dspark": DSparkDrafter}
    drafter = kinds[config.kind](config, own_embedding, own_head)
    if drafter.device.type != "meta":
        drafter.reset_parameters(seed)
    return drafter
