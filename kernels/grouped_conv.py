"""Two-tap dynamic depthwise convolution over the rows of one block (DFlash 2).

    out[i, c] = sum_t (base[t, c] + dynamic[i, t, group(c)]) * x[i - t, c],    x[-1] = 0

Row 0 of every block (the anchor) reads zero for its previous tap, so nothing crosses a block
boundary. `base` is static per channel; `dynamic` is predicted per row, one value a channel group.
Source: Inco AI, "DFlash 2: Keep Drafting Parallel" (2026-08-18); published checkpoints.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def grouped_conv(
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
        shifted = rows if tap == 0 else F.pad(rows[..., :-tap, :, :], (0, 0, 0, 0, tap, 0))
        out = out + (base[tap] + dynamic[..., tap, :, None]) * shifted
    return out.flatten(-2)
