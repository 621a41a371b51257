"""Dynamic depthwise convolution over the rows of one block (DFlash 2; published with two taps).

    out[i, c] = sum_t k[i, t, c] * x[i - t, c],    k[i, t, c] = base[t, c] + dynamic[i, t, group(c)]

and x is zero before the first row of its block (the anchor), so nothing crosses a block boundary.
`base` is static per channel; `dynamic` is predicted per row, one value a channel group. Backward:

    d_x[i, c]          = sum_t k[i + t, t, c] * d_out[i + t, c]
    d_dynamic[i, t, g] = sum over the channels c of g of d_out[i, c] * x[i - t, c]
    d_base[t, c]       = sum over all rows of all blocks of d_out[i, c] * x[i - t, c]

A program is one warp with a strip of channels, [groups, width], and walks down the rows of a block:
earlier rows stay in registers, so x is read once, tap t costs no second read, and a block starts
from zeros. One warp needs neither barriers nor shared memory, and `dynamic` is loaded once a group.
Source: Inco AI, "DFlash 2: Keep Drafting Parallel" (2026-08-18); published checkpoints.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from .tools import jit, next_power_of_2, on_gpu, tl

FORWARD_ROWS = 8  # rows loaded before the first is used; as many as registers allow
BACKWARD_ROWS = 4
PROGRAMS = 8192  # of the backward, at most: enough waves to balance, few partial sums of d_base
BLOCKS_A_PROGRAM = 4  # of the backward, at least: d_base is then a small part of the traffic


def grouped_conv_reference(
    x: Float[Tensor, "*blocks G H"],
    dynamic: Float[Tensor, "*blocks G taps groups"],
    base: Float[Tensor, "taps H"],
) -> Float[Tensor, "*blocks G H"]:
    """Plain torch form, differentiable. The group width is H // groups; tap t reads row i - t."""
    taps, groups = dynamic.shape[-2:]
    width = x.shape[-1] // groups
    rows = x.unflatten(-1, (groups, width))
    base = base.to(x.dtype).unflatten(-1, (groups, width))
    out = torch.zeros_like(rows)
    for tap in range(taps):
        shifted = F.pad(rows, (0, 0, 0, 0, tap, 0))[..., : rows.shape[-3], :, :]
        out = out + (base[tap] + dynamic[..., tap, :, None]) * shifted
    return out.flatten(-2)


@jit
def _forward_kernel(
    x_ptr,
    dynamic_ptr,
    base_ptr,
    out_ptr,
    num_groups,
    x_row,
    dynamic_row,
    dynamic_tap,
    dynamic_group,
    G: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,  # a divisor of G
):
    i_strip = tl.program_id(0) % tl.cdiv(num_groups, GROUPS)
    i_block = tl.program_id(0) // tl.cdiv(num_groups, GROUPS)
    hidden = num_groups * WIDTH
    o_group = i_strip * GROUPS + tl.arange(0, GROUPS)
    o_lane = tl.arange(0, LANES)
    o_channel = o_group[:, None] * WIDTH + o_lane[None, :]
    m_group = o_group < num_groups
    m_channel = m_group[:, None] & (o_lane < WIDTH)[None, :]
    first_row = i_block.to(tl.int64) * G
    p_x = x_ptr + first_row * x_row + o_channel
    p_dynamic = dynamic_ptr + first_row * dynamic_row + o_group * dynamic_group
    p_out = out_ptr + first_row * hidden + o_channel

    b_base, b_history = (), ()  # b_history: x of rows i - TAPS + 1, ..., i - 1, i
    for t in tl.static_range(TAPS):
        b_base += (tl.load(base_ptr + t * hidden + o_channel, m_channel, 0.0).to(tl.float32),)
        if t > 0:
            b_history += (tl.zeros([GROUPS, LANES], tl.float32),)
    for start in range(0, G, ROWS):
        # All loads go before the first store, which none of them could pass.
        b_x, b_dynamic = (), ()
        for j in tl.static_range(ROWS):
            i = start + j
            b_x += (tl.load(p_x + i * x_row, m_channel, 0.0),)
            for t in tl.static_range(TAPS):
                p_tap = p_dynamic + i * dynamic_row + t * dynamic_tap
                b_dynamic += (tl.load(p_tap, m_group, 0.0),)
        for j in tl.static_range(ROWS):
            i = start + j
            b_history += (b_x[j].to(tl.float32),)
            b_out = tl.zeros([GROUPS, LANES], tl.float32)
            for t in tl.static_range(TAPS):
                b_kernel = b_base[t] + b_dynamic[j * TAPS + t].to(tl.float32)[:, None]
                b_out += b_kernel * b_history[TAPS - 1 - t]
            b_history = b_history[1:]
            tl.store(p_out + i * hidden, b_out.to(out_ptr.dtype.element_ty), m_channel)


@jit
def _backward_kernel(
    d_out_ptr,
    x_ptr,
    dynamic_ptr,
    base_ptr,
    d_x_ptr,
    d_dynamic_ptr,
    d_base_ptr,
    num_blocks,
    num_groups,
    d_out_row,
    x_row,
    dynamic_row,
    dynamic_tap,
    dynamic_group,
    G: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,  # a divisor of G
):
    """d_x and d_dynamic, and each program's part of d_base, of every `num_workers`-th block."""
    i_strip = tl.program_id(0) % tl.cdiv(num_groups, GROUPS)
    i_worker = tl.program_id(0) // tl.cdiv(num_groups, GROUPS)
    num_workers = tl.num_programs(0) // tl.cdiv(num_groups, GROUPS)
    hidden = num_groups * WIDTH
    o_group = i_strip * GROUPS + tl.arange(0, GROUPS)
    o_lane = tl.arange(0, LANES)
    o_channel = o_group[:, None] * WIDTH + o_lane[None, :]
    m_group = o_group < num_groups
    m_channel = m_group[:, None] & (o_lane < WIDTH)[None, :]

    b_base, b_d_base, b_zeros = (), (), ()
    for t in tl.static_range(TAPS):
        b_base += (tl.load(base_ptr + t * hidden + o_channel, m_channel, 0.0).to(tl.float32),)
        b_d_base += (tl.zeros([GROUPS, LANES], tl.float32),)
        if t > 0:
            b_zeros += (tl.zeros([GROUPS, LANES], tl.float32),)
    for i_block in range(i_worker, num_blocks, num_workers):
        first_row = tl.full((), i_block, tl.int64) * G
        p_x = x_ptr + first_row * x_row + o_channel
        p_d_out = d_out_ptr + first_row * d_out_row + o_channel
        p_dynamic = dynamic_ptr + first_row * dynamic_row + o_group * dynamic_group
        p_d_x = d_x_ptr + first_row * hidden + o_channel
        p_d_dynamic = d_dynamic_ptr + first_row * (TAPS * num_groups) + o_group
        # b_pending: what the rows so far add to d_x of rows i - 1, ..., i - TAPS + 1
        b_history, b_pending = b_zeros, b_zeros
        for start in range(0, G, ROWS):
            b_x, b_d_out, b_dynamic = (), (), ()
            for j in tl.static_range(ROWS):
                i = start + j
                b_x += (tl.load(p_x + i * x_row, m_channel, 0.0),)
                b_d_out += (tl.load(p_d_out + i * d_out_row, m_channel, 0.0),)
                for t in tl.static_range(TAPS):
                    p_tap = p_dynamic + i * dynamic_row + t * dynamic_tap
                    b_dynamic += (tl.load(p_tap, m_group, 0.0),)
            for j in tl.static_range(ROWS):
                i = start + j
                b_history += (b_x[j].to(tl.float32),)
                b_row = b_d_out[j].to(tl.float32)
                b_sums, b_d_x = (), ()  # b_d_x: of rows i, i - 1, ..., and the last one is complete
                for t in tl.static_range(TAPS):
                    b_product = b_row * b_history[TAPS - 1 - t]
                    b_sums += (b_d_base[t] + b_product,)
                    b_d_dynamic = tl.sum(b_product, axis=1).to(d_dynamic_ptr.dtype.element_ty)
                    p_tap = p_d_dynamic + (i * TAPS + t) * num_groups
                    tl.store(p_tap, b_d_dynamic, m_group)
                    b_kernel = b_base[t] + b_dynamic[j * TAPS + t].to(tl.float32)[:, None]
                    if t == 0:
                        b_d_x += (b_kernel * b_row,)
                    else:
                        b_d_x += (b_pending[t - 1] + b_kernel * b_row,)
                b_d_base, b_pending = b_sums, b_d_x[: TAPS - 1]
                b_history = b_history[1:]
                done = i - TAPS + 1
                b_done = b_d_x[TAPS - 1].to(d_x_ptr.dtype.element_ty)
                # (a mask of no dimensions would lose its type in the interpreter)
                m_done = m_channel & (tl.full([1, 1], done, tl.int32) >= 0)
                tl.store(p_d_x + done * hidden, b_done, m_done)
        for t in tl.static_range(TAPS - 1):
            # No row follows that would add to what is pending: it is complete.
            if t < G:
                b_last = b_pending[t].to(d_x_ptr.dtype.element_ty)
                tl.store(p_d_x + (G - 1 - t) * hidden, b_last, m_channel)
    for t in tl.static_range(TAPS):
        p_d_base = d_base_ptr + (i_worker * TAPS + t) * hidden + o_channel
        tl.store(p_d_base, b_d_base[t], m_channel)


def _launch(x: Tensor, dynamic: Tensor, base: Tensor) -> dict[str, int]:
    """What both kernels are told of the shapes. Raises `ValueError` for shapes that do not fit."""
    *blocks, rows, hidden = x.shape
    taps, groups = dynamic.shape[-2:]
    if dynamic.shape[:-2] != (*blocks, rows) or taps < 1 or groups < 1 or hidden % groups:
        raise ValueError(
            f"dynamic: found {tuple(dynamic.shape)}, expected {(*blocks, rows)} + (taps, groups) "
            f"with groups a divisor of {hidden}"
        )
    if base.shape != (taps, hidden):
        raise ValueError(f"base: found {tuple(base.shape)}, expected {(taps, hidden)}")
    # Eight channels a thread: in bf16 one access of 16 bytes.
    lanes = next_power_of_2(hidden // groups)
    return {
        "G": rows,
        "TAPS": taps,
        "WIDTH": hidden // groups,
        "GROUPS": max(256 // lanes, 1),
        "LANES": lanes,
        "num_warps": min(max(lanes // 256, 1), 16),
    }


def _rows(x: Tensor) -> Float[Tensor, "rows H"]:
    """A view, or a copy where rows are not evenly spaced or channels not side by side."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows_at_once(rows: int, limit: int) -> int:
    """Equal passes: the largest divisor up to `limit`, or all of a few rows that have none."""
    best = max(step for step in range(1, limit + 1) if rows % step == 0)
    return rows if best == 1 and rows <= 8 else best


def _forward(x: Tensor, dynamic: Tensor, base: Tensor) -> Tensor:
    launch = _launch(x, dynamic, base)
    dtype = torch.promote_types(x.dtype, dynamic.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return out
    rows, kernels = _rows(x), dynamic.flatten(0, -3)
    groups = dynamic.shape[-1]
    grid = (len(rows) // launch["G"] * -(-groups // launch["GROUPS"]),)
    _forward_kernel[grid](
        *(rows, kernels, base.contiguous(), out),
        *(groups, rows.stride(0), *kernels.stride()),
        ROWS=_rows_at_once(launch["G"], FORWARD_ROWS),
        **launch,
    )
    return out


def _backward(
    d_out: Tensor, x: Tensor, dynamic: Tensor, base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    launch = _launch(x, dynamic, base)
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_dynamic = torch.empty(dynamic.shape, dtype=dynamic.dtype, device=x.device)
    if x.numel() == 0:
        return d_x, d_dynamic, torch.zeros_like(base)
    rows, kernels, above = _rows(x), dynamic.flatten(0, -3), _rows(d_out)
    groups = dynamic.shape[-1]
    blocks, strips = len(rows) // launch["G"], -(-groups // launch["GROUPS"])
    workers = min(-(-blocks // BLOCKS_A_PROGRAM), -(-PROGRAMS // strips))
    # Each worker's sum, and then the sum of these: the same order, so the same bits, in every run.
    parts = torch.empty((workers, *base.shape), dtype=torch.float32, device=x.device)
    _backward_kernel[(workers * strips,)](
        *(above, rows, kernels, base.contiguous(), d_x, d_dynamic, parts),
        *(blocks, groups, above.stride(0), rows.stride(0), *kernels.stride()),
        ROWS=_rows_at_once(launch["G"], BACKWARD_ROWS),
        **launch,
    )
    return d_x, d_dynamic, parts.sum(0).to(base.dtype)


class _GroupedConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dynamic, base):
        ctx.save_for_backward(x, dynamic, base)
        return _forward(x, dynamic, base)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        return _backward(d_out, *ctx.saved_tensors)


def grouped_conv_triton(
    x: Float[Tensor, "*blocks G H"],
    dynamic: Float[Tensor, "*blocks G taps groups"],
    base: Float[Tensor, "taps H"],
) -> Float[Tensor, "*blocks G H"]:
    """Triton form of `grouped_conv_reference`, once differentiable; sums in fp32.

    `dynamic` may be a view of a projection's output; it and `x` are copied only when their rows
    are not evenly spaced. Raises `ValueError` for shapes that do not fit.
    """
    return _GroupedConv.apply(x, dynamic, base)


def grouped_conv(
    x: Float[Tensor, "*blocks G H"],
    dynamic: Float[Tensor, "*blocks G taps groups"],
    base: Float[Tensor, "taps H"],
) -> Float[Tensor, "*blocks G H"]:
    """The convolution; by Triton on a GPU, save float64, since the kernel sums in fp32."""
    if on_gpu(x) and x.dtype != torch.float64:
        return grouped_conv_triton(x, dynamic, base)
    return grouped_conv_reference(x, dynamic, base)
