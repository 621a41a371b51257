"""How block attention is shared out over a GPU: splits, head groups, tiles, and the scratch."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

TILE_BYTES = 32768  # keys and values that a program reads at a time
UNITS_PER_SPLIT = 2  # a split has at least so many tiles to do, the block's own rows being one
MAX_SPLITS = 16  # more cost the merge more than they save
MERGE_UNROLL = 8  # partial results that the merge asks for at once
FULL_GPU = 64  # kv heads of all sequences that keep a GPU busy without sharing a head's rows out


@dataclass(frozen=True)
class Workspace:
    """Scratch of split attention. Launches in order may share one; `counters` rests at zero."""

    partial: Float[Tensor, " outputs"]
    stats: Float[Tensor, " rows"]
    counters: Int[Tensor, " heads"]


def make_workspace(
    B: int, KV: int, G: int, H: int, D: int, max_splits: int, device: torch.device | str
) -> Workspace:
    """Scratch that is enough for calls of these shapes or smaller ones."""
    heads, groups = head_groups(B, KV, G, H)
    programs = B * KV * groups
    rows = programs * G * heads
    return Workspace(
        torch.empty(rows * max_splits * D, dtype=torch.float32, device=device),
        torch.empty(rows * (2 * max_splits + 3), dtype=torch.float32, device=device),
        torch.zeros(programs, dtype=torch.int32, device=device),
    )


def head_groups(B: int, KV: int, G: int, H: int) -> tuple[int, int]:
    """Query heads of a kv head that share a program, and how many such groups there are.

    At small batches 16 rows, the least that a tensor core takes: keys are read more than once then,
    but from the L2 cache, and the merge has less to do. Otherwise all heads of the kv head.
    """
    repeat = H // KV
    heads = repeat if B * KV >= FULL_GPU else min(repeat, max(1, 16 // G))
    return heads, -(-repeat // heads)


def default_splits(B: int, KV: int, G: int, H: int, S: int, device: torch.device) -> int:
    """Splits that make two small programs for every multiprocessor, or one large one.

    A cache of S rows bounds them too. Without a GPU to ask, 132 multiprocessors are assumed.
    """
    processors = 132
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    _, groups = head_groups(B, KV, G, H)
    wanted = processors if B * KV >= FULL_GPU else 2 * processors
    return max(1, min(wanted // (B * KV * groups), S // 64, MAX_SPLITS))


def tiling(rows: int, half: int, itemsize: int) -> tuple[int, int]:
    """Cache rows a tile, and warps a program, such that nothing leaves the registers (sm_90)."""
    tile = TILE_BYTES // (4 * half * itemsize)
    small = rows * half <= 1024 and itemsize == 2
    return min(128 // itemsize, max(16, tile)), 4 if small else 8
