"""situ_and_mul: elementwise, so what counts is bytes in flight: 16-byte loads of both halves, several per thread."""

from dataclasses import dataclass
from typing import Literal

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from kernelmill.kernels.lib.activation import sigmoid, tanh

VECTOR = 8  # bfloat16 values in 16 bytes
GATE_BETA = 4.0
UP_BETA = 25.0


@dataclass(frozen=True)
class Schedule:
    """Compile-time choices: ``threads`` per CTA, ``vectors`` per thread, all loaded before the first use."""

    threads: Literal[64, 128, 256, 512] = 128
    vectors: Literal[1, 2, 4] = 1


SCHEDULES = (
    (1, 8, Schedule(threads=128, vectors=1)),
    (9, 8192, Schedule(threads=128, vectors=1)),
)


@cute.jit
def situ(gate: Float32, up: Float32) -> Float32:
    """4 tanh(g / 4) * sigmoid(g) * 25 tanh(u / 25); sigmoid sees the gate itself."""
    squashed = Float32(GATE_BETA) * tanh(gate * Float32(1.0 / GATE_BETA))
    return squashed * sigmoid(gate) * (Float32(UP_BETA) * tanh(up * Float32(1.0 / UP_BETA)))


@cute.kernel
def kernel(x: cute.Tensor, out: cute.Tensor, schedule: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    part, row, _ = cute.arch.block_idx()
    n = out.shape[1]
    columns = n // VECTOR
    x_row = cute.zipped_divide(x[row, None], (VECTOR,))
    out_row = cute.zipped_divide(out[row, None], (VECTOR,))
    first = part * (schedule.threads * schedule.vectors) + tid

    gates = cute.make_rmem_tensor(cute.make_layout((VECTOR, schedule.vectors)), BFloat16)
    ups = cute.make_rmem_tensor(cute.make_layout((VECTOR, schedule.vectors)), BFloat16)
    for k in cutlass.range_constexpr(schedule.vectors):
        column = first + k * schedule.threads
        if column < columns:
            gates[None, k].store(x_row[None, column].load())
            ups[None, k].store(x_row[None, column + columns].load())
    for k in cutlass.range_constexpr(schedule.vectors):
        column = first + k * schedule.threads
        if column < columns:
            gate = gates[None, k].load().to(Float32)
            up = ups[None, k].load().to(Float32)
            result = cute.make_rmem_tensor(cute.make_layout((VECTOR,)), Float32)
            for e in cutlass.range_constexpr(VECTOR):
                result[e] = situ(gate[e], up[e])
            out_row[None, column].store(result.load().to(BFloat16))


@cute.jit
def launch(x: cute.Tensor, out: cute.Tensor, schedule: cutlass.Constexpr, stream: cuda.CUstream):
    per_cta = schedule.threads * schedule.vectors * VECTOR
    parts = (out.shape[1] + per_cta - 1) // per_cta
    kernel(x, out, schedule).launch(grid=(parts, out.shape[0], 1), block=(schedule.threads, 1, 1), stream=stream)
