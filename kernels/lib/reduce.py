"""Sums over a warp and over a CTA."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

WARP = 32


@cute.jit
def warp_sum(value: Float32) -> Float32:
    """Sum of ``value`` over the warp's 32 lanes, in every lane; all lanes must take part."""
    for step in cutlass.range_constexpr(5):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << step)
    return value


@cute.jit
def cta_sums(values: list, scratch: cute.Tensor, warps: cutlass.Constexpr, tid: Int32) -> list:
    """Sum each of ``values`` (one Float32 per thread) over the CTA; every thread gets every sum.

    ``scratch``: shared Float32 [len(values), warps]. One barrier: after it each warp adds the partial sums itself. The
    caller must put a barrier between this and the next use of ``scratch``. ``warps`` is at most 32.
    """
    lane = tid % WARP
    warp = tid // WARP
    for i in cutlass.range_constexpr(len(values)):
        partial = warp_sum(values[i])
        if lane == 0:
            scratch[i, warp] = partial
    cute.arch.barrier()
    sums = []
    for i in cutlass.range_constexpr(len(values)):
        partial = Float32(0.0)
        if lane < warps:
            partial = scratch[i, lane]
        sums.append(warp_sum(partial))
    return sums


@cute.jit
def cta_sums_first_warp(values: list, scratch: cute.Tensor, warps: cutlass.Constexpr, tid: Int32) -> list:
    """As :func:`cta_sums`, but the partial sums of value ``i`` are added by warp ``i % warps`` alone and the result is
    shared through ``scratch``: fewer shuffles in all, one more barrier."""
    lane = tid % WARP
    warp = tid // WARP
    for i in cutlass.range_constexpr(len(values)):
        partial = warp_sum(values[i])
        if lane == 0:
            scratch[i, warp] = partial
    cute.arch.barrier()
    for i in cutlass.range_constexpr(len(values)):
        if warp == i % warps:
            partial = Float32(0.0)
            if lane < warps:
                partial = scratch[i, lane]
            total = warp_sum(partial)
            if lane == 0:
                scratch[i, 0] = total
    cute.arch.barrier()
    sums = []
    for i in cutlass.range_constexpr(len(values)):
        sums.append(scratch[i, 0])
    return sums
