"""A fresh drafter for a target: its shape copied, its layers read at an even spread."""

from collections.abc import Sequence

from dflash2_lab.errors import LabError
from dflash2_lab.models.config import DrafterConfig
from dflash2_lab.models.drafter import Drafter, build_drafter
from dflash2_lab.target import Target
from dflash2_lab.training.data import Corpus

KINDS = ("dflash", "dflash2")


def spread_layers(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Layer ids from 1 to the third last, evenly spaced, as the published drafters choose them."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    if span < num_taps - 1:
        raise LabError(
            f"num_layers: {num_taps} context layers do not fit between layers 1 and "
            f"{num_target_layers - 3} of the target"
        )
    return tuple(round(1 + index * span / (num_taps - 1)) for index in range(num_taps))


def new_drafter(
    target: Target,
    kind: str,
    mask_token_id: int,
    num_layers: int = 5,
    intermediate_size: int | None = None,
    block_size: int = 8,
    selector_rank: int = 256,
    seed: int = 0,
) -> Drafter:
    """An untrained drafter with the target's width, heads, RoPE and embeddings.

    DFlash 2 gets identity convs (two taps, groups of 16) and a silent projected selector over 16
    candidates, so it starts as the DFlash drafter of the same seed. `mask_token_id` must be a row
    of the embedding that the text never uses. Raises `LabError` for what the target cannot carry.
    """
    if kind not in KINDS:
        raise LabError(f"kind: found {kind!r}, can train {', '.join(KINDS)}")
    body = target.config
    if intermediate_size is None:
        intermediate_size = body.intermediate_size
    heads = body.num_attention_heads
    second = {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": selector_rank,
        "selector_top_k": 16,
        "selector_parametrization": "projected",
    }
    config = DrafterConfig(
        kind=kind,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=body.num_key_value_heads,
        head_dim=getattr(body, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        attention_bias=False,
        max_position_embeddings=body.max_position_embeddings,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(body.rope_parameters["rope_theta"]),
        },
        num_target_layers=target.num_layers,
        target_layer_ids=spread_layers(target.num_layers, num_layers),
        mask_token_id=mask_token_id,
        block_size=block_size,
        **(second if kind == "dflash2" else {}),
    )
    return build_drafter(config, seed=seed)


def choose_mask_token(target: Target, corpora: Sequence[Corpus], wanted: int | None = None) -> int:
    """The token that stands for "not drafted yet": `wanted`, or the highest special token that
    neither ends, starts nor pads text. It must not occur in the text, whose tokens are labels.

    Raises `LabError` when `wanted` is no token or occurs in the text, or when none is left.
    """

    def occurs(token: int) -> bool:
        return any((row == token).any() for corpus in corpora for row in corpus.tokens)

    if wanted is not None:
        if not 0 <= wanted < target.vocab_size or occurs(wanted):
            raise LabError(
                f"mask_token_id: found {wanted}, expected a token below {target.vocab_size} that "
                "the training text never uses"
            )
        return wanted
    tokenizer = target.tokenizer
    taken = {tokenizer.bos_token_id, tokenizer.pad_token_id, *target.eos_token_ids}
    special = sorted(set(tokenizer.added_tokens_decoder) - taken, reverse=True)
    for token in special:
        if token < target.vocab_size and not occurs(token):
            return token
    raise LabError("mask_token_id: no special token is unused by the text; name one")
