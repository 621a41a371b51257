"""The K best tokens of each row of draft logits, ordered by (logit descending, id ascending).

Ties matter: bf16 logits tie often, and `torch.topk` leaves the order of equal values, and which of
them it keeps at the K-th place, undefined. Here both are fixed by the lowest id.

Two kernels. The first streams the logits and keeps the largest of every COLUMNS consecutive ones;
the second, one program a row, picks from these by the following lemma, twice.

Lemma. Cut a row into groups of consecutive entries and order the groups by (largest entry
descending, group id ascending). The K best entries lie in the first K groups.
Proof. Let e be an entry of a group g that is not among the first K. Each of the K groups h before g
has max(h) > max(g), or max(h) = max(g) and h < g. In the first case max(h) > e. In the second,
max(h) >= e, and where they are equal the entry of h has the lower id, since groups are consecutive.
Either way one entry of h comes before e: K entries do, so e is not among the K best. QED

So: pick K groups by their maxima; cut their entries into parts of PART, take the parts' maxima and
pick K parts by the same lemma; pick K among their K * PART entries. A pick is a running maximum
over distinct integer keys, value above position, and positions follow the ids, so ties need no
care. NaN comes first, above +inf, so that a caller sees it; -0.0 equals 0.0; -inf is a value.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .tools import jit, next_power_of_2, on_gpu, tl

COLUMNS = (
    256  # a group: about sqrt(V / K), which halves what the second kernel reads and picks from
)
PART = 16
GROUPS = 16  # groups a program of the first kernel
MAX_CANDIDATES = 64  # more are left to the reference: each is one more step of three picks
BITS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 32}


def candidate_topk_reference(
    logits: Float[Tensor, "rows V"], num_candidates: int
) -> tuple[Float[Tensor, "rows K"], Int[Tensor, "rows K"]]:
    """Plain torch form. On a GPU it waits for the device (it asks whether any row is tied)."""
    vocab = logits.shape[-1]
    wanted = min(num_candidates, vocab)
    values, ids = torch.topk(logits, min(wanted + 1, vocab), dim=-1)
    if wanted < vocab:
        # A tie across the K-th place: redo those few rows with the id as the second key.
        tied = (values[:, wanted - 1] == values[:, wanted]).nonzero()[:, 0]
        if tied.numel():
            kept = torch.sort(logits[tied], dim=-1, descending=True, stable=True)
            values[tied, :wanted] = kept.values[:, :wanted]
            ids[tied, :wanted] = kept.indices[:, :wanted]
        values, ids = values[:, :wanted], ids[:, :wanted]
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


@jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _largest(b_values, axis: tl.constexpr):
    """Maximum along an axis; NaN if there is one."""
    return tl.reduce(b_values.to(tl.float32), axis, _larger).to(b_values.dtype)


@jit
def _keys(b_values, o_position, m_valid, BITS: tl.constexpr):
    """Distinct keys >= 0 in the order (value descending, position ascending); -1 if not valid."""
    if BITS == 16:
        b_bits = b_values.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        b_bits = b_values.to(tl.int32, bitcast=True).to(tl.int64)
    low = -(2 ** (BITS - 1))
    # Sign and magnitude to an integer: -0.0 and 0.0 are both 0.
    b_order = tl.where(b_bits < 0, low - b_bits, b_bits)
    b_float = b_values.to(tl.float32)
    b_order = tl.where(b_float != b_float, -1 - low, b_order)
    b_key = ((b_order - low) << (BITS - 1)) + (-2 - low - o_position)
    return tl.where(m_valid, b_key, -1)


@jit
def _pick(b_keys, K: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr):
    """The K largest keys, largest first; -1 in slots for which there is none."""
    UNSIGNED: tl.constexpr = tl.uint32 if BITS == 16 else tl.uint64
    o_slot = tl.arange(0, SLOTS)
    best = tl.max(b_keys)
    b_picked = tl.where(o_slot == 0, best, -1)
    for k in range(1, K):
        # The key next below `best` has the least negative difference to it, and negative numbers
        # are the largest unsigned ones: a subtraction and a maximum a key, and nothing to mask.
        below = tl.max((b_keys - best).to(UNSIGNED, bitcast=True)).to(b_keys.dtype, bitcast=True)
        best = tl.where(below < 0, best + below, -1)
        b_picked = tl.where(o_slot == k, best, b_picked)
    return b_picked


@jit
def _position(b_key, BITS: tl.constexpr):
    return (2 ** (BITS - 1) - 2 - (b_key & (2 ** (BITS - 1) - 1))).to(tl.int32)


@jit
def _place(b_x):
    """How many of a few distinct numbers are smaller than each of them."""
    return tl.sum((b_x[None, :] < b_x[:, None]).to(tl.int32), axis=1)


@jit
def _at_place(b_x, b_place, b_wanted):
    """The x whose place is the wanted one; 0 if there is none."""
    return tl.sum(tl.where(b_place[None, :] == b_wanted[:, None], b_x[None, :], 0), axis=1)


@jit
def _maxima_kernel(
    logits_ptr,
    maxima_ptr,
    row_stride,
    vocab,
    NUM_GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    i_row = tl.program_id(0) // tl.cdiv(NUM_GROUPS, GROUPS)
    i_tile = tl.program_id(0) % tl.cdiv(NUM_GROUPS, GROUPS)
    o_group = i_tile * GROUPS + tl.arange(0, GROUPS)
    o_id = o_group[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    p_row = logits_ptr + i_row.to(tl.int64) * row_stride
    b_values = tl.load(p_row + o_id, o_id < vocab, -float("inf"))
    p_maxima = maxima_ptr + i_row.to(tl.int64) * NUM_GROUPS + o_group
    tl.store(p_maxima, _largest(b_values, 1), o_group < NUM_GROUPS)


@jit
def _pick_kernel(
    logits_ptr,
    maxima_ptr,
    values_ptr,
    ids_ptr,
    row_stride,
    vocab,
    NUM_GROUPS: tl.constexpr,  # no variable: the keys of the slots beyond it are then never formed
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
):
    PARTS: tl.constexpr = COLUMNS // PART
    i_row = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + i_row * row_stride
    o_slot = tl.arange(0, SLOTS)
    o_in_part = tl.arange(0, PART)

    # K groups. Where there are fewer, what fills the slots lies behind the end of the row.
    o_group = tl.arange(0, GROUPS)
    m_group = o_group < NUM_GROUPS
    b_maxima = tl.load(maxima_ptr + i_row * NUM_GROUPS + o_group, m_group, 0.0)
    b_key = _pick(_keys(b_maxima, o_group, m_group, BITS), K, SLOTS, BITS)
    b_group = tl.where(b_key < 0, NUM_GROUPS + o_slot, _position(b_key, BITS))

    # K parts of these groups.
    b_place = _place(b_group)
    o_part = b_place[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    o_start = b_group[:, None] * COLUMNS + tl.arange(0, PARTS)[None, :] * PART
    o_id = o_start[:, :, None] + o_in_part[None, None, :]
    b_maxima = _largest(tl.load(p_row + o_id, o_id < vocab, -float("inf")), 2)
    b_key = _pick(_keys(b_maxima, o_part, o_start < vocab, BITS), K, SLOTS, BITS)
    b_part = _position(b_key, BITS)
    b_start = _at_place(b_group, b_place, b_part // PARTS) * COLUMNS + b_part % PARTS * PART
    b_start = tl.where(b_key < 0, vocab + o_slot, b_start)

    # K entries of these parts.
    b_place = _place(b_start)
    o_entry = b_place[:, None] * PART + o_in_part[None, :]
    o_id = b_start[:, None] + o_in_part[None, :]
    b_values = tl.load(p_row + o_id, o_id < vocab, 0.0)
    b_key = _pick(_keys(b_values, o_entry, o_id < vocab, BITS), K, SLOTS, BITS)
    b_entry = _position(b_key, BITS)
    b_id = _at_place(b_start, b_place, b_entry // PART) + b_entry % PART

    low = -(2 ** (BITS - 1))
    b_order = (b_key >> (BITS - 1)) + low
    b_bits = tl.where(b_order < 0, low - b_order, b_order)
    b_bits = b_bits.to(tl.int16) if BITS == 16 else b_bits.to(tl.int32)
    p_value = values_ptr + i_row * K + o_slot
    tl.store(p_value, b_bits.to(values_ptr.dtype.element_ty, bitcast=True), o_slot < K)
    tl.store(ids_ptr + i_row * K + o_slot, b_id.to(tl.int64), o_slot < K)


def candidate_topk_triton(
    logits: Float[Tensor, "rows V"], num_candidates: int
) -> tuple[Float[Tensor, "rows K"], Int[Tensor, "rows K"]]:
    """Triton form of `candidate_topk_reference` in two launches; not differentiable.

    For bf16, fp16 and fp32 logits and at most MAX_CANDIDATES candidates. NaN, of any sign, counts
    as the largest value; of several the lowest id comes first. A value of -0.0 is given as 0.0.
    """
    rows, vocab = logits.shape
    wanted = min(num_candidates, vocab)
    if not 1 <= wanted <= MAX_CANDIDATES:
        raise ValueError(f"num_candidates: found {wanted}, expected 1 to {MAX_CANDIDATES}")
    if logits.dtype not in BITS:
        raise ValueError(f"logits: found {logits.dtype}, expected bfloat16, float16 or float32")
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    num_groups = -(-vocab // COLUMNS)
    values = torch.empty((rows, wanted), dtype=logits.dtype, device=logits.device)
    ids = torch.empty((rows, wanted), dtype=torch.int64, device=logits.device)
    maxima = torch.empty((rows, num_groups), dtype=logits.dtype, device=logits.device)
    sizes = (logits.stride(0), vocab)
    _maxima_kernel[(rows * -(-num_groups // GROUPS),)](
        *(logits, maxima, *sizes),
        NUM_GROUPS=num_groups,
        COLUMNS=COLUMNS,
        GROUPS=GROUPS,
        num_warps=4,
    )
    slots = next_power_of_2(wanted)
    _pick_kernel[(rows,)](
        *(logits, maxima, values, ids, *sizes),
        NUM_GROUPS=num_groups,
        K=wanted,
        SLOTS=slots,
        COLUMNS=COLUMNS,
        PART=PART,
        GROUPS=next_power_of_2(num_groups),
        BITS=BITS[logits.dtype],
        # One warp picks without barriers, as long as its registers hold the entries of K groups.
        num_warps=max(slots * COLUMNS * logits.element_size() // 8192, 1),
    )
    return values, ids


def candidate_topk(
    logits: Float[Tensor, "rows V"], num_candidates: int
) -> tuple[Float[Tensor, "rows K"], Int[Tensor, "rows K"]]:
    """Values (in the dtype of `logits`) and ids (int64). K is cut to V when V is smaller.

    By Triton on a GPU, or by the reference there too for more than MAX_CANDIDATES or float64.
    """
    few = min(num_candidates, logits.shape[-1]) <= MAX_CANDIDATES
    if on_gpu(logits) and few and logits.dtype in BITS:
        return candidate_topk_triton(logits, num_candidates)
    return candidate_topk_reference(logits, num_candidates)
