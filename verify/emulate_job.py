"""The emulator's side of the sandbox: PTX, plans and input bytes in, raw memory and findings out.

Runs in a sandboxed child that has no reference. ``request.json`` and ``inputs.bin`` come from the trusted
side; ``result.json`` and one ``runN.bin`` per run go back to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kernelmill.specs.data import Frozen
from kernelmill.verify import emulator
from kernelmill.verify.emulator import Approx, Buffer, Copies, Finding, KernelCounters
from kernelmill.verify.plan import LaunchPlan


class BufferRequest(Frozen):
    """A tensor in ``inputs.bin``: ``data`` at ``at``, then as many bytes of initialised flags (0 or 1)."""

    name: str
    at: int
    bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    writable: bool


class RunRequest(Frozen):
    plan: LaunchPlan
    buffers: tuple[BufferRequest, ...]
    order: int
    approx: Approx
    copies: Copies


class EmulateRequest(Frozen):
    """``seconds`` bounds each run. Runs go on until one has a finding."""

    ptx: str
    seed: int
    seconds: float
    runs: tuple[RunRequest, ...]


class RunReply(Frozen):
    """``finding``: the first; then the run has no file. Otherwise ``runN.bin`` has each writable buffer's data,
    then its initialised flags, in request order."""

    finding: Finding | None
    counters: tuple[KernelCounters, ...]
    seconds: float


class EmulateReply(Frozen):
    unsupported: str | None = None
    malformed: str | None = None
    compile_seconds: float = 0.0
    runs: tuple[RunReply, ...] = ()


def emulate(folder: Path) -> dict[str, Any]:
    """Run ``folder/request.json``; see the module's docstring for the files."""
    request = EmulateRequest.model_validate_json((folder / "request.json").read_text())
    try:
        program = emulator.compile(request.ptx)
    except emulator.Unsupported as error:
        return EmulateReply(unsupported=str(error)).model_dump(mode="json")
    except (emulator.PtxError, emulator.PlanError) as error:
        return EmulateReply(malformed=str(error)).model_dump(mode="json")
    inputs = np.memmap(folder / "inputs.bin", dtype=np.uint8, mode="r")
    replies = []
    for n, run in enumerate(request.runs):
        buffers = [_buffer(inputs, b) for b in run.buffers]
        try:
            result = program.run(
                run.plan,
                buffers,
                order=run.order,
                approx=run.approx,
                copies=run.copies,
                seed=request.seed,
                max_seconds=request.seconds,
            )
        except emulator.Unsupported as error:
            return EmulateReply(unsupported=str(error)).model_dump(mode="json")
        except emulator.PlanError as error:
            return EmulateReply(malformed=str(error)).model_dump(mode="json")
        finding = result.findings[0] if result.findings else None
        replies.append(RunReply(finding=finding, counters=tuple(result.counters), seconds=result.seconds))
        if finding:
            break
        with (folder / f"run{n}.bin").open("wb") as file:
            for buffer in (b for b in buffers if b.writable):
                file.write(buffer.data.tobytes())
                file.write(buffer.initialised.astype(np.uint8).tobytes())
    return EmulateReply(runs=tuple(replies)).model_dump(mode="json")


def _buffer(inputs: np.ndarray, b: BufferRequest) -> Buffer:
    """A tensor of a run: its own copy, or for what no run may change the pages of ``inputs``, which are read-only."""
    data = inputs[b.at : b.at + b.bytes]
    flags = inputs[b.at + b.bytes : b.at + 2 * b.bytes].view(bool)
    if b.writable:
        data, flags = np.array(data), np.array(flags)
    return Buffer(b.name, data, flags, b.shape, b.strides, b.itemsize, b.writable)


preload = emulator.preload


def main(folder: Path) -> None:
    (folder / "result.json").write_text(json.dumps(emulate(folder)))
