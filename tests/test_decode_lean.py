"""The lean forward pass is the Hugging Face model's, on that model's own weights."""

import pytest
import torch
from decode_helpers import hybrid_target
from drafters import random_blocks, tiny_drafter
from helpers import tiny_target
from transformers import Qwen2Config, Qwen2ForCausalLM

from dflash2_lab.decoding.lean import lean_drafter, lean_target, make_scratch, run_layers
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.linear import linear
from dflash2_lab.kernels.stream import finish_norm, start_stream
from dflash2_lab.models.io import save_drafter
from dflash2_lab.target import wrap_target

CAPACITY = 64


def qwen2_target():
    plain = tiny_target("qwen3")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, eos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    return wrap_target(model, plain.tokenizer, "tiny-qwen2")


TARGETS = {
    "qwen3": lambda: tiny_target("qwen3"),
    "qwen2, biased and tied": qwen2_target,
    "llama": lambda: tiny_target("llama"),
    "llama, biases everywhere": lambda: tiny_target("llama", attention_bias=True, mlp_bias=True),
    "llama, scaled positions": lambda: tiny_target(
        "llama",
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ),
}  # fmt: skip


def cache(trunk, batch):
    """An empty cache whose memory holds NaN."""
    shape = (len(trunk.layers), batch, trunk.num_kv_heads, CAPACITY, trunk.head_dim)
    return torch.full(shape, float("nan")), torch.full(shape, float("nan"))


@torch.inference_mode()
def lean_pass(target, prefixes, ids):
    """Logits and layer outputs of `ids` [B, G] behind the prefixes, whose keys come from Hugging
    Face's cache."""
    trunk = lean_target(target, CAPACITY)
    keys, values = cache(trunk, len(ids))
    for row, prefix in enumerate(prefixes):
        found = target.model(prefix[None], use_cache=True).past_key_values
        for layer, pair in enumerate(found.layers):
            keys[layer, row, :, : len(prefix)] = pair.keys[0]
            values[layer, row, :, : len(prefix)] = pair.values[0]
    start = torch.tensor([len(prefix) for prefix in prefixes])
    scratch = make_scratch(trunk, *ids.shape, CAPACITY)
    embedded = target.embed_weight[ids].flatten(0, 1)
    taps = {layer: torch.empty_like(embedded) for layer in range(target.num_layers)}
    stream = start_stream(embedded, trunk.layers[0].input_norm)
    rows = run_layers(trunk, stream, keys, values, start, True, scratch, taps)
    logits = linear(rows, target.head.weight, target.head.bias)
    return logits.unflatten(0, ids.shape), taps, (keys, values, start)


@pytest.mark.parametrize("name", TARGETS)
def test_a_block_behind_a_cache_is_the_models_own(name):
    target = TARGETS[name]()
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(4, 264, (n,), generator=generator) for n in (9, 17)]
    with torch.no_grad():
        full = [target.model(s[None], output_hidden_states=True) for s in sequences]
    prefixes = [s[:-5] for s in sequences]
    ids = torch.stack([s[-5:] for s in sequences])
    logits, taps, (keys, values, start) = lean_pass(target, prefixes, ids)
    for row, out in enumerate(full):
        assert torch.allclose(logits[row], out.logits[0, -5:], atol=2e-4)
        for layer in range(target.num_layers - 1):
            expected = out.hidden_states[layer + 1][0, -5:]
            assert torch.allclose(taps[layer].view(2, 5, -1)[row], expected, atol=2e-4)
        end = int(start[row]) + 5
        assert torch.isfinite(keys[:, row, :, :end]).all() and keys[:, row, :, end:].isnan().all()
        assert torch.isfinite(values[:, row, :, :end]).all()


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_drafted_blocks_are_the_drafters_own(kind):
    drafter = tiny_drafter(kind, windows=(6, None), causal=(True, False))
    features, embeds, anchors = random_blocks(drafter, [[7], [15]])
    with torch.no_grad():
        context = drafter.context_keys(features)
        expected = drafter(embeds, context, anchors)[:, 0]
        trunk = lean_drafter(drafter, CAPACITY)
        keys, values = cache(trunk, 2)
        for layer, (k, v) in enumerate(context):
            for row, length in enumerate((7, 15)):
                keys[layer, row, :, :length] = k[row, :, :length]
                values[layer, row, :, :length] = v[row, :, :length]
        scratch = make_scratch(trunk, 2, embeds.shape[2], CAPACITY)
        stream = start_stream(embeds.flatten(0, 2), trunk.layers[0].input_norm)
        rows = run_layers(trunk, stream, keys, values, anchors[:, 0], False, scratch)
    assert torch.allclose(finish_norm(rows).view_as(expected), expected, atol=1e-4)
    assert keys[0, 0, :, 7:].isnan().all()


def test_fused_weights_are_the_modules_own_memory(tmp_path):
    target, drafter = tiny_target("llama", attention_bias=True), tiny_drafter("dflash2")
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    trunks = [lean_target(target, CAPACITY) for _ in range(2)]
    for name, weight in target.model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    attention = target.layers[0].self_attn
    assert trunks[0].layers[0].qkv.data_ptr() == attention.q_proj.weight.data_ptr()
    assert trunks[1].layers[0].qkv.data_ptr() == attention.q_proj.weight.data_ptr()
    attention.v_proj.weight.fill_(3.0)
    assert (trunks[0].layers[0].qkv[-16:] == 3.0).all()
    lean_drafter(drafter, CAPACITY)
    save_drafter(drafter, tmp_path / "saved")  # weights that share memory can still be saved


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: tiny_target("mistral"), "mistral"),
        (lambda: hybrid_target("gemma3"), "gemma3"),
        (lambda: hybrid_target("qwen3_next"), "qwen3_next"),
        (lambda: tiny_target("llama", hidden_act="gelu"), "gelu"),
        (
            lambda: tiny_target(
                "qwen3",
                use_sliding_window=True,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            "sliding_attention",
        ),
    ],
)
def test_other_architectures_are_refused_with_the_way_out(make, why):
    with pytest.raises(LabError, match=rf"{why}.*engine='eager'"):
        lean_target(make(), CAPACITY)
