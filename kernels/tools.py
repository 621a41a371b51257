"""What every kernel file shares: Triton where it is installed, and counter-based random numbers.

Without Triton (a machine that has no build of it) the plain references still import and run.
"""

import torch

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


def on_gpu(*tensors: torch.Tensor | None) -> bool:
    """Whether the Triton launcher should run: the tensors are on a CUDA device."""
    return any(tensor is not None and tensor.is_cuda for tensor in tensors)


@jit
def uniform48(key, counter):
    """Uniform float64 in [0, 1) of 48 bits from an int64 key and an int64 counter.

    The output function of SplitMix64 (Steele, Lea, Flood 2014) on key + counter * golden gamma.
    """
    state = (key + counter * -7046029254386353131).to(tl.uint64, bitcast=True)
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 16).to(tl.float64) * (1.0 / 281474976710656.0)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors."""
    return triton is not None and triton.knobs.runtime.interpret


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
