"""Block attention against plain loops, the drafter's own attention, and Hugging Face layers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafters import tiny_drafter
from helpers import tiny_model
from transformers import DynamicCache

from dflash2_lab.kernels.attention_plan import default_splits, make_workspace
from dflash2_lab.kernels.block_attention import (
    block_attention,
    block_attention_reference,
    block_attention_triton,
)
from dflash2_lab.kernels.context_store import (
    store_context,
    store_context_reference,
    store_context_triton,
)
from dflash2_lab.models.attention import merged_attention

FORMS = [block_attention_reference, block_attention_triton]
STORES = [store_context_reference, store_context_triton]
SHAPES = [  # query heads, kv heads, head width, block rows
    (4, 2, 8, 4),
    (3, 1, 10, 5),
    (2, 2, 80, 3),
    (6, 2, 64, 1),
    (8, 1, 16, 7),
]


def tables(length, width, device="cpu"):
    """cos and sin of Llama's rotary embedding, float64."""
    angle = torch.arange(length, dtype=torch.float64)[:, None]
    angle = angle / 100 ** (torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    angle = torch.cat([angle, angle], dim=-1).to(device)
    return angle.cos(), angle.sin()


def case(
    device, heads=4, kv_heads=2, width=8, rows=4, starts=(0, 1, 37), dtype=torch.float32, **sizes
):
    """Random projections and caches; the caches hold NaN from start[b] on."""
    batch, length = len(starts), sizes.get("length", max(starts) + rows + 3)
    cos, sin = (table.to(dtype) for table in tables(length, width, device))
    caches = torch.randn(2, batch, kv_heads, length, width, device=device).to(dtype)
    for b, start in enumerate(starts):
        caches[:, b, :, start:] = float("nan")
    return {
        "qkv": torch.randn(batch, rows, (heads + 2 * kv_heads) * width, device=device).to(dtype),
        "cache_k": caches[0],
        "cache_v": caches[1],
        "start": torch.tensor(starts, device=device),
        "cos": cos,
        "sin": sin,
        "num_heads": heads,
        "q_norm": (1 + 0.3 * torch.randn(width, device=device)).to(dtype),
        "k_norm": (1 + 0.3 * torch.randn(width, device=device)).to(dtype),
        "eps": 1e-5,
    }


def own_copy(inputs):
    """The same inputs with caches of their own, since a call may write to them."""
    copied = {name: inputs[name].clone() for name in ("cache_k", "cache_v")}
    return inputs | copied


def head_by_loops(x, weight, eps, cos, sin):
    """One head, normed and rotated in float64, entry by entry, then rounded to the model dtype."""
    wide, half = x.double().cpu().numpy(), len(x) // 2
    if weight is not None:
        wide = wide / np.sqrt((wide**2).mean() + eps) * weight.double().cpu().numpy()
    out = np.zeros(len(wide))
    for d in range(half):
        c, s = float(cos[d]), float(sin[d])
        out[d] = wide[d] * c - wide[half + d] * s
        out[half + d] = wide[half + d] * c + wide[d] * s
    return torch.from_numpy(out).to(x.dtype).double().numpy()


def by_loops(inputs, causal=True, window=None):
    """Output, lse, mass, and the block's keys, with one softmax over keys collected one by one."""
    use = SimpleNamespace(**inputs)
    batch, rows = use.qkv.shape[:2]
    kv_heads, width = use.cache_k.shape[1], use.cache_k.shape[3]
    part = use.qkv.unflatten(-1, (-1, width))
    out = np.zeros((batch, rows, use.num_heads, width))
    lse, mass = (np.zeros((batch, use.num_heads, rows, *more)) for more in ((), (3,)))
    keys = np.zeros((batch, kv_heads, rows, width))
    caches = [cache.double().cpu().numpy() for cache in (use.cache_k, use.cache_v)]
    for b in range(batch):
        start = int(use.start[b])
        turns = [min(start + g, len(use.cos) - 1) for g in range(rows)]
        turns = [(use.cos[turn], use.sin[turn]) for turn in turns]
        for kv, g in np.ndindex(kv_heads, rows):
            head = part[b, g, use.num_heads + kv]
            keys[b, kv, g] = head_by_loops(head, use.k_norm, use.eps, *turns[g])
        for h, g in np.ndindex(use.num_heads, rows):
            kv = h * kv_heads // use.num_heads
            query = head_by_loops(part[b, g, h], use.q_norm, use.eps, *turns[g])
            seen, values, groups = [], [], []
            for position in range(start):
                if window is None or start + g - position < window:
                    seen.append(caches[0][b, kv, position])
                    values.append(caches[1][b, kv, position])
                    groups.append(0)
            for other in range(rows):
                if (other <= g or not causal) and (window is None or abs(g - other) < window):
                    seen.append(keys[b, kv, other])
                    value = part[b, other, use.num_heads + kv_heads + kv]
                    values.append(value.double().cpu().numpy())
                    groups.append(1 if other == 0 else 2)
            scores = np.stack(seen) @ query / np.sqrt(width)
            lse[b, h, g] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
            weights = np.exp(scores - lse[b, h, g])
            out[b, g, h] = weights @ np.stack(values)
            np.add.at(mass[b, h, g], groups, weights)
    return out.reshape(batch, rows, -1), lse, mass, keys


def near(found, expected, tolerance=3e-6):
    np.testing.assert_allclose(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "kv_heads", "width", "rows"), SHAPES)
@pytest.mark.usefixtures("poisoned")
def test_output_lse_and_masses_equal_the_loop(form, heads, kv_heads, width, rows, device):
    inputs = case(device, heads, kv_heads, width, rows, starts=(0, 37))
    expected = by_loops(inputs)
    out, lse, mass = form(**inputs, shares=True)
    near(out, expected[0])
    near(lse, expected[1])
    near(mass, expected[2])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 3, 6, 40])
def test_windows_and_masks_equal_the_loop(form, causal, window, device):
    inputs = case(device, 2, 1, starts=(2, 45))
    expected = by_loops(inputs, causal, window)
    options = {"causal": causal, "window": window, "write": False, "num_splits": 2}
    out, lse, mass = form(**inputs, **options, shares=True)
    near(out, expected[0])
    near(lse, expected[1])
    near(mass, expected[2])


@pytest.mark.parametrize("causal", [True, False])
def test_reference_in_float64_is_the_loop_to_rounding(causal):
    inputs = case("cpu", dtype=torch.float64)
    out, _, _ = block_attention_reference(**own_copy(inputs), causal=causal, shares=True)
    near(out, by_loops(inputs, causal)[0], 1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_without_norms_heads_are_only_rotated(form, device):
    inputs = case(device, starts=(9,)) | {"q_norm": None, "k_norm": None}
    expected, _, _, keys = by_loops(inputs)
    near(form(**inputs), expected)
    near(inputs["cache_k"][:, :, 9:13], keys)


@pytest.mark.parametrize("form", FORMS)
def test_bf16_inputs_are_the_loop_on_the_rounded_numbers(form, device):
    inputs = case(device, 3, 1, 12, starts=(1, 37), dtype=torch.bfloat16)
    inputs |= {name: inputs[name].float() for name in ("cos", "sin")}
    expected = by_loops(inputs, causal=False)
    out, lse, mass = form(**inputs, causal=False, shares=True, num_splits=2)
    assert (out.dtype, lse.dtype, mass.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    near(out, expected[0], 0.03)
    near(lse, expected[1], 0.03)
    near(mass, expected[2], 0.02)


@pytest.mark.parametrize("form", FORMS)
def test_bf16_tables_serve_as_well(form, device):
    inputs = case(device, starts=(9,))
    inputs |= {name: inputs[name].bfloat16() for name in ("cos", "sin")}
    near(form(**own_copy(inputs)), by_loops(inputs)[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_keeps_the_block_in_the_cache_and_leaves_the_rest_bit_for_bit(form, dtype, device):
    inputs = case(device, 3, 1, 12, 5, dtype=dtype)
    before = own_copy(inputs)
    keys = by_loops(inputs)[3]
    form(**inputs, num_splits=2)
    values = inputs["qkv"].unflatten(-1, (-1, 12))[:, :, 4]
    for b, start in enumerate(inputs["start"].tolist()):
        own = slice(start, start + 5)
        near(inputs["cache_k"][b, :, own], keys[b], 3e-6 if dtype == torch.float32 else 0.02)
        assert torch.equal(inputs["cache_v"][b, 0, own], values[b])
        for name in ("cache_k", "cache_v"):
            inputs[name][b, :, own] = before[name][b, :, own]
    for name in ("cache_k", "cache_v"):
        assert torch.equal(inputs[name].view(torch.int16), before[name].view(torch.int16))


@pytest.mark.parametrize("form", FORMS)
def test_without_write_the_cache_is_only_read(form, device):
    inputs = case(device, 2, 1, starts=(0, 37))
    before = own_copy(inputs)
    form(**inputs, write=False, num_splits=2)
    for name in ("cache_k", "cache_v"):
        assert torch.equal(inputs[name].view(torch.int32), before[name].view(torch.int32))


@pytest.mark.parametrize("form", FORMS)
def test_a_written_block_is_context_to_the_next_as_if_it_had_been_one(form, device):
    inputs = case(device, 2, 1, rows=6, starts=(0, 11))
    whole = form(**own_copy(inputs))
    first = form(**inputs | {"qkv": inputs["qkv"][:, :4]})
    second = form(**inputs | {"qkv": inputs["qkv"][:, 4:], "start": inputs["start"] + 4})
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("window", [None, 100])
def test_any_number_of_splits_gives_the_same_result(window, device):
    inputs = case(device, 2, 1, starts=(31, 300))
    whole = block_attention_triton(**own_copy(inputs), window=window, num_splits=1, shares=True)
    near(whole[0], by_loops(inputs, window=window)[0])
    for num_splits in (2, 5):
        split = block_attention_triton(
            **own_copy(inputs), window=window, num_splits=num_splits, shares=True
        )
        for found, expected in zip(split, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_calls_share_a_workspace_and_leave_it_ready(device):
    workspace = make_workspace(2, 1, 4, 2, 8, 2, device)
    for starts in ((150, 0), (70, 90)):
        for some in (case(device, 2, 1, starts=starts), case(device, 1, 1, rows=2, starts=(150,))):
            alone = block_attention_triton(**own_copy(some), num_splits=2)
            shared = block_attention_triton(**some, num_splits=2, workspace=workspace)
            assert torch.equal(alone, shared)
            assert not workspace.counters.any()


def test_rows_of_the_projections_may_be_strided_and_tables_may_end_early(device):
    inputs = case(device, 2, 1, starts=(3, 30))
    inputs |= {"cos": inputs["cos"][:32], "sin": inputs["sin"][:32]}
    plain = block_attention_triton(**inputs, write=False)
    wide = torch.full((2, 8, inputs["qkv"].shape[-1] + 16), float("nan"), device=device)
    wide[:, ::2, 16:] = inputs["qkv"]
    strided = block_attention_triton(**inputs | {"qkv": wide[:, ::2, 16:]}, write=False)
    assert torch.equal(strided, plain)
    near(plain, by_loops(inputs)[0])


def test_one_row_after_no_context_attends_to_itself(device):
    inputs = case(device, 2, 1, rows=1, starts=(0, 0))
    out, _, mass = block_attention_triton(**inputs, shares=True)
    values = inputs["qkv"].unflatten(-1, (-1, 8))[:, 0, 3:]
    torch.testing.assert_close(out.unflatten(-1, (2, 8))[:, 0, 1:], values)
    assert torch.equal(mass, torch.tensor([0.0, 1.0, 0.0], device=device).expand_as(mass))


@pytest.mark.parametrize("form", FORMS)
def test_nan_in_one_sequence_stays_there(form, device):
    inputs = case(device, 2, 1, starts=(5, 37))
    before = form(**own_copy(inputs))
    inputs["qkv"][0, 1] = float("nan")
    after = form(**inputs)
    assert after[0, 1:].isnan().all()
    assert torch.equal(after[1], before[1])


def test_shapes_that_do_not_fit_are_told(device):
    inputs = case(device)
    with pytest.raises(ValueError, match="width of qkv: found 56, expected 64"):
        block_attention_triton(**inputs | {"qkv": inputs["qkv"][..., :56]})
    with pytest.raises(ValueError, match="workspace too small for 3 splits"):
        block_attention_triton(
            **inputs, num_splits=3, workspace=make_workspace(3, 2, 4, 4, 8, 2, device)
        )


@pytest.mark.parametrize(
    ("B", "KV", "S", "splits"),
    [(1, 8, 8192, 16), (1, 8, 512, 8), (8, 8, 2048, 2), (16, 8, 8192, 1), (1, 8, 20, 1)],
)
def test_splits_fill_a_132_processor_gpu(B, KV, S, splits):
    assert default_splits(B, KV, 8, 4 * KV, S, torch.device("cpu")) == splits


def projected(attention, rows):
    """Raw query, key and value heads of the rows, side by side."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    return torch.cat([part(rows) for part in parts], dim=-1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layer", [0, 1])  # windowed, then full
def test_output_and_masses_are_those_of_the_drafters_attention(form, causal, layer, device):
    drafter = tiny_drafter().to(device)
    attention, window = drafter.layers[layer].self_attn, drafter.settings.windows[layer]
    features = torch.randn(2, 20, drafter.fc.in_features, device=device)
    block, anchors = torch.randn(2, 1, 4, 32, device=device), torch.tensor([[9], [16]])
    anchors = anchors.to(device)
    context = drafter.context_keys(features)[layer]
    cos, sin = drafter.rotary_emb(features, torch.arange(30, device=device)[None])
    position = anchors[..., None] + torch.arange(4, device=device)
    rotary = cos[0][position], sin[0][position]
    expected, mass = merged_attention(
        attention.queries(block, rotary), context, attention.keys_values(block, rotary), anchors,
        window, causal,
    )  # fmt: skip
    out, _, found = form(
        projected(attention, block[:, 0]), *context, anchors[:, 0], cos[0], sin[0], 4,
        attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps, causal, window,
        write=False, shares=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected[:, :, 0].transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, mass[:, :, 0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_output_and_cache_are_those_of_a_hugging_face_layer(form, family, device):
    model, prefix, rows = tiny_model(family).to(device), 13, 5
    ids = torch.randint(4, 260, (2, prefix + rows), device=device)
    cache, seen = DynamicCache(config=model.config), {}
    model(ids[:, :prefix], past_key_values=cache)
    layer = model.model.layers[2].self_attn
    cache_k, cache_v = torch.full((2, 2, 2, 24, 8), float("nan"), device=device)
    cache_k[:, :, :prefix] = cache.layers[2].keys
    cache_v[:, :, :prefix] = cache.layers[2].values

    def keep(_module, _args, options, output):
        seen.update(rows=options["hidden_states"], output=output[0])

    handle = layer.register_forward_hook(keep, with_kwargs=True)
    model(ids[:, prefix:], past_key_values=cache)
    handle.remove()
    cos, sin = model.model.rotary_emb(seen["rows"], torch.arange(24, device=device)[None])
    norms = [getattr(getattr(layer, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    out = form(
        projected(layer, seen["rows"]), cache_k, cache_v, torch.full((2,), prefix, device=device),
        cos[0], sin[0], 4, *norms, model.config.rms_norm_eps,
    )  # fmt: skip
    torch.testing.assert_close(layer.o_proj(out), seen["output"])
    torch.testing.assert_close(cache_k[:, :, : prefix + rows], cache.layers[2].keys)
    assert torch.equal(cache_v[:, :, : prefix + rows], cache.layers[2].values)


def context_case(device, starts=(0, 4), dtype=torch.float32):
    """Projections of new context rows of all layers, and caches full of NaN."""
    layers, kv_heads, width, rows = 2, 3, 12, 3
    cos, sin = (table.to(dtype) for table in tables(20, width, device))
    shape = (layers, len(starts), kv_heads, 11, width)
    return {
        "kv": torch.randn(len(starts), rows, layers * 2 * kv_heads * width, device=device).to(
            dtype
        ),
        "k_norm": (1 + 0.3 * torch.randn(layers, width, device=device)).to(dtype),
        "eps": 1e-5,
        "keys": torch.full(shape, float("nan"), dtype=dtype, device=device),
        "values": torch.full(shape, float("nan"), dtype=dtype, device=device),
        "start": torch.tensor(starts, device=device),
        "cos": cos,
        "sin": sin,
    }


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_context_equals_the_loop_and_rows_past_the_end_are_dropped(store, dtype, device):
    inputs = context_case(device, starts=(4, 9), dtype=dtype)
    heads = inputs["kv"].unflatten(-1, (2, 2, 3, 12))
    store(**inputs)
    written = torch.zeros(inputs["keys"].shape[:-1], dtype=torch.bool, device=device)
    for b, g, layer, head in np.ndindex(2, 3, 2, 3):
        place = int(inputs["start"][b]) + g
        if place < 11:
            key, value = heads[b, g, layer, :, head]
            turn = inputs["cos"][place], inputs["sin"][place]
            expected = head_by_loops(key, inputs["k_norm"][layer], inputs["eps"], *turn)
            found = inputs["keys"][layer, b, head, place]
            near(found, expected, 3e-6 if dtype == torch.float32 else 0.02)
            assert torch.equal(inputs["values"][layer, b, head, place], value)
            written[layer, b, head, place] = True
    assert torch.equal(~inputs["keys"].isnan().any(-1), written)
    assert torch.equal(~inputs["values"].isnan().any(-1), written)


@pytest.mark.parametrize("store", STORES)
def test_stored_context_is_that_of_the_drafter(store, device):
    drafter = tiny_drafter().to(device)
    features = torch.randn(2, 9, drafter.fc.in_features, device=device)
    expected = drafter.context_keys(features)
    context = drafter.hidden_norm(drafter.fc(features))
    parts = [layer.self_attn for layer in drafter.layers]
    kv = [projection(context) for part in parts for projection in (part.k_proj, part.v_proj)]
    norms = torch.stack([part.k_norm.weight for part in parts])
    cos, sin = drafter.rotary_emb(features, torch.arange(16, device=device)[None])
    keys, values = torch.full((2, 2, 2, 2, 16, 8), float("nan"), device=device)
    start = torch.zeros(2, dtype=torch.int64, device=device)
    whole = torch.cat(kv, dim=-1)
    for first, last in ((0, 6), (6, 9)):
        store(whole[:, first:last], norms, 1e-6, keys, values, start + first, cos[0], sin[0])
    for layer, (old_keys, old_values) in enumerate(expected):
        torch.testing.assert_close(keys[layer, :, :, :9], old_keys)
        torch.testing.assert_close(values[layer, :, :, :9], old_values)


def test_the_library_calls_the_form_of_the_device(device):
    inputs, context = case(device), context_case(device)
    form, store = (forms[device.type == "cuda"] for forms in (FORMS, STORES))
    expected = form(**own_copy(inputs), window=6)
    assert torch.equal(block_attention(**inputs, window=6), expected)
    other = context | {name: context[name].clone() for name in ("keys", "values")}
    store(**other)
    store_context(**context)
    assert torch.equal(context["keys"].view(torch.int32), other["keys"].view(torch.int32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_graph_serves_every_length(device):
    inputs = case(device, 8, 2, 64, 4, starts=(0, 900), dtype=torch.bfloat16)
    inputs["cache_k"].normal_(), inputs["cache_v"].normal_()
    inputs["workspace"] = make_workspace(2, 2, 4, 8, 64, 8, device)
    block_attention_triton(**inputs, write=False, num_splits=8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_attention_triton(**inputs, write=False, num_splits=8)
    for starts in ((0, 900), (700, 3), (64, 128)):
        inputs["start"].copy_(torch.tensor(starts))
        graph.replay()
        expected = block_attention_reference(**inputs, write=False)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
