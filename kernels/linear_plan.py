"""How the fused products are shared out over a GPU: tiles, splits, and the scratch of a split."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .tools import next_power_of_2

MAX_ROWS = 128  # of a fused product
_MAX_TILES = 128  # of 32 columns, of a product that is split
_MAX_SPLITS = 4
_SHARED_BYTES = 220_000  # of the 227 KiB that a program may have on sm_90


class Workspace(NamedTuple):
    """Scratch of split products: partial sums, and counters that every launch leaves at zero.
    Launches that follow one another on a stream share it."""

    partial: Float[Tensor, " floats"]
    counters: Int[Tensor, " tiles"]


class Tiling(NamedTuple):
    """Work of one program: columns of y, columns of x at a time, programs that share a tile; the
    cache lines of each row of W that it asks for before it waits for its input; rows at most."""

    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    lines: int = 0
    block_r: int = 64


def make_workspace(device: torch.device, rows: int = 16) -> Workspace:
    """Room for every product of at most `rows` rows that is split or has a convolution."""
    shares = -(-min(rows, MAX_ROWS) // 32)
    counters = torch.zeros(shares * 1024, dtype=torch.int32, device=device)
    floats = shares * _MAX_TILES * _MAX_SPLITS * 2 * 32 * 32
    return Workspace(torch.empty(floats, device=device), counters)


def fuses(R: int, K: int) -> bool:
    """Whether a product of R rows of K columns is fused on a GPU: where that is the faster way."""
    most = MAX_ROWS if K < 2048 else 64
    return most >= R


def choose_tiling(R: int, N: int, K: int, gated: bool, splittable: bool) -> Tiling:
    """Tiles that keep every processor of an H200 reading W; `bench kernels` times them."""
    small = N * K < 2**22
    splits = min(_MAX_SPLITS, -(-K // 512)) if splittable and -(-N // 32) <= _MAX_TILES else 0
    if R > 32:
        # Enough rows for the wide tensor-core instructions, which take four warps.
        if small and gated:
            return Tiling(32, 128, 1, 4, 4, 2)
        if small and splits and K < 1024:
            return Tiling(16, 64, 1, 4, 6, 4)
        if small and splits and R > 64:
            return Tiling(32, 128, 1, 4, 6, 4)
        if small:
            return Tiling(32, 64, max(1, splits), 4, 6, 4)
        if gated:
            return Tiling(64, 64, 1, 4, 4, 0)
        if N >= 32768:
            return Tiling(128, 64, 1, 8, 4, 0, 128)
        return Tiling(32, 64, splits, 4, 4, 4) if splits else Tiling(32, 128, 1, 4, 4, 4)
    if gated:
        return Tiling(32, 64, 1, 4, 6, 2) if small else Tiling(64, 128, 1, 4, 3, 2)
    if splits:
        # Too few tiles to go round: several programs share one.
        return Tiling(32, 64, splits, 4, 6, 4) if small else Tiling(32, 128, splits, 4, 4, 4)
    if small:
        return Tiling(32, 64, 1, 2, 6, 4)
    return Tiling(128, 128, 1, 8, 3, 2) if N >= 32768 else Tiling(32, 128, 1, 2, 6, 4)


def row_tile(R: int, most: int, block: int) -> tuple[int, int]:
    """Rows of a tile (a power of two), and how many of them are its own: whole blocks."""
    size = max(16, min(most, next_power_of_2(R)), next_power_of_2(block))
    return size, size if size >= R else size // block * block


def launch_options(tiling: Tiling, pdl: bool, stage: int) -> dict[str, object]:
    """Options of a launch whose pipeline holds `stage` bytes of shared memory a stage."""
    stages = max(1, min(tiling.num_stages, _SHARED_BYTES // stage))
    options = {"num_warps": tiling.num_warps, "num_stages": stages}
    return options | ({"launch_pdl": True} if pdl else {})
