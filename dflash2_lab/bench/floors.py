"""Weight bytes of a decode cycle: the time that no engine can be under is these over the bandwidth.

Every weight matrix is read once per use. The head is used twice (draft and verify), a drafter's key
and value projections twice (its block and the new context rows), DSpark's output table once a slot,
since a slot's correction needs the token before it. Of token tables only the rows looked up count.
Keys and values of the context, activations and logits are left out.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from dflash2_lab.models.drafter import Drafter, DSparkDrafter
from dflash2_lab.target import Target


def target_bytes(target: Target) -> dict[str, int]:
    """Bytes by part of one step of plain decoding (and of one verification)."""
    return {
        "target layers": _matrices(target.layers),
        "target head": _matrices([target.head]),
    }


def draft_bytes(target: Target, drafter: Drafter, policy: str, batch: int) -> dict[str, int]:
    """Bytes by part of drafting a block for each of `batch` sequences."""
    attention = [layer.self_attn for layer in drafter.layers]
    found = {
        "drafter layers": _matrices(drafter.layers),
        "draft head": _matrices([drafter.lm_head or target.head]),
        "context fusion": _matrices([drafter.fc]),
        "context keys and values": _matrices(
            module for part in attention for module in (part.k_proj, part.v_proj)
        ),
    }
    if policy.startswith("selector"):
        found["selector"] = selector_bytes(drafter, batch)
    if isinstance(drafter, DSparkDrafter) and drafter.markov_head is not None:
        found["markov head"] = markov_bytes(drafter, batch)
    return found


def selector_bytes(drafter: Drafter, batch: int) -> int:
    """The gate's projection, and a row for every candidate as successor and (but in the last slot)
    as predecessor, the anchor's too."""
    settings, gate = drafter.settings, drafter.candidate_selector.hidden_projection.weight
    slots, top_k = settings.num_draft, settings.selector_top_k
    rows = batch * (1 + (slots - 1) * top_k + slots * top_k)
    return _size(gate) + rows * settings.selector_rank * gate.element_size()


def markov_bytes(drafter: DSparkDrafter, batch: int) -> int:
    """The output table once a slot, and the previous token's row."""
    slots, output = drafter.settings.num_draft, drafter.markov_head.markov_w2.weight
    return slots * (_size(output) + batch * drafter.settings.markov_rank * output.element_size())


def cache_bytes(target: Target, drafter: Drafter | None, batch: int, context: int) -> int:
    """Keys and values of the context that a cycle reads: shown beside the floor, no part of it."""
    config = target.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = target.num_layers * config.num_key_value_heads * head_dim
    size = values * target.embed_weight.element_size()
    if drafter is not None:
        part = drafter.settings
        values = part.num_hidden_layers * part.num_key_value_heads * part.head_dim
        size += values * drafter.fc.weight.element_size()
    return 2 * batch * context * size


def _matrices(modules: Iterable[nn.Module]) -> int:
    """Bytes of all weights but vectors (norms, biases)."""
    weights = (weight for module in modules for weight in module.parameters())
    return sum(_size(weight) for weight in weights if weight.dim() > 1)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
