"""Head rows as attention wants them: normed per head (optional), rotated, rounded once.

    n = w x / rms(x),    (n1, n2) -> (n1 cos - n2 sin, n2 cos + n1 sin)

in the half-split layout of Llama and Qwen. Kernels hold the two halves apart, since the rotation
pairs them.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from .tools import jit, tl


def rotated(
    heads: Float[Tensor, "*rows n D"],
    weight: Float[Tensor, "D"] | None,
    eps: float,
    cos: Float[Tensor, "*rows D"],
    sin: Float[Tensor, "*rows D"],
) -> Float[Tensor, "*rows n D"]:
    """RMS norm (if there is a weight) and rotary embedding in fp32, rounded once."""
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    if weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (wide * cos[..., None, :] + turned * sin[..., None, :]).to(heads.dtype)


@jit
def load_halves(pointer, inside, mask, D: tl.constexpr):
    """Both halves of head rows; the rotary embedding pairs them, so they stay apart."""
    mask = mask & inside
    return tl.load(pointer, mask=mask, other=0.0), tl.load(pointer + D // 2, mask=mask, other=0.0)


@jit
def rotate(
    first, second, weight, cos, sin, position, stride, half, eps, D: tl.constexpr,
    MODEL: tl.constexpr,
):  # fmt: skip
    """Halves of head rows [rows, BLOCK_HALF], normed if there is a weight, rotated, rounded."""
    inside = half < D // 2
    at = position[:, None] * stride + half
    cos = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / D + eps)[:, None]
        weight1, weight2 = load_halves(weight + half, inside, True, D)
        first *= scale * weight1.to(tl.float32)
        second *= scale * weight2.to(tl.float32)
    return (first * cos - second * sin).to(MODEL), (second * cos + first * sin).to(MODEL)


def check(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise ValueError(f"{what}: found {found}, expected {expected}")
