"""The grouped convolutions around a sublayer: both are predicted here, the first is applied.

    kernels = x W^T,   before the sublayer   out[i] = sum_t (base[t] + kernels[i, t]) x[i - t]

one product of few outputs from the sublayer's normed input x; the second convolution goes with the
product that it follows (see `linear_add`).
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from .linear import Conv, product
from .linear_plan import Tiling, fuses, launch_options, row_tile
from .stream import Rows, finish_norm, finish_norm_reference, load_squares, row_scale, tile_options
from .tools import interpreting, jit, launches_early, next_power_of_2, on_gpu, prefetch_rows, tl


def conv_project_reference(
    x: Rows,
    projection: Float[Tensor, "outputs H"],
    base: Float[Tensor, "2 taps H"],
    rows: int,
) -> tuple[Float[Tensor, "R H"], Conv]:
    """x after the convolution before a sublayer, and the one after it; both predicted from x."""
    value = finish_norm_reference(x)
    groups = projection.shape[0] // (2 * base.shape[1])
    dynamic = F.linear(value, projection).unflatten(-1, (2, base.shape[1], groups))
    return Conv(dynamic[:, 0], base[0], rows)(value), Conv(dynamic[:, 1], base[1], rows)


@jit
def _conv_project_kernel(
    x_ptr, weight_ptr, squares_ptr, base_ptr, out_ptr, dynamic_ptr,
    R, H, tiles, step, stride_x, eps, GROUPS: tl.constexpr, TAPS: tl.constexpr,
    TILES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr, SLICES: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """One program: the kernels of BLOCK_G channel groups of one side, all taps; on the side before
    the sublayer it applies them at once."""
    i_row, i_group, i_side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    local, groups = tl.arange(0, BLOCK_R), i_group * BLOCK_G + tl.arange(0, BLOCK_G)
    rows = i_row * step + local
    b_row, b_group = (rows < R) & (local < step), groups < GROUPS
    # Columns of the product: the taps of a group side by side (padded to a power of two).
    pairs = tl.arange(0, BLOCK_G * BLOCK_T)
    outputs = tl.minimum(i_group * BLOCK_G + pairs // BLOCK_T, GROUPS - 1)
    outputs += (i_side * TAPS + tl.minimum(pairs % BLOCK_T, TAPS - 1)) * GROUPS
    p_weight = weight_ptr + outputs[:, None] * H
    # What the convolution takes, (tap, row, group, channel): asked for before the product.
    taps = tl.arange(0, BLOCK_T)
    channels = groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    b_channels = (groups < tl.where(i_side == 0, GROUPS, 0))[None, None, :, None]
    p_base = base_ptr + taps[:, None, None, None] * H + channels[None, None, :, :]
    base = tl.load(p_base, mask=(taps < TAPS)[:, None, None, None] & b_channels, other=0.0)
    if PDL:
        prefetch_rows(p_weight, H, LINES)
        tl.extra.cuda.gdc_wait()
    before = tl.maximum(local[None, :] - taps[:, None], 0)
    b_before = (b_row & (rows % ROWS >= taps[:, None])) & (taps < TAPS)[:, None]
    p_moved = x_ptr + (i_row * step + before)[:, :, None, None] * stride_x
    b_moved = b_before[:, :, None, None] & b_channels
    moved = tl.load(p_moved + channels[None, None, :, :], mask=b_moved, other=0.0)
    if TILES > 0:
        squares = load_squares(squares_ptr, tiles, rows, R, TILES)
    # Each warp sums a slice of H of its own: one chain of products over all of it would take
    # longer than reading it. The axes are (slice, row, channel).
    sums = tl.zeros((SLICES, BLOCK_R, BLOCK_G * BLOCK_T), tl.float32)
    o_slice = (tl.arange(0, SLICES) * BLOCK_K)[:, None, None] + tl.arange(0, BLOCK_K)[None, None, :]
    for start in range(0, H, BLOCK_K * SLICES):
        inner = start + o_slice
        b_x = b_row[None, :, None] & (inner < H)
        x = tl.load(x_ptr + rows[None, :, None] * stride_x + inner, mask=b_x, other=0.0)
        w = tl.load(p_weight[None, :, :] + inner, mask=inner < H, other=0.0)
        sums = product(x, tl.permute(w, (0, 2, 1)), sums, EXACT, WIDE)
    total = tl.sum(sums, 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.full((BLOCK_R,), 1.0, tl.float32)
    if TILES > 0:
        scale = row_scale(squares, H, eps)
    dtype = out_ptr.dtype.element_ty
    kernels = tl.reshape((total * scale[:, None]).to(dtype), (BLOCK_R, BLOCK_G, BLOCK_T))
    if i_side == 1:
        at = rows[:, None, None] * (TAPS * GROUPS) + taps[None, None, :] * GROUPS
        b_kernels = (b_row[:, None] & b_group[None, :])[:, :, None] & (taps < TAPS)[None, None, :]
        tl.store(dynamic_ptr + at + groups[None, :, None], kernels, mask=b_kernels)
    else:
        # An axis for the channels behind (tap, row, group).
        own = tl.permute(kernels, (2, 0, 1)).to(tl.float32)[:, :, :, None]
        normed = moved.to(tl.float32)
        if TILES > 0:
            spread = tl.broadcast_to(scale[None, :], (BLOCK_T, BLOCK_R))
            normed *= tl.gather(spread, before, 1)[:, :, None, None]
        out = tl.sum((base.to(tl.float32) + own) * normed, 0)
        p_out = out_ptr + rows[:, None, None] * H + channels[None, :, :]
        tl.store(p_out, out, mask=b_row[:, None, None] & b_group[None, :, None])


def conv_project_triton(
    x: Rows,
    projection: Float[Tensor, "outputs H"],
    base: Float[Tensor, "2 taps H"],
    rows: int,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> tuple[Float[Tensor, "R H"], Conv]:
    """See `conv_project`; `tiling` counts channel groups (block_n), channels a warp (block_k)."""
    R, H = x.value.shape
    taps = base.shape[1]
    groups = projection.shape[0] // (2 * taps)
    tiling = tiling or Tiling(4, 128, 1, 4, 4, 2, 16)
    dtype, device = x.value.dtype, x.value.device
    out = torch.empty(R, H, dtype=dtype, device=device)
    dynamic = torch.empty(R, taps, groups, dtype=dtype, device=device)
    block_r, step = row_tile(R, tiling.block_r, rows)
    outputs = tiling.block_n * next_power_of_2(taps)
    stage = (block_r + outputs) * tiling.block_k * tiling.num_warps * dtype.itemsize
    _conv_project_kernel[(-(-R // step), -(-groups // tiling.block_n), 2)](
        x.value, projection, x.squares, base, out, dynamic, R, H,
        0 if x.squares is None else x.squares.shape[0], step, x.value.stride(0), x.eps,
        GROUPS=groups, TAPS=taps, WIDTH=H // groups, ROWS=rows,
        BLOCK_R=block_r, BLOCK_G=tiling.block_n,
        BLOCK_T=next_power_of_2(taps), BLOCK_K=tiling.block_k,
        EXACT=dtype == torch.float32, WIDE=interpreting(), PDL=pdl,
        SLICES=tiling.num_warps, LINES=tiling.lines,
        **tile_options(x), **launch_options(tiling, pdl, stage),
    )  # fmt: skip
    return out, Conv(dynamic, base[1], rows)


def conv_project(
    x: Rows,
    projection: Float[Tensor, "outputs H"],
    base: Float[Tensor, "2 taps H"],
    rows: int,
) -> tuple[Float[Tensor, "R H"], Conv]:
    """Convolutions around a sublayer, both predicted from its normed input x.

    `projection` is laid out (side, tap, group), side 0 before the sublayer, and `base` likewise;
    `rows` are the rows of a block. Returns x convolved, and the convolution of the output.
    """
    if on_gpu(projection) and fuses(*x.value.shape):
        return conv_project_triton(x, projection, base, rows, pdl=launches_early(projection))
    return conv_project_reference(Rows(finish_norm(x)), projection, base, rows)
