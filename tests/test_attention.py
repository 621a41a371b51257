"""Packed block attention: two forms and a plain softmax agree, and the masses are its weights."""

import numpy as np
import pytest
import torch
from profiling import peak_bytes

from dflash2_lab.attention_sums import AttentionSums, context_bin
from dflash2_lab.models.attention import (
    attend_with_lse,
    block_visible,
    context_visible,
    dense_attention,
    merged_attention,
    uniform_share,
)

WINDOWS = [None, 1, 2, 3, 6, 40]
ROWS = 4


def inputs(heads=4, kv_heads=2, length=13, anchors=((1, 5, 13), (2, 7, 9)), dtype=torch.float32):
    """Query, context and block of two sequences with three blocks each; head width 8."""
    anchors = torch.tensor(anchors)
    batch, blocks = anchors.shape
    query = torch.randn(batch, heads, blocks, ROWS, 8, dtype=dtype)
    context = tuple(torch.randn(batch, kv_heads, length, 8, dtype=dtype) for _ in range(2))
    block = tuple(torch.randn(batch, kv_heads, blocks, ROWS, 8, dtype=dtype) for _ in range(2))
    return query, context, block, anchors


def eager(query, context, block, anchors, window, causal):
    """One softmax a row over keys collected one by one, in float64: (output, weights by group)."""
    batch, heads, blocks, rows, width = query.shape
    repeat = heads // context[0].shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    mass = torch.zeros(*query.shape[:-1], 3, dtype=torch.float64)
    for b, h, a, g in np.ndindex(batch, heads, blocks, rows):
        kv, anchor = h // repeat, int(anchors[b, a])
        keys, values, groups = [], [], []
        for position in range(anchor):
            if window is None or anchor + g - position < window:
                keys.append(context[0][b, kv, position])
                values.append(context[1][b, kv, position])
                groups.append(0)
        for other in range(rows):
            near = window is None or abs(g - other) < window
            if near and (not causal or other <= g):
                keys.append(block[0][b, kv, a, other])
                values.append(block[1][b, kv, a, other])
                groups.append(1 if other == 0 else 2)
        scores = torch.stack(keys).double() @ query[b, h, a, g].double() / width**0.5
        weights = scores.softmax(0)
        out[b, h, a, g] = weights @ torch.stack(values).double()
        mass[b, h, a, g].index_add_(0, torch.tensor(groups), weights)
    return out, mass


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_dense_and_merged_equal_a_plain_softmax(window, causal, heads, kv_heads):
    parts = inputs(heads, kv_heads)
    expected, weights = eager(*parts, window, causal)
    dense = dense_attention(*parts, window, causal)
    merged, mass = merged_attention(*parts, window, causal)
    torch.testing.assert_close(dense.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(mass.double(), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mass.sum(-1), torch.ones_like(mass[..., 0]))


@pytest.mark.parametrize("window", [None, 2])
def test_dense_in_float64_equals_the_plain_softmax_to_rounding(window):
    parts = inputs(dtype=torch.float64)
    expected, _ = eager(*parts, window, False)
    torch.testing.assert_close(dense_attention(*parts, window, False), expected)


def test_rows_past_the_window_have_no_mass_on_the_context_at_all():
    _, mass = merged_attention(*inputs(), 3, False)
    assert (mass[:, :, :, :2, 0] > 0).all()
    assert not mass[:, :, :, 2:, 0].any()


def test_bf16_inputs_stay_close_and_keep_their_dtype():
    query, context, block, anchors = inputs()
    narrow = [query.bfloat16(), *(tuple(x.bfloat16() for x in pair) for pair in (context, block))]
    expected, weights = eager(*narrow, anchors, None, False)
    out, mass = merged_attention(*narrow, anchors, None, False)
    assert (out.dtype, mass.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(mass.double(), weights, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("form", [dense_attention, merged_attention])
def test_a_block_never_sees_another_block_nor_the_context_from_its_anchor_on(form):
    query, context, block, anchors = inputs(anchors=((3, 3, 9),))
    before = form(query, context, block, anchors, None, False)
    for part in context:
        part[:, :, 3:] = 1e4
    for part in block:
        part[:, :, 2] = 1e4
    after = form(query, context, block, anchors, None, False)
    before, after = ((x[0] if isinstance(x, tuple) else x)[:, :, :2] for x in (before, after))
    assert torch.equal(before, after)


def test_context_behind_the_last_anchor_may_hold_anything():
    query, context, block, anchors = inputs(anchors=((2, 5, 6),))
    before, _ = merged_attention(query, context, block, anchors, None, False)
    for part in context:
        part[:, :, 6:] = float("nan")
    after, _ = merged_attention(query, context, block, anchors, None, False)
    assert torch.equal(before, after)


def test_dense_gradients_reach_only_what_a_block_sees():
    query, context, block, anchors = inputs(anchors=((3, 9),))
    leaves = [part.requires_grad_() for part in (*context, *block)]
    out = dense_attention(query, context, block, anchors, None, False)
    out[:, :, 0].square().sum().backward()
    for part in leaves[:2]:
        assert part.grad[:, :, :3].abs().min() > 0
        assert not part.grad[:, :, 3:].any()
    for part in leaves[2:]:
        assert part.grad[:, :, 0].any()
        assert not part.grad[:, :, 1:].any()


def test_a_row_without_keys_has_output_zero_and_lse_minus_infinity():
    query, keys = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    visible = torch.tensor([[[1, 1, 0, 0, 0], [0] * 5, [1] * 5]]).bool()
    out, lse = attend_with_lse(query, keys, keys, visible)
    assert not out[:, :, 1].any()
    assert (lse[:, :, 1] == -torch.inf).all()
    expected = (query @ keys.mT / 8**0.5).masked_fill(~visible[:, None], -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_uniform_share_is_the_share_of_visible_keys(window, causal):
    anchors = np.arange(1, 12)
    seen = context_visible(torch.from_numpy(anchors)[None], ROWS, 12, window)[0].sum(-1).numpy()
    own = block_visible(ROWS, window, causal, torch.device("cpu")).sum(-1).numpy()
    found = uniform_share(anchors, ROWS, window, causal)
    np.testing.assert_allclose(found, own / (own + seen), rtol=1e-12)


def test_uniform_share_is_the_within_block_mass_of_equal_scores():
    query, context, block, anchors = inputs()
    _, mass = merged_attention(torch.zeros_like(query), context, block, anchors, 6, True)
    expected = uniform_share(anchors[0].numpy(), ROWS, 6, True)
    np.testing.assert_allclose(mass[0, 0, ..., 1:].sum(-1), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("length", "label"),
    [
        (1, "0-127"),
        (127, "0-127"),
        (128, "128-255"),
        (255, "128-255"),
        (256, "256-511"),
        (5000, "4096-8191"),
    ],
)
def test_context_bins_double(length, label):
    assert context_bin(length) == label


def test_sums_of_any_tiling_are_the_sums_over_all_blocks():
    mass = torch.rand(2, 300, 3, 3)  # heads, blocks, slots, groups
    uniform, lengths = np.random.default_rng(0).random((300, 3)), np.arange(60, 360)
    whole, tiled = AttentionSums(), AttentionSums()
    whole.add(0, mass, uniform, lengths)
    for first in range(0, 300, 37):
        part = slice(first, first + 37)
        tiled.add(0, mass[:, part], uniform[part], lengths[part])
    found, expected = (sums.frame({"prompt_id": "a"}) for sums in (tiled, whole))
    assert expected["context_bin"].unique().tolist() == ["0-127", "128-255", "256-511"]
    for name in expected:
        if expected[name].dtype == float:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-12)
        else:
            assert (found[name] == expected[name]).all()
    row = expected.query("context_bin == '128-255' and head == 1 and slot == 2").iloc[0]
    part = mass[1, 68:196, 1].double()
    assert row["count"] == 128
    assert row["sum_context"] == pytest.approx(float(part[:, 0].sum()))
    assert row["sum_anchor"] == pytest.approx(float(part[:, 1].sum()))
    assert row["sum_drafted"] == pytest.approx(float(part[:, 2].sum()))
    assert row["sumsq_within"] == pytest.approx(float(part[:, 1:].sum(-1).square().sum()))
    assert row["sum_uniform"] == pytest.approx(uniform[68:196, 1].sum())


def test_memory_of_one_block_at_32k_context_is_a_few_rows_of_mask():
    heads, kv_heads, rows, length, width = 4, 2, 16, 32_768, 16
    query = torch.randn(1, heads, 1, rows, width)
    context = tuple(torch.randn(1, kv_heads, length, width) for _ in range(2))
    block = tuple(torch.randn(1, kv_heads, 1, rows, width) for _ in range(2))
    anchors = torch.tensor([[length]])
    peak = peak_bytes(lambda: merged_attention(query, context, block, anchors, None, False))
    assert 0 < peak < 10e6  # keys and values repeated for every query head alone are 16.8 MB
