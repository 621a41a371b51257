"""Linear maps of a few rows, fused with what stands around them in a decoder layer.

With few rows the time of y = x W^T is that of reading W once, and every further kernel adds its
launch. So a layer is four products and nothing else:

    qkv     scale(x W^T)                     the RMS norm before it is a factor of each row ...
    o       x + y,  n * (x + y),  partial sums of (x + y)^2      ... that its producer prepares
    gate-up silu(scale(x W^T)) * scale(x W'^T)
    down    as o

A `Stream` carries the residual x, n * x with the next norm's weight n, and partial sums of squares:
norm(x) W^T = s ((n * x) W^T) with s = 1 / sqrt(mean(x^2) + eps). Weights keep their own bits.
DFlash 2 puts a grouped convolution before and after each sublayer: the first is applied where its
kernels are predicted (see `conv_project`), the second in the product that it follows.

Between two products the memory lies idle: the last programs finish, a launch passes, the first
bytes are on their way. So on a GPU that can, a kernel is launched while the last programs of the
one before it finish, and asks for its first weights, which nothing writes, before it waits.

With many rows (see `fuses`) reading W is no longer the whole cost: there the library's matrix
product is used, with the norm in a kernel of its own. Up to there rows come in tiles of whole
blocks.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from .grouped_conv import grouped_conv
from .linear_plan import (
    Tiling,
    Workspace,
    choose_tiling,
    fuses,
    launch_options,
    make_workspace,
    row_tile,
)
from .stream import (
    Norm,
    Rows,
    Stream,
    finish_norm,
    finish_norm_reference,
    load_squares,
    row_scale,
    start_stream_reference,
    start_stream_triton,
    tile_options,
)
from .tools import (
    interpreting,
    jit,
    last_to_arrive,
    launches_early,
    next_power_of_2,
    on_gpu,
    prefetch_rows,
    tl,
)


class Conv(NamedTuple):
    """Grouped convolution over blocks of `rows` rows (see `grouped_conv`)."""

    dynamic: Float[Tensor, "R taps groups"]
    base: Float[Tensor, "taps N"]
    rows: int

    def __call__(self, x: Float[Tensor, "R N"]) -> Float[Tensor, "R N"]:
        blocks = (part.unflatten(0, (-1, self.rows)) for part in (x, self.dynamic))
        return grouped_conv(*blocks, self.base).flatten(0, 1)


# --- plain torch -----------------------------------------------------------------------------


def linear_reference(
    x: Rows,
    weight: Float[Tensor, "N K"],
    bias: Float[Tensor, " N"] | None = None,
    gated: bool = False,
) -> Float[Tensor, "R N"]:
    """y, or silu(first half of y) * second half."""
    y = F.linear(finish_norm_reference(x), weight, bias)
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_add_reference(
    x: Float[Tensor, "R K"],
    weight: Float[Tensor, "N K"],
    residual: Float[Tensor, "R N"],
    norm: Norm,
    bias: Float[Tensor, " N"] | None = None,
    conv: Conv | None = None,
    out: Float[Tensor, "R N"] | None = None,
) -> Stream:
    """The stream after residual + conv(x W^T + bias)."""
    y = F.linear(x, weight, bias)
    y = residual + (y if conv is None else conv(y))
    return start_stream_reference(y if out is None else out.copy_(y), norm)


# --- Triton ----------------------------------------------------------------------------------


@jit
def product(x, w, total, EXACT: tl.constexpr, WIDE: tl.constexpr):
    """total + x w^T. EXACT keeps fp32 operands whole; WIDE widens bf16 for the interpreter, which
    would multiply the bits."""
    if WIDE:
        x, w = x.to(tl.float32), w.to(tl.float32)
    if EXACT:
        return tl.dot(x, w, total, input_precision="ieee")
    return tl.dot(x, w, total)


@jit
def _sum_parts(p_tile, there, SPLITS: tl.constexpr, PART: tl.constexpr):
    """The parts of a split tile, added in their order; zero for rows that are not there."""
    total = tl.load(p_tile, mask=there, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(p_tile + split * PART, mask=there, other=0.0, cache_modifier=".cg")
    return total


@jit
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, squares_ptr, out_ptr, residual_ptr, norm_ptr, next_ptr,
    next_squares_ptr, dynamic_ptr, base_ptr, partial_ptr, counter_ptr,
    R, N, K, tiles, step, stride_x, stride_out, stride_residual, stride_row, stride_tap, eps,
    BIAS: tl.constexpr, TILES: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    # Programs of the same columns follow one another: the second reads W from the L2 cache.
    i_row, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_tile = i_n * tl.num_programs(0) + i_row
    local = tl.arange(0, BLOCK_R)
    rows = i_row * step + local
    cols = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_row, b_col = (rows < R) & (local < step), cols < N
    # Rows of W past its end are read as its last one, and never stored: no mask in the loop.
    p_weight = weight_ptr + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * K
    p_up = p_weight + tl.cast(N, tl.int64) * K
    m_share = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    first = i_split * m_share
    last = tl.minimum(first + m_share, K)
    if PDL:
        prefetch_rows(p_weight + first, last - first, LINES)
        if GATED:
            prefetch_rows(p_up + first, last - first, LINES)
        tl.extra.cuda.gdc_wait()
    if TILES > 0:
        squares = load_squares(squares_ptr, tiles, rows, R, TILES)
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    total_up = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    p_x = x_ptr + rows[:, None] * stride_x
    for start in range(first, last, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)[None, :]
        # Without the comparison where K is a multiple of the tile: the mask folds away.
        b_inner = (inner < last) | EVEN
        x = tl.load(p_x + inner, mask=b_row[:, None] & b_inner, other=0.0)
        w = tl.load(p_weight + inner, mask=b_inner, other=0.0)
        total = product(x, tl.trans(w), total, EXACT, WIDE)
        if GATED:
            up = tl.load(p_up + inner, mask=b_inner, other=0.0)
            total_up = product(x, tl.trans(up), total_up, EXACT, WIDE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    b_out = b_row[:, None] & b_col[None, :]
    PART: tl.constexpr = BLOCK_R * BLOCK_N
    if SPLITS > 1 or TAPS > 0:
        # Whoever comes last adds the parts, in their order: the sum does not depend on the race.
        tile = local[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        p_tile = partial_ptr + i_tile * (SPLITS * PART) + tile
        tl.store(p_tile + i_split * PART, total)
        if not last_to_arrive(counter_ptr + i_tile, SPLITS):
            return
    # All that is still needed is asked for at once; before the loop, the layouts that it is brought
    # into would hold the loop up.
    if TAPS > 0:
        # Each row and the rows before it, (tap, row, column), from where the parts lie.
        taps = tl.arange(0, BLOCK_T)
        b_tap = (taps[:, None] < TAPS) & ((local % ROWS)[None, :] >= taps[:, None])
        p_dynamic = dynamic_ptr + rows[None, :] * stride_row + taps[:, None] * stride_tap
        kernels = tl.load(
            p_dynamic[:, :, None] + (cols // WIDTH)[None, None, :],
            mask=b_tap[:, :, None] & b_out[None, :, :], other=0.0,
        )  # fmt: skip
        base = tl.load(
            base_ptr + taps[:, None] * N + cols[None, :],
            mask=(taps < TAPS)[:, None] & b_col[None, :], other=0.0,
        )  # fmt: skip
    if ADD:
        p_residual = residual_ptr + rows[:, None] * stride_residual + cols[None, :]
        residual = tl.load(p_residual, mask=b_out, other=0.0)
        norm_weight = tl.load(norm_ptr + cols, mask=b_col, other=0.0)
    if TAPS > 0:
        p_moved = p_tile[None, :, :] - taps[:, None, None] * BLOCK_N
        moved = _sum_parts(p_moved, b_tap[:, :, None], SPLITS, PART)
    elif SPLITS > 1:
        total = _sum_parts(p_tile, local[:, None] >= 0, SPLITS, PART)

    if TILES > 0:
        scale = row_scale(squares, K, eps)[:, None]
        total *= scale
        total_up *= scale
    if BIAS:
        bias = tl.load(bias_ptr + cols, mask=b_col, other=0.0).to(tl.float32)
        if TAPS > 0:
            moved += tl.where(b_tap[:, :, None], bias[None, None, :], 0.0)
        else:
            total += bias[None, :]
        if GATED:
            total_up += tl.load(bias_ptr + N + cols, mask=b_col, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    if TAPS > 0:
        total = tl.sum((base.to(tl.float32)[:, None, :] + kernels.to(tl.float32)) * moved, 0)
    p_out = out_ptr + rows[:, None] * stride_out + cols[None, :]
    if ADD:
        total += residual.to(tl.float32)
        rounded = total.to(out_ptr.dtype.element_ty)
        tl.store(p_out, rounded, mask=b_out)
        total = rounded.to(tl.float32)
        squares = tl.sum(tl.where(b_out, total * total, 0.0), 1)
        tl.store(next_squares_ptr + i_n * R + rows, squares, mask=b_row)
        scaled = total * norm_weight.to(tl.float32)[None, :]
        tl.store(next_ptr + rows[:, None] * N + cols[None, :], scaled, mask=b_out)
    else:
        tl.store(p_out, total, mask=b_out)


# --- launchers -------------------------------------------------------------------------------


def linear_triton(
    x: Rows,
    weight: Float[Tensor, "M K"],
    bias: Float[Tensor, " M"] | None = None,
    gated: bool = False,
    workspace: Workspace | None = None,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Float[Tensor, "R N"]:
    """See `linear`; without a workspace the product is not split."""
    N = weight.shape[0] // 2 if gated else weight.shape[0]
    R, K = x.value.shape
    tiling = tiling or choose_tiling(R, N, K, gated, workspace is not None)
    out = torch.empty(R, N, dtype=x.value.dtype, device=x.value.device)
    _launch(x, weight, bias, out, tiling, pdl, workspace=workspace, gated=gated)
    return out


def linear_add_triton(
    x: Float[Tensor, "R K"],
    weight: Float[Tensor, "N K"],
    residual: Float[Tensor, "R N"],
    norm: Norm,
    bias: Float[Tensor, " N"] | None = None,
    conv: Conv | None = None,
    out: Float[Tensor, "R N"] | None = None,
    workspace: Workspace | None = None,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Stream:
    """See `linear_add`; without a workspace the product is not split."""
    (R, K), N = x.shape, weight.shape[0]
    tiling = tiling or choose_tiling(R, N, K, False, workspace is not None)
    out = torch.empty(R, N, dtype=x.dtype, device=x.device) if out is None else out
    tiles = -(-N // tiling.block_n)
    scaled = torch.empty(R, N, dtype=x.dtype, device=x.device)
    squares = torch.empty(tiles, R, device=x.device)
    after = (residual, norm, scaled, squares)
    _launch(Rows(x), weight, bias, out, tiling, pdl, after, conv, workspace)
    return Stream(out, Rows(scaled, squares, norm.eps))


def _launch(
    x: Rows,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiling: Tiling,
    pdl: bool,
    after: tuple[Tensor, Norm, Tensor, Tensor] | None = None,
    conv: Conv | None = None,
    workspace: Workspace | None = None,
    gated: bool = False,
) -> None:
    (R, K), N = x.value.shape, out.shape[1]
    residual, norm, scaled, squares = after or (None, None, None, None)
    partial, counters = workspace or (None, None)
    tiles = -(-N // tiling.block_n)
    # A convolution holds its rows twice: a large tile would leave the registers.
    most = tiling.block_r if conv is None else min(tiling.block_r, 64)
    block_r, step = row_tile(R, most, conv.rows if conv else 1)
    grid = (-(-R // step), tiles, tiling.splits)
    if conv is not None and workspace is None:
        partial, counters = make_workspace(out.device, R)
    if tiling.splits > 1 or conv is not None:
        floats = grid[0] * tiles * tiling.splits * block_r * tiling.block_n
        if counters is None or len(counters) < grid[0] * tiles or len(partial) < floats:
            raise ValueError(f"{tiling}: {grid} programs, which the workspace has no room for")
    taps = 0 if conv is None else conv.dynamic.shape[1]
    stage = (block_r + tiling.block_n * (1 + gated)) * tiling.block_k * out.element_size()
    _linear_kernel[grid](
        x.value, weight, bias, x.squares, out, residual, norm and norm.weight, scaled, squares,
        conv and conv.dynamic, conv and conv.base, partial, counters, R, N, K,
        0 if x.squares is None else x.squares.shape[0], step, x.value.stride(0), out.stride(0),
        0 if residual is None else residual.stride(0),
        *(conv.dynamic.stride()[:2] if conv else (0, 0)), x.eps,
        BIAS=bias is not None, GATED=gated, ADD=after is not None,
        TAPS=taps, BLOCK_T=next_power_of_2(taps),
        WIDTH=N // conv.dynamic.shape[2] if conv else 1, ROWS=conv.rows if conv else 1,
        BLOCK_R=block_r, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        SPLITS=tiling.splits, EVEN=K % (tiling.block_k * tiling.splits) == 0,
        EXACT=out.dtype == torch.float32, WIDE=interpreting(), PDL=pdl,
        LINES=tiling.lines,
        **tile_options(x), **launch_options(tiling, pdl, stage),
    )  # fmt: skip


# --- what the library calls ------------------------------------------------------------------


def linear(
    x: Rows,
    weight: Float[Tensor, "M K"],
    bias: Float[Tensor, " M"] | None = None,
    gated: bool = False,
    workspace: Workspace | None = None,
) -> Float[Tensor, "R N"]:
    """x W^T + bias of normed rows; with `gated`, silu(first half) * second half (N = M / 2)."""
    if on_gpu(weight) and fuses(*x.value.shape):
        early = launches_early(weight)
        return linear_triton(x, weight, bias, gated, workspace, pdl=early)
    return linear_reference(Rows(finish_norm(x)), weight, bias, gated)


def linear_add(
    x: Float[Tensor, "R K"],
    weight: Float[Tensor, "N K"],
    residual: Float[Tensor, "R N"],
    norm: Norm,
    bias: Float[Tensor, " N"] | None = None,
    conv: Conv | None = None,
    out: Float[Tensor, "R N"] | None = None,
    workspace: Workspace | None = None,
) -> Stream:
    """residual + conv(x W^T + bias), written to `out` when given, as the stream before `norm`."""
    if not on_gpu(weight):
        return linear_add_reference(x, weight, residual, norm, bias, conv, out)
    if fuses(*x.shape):
        early = launches_early(weight)
        return linear_add_triton(x, weight, residual, norm, bias, conv, out, workspace, pdl=early)
    y = F.linear(x, weight, bias)
    return start_stream_triton(residual, norm, y if conv is None else conv(y), out)
