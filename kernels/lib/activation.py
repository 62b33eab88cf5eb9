"""Activations in Float32 from exp2 and reciprocal, accurate enough for BF16 outputs."""

import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634


@cute.jit
def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)). exp overflows to infinity for very negative x and the result is 0."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * Float32(-LOG2_E), fastmath=True))


@cute.jit
def tanh(x: Float32) -> Float32:
    """2 * sigmoid(2 x) - 1 away from zero, and x - x^3 / 3 near it, where that difference would cancel.

    At |x| = 1/16 the two differ by 1.3e-7, 2e-6 relative: the series' next term, 2 x^5 / 15.
    """
    far = Float32(2.0) * sigmoid(x + x) - Float32(1.0)
    near = x - x * x * x * Float32(1.0 / 3.0)
    return near if (x * x) < Float32(1.0 / 256.0) else far
