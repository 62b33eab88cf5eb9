"""Takes its tensors in another order than the family's.

Verdict: audit.signature
Whole: yes
"""

from dataclasses import dataclass
from typing import Literal

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


@dataclass(frozen=True)
class Schedule:
    threads: Literal[32] = 32


SCHEDULES = ((1, 8192, Schedule(threads=32)),)


@cute.jit
def launch(out: cute.Tensor, x: cute.Tensor, schedule: cutlass.Constexpr, stream: cuda.CUstream):
    pass
