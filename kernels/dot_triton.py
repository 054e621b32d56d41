"""A tensor-core product that means the same on a GPU and in Triton's interpreter, for the engine's kernels."""

import triton
import triton.language as tl


@triton.jit
def _probe():
    pass


# the interpreter multiplies the bits of bf16 operands as integers, so there they are widened first
_INTERPRETED = tl.constexpr(type(_probe).__name__ == "InterpretedFunction")


@triton.jit
def dot(a, b, acc):
    """Return acc + a b with float32 sums; float32 operands are multiplied in full."""
    if _INTERPRETED or a.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc=acc)
