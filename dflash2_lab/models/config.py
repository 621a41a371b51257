"""The drafter's configuration: one frozen record for every published layout.

`DrafterConfig` holds what a DFlash, DFlash 2 or DSpark drafter is built from, in one vocabulary:
layer ids are 0-based decoder layers of the target whose *output* is read, windows and in-block
causality are spelled out per layer, and `num_draft` is derived from `block_size` and the layout
(`sample_from_anchor`), never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = ("dflash", "dflash2", "dspark")


@dataclass(frozen=True)
class DrafterConfig:
    """Everything needed to build a drafter. Sizes are counts; windows are in tokens.

    `target_layer_ids` are decoder layers of the target, 0-based; the feature is that layer's
    output. `windows[i]` is layer i's sliding window (None: full attention) and `causal[i]` says
    whether its block rows see only earlier rows; an empty tuple means no window, not causal, for
    every layer. Raises `LabError` naming every value that cannot be right.
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
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        windows = tuple(self.windows) or (None,) * self.num_hidden_layers
        causal = tuple(self.causal) or (False,) * self.num_hidden_layers
        object.__setattr__(self, "windows", windows)
        object.__setattr__(self, "causal", causal)

    @property
    def num_draft(self) -> int:
        """Drafted slots per block: all rows when anchor-first, all but the anchor's otherwise."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1
