"""What the kernel files share: Triton where it is installed, counter-based random numbers, the
arrival counter of programs that work on one row, and checks of shapes.

Without Triton (a machine that has no build of it) the plain references still import and run.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:  # pragma: no cover - platforms without a Triton build

    class _Absent:
        """Stands where kernels are declared; launching one is what fails."""

        constexpr = int

    triton, tl = None, _Absent()

    def jit(function: object) -> object:
        return function


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def on_gpu(*tensors: Tensor | None) -> bool:
    """Whether the Triton launcher should run: the tensors are on a CUDA device."""
    return any(tensor is not None and tensor.is_cuda for tensor in tensors)


def check_shape(name: str, tensor: Tensor, *shape: int, contiguous: bool = False) -> None:
    """Raise `ValueError` unless the tensor has this shape and a last axis without gaps (no axis
    with gaps where `contiguous`)."""
    dense = tensor.is_contiguous() if contiguous else shape[-1] <= 1 or tensor.stride(-1) == 1
    if tuple(tensor.shape) != shape or not dense:
        raise ValueError(
            f"{name}: found shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
            f"expected {shape}, {'contiguous' if contiguous else 'the last axis contiguous'}"
        )


def uniforms(keys: Int[Tensor, "*n"], counters: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Uniform float64 numbers in [0, 1) of 48 bits, one for each int64 (key, counter).

    The output function of SplitMix64 (Steele, Lea, Flood 2014) on key + counter * golden gamma;
    `uniform48` gives the same numbers inside a kernel.
    """
    state = keys + counters.long() * -7046029254386353131  # 0x9E3779B97F4A7C15, signed
    state = (state ^ _shift_right(state, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    state = (state ^ _shift_right(state, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    state = state ^ _shift_right(state, 31)
    return _shift_right(state, 16).double() / 2.0**48


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch shifts signed integers arithmetically; the copies of the sign are cut off again.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@jit
def uniform48(key, counter):
    """The number of `uniforms` of an int64 key and an int64 counter, inside a kernel."""
    state = (key + counter * -7046029254386353131).to(tl.uint64, bitcast=True)
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 16).to(tl.float64) * (1.0 / 281474976710656.0)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors."""
    return triton is not None and triton.knobs.runtime.interpret


@jit
def last_to_arrive(arrivals, count):
    """Whether the other `count` - 1 programs that call this have all done so; what they stored
    before is then visible to the caller. The counter is zero again for the next launch."""
    tl.debug_barrier()  # every thread's stores come before the one thread's atomic
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(arrivals, 0)
    return last


def launches_early(tensor: Tensor) -> bool:
    """Whether a kernel on the tensor's device can be launched while the one before it runs
    (programmatic dependent launch, compute capability 9.0 and above)."""
    if not tensor.is_cuda:
        return False
    return torch.cuda.get_device_capability(tensor.device) >= (9, 0)


@jit
def prefetch_rows(p_row, size, LINES: tl.constexpr):
    """Ask the L2 cache for the first LINES lines of 128 bytes of each row of `size` elements."""
    if LINES > 0:
        line: tl.constexpr = 1024 // p_row.dtype.element_ty.primitive_bitwidth
        p_line = p_row + tl.minimum(tl.arange(0, LINES) * line, size - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_line],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
