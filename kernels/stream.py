"""The residual stream between two sublayers, and where it starts: norms and embedded blocks.

An RMS norm's scale s = 1 / sqrt(mean(x^2) + eps) is a factor of its row. Whoever writes x also
writes n * x, with the weight n of the norm that comes next, and partial sums of x^2; whoever
multiplies by W scales the product. So a norm needs no kernel of its own.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from .tools import jit, next_power_of_2, on_gpu, tl


class Norm(NamedTuple):
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight."""

    weight: Float[Tensor, " K"]
    eps: float


class Rows(NamedTuple):
    """Input of a product: `value` as it is, or to be scaled by 1 / sqrt(sum(squares) / K + eps)."""

    value: Float[Tensor, "R K"]
    squares: Float[Tensor, "tiles R"] | None = None
    eps: float = 0.0


class Stream(NamedTuple):
    """The residual stream between two sublayers: x, and the normed input of the next sublayer."""

    residual: Float[Tensor, "R H"]
    normed: Rows


def start_stream_reference(x: Float[Tensor, "R H"], norm: Norm) -> Stream:
    """The stream of x before the sublayer behind `norm`, as Hugging Face's modules round it."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return Stream(x, Rows(norm.weight * normed.to(x.dtype)))


def embed_block_reference(
    table: Float[Tensor, "V H"],
    first: Int[Tensor, " B"],
    rest: Int[Tensor, "B P"],
    scale: float,
    norm: Norm,
) -> Stream:
    """See `embed_block`."""
    ids = torch.cat([first[:, None], rest], dim=1).flatten()
    return start_stream_reference(F.embedding(ids, table) * scale, norm)


def finish_norm_reference(x: Rows) -> Float[Tensor, "R K"]:
    """The normed rows themselves."""
    if x.squares is None:
        return x.value
    scale = torch.rsqrt(x.squares.sum(0) / x.value.shape[1] + x.eps)
    return (x.value.float() * scale[:, None]).to(x.value.dtype)


@jit
def load_squares(squares_ptr, tiles, rows, R, TILES: tl.constexpr):
    """Partial sums of the squares of `rows`, [TILES, rows]; asked for here and summed later, so
    that nothing waits for them meanwhile."""
    parts = tl.arange(0, TILES)
    b_parts = (parts < tiles)[:, None] & (rows < R)[None, :]
    return tl.load(squares_ptr + parts[:, None] * R + rows[None, :], mask=b_parts, other=0.0)


@jit
def row_scale(squares, K, eps):
    """1 / rms of every row, from the partial sums of its squares."""
    return 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)


@jit
def _store_normed(x, norm_ptr, p_normed, cols, b_col, H, eps):
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
    weight = tl.load(norm_ptr + cols, mask=b_col, other=0.0).to(tl.float32)
    # Rounded before the weight, as Hugging Face's modules do.
    scaled = (x * scale).to(p_normed.dtype.element_ty).to(tl.float32)
    tl.store(p_normed, scaled * weight, mask=b_col)


@jit
def _norm_kernel(
    x_ptr, add_ptr, norm_ptr, out_ptr, normed_ptr, H, stride_x, stride_out, eps,
    ADD: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out = x (+ add), normed = norm(out), one program a row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    b_col = cols < H
    x = tl.load(x_ptr + row * stride_x + cols, mask=b_col, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(add_ptr + row * H + cols, mask=b_col, other=0.0).to(tl.float32)
        rounded = x.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * stride_out + cols, rounded, mask=b_col)
        x = rounded.to(tl.float32)
    _store_normed(x, norm_ptr, normed_ptr + row * H + cols, cols, b_col, H, eps)


@jit
def _embed_kernel(
    table_ptr, first_ptr, rest_ptr, norm_ptr, out_ptr, normed_ptr, H, scale, stride_rest, eps,
    G: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i_b, i_g = row // G, row % G
    token = tl.load(first_ptr + i_b)
    if i_g > 0:
        token = tl.load(rest_ptr + i_b * stride_rest + i_g - 1)
    cols = tl.arange(0, BLOCK_H)
    b_col = cols < H
    x = tl.load(table_ptr + token.to(tl.int64) * H + cols, mask=b_col, other=0.0).to(tl.float32)
    rounded = (x * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * H + cols, rounded, mask=b_col)
    x = rounded.to(tl.float32)
    _store_normed(x, norm_ptr, normed_ptr + row * H + cols, cols, b_col, H, eps)


@jit
def _finish_kernel(
    x_ptr, squares_ptr, out_ptr, R, H, tiles, eps,
    TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_R)
    scale = row_scale(load_squares(squares_ptr, tiles, rows, R, TILES), H, eps)
    cols = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    b = (rows < R)[:, None] & (cols < H)[None, :]
    x = tl.load(x_ptr + rows[:, None] * H + cols[None, :], mask=b, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows[:, None] * H + cols[None, :], x * scale[:, None], mask=b)


def tile_options(x: Rows) -> dict[str, int]:
    """The constant that kernels need to read `x.squares`: 0 where the rows are normed already."""
    tiles = 0 if x.squares is None else x.squares.shape[0]
    return {"TILES": next_power_of_2(tiles) if tiles else 0}


def start_stream_triton(x: Float[Tensor, "R H"], norm: Norm, add: Tensor | None = None,
                        out: Tensor | None = None) -> Stream:  # fmt: skip
    """The stream of x (+ add)."""
    R, H = x.shape
    if add is None:
        out = x
    elif out is None:
        out = torch.empty(R, H, dtype=x.dtype, device=x.device)
    normed = torch.empty(R, H, dtype=x.dtype, device=x.device)
    _norm_kernel[(R,)](
        x, add, norm.weight, out, normed, H, x.stride(0), out.stride(0), norm.eps,
        ADD=add is not None, BLOCK_H=next_power_of_2(H), num_warps=8,
    )  # fmt: skip
    return Stream(out, Rows(normed))


def embed_block_triton(
    table: Float[Tensor, "V H"],
    first: Int[Tensor, " B"],
    rest: Int[Tensor, "B P"],
    scale: float,
    norm: Norm,
) -> Stream:
    """See `embed_block`."""
    (B, P), H = rest.shape, table.shape[1]
    R = B * (P + 1)
    out, normed = (torch.empty(R, H, dtype=table.dtype, device=table.device) for _ in range(2))
    _embed_kernel[(R,)](
        table, first, rest, norm.weight, out, normed, H, scale, rest.stride(0), norm.eps,
        G=P + 1, BLOCK_H=next_power_of_2(H), num_warps=8,
    )  # fmt: skip
    return Stream(out, Rows(normed))


def finish_norm_triton(x: Rows) -> Float[Tensor, "R H"]:
    """See `finish_norm`."""
    if x.squares is None:
        return x.value
    R, H = x.value.shape
    out = torch.empty(R, H, dtype=x.value.dtype, device=x.value.device)
    _finish_kernel[(-(-H // 128),)](
        x.value, x.squares, out, R, H, x.squares.shape[0], x.eps,
        BLOCK_R=max(16, next_power_of_2(R)), BLOCK_H=128, **tile_options(x),
    )  # fmt: skip
    return out


def start_stream(x: Float[Tensor, "R H"], norm: Norm) -> Stream:
    """The residual stream of x in front of a sublayer whose norm is `norm`."""
    return (start_stream_triton if on_gpu(x) else start_stream_reference)(x, norm)


def embed_block(
    table: Float[Tensor, "V H"],
    first: Int[Tensor, " B"],
    rest: Int[Tensor, "B P"],
    scale: float,
    norm: Norm,
) -> Stream:
    """The stream of the blocks [first, rest], rows of `table` times `scale`, before `norm`."""
    run = embed_block_triton if on_gpu(table) else embed_block_reference
    return run(table, first, rest, scale, norm)


def finish_norm(x: Rows) -> Float[Tensor, "R K"]:
    """The normed rows themselves."""
    return (finish_norm_triton if on_gpu(x.value) else finish_norm_reference)(x)
