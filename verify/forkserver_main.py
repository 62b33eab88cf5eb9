"""The server process behind :class:`kernelmill.verify.forkserver.ForkServer`. Run as a module with its flavour and the
file descriptor of its control socket."""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelmill.verify import sandbox

FLAVOURS: dict[str, dict[str, str]] = {
    "compile": {"compile": "kernelmill.verify.compile_job", "declare": "kernelmill.verify.declare_job"},
    "native": {
        "record": "kernelmill.verify.record_job",
        "assemble": "kernelmill.verify.assemble_job",
        "emulate": "kernelmill.verify.emulate_job",
    },
}
"""Flavour to job to the module whose ``main(folder)`` is the job. Importing the modules is the preloading,
and their ``preload()`` where they have one."""

Job = Callable[[Path], None]

CHECK_SECONDS = 0.05
MAX_FILES = 10_000
"""Files that a child may make in its folder."""

STATUS_RAISED = 70
STATUS_NO_SANDBOX = 71


@dataclass
class Child:
    """A running child. ``answer`` is the pipe to whoever asked, ``told`` what the child said before its job began."""

    pid: int
    pidfd: int
    answer: int
    told: int
    folder: Path
    begun: float
    limits: dict[str, Any]
    killed: str | None = None


def serve(control: socket.socket, jobs: dict[str, Job]) -> None:
    """Answer requests until the other side closes; then kill what still runs."""
    children: dict[int, Child] = {}
    try:
        while True:
            timeout = CHECK_SECONDS if children else None
            ready, _, _ = select.select([control.fileno(), *children], [], [], timeout)
            if control.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
                if not message:
                    return
                child = _start(json.loads(message), fds[0], jobs)
                children[child.pidfd] = child
            for child in list(children.values()):
                if child.pidfd in ready:
                    _, status = os.waitpid(child.pid, 0)
                    del children[child.pidfd]
                    _answer(child, os.waitstatus_to_exitcode(status))
                else:
                    _watch(child)
    finally:
        for child in children.values():
            _kill(child)


def _kill(child: Child) -> None:
    with suppress(OSError):
        os.kill(child.pid, signal.SIGKILL)
    # Only a weak sandbox lets a child have children.
    with suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)


def _watch(child: Child) -> None:
    reason = _excess(child) if child.killed is None else None
    if time.monotonic() - child.begun > child.limits["seconds"]:
        reason = f"deadline of {child.limits['seconds']:g} s"
    if reason and child.killed is None:
        child.killed = reason
        _kill(child)


def _excess(child: Child) -> str | None:
    """Which of its size limits the child exceeds."""
    total = 0
    for count, entry in enumerate(_entries(child.folder)):
        size = 0
        with suppress(FileNotFoundError):
            size = entry.stat(follow_symlinks=False).st_size
        total += size
        if entry.name == "output.txt" and size > child.limits["output_bytes"]:
            return f"output over {child.limits['output_bytes']} bytes"
        if count >= MAX_FILES:
            return f"folder over {MAX_FILES} files"
    if total > child.limits["folder_bytes"]:
        return f"folder over {child.limits['folder_bytes']} bytes"
    return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Everything in the folder and the folders in it: the sandbox lets a child make files, but no folders."""
    found: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(folder) as top:
        for entry in top:
            found.append(entry)
            if entry.is_dir(follow_symlinks=False):
                with os.scandir(entry) as inner:
                    found.extend(inner)
            if len(found) > MAX_FILES:
                break
    return found


def _answer(child: Child, status: int) -> None:
    os.close(child.pidfd)
    with os.fdopen(child.told, "rb") as pipe:
        told = json.loads(pipe.read() or b"{}")
    killed = child.killed or _excess(child)
    answer = {"status": status, "killed": killed, "seconds": round(time.monotonic() - child.begun, 4), **told}
    with suppress(OSError), os.fdopen(child.answer, "wb") as pipe:
        pipe.write(json.dumps(answer).encode())


def _start(request: dict[str, Any], answer: int, jobs: dict[str, Job]) -> Child:
    folder = Path(request["folder"])
    begun = time.monotonic()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, os.pidfd_open(pid), answer, reading, folder, begun, request["limits"])
    status = STATUS_RAISED
    try:
        if _become_child(request, folder, writing):
            jobs[request["job"]](folder)
            status = 0
        else:
            status = STATUS_NO_SANDBOX
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _become_child(request: dict[str, Any], folder: Path, told: int) -> bool:
    """Put this process into the sandbox. ``told`` is closed before anything of a candidate's can run."""
    os.setsid()
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sandbox.close_other_files({told})
    os.environ.clear()
    # Compilers and Python ask for these; nothing of the user's environment is left.
    os.environ.update({"HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8", "CUDA_VISIBLE_DEVICES": ""})
    tempfile.tempdir = str(folder)
    os.chdir(folder)
    limits = request["limits"]
    policy = sandbox.Policy(
        read=(*sandbox.system_paths(), *map(Path, request["read"])),
        write=folder,
        memory_bytes=limits["memory_bytes"],
        file_bytes=limits["file_bytes"],
        cpu_seconds=int(4 * limits["seconds"]) + 1,
        programs=tuple(map(Path, request["programs"])),
        weak=request["weak"],
    )
    note: dict[str, Any]
    try:
        note = {"weak": sandbox.apply(policy)}
    except sandbox.SandboxUnavailable as error:
        note = {"sandbox_failed": str(error)}
    os.write(told, json.dumps(note).encode())
    os.close(told)
    return "sandbox_failed" not in note


def main() -> None:
    flavour, descriptor = sys.argv[1], int(sys.argv[2])
    # Compilers look for a GPU unless told otherwise.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    control = socket.socket(fileno=descriptor)
    modules = {name: importlib.import_module(module) for name, module in FLAVOURS[flavour].items()}
    for module in modules.values():
        getattr(module, "preload", lambda: None)()
    jobs = {name: module.main for name, module in modules.items()}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    serve(control, jobs)


if __name__ == "__main__":
    main()
