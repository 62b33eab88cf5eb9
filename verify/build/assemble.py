"""PTX to cubin with ptxas, in the sandbox, and what ptxas says of the kernels."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from functools import cache
from pathlib import Path

from kernelmill.verify.artifact import KernelResources
from kernelmill.verify.files import ChildFileError, read_child_file
from kernelmill.verify.forkserver import ForkServer, Limits
from kernelmill.verify.verdict import Code, MachineFailure, Rejected

WHEEL = "nvidia-cuda-nvcc"
LIMITS = Limits(seconds=120.0, memory_bytes=4 << 30)
MAX_CUBIN_BYTES = 64 << 20

_FUNCTION = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")


@cache
def ptxas() -> Path:
    """The assembler in the pinned wheel. Raises MachineFailure when it is not installed."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "ptxas":
            return Path(str(file.locate())).resolve()
    raise MachineFailure(f"ptxas is missing: install {WHEEL} (`make install`)")


def ptxas_version() -> str:
    """The release that ptxas prints. Raises MachineFailure when it does not run."""
    try:
        done = subprocess.run([ptxas(), "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineFailure(f"ptxas does not run: {error}") from None
    found = re.search(r"release (\S+), (\S+)", done.stdout)
    return found.group(2) if found else "unknown"


def assemble(server: ForkServer, ptx: str, target: str) -> tuple[bytes, tuple[KernelResources, ...]]:
    """Assemble for ``target``. Raises Rejected(inspect.assemble) with ptxas' first error."""
    with server.folder() as folder:
        (folder / "kernel.ptx").write_text(ptx)
        (folder / "request.json").write_text(json.dumps({"ptxas": str(ptxas()), "target": target}))
        reply = server.run("assemble", folder, LIMITS, programs=[ptxas()])
        if reply.status != 0 or reply.killed:
            lines = [n for n in reply.output.splitlines() if "error" in n or "fatal" in n] or [reply.describe()]
            raise Rejected(Code.inspect_assemble, f"ptxas for {target}: {lines[0][:300]}", reply.output)
        try:
            cubin = read_child_file(folder / "kernel.cubin", MAX_CUBIN_BYTES)
        except ChildFileError as error:
            raise MachineFailure(f"ptxas left no cubin: {error}") from None
    return cubin, _resources(reply.output)


def _resources(output: str) -> tuple[KernelResources, ...]:
    found = []
    for part in re.split(r"(?=Compiling entry function)", output):
        name, stack, used = _FUNCTION.search(part), _STACK.search(part), _USED.search(part)
        if not (name and stack and used):
            continue
        rest = used.group(2)
        shared, barriers = re.search(r"(\d+) bytes smem", rest), re.search(r"used (\d+) barriers", rest)
        found.append(
            KernelResources(
                kernel=name.group(1),
                registers=int(used.group(1)),
                stack_bytes=int(stack.group(1)),
                spill_store_bytes=int(stack.group(2)),
                spill_load_bytes=int(stack.group(3)),
                shared_bytes=int(shared.group(1)) if shared else 0,
                barriers=int(barriers.group(1)) if barriers else 0,
            )
        )
    return tuple(found)
