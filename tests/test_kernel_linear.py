"""Fused products of a few rows against plain torch in float64."""

from typing import NamedTuple

import pytest
import torch

from dflash2_lab.kernels.conv_project import (
    conv_project,
    conv_project_reference,
    conv_project_triton,
)
from dflash2_lab.kernels.grouped_conv import grouped_conv
from dflash2_lab.kernels.linear import (
    Conv,
    linear,
    linear_add,
    linear_add_reference,
    linear_add_triton,
    linear_reference,
    linear_triton,
)
from dflash2_lab.kernels.linear_plan import Tiling, make_workspace
from dflash2_lab.kernels.stream import (
    Norm,
    Rows,
    embed_block_reference,
    embed_block_triton,
    finish_norm_triton,
    start_stream_reference,
    start_stream_triton,
)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
DTYPES = sorted(TOLERANCE, key=str)


class Case(NamedTuple):
    """Random operands of a product with R rows in blocks of 4; the groups are 16 channels wide."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor
    norm: Norm
    conv: Conv


def make(device, dtype, R=8, K=96, N=80):
    def draw(*shape):
        return torch.randn(shape).to(device, dtype)

    return Case(
        draw(R, K), 0.1 * draw(N, K), draw(N), draw(R, N), Norm(draw(N), 1e-6),
        Conv(draw(R, 2, N // 16), draw(2, N), 4),
    )  # fmt: skip


def wide(value):
    """The same in float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    return type(value)(*map(wide, value)) if isinstance(value, tuple) else value


def distance(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def normed(rows):
    """What stands before a product once its scale is known."""
    return finish_norm_triton(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiling", [Tiling(32, 64), Tiling(16, 32, num_warps=2)], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 16, 20])
def test_a_product_is_torchs_for_any_number_of_rows(device, poisoned, dtype, tiling, rows):
    case = make(device, dtype, R=rows, K=72, N=40)
    found = linear_triton(Rows(case.x), case.weight, case.bias, tiling=tiling)
    expected = wide(case.x) @ wide(case.weight).T + wide(case.bias)
    assert distance(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gated_product_is_silu_of_the_first_half_times_the_second(device, poisoned, dtype):
    case = make(device, dtype, K=72, N=80)
    found = linear_triton(Rows(case.x), case.weight, case.bias, gated=True)
    gate, up = (wide(case.x) @ wide(case.weight).T + wide(case.bias)).chunk(2, dim=-1)
    assert distance(found, torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("part", ["plain", "bias", "conv", "view"])
def test_the_stream_after_a_product(device, poisoned, dtype, splits, part):
    case = make(device, dtype)
    options = {"bias": {"bias": case.bias}, "conv": {"conv": case.conv}}.get(part, {})
    workspace = make_workspace(device)
    whole = torch.empty(8, 240, dtype=dtype, device=device)
    out = whole[:, 80:160] if part == "view" else None
    stream = linear_add_triton(
        case.x, case.weight, case.residual, case.norm, **options, out=out,
        workspace=workspace, tiling=Tiling(32, 32, splits),
    )  # fmt: skip
    y = wide(case.x) @ wide(case.weight).T
    if part == "bias":
        y = y + wide(case.bias)
    if part == "conv":
        blocks = (tensor.unflatten(0, (2, 4)) for tensor in (y, wide(case.conv.dynamic)))
        y = grouped_conv(*blocks, wide(case.conv.base)).flatten(0, 1)
    expected = start_stream_reference(wide(case.residual) + y, wide(case.norm))
    assert distance(stream.residual, expected.residual) < TOLERANCE[dtype]
    assert distance(normed(stream.normed), expected.normed.value) < TOLERANCE[dtype]
    assert not workspace.counters.any()
    if part == "view":
        assert stream.residual.data_ptr() == out.data_ptr()
        assert whole[:, :80].isnan().all() and whole[:, 160:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_tiles_of_rows_hold_whole_blocks(device, poisoned, dtype, splits):
    case = make(device, dtype, R=35)  # seven blocks of 5 rows; a tile of 16 rows holds three
    dynamic = torch.randn(35, 2, 5).to(device, dtype)
    conv = Conv(dynamic, case.conv.base, 5)
    workspace = make_workspace(device, 35)
    tiling = Tiling(32, 32, splits, block_r=16)
    stream = linear_add_triton(
        case.x, case.weight, case.residual, case.norm, case.bias, conv,
        workspace=workspace, tiling=tiling,
    )  # fmt: skip
    expected = linear_add_reference(
        *map(wide, (case.x, case.weight, case.residual, case.norm, case.bias)),
        Conv(wide(dynamic), wide(case.conv.base), 5),
    )
    assert distance(stream.residual, expected.residual) < TOLERANCE[dtype]
    assert not workspace.counters.any()
    weight = case.weight[:, :80].contiguous()
    found = linear_triton(stream.normed, weight, tiling=tiling._replace(splits=1))
    y = expected.normed.value @ wide(weight).T
    assert distance(found, y) < 2 * TOLERANCE[dtype]
    projection = 0.1 * torch.randn(4 * 5, 80).to(device, dtype)
    base = torch.randn(2, 2, 80).to(device, dtype)
    narrow = Tiling(2, 32, num_warps=2, block_r=16)
    found, after = conv_project_triton(stream.normed, projection, base, 5, narrow)
    plain, conv = conv_project_reference(expected.normed, wide(projection), wide(base), 5)
    assert distance(found, plain) < 2 * TOLERANCE[dtype]
    assert distance(after.dynamic, conv.dynamic) < 2 * TOLERANCE[dtype]


def test_a_split_product_that_the_workspace_cannot_hold_is_refused(device):
    case = make(device, torch.float32, R=16, N=2**15 + 16)
    with pytest.raises(ValueError, match="no room"):
        linear_add_triton(case.x, case.weight, case.residual, case.norm,
                          workspace=make_workspace(device), tiling=Tiling(32, 32, 2))  # fmt: skip


def test_a_split_product_is_the_same_every_time(device):
    case = make(device, torch.float32, K=256)
    workspace = make_workspace(device)
    runs = [
        linear_add_triton(case.x, case.weight, case.residual, case.norm, workspace=workspace,
                          tiling=Tiling(16, 32, 4)).residual
        for _ in range(3)
    ]  # fmt: skip
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taps", [1, 2, 3])
def test_convs_around_a_sublayer_are_predicted_from_its_normed_input(device, poisoned, dtype, taps):
    case = make(device, dtype, N=80)
    stream = linear_add_triton(case.x, case.weight, case.residual, case.norm)
    expected = linear_add_reference(*map(wide, (case.x, case.weight, case.residual, case.norm)))
    projection = 0.1 * torch.randn(2 * taps * 5, 80).to(device, dtype)
    base = torch.randn(2, taps, 80).to(device, dtype)
    found, after = conv_project_triton(stream.normed, projection, base, 4, Tiling(2, 32))
    plain, conv = conv_project_reference(expected.normed, wide(projection), wide(base), 4)
    assert distance(found, plain) < TOLERANCE[dtype]
    assert distance(after.dynamic, conv.dynamic) < TOLERANCE[dtype]
    assert torch.equal(after.base, base[1]) and after.rows == 4


def test_a_conv_never_reads_another_block(device):
    case = make(device, torch.float32, R=12)
    projection, base = torch.randn(4 * 6, 96).to(device), torch.randn(2, 2, 96).to(device)
    before, _ = conv_project_triton(Rows(case.x), projection, base, 4)
    changed = case.x.clone()
    changed[:4] = torch.randn(4, 96)
    after, _ = conv_project_triton(Rows(changed), projection, base, 4)
    assert torch.equal(before[4:], after[4:])
    assert not torch.equal(before[:4], after[:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedded_blocks_start_with_their_first_token(device, poisoned, dtype):
    table = torch.randn(50, 24).to(device, dtype)
    norm = Norm(torch.randn(24).to(device, dtype), 1e-6)
    first, rest = torch.tensor([3, 7]).to(device), torch.randint(50, (2, 3)).to(device)
    found = embed_block_triton(table, first, rest, 0.5, norm)
    expected = embed_block_reference(wide(table), first, rest, 0.5, wide(norm))
    assert distance(found.residual, expected.residual) < TOLERANCE[dtype]
    assert distance(found.normed.value, expected.normed.value) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stream_may_start_from_a_sum_in_a_wider_row(device, poisoned, dtype):
    case = make(device, dtype)
    whole = torch.randn(8, 200).to(device, dtype)
    x, out = whole[:, :80], whole[:, 100:180]
    expected = start_stream_reference(wide(x) + wide(case.residual), wide(case.norm))
    stream = start_stream_triton(x, case.norm, case.residual, out)
    assert stream.residual.data_ptr() == out.data_ptr()
    assert distance(stream.residual, expected.residual) < TOLERANCE[dtype]
    assert distance(stream.normed.value, expected.normed.value) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [8, 40, 140])
def test_the_library_gets_the_same_from_few_rows_and_from_many(device, rows):
    case = make(device, torch.float32, R=rows)
    projection, base = torch.randn(4 * 6, 96).to(device), torch.randn(2, 2, 96).to(device)
    x = Rows(case.x)
    assert torch.allclose(
        linear(x, case.weight, gated=True), linear_reference(x, case.weight, gated=True), atol=1e-4
    )
    found = linear_add(case.x, case.weight, case.residual, case.norm, case.bias, case.conv)
    expected = linear_add_reference(
        case.x, case.weight, case.residual, case.norm, case.bias, case.conv
    )
    assert torch.allclose(found.residual, expected.residual, atol=1e-4)
    assert torch.allclose(normed(found.normed), expected.normed.value, atol=1e-4)
    found, expected = (
        run(x, projection, base, 4)[0] for run in (conv_project, conv_project_reference)
    )
    assert torch.allclose(found, expected, atol=1e-4)
