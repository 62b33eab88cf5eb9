"""Opens a socket while it is traced, inside of the DSL.

Verdict: compile.sandbox
Whole: yes
"""

from dataclasses import dataclass
from typing import Literal

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


@dataclass(frozen=True)
class Schedule:
    threads: Literal[32, 64] = 32


SCHEDULES = ((1, 8192, Schedule(threads=32)),)


@cute.kernel
def kernel(x: cute.Tensor, out: cute.Tensor):
    row, _, _ = cute.arch.block_idx()
    lane, _, _ = cute.arch.thread_idx()
    out[row, lane] = x[row, lane]


@cute.jit
def launch(x: cute.Tensor, out: cute.Tensor, schedule: cutlass.Constexpr, stream: cuda.CUstream):
    __import__("socket").socket()
    kernel(x, out).launch(grid=(out.shape[0], 1, 1), block=(schedule.threads, 1, 1), stream=stream)
