"""From what the CUDA driver reports to a verdict, or to the machine's failure where the candidate is not to blame."""

from __future__ import annotations

from kernelmill.verify.verdict import Code, MachineFailure, Rejected

FAULTS: dict[str, Code] = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": Code.execute_out_of_bounds,
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": Code.execute_out_of_bounds,
    "CUDA_ERROR_MISALIGNED_ADDRESS": Code.execute_misaligned,
    "CUDA_ERROR_LAUNCH_TIMEOUT": Code.execute_hang,
    "CUDA_ERROR_LAUNCH_FAILED": Code.execute_trap,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": Code.execute_trap,
    "CUDA_ERROR_ASSERT": Code.execute_trap,
    "CUDA_ERROR_HARDWARE_STACK_ERROR": Code.execute_trap,
    "CUDA_ERROR_INVALID_PC": Code.execute_trap,
    "CUDA_ERROR_INVALID_VALUE": Code.execute_launch,
    "CUDA_ERROR_INVALID_IMAGE": Code.execute_launch,
    "CUDA_ERROR_NOT_FOUND": Code.execute_launch,
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": Code.execute_launch,
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": Code.execute_launch,
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": Code.execute_launch,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": Code.execute_stream,
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": Code.execute_stream,
    "CUDA_ERROR_STREAM_CAPTURE_MERGE": Code.execute_stream,
    "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED": Code.execute_stream,
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": Code.execute_stream,
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": Code.execute_stream,
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": Code.execute_stream,
    "CUDA_ERROR_CAPTURED_EVENT": Code.execute_stream,
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": Code.execute_stream,
}
"""CUresult names that are the candidate's doing. All others are the machine's: no memory, ECC, a lost device."""

STICKY = frozenset({Code.execute_out_of_bounds, Code.execute_misaligned, Code.execute_hang, Code.execute_trap})
"""After these the context is dead: every later call in the process reports the same."""


def rejection(name: str, call: str, where: str) -> Rejected | MachineFailure:
    """What a failed driver call during a candidate's run means. ``where``: spec, workload and artifact."""
    code = FAULTS.get(name)
    if code is None:
        return MachineFailure(f"{where}: {call} failed with {name}; no verdict on the candidate")
    sticky = ", which ended its context" if code in STICKY else ""
    return Rejected(code, f"{where}: {call} failed with {name}{sticky}")
