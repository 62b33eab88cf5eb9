"""The emulator: PTX and a launch plan executed on the CPU, a warp at a time, in native code."""

from kernelmill.verify.emulator.interface import (
    Approx,
    Buffer,
    Copies,
    Finding,
    KernelCounters,
    PlanError,
    Result,
    TensorCounters,
    Unsupported,
)
from kernelmill.verify.emulator.ir import PtxError
from kernelmill.verify.emulator.program import Program, compile, preload

__all__ = [
    "Approx",
    "Buffer",
    "Copies",
    "Finding",
    "KernelCounters",
    "PlanError",
    "Program",
    "PtxError",
    "Result",
    "TensorCounters",
    "Unsupported",
    "compile",
    "preload",
]
