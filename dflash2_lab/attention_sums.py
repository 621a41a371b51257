"""Sums of attention mass by layer, head, slot and context length, kept instead of the weights.

Sums of several files or machines add up, and shares are formed once, at the end.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

FIRST_BIN = 128  # context lengths below this share a bin; above it, bins double


def context_bin(length: int) -> str:
    """The bin of a context length in tokens: "0-127", "128-255", "256-511", ..."""
    if length < FIRST_BIN:
        return f"0-{FIRST_BIN - 1}"
    low = 1 << (length.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


class AttentionSums:
    """Accumulates in float64 where the mass lies; `frame` forms the `attention` table's rows."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, str], Float[Tensor, "4 H P"]] = {}
        self.uniform: dict[tuple[int, str], tuple[Float[np.ndarray, " P"], int]] = {}

    def add(
        self,
        layer: int,
        mass: Float[Tensor, "H A P groups"],
        uniform: Float[np.ndarray, "A P"],
        context_lens: Int[np.ndarray, " A"],
    ) -> None:
        """Add A blocks with ascending context lengths; `mass` on (context, anchor, drafted)."""
        labels = [context_bin(int(length)) for length in context_lens]
        starts = [i for i, label in enumerate(labels) if i == 0 or labels[i - 1] != label]
        for start, stop in zip(starts, [*starts[1:], len(labels)], strict=True):
            part = mass[:, start:stop].double()
            within = part[..., 1] + part[..., 2]
            sums = torch.stack([*part.sum(1).unbind(-1), within.square().sum(1)])
            key = (layer, labels[start])
            self.sums[key] = self.sums[key] + sums if key in self.sums else sums
            expected, count = self.uniform.get(key, (0.0, 0))
            expected = expected + uniform[start:stop].sum(0)
            self.uniform[key] = (expected, count + stop - start)

    def frame(self, key: Mapping[str, object]) -> pd.DataFrame:
        """Rows of the `attention` table, by layer, context bin, head and slot."""
        parts = []
        for (layer, label), sums in sorted(
            self.sums.items(), key=lambda item: (item[0][0], int(item[0][1].split("-")[0]))
        ):
            uniform, count = self.uniform[layer, label]
            _, heads, slots = sums.shape
            context, anchor, drafted, squares = sums.cpu().numpy().reshape(4, -1)
            columns = {
                "layer": layer,
                "head": np.repeat(np.arange(heads), slots),
                "slot": np.tile(np.arange(1, slots + 1), heads),
                "context_bin": label,
                "sum_context": context,
                "sum_anchor": anchor,
                "sum_drafted": drafted,
                "sumsq_within": squares,
                "sum_uniform": np.tile(uniform, heads),
                "count": count,
            }
            parts.append(pd.DataFrame(dict(key) | columns))
        return pd.concat(parts, ignore_index=True)
