"""The emulator: PTX and a launch plan executed on the CPU, a warp at a time, in native code."""

from kernelmill.verify.emulator.interface import (
    Approx,
    Buffer,
    Finding,
    KernelCounters,
    Result,
    TensorCounters,
    Unsupported,
)

__all__ = ["Approx", "Buffer", "Finding", "KernelCounters", "Result", "TensorCounters", "Unsupported"]
