"""The Triton convolution and its gradients against the plain form in float64."""

import pytest
import torch

from dflash2_lab.kernels import grouped_conv as kernel
from dflash2_lab.kernels.grouped_conv import (
    grouped_conv,
    grouped_conv_reference,
    grouped_conv_triton,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2e-2, FP16: 2e-3, FP32: 2e-5}
# blocks, G, taps, groups, width: published, ragged, wide, more taps than rows, many rows, one row
SHAPES = [
    ((2, 2), 8, 2, 20, 16),
    ((3,), 7, 2, 9, 12),
    ((2,), 5, 1, 3, 1),
    ((1, 3), 2, 4, 5, 3),
    ((2,), 11, 3, 2, 300),
    ((4,), 1, 2, 17, 16),
]


def inputs(shape, device, dtype=FP32, base_dtype=FP32):
    blocks, rows, taps, groups, width = shape
    x = torch.randn(*blocks, rows, groups * width)
    dynamic = torch.randn(*blocks, rows, taps, groups)
    base = torch.randn(taps, groups * width)
    parts = (x.to(dtype), dynamic.to(dtype), base.to(base_dtype))
    return [part.to(device).requires_grad_() for part in parts]


def gradients(function, parts, d_out):
    out = function(*parts)
    return [out, *torch.autograd.grad(out, parts, d_out.to(out.dtype))]


def assert_like_float64(parts, tolerance):
    """Forward and the three gradients of the kernel, relative to the largest element of each."""
    d_out = torch.randn(parts[0].shape).to(parts[0])
    found = gradients(grouped_conv_triton, parts, d_out)
    exact = [part.detach().double().requires_grad_() for part in parts]
    expected = gradients(grouped_conv_reference, exact, d_out)
    for part, mine in zip([parts[0], *parts], found, strict=True):
        assert mine.dtype == part.dtype and mine.shape == part.shape
    for mine, true in zip(found, expected, strict=True):
        worst = (mine.double() - true).abs().max() / true.abs().max()
        assert worst <= tolerance  # a NaN fails too


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_equal_the_plain_form(shape, device, poisoned):
    assert_like_float64(inputs(shape, device), TOLERANCE[FP32])


@pytest.mark.parametrize("base_dtype", [BF16, FP32])
def test_bf16_is_summed_in_fp32(base_dtype, device, poisoned):
    assert_like_float64(inputs(((2,), 7, 2, 18, 16), device, BF16, base_dtype), TOLERANCE[BF16])


def test_fp16(device, poisoned):
    assert_like_float64(inputs(((2,), 3, 2, 5, 16), device, FP16, FP16), TOLERANCE[FP16])


def test_bf16_output_is_the_rounded_exact_value(device):
    # exactly representable sums: any rounding before the last one would show
    x = torch.full((1, 2, 16), 256.0, dtype=BF16, device=device)
    dynamic = torch.full((1, 2, 2, 1), 0.00390625, dtype=BF16, device=device)
    base = torch.tensor([[1.0], [-1.0]], device=device).expand(2, 16)
    out = grouped_conv_triton(x, dynamic, base)
    assert out[0, 0].eq(256 * 1.00390625).logical_or(out[0, 0].eq(256.0)).all()
    assert out[0, 1].eq(2.0).all()


def test_a_projection_output_is_read_through_its_strides(device, poisoned):
    x, _, base = inputs(((2, 3), 4, 2, 5, 8), device)
    projected = torch.randn(2, 3, 4, 2, 2, 5).to(device)
    for dynamic in projected.unbind(-3):
        assert dynamic.flatten(0, -3).data_ptr() == dynamic.data_ptr()  # no copy
        found = grouped_conv_triton(x, dynamic, base)
        torch.testing.assert_close(found, grouped_conv_reference(x, dynamic, base))


def test_the_gradient_of_a_projection_goes_through_both_its_sides(device):
    x, _, base = inputs(((2,), 3, 2, 4, 8), device)
    projected = torch.randn(2, 3, 2, 2, 4).to(device).requires_grad_()

    def twice(function):
        before, after = projected.unbind(-3)
        return function(function(x, before, base).tanh(), after, base).square().sum()

    found = torch.autograd.grad(twice(grouped_conv_triton), (x, projected, base))
    expected = torch.autograd.grad(twice(grouped_conv_reference), (x, projected, base))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["rows apart", "transposed", "channels apart"])
def test_x_need_not_be_contiguous(layout, device):
    x, dynamic, base = (part.detach() for part in inputs(((3,), 4, 2, 3, 8), device))
    views = {
        "rows apart": torch.cat([x, x], -1)[..., :24],
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "channels apart": x.repeat_interleave(2, -1)[..., ::2],
    }
    found = grouped_conv_triton(views[layout], dynamic.mT.contiguous().mT, base.mT.contiguous().mT)
    torch.testing.assert_close(found, grouped_conv_reference(x, dynamic, base))


def test_an_expanded_gradient(device):
    parts = inputs(((2,), 3, 2, 4, 8), device)
    found = torch.autograd.grad(grouped_conv_triton(*parts).sum(), parts)
    expected = torch.autograd.grad(grouped_conv_reference(*parts).sum(), parts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_block_never_reads_or_trains_on_another_block(device, poisoned):
    parts = inputs(((4,), 5, 3, 4, 8), device)
    d_out = torch.randn(4, 5, 32).to(device)
    before = gradients(grouped_conv_triton, parts, d_out)
    with torch.no_grad():
        parts[0][1], parts[1][1], d_out[1] = float("nan"), 7.0, 5.0
    after = gradients(grouped_conv_triton, parts, d_out)
    for old, new in list(zip(before, after, strict=True))[:3]:  # all but d_base
        same = (old == new).flatten(1).all(-1)
        assert same.tolist() == [True, False, True, True]


def test_a_row_reads_no_later_row(device):
    x, dynamic, base = (part.detach() for part in inputs(((2,), 5, 2, 4, 8), device))
    before = grouped_conv_triton(x, dynamic, base)
    x[:, 3] += 1.0
    changed = (grouped_conv_triton(x, dynamic, base) != before).any(-1)
    assert changed.tolist() == [[False, False, False, True, True]] * 2


@pytest.mark.parametrize("blocks_a_program", [1, 3, 100])
def test_d_base_is_the_same_bits_in_every_run_however_blocks_are_shared(
    blocks_a_program, device, monkeypatch, poisoned
):
    monkeypatch.setattr(kernel, "BLOCKS_A_PROGRAM", blocks_a_program)
    parts = inputs(((7,), 3, 2, 20, 16), device)
    d_out = torch.randn(7, 3, 320).to(device)
    runs = [gradients(grouped_conv_triton, parts, d_out) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    expected = gradients(grouped_conv_reference, parts, d_out)
    torch.testing.assert_close(runs[0], expected, rtol=1e-4, atol=1e-4)


def test_inference_mode(device):
    with torch.inference_mode():
        x, dynamic, base = (part.detach() for part in inputs(((2,), 4, 2, 3, 8), device))
        found = grouped_conv_triton(x, dynamic, base)
        torch.testing.assert_close(found, grouped_conv_reference(x, dynamic, base))


def test_no_blocks(device):
    parts = inputs(((0,), 4, 2, 3, 8), device)
    out, *grads = gradients(grouped_conv_triton, parts, torch.empty(0, 4, 24, device=device))
    assert out.shape == (0, 4, 24)
    assert [grad.shape for grad in grads] == [part.shape for part in parts]
    assert not grads[2].any()


def test_shapes_that_do_not_fit_are_told(device):
    x, dynamic, base = inputs(((2,), 4, 2, 3, 8), device)
    with pytest.raises(ValueError, match=r"dynamic: found \(2, 4, 2, 5\)"):
        grouped_conv_triton(x, torch.zeros(2, 4, 2, 5, device=device), base)
    with pytest.raises(ValueError, match=r"dynamic: found \(1, 4, 2, 3\)"):
        grouped_conv_triton(x, dynamic[:1], base)
    with pytest.raises(ValueError, match=r"base: found \(1, 24\), expected \(2, 24\)"):
        grouped_conv_triton(x, dynamic, base[:1])


def test_the_library_computes_float64_in_float64(device):
    parts = [part.detach().double() for part in inputs(((2,), 4, 2, 3, 8), device)]
    out = grouped_conv(*parts)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, grouped_conv_reference(*parts), rtol=1e-12, atol=1e-12)
