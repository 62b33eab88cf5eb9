"""Sandboxed children from preloaded servers: the one way in which the verifier runs anything of a candidate's.

A server is a process of ours that has imported what its jobs need and never touched a candidate. For each request it
forks a child, which applies the sandbox and then runs the named job on a folder. The server enforces the deadline and
the folder's size, and ends with its parent. Requests and results are files in the folder; nothing else comes back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from kernelmill.specs.data import Frozen
from kernelmill.verify.files import ChildFileError, read_child_file
from kernelmill.verify.verdict import MachineFailure

RESULT_BYTES = 64 << 20
OUTPUT_BYTES_SHOWN = 4000

ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "TZ")
"""What a server gets of the environment. A key must not be in its memory, which the children inherit, even for a
moment: the kernel leaves the first environment on the stack."""


@dataclass(frozen=True)
class Limits:
    """``seconds`` of wall time; bytes of memory beyond what the server has mapped, of any one file, of the folder, and
    of printed output."""

    seconds: float
    memory_bytes: int
    file_bytes: int = 256 << 20
    folder_bytes: int = 2 << 30
    output_bytes: int = 1 << 20


class Reply(Frozen):
    """How a child ended. ``status``: exit status, or minus the signal. ``killed``: why the server killed it, if it did:
    deadline, folder or output, then the figure. ``sandbox_failed``: the sandbox could not be set up, so the job never
    ran. ``weak``: parts of it left out. ``result``: what the job left in result.json; a hostile job leaves anything."""

    status: int
    killed: str | None = None
    sandbox_failed: str | None = None
    weak: tuple[str, ...] = ()
    seconds: float = 0.0
    output: str = ""
    result: bytes | None = None

    @property
    def ok(self) -> bool:
        return self.status == 0 and self.killed is None and self.result is not None

    @property
    def out_of_memory(self) -> bool:
        """Killed by the kernel, or ended saying so."""
        said = re.search(r"MemoryError|bad_alloc|out of memory|Cannot allocate memory", self.output, re.IGNORECASE)
        return self.killed is None and (self.status == -9 or (self.status != 0 and bool(said)))

    def describe(self) -> str:
        """One line: why there is no good result."""
        last = self.output.strip().splitlines()[-1:] or ["no output"]
        how = f"killed: {self.killed}" if self.killed else f"status {self.status}"
        return f"{how}; {last[0][:300]}"


@dataclass
class _Server:
    process: subprocess.Popen[bytes]
    control: socket.socket

    def end(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


class ForkServer:
    """A server of one flavour (see ``forkserver_main.FLAVOURS``), started when needed, again when it died; safe
    from several threads.

    ``weak``: let children run where the sandbox cannot be set up; recorded by whoever asks for it. ``scratch``: where
    the requests' folders are made, the system's temporary folder by default."""

    def __init__(self, flavour: str, *, weak: bool = False, scratch: Path | None = None) -> None:
        self._flavour = flavour
        self._weak = weak
        self._scratch = scratch
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A fresh private folder for one request, removed afterwards."""
        path = Path(tempfile.mkdtemp(prefix="kernelmill-", dir=self._scratch))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def run(
        self, job: str, folder: Path, limits: Limits, *, read: Sequence[Path] = (), programs: Sequence[Path] = ()
    ) -> Reply:
        """Run ``job`` on ``folder`` in a sandboxed child. ``read``: more paths that it may read; ``programs``: files
        that it may turn into. Raises MachineFailure when the server dies or the sandbox cannot be set up."""
        request = {
            "job": job,
            "folder": str(folder),
            "limits": asdict(limits),
            "read": [str(p) for p in read],
            "programs": [str(p) for p in programs],
            "weak": self._weak,
        }
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as pipe:
            with self._lock:
                server = self._started()
                with suppress(OSError):
                    socket.send_fds(server.control, [json.dumps(request).encode()], [writing])
                os.close(writing)
            answer = pipe.read(1 << 16)
        if not answer:
            with self._lock:
                server.end()
            raise MachineFailure(f"the {self._flavour} server died during {job}; see `kernelmill doctor`")
        return self._reply(json.loads(answer), folder, limits)

    def close(self) -> None:
        """End the server and all of its children."""
        with self._lock:
            if self._server is not None:
                self._server.end()
            self._server = None

    def _reply(self, answer: dict[str, object], folder: Path, limits: Limits) -> Reply:
        reply = Reply.model_validate({**answer, "output": _last_output(folder / "output.txt")})
        if reply.sandbox_failed:
            raise MachineFailure(
                f"the sandbox cannot be set up here ({reply.sandbox_failed}); see `kernelmill doctor`, or use "
                "--weak-sandbox, whose evidence cannot be merged"
            )
        result = None
        with suppress(ChildFileError):
            result = read_child_file(folder / "result.json", min(RESULT_BYTES, limits.file_bytes))
        return reply.model_copy(update={"result": result})

    def _started(self) -> _Server:
        if self._server is not None and self._server.process.poll() is not None:
            self._server.end()
            self._server = None
        if self._server is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-m", "kernelmill.verify.forkserver_main", self._flavour, str(theirs.fileno())]
            # Its own session: an interrupt at the terminal is the parent's to handle.
            with theirs:
                process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                )
            self._server = _Server(process, ours)
        return self._server


def _last_output(path: Path) -> str:
    """The end of what a child printed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return f"(no output: {error.strerror})"
    with os.fdopen(fd, "rb") as file:
        with suppress(OSError):
            file.seek(-OUTPUT_BYTES_SHOWN, os.SEEK_END)
        return file.read(OUTPUT_BYTES_SHOWN).decode(errors="replace")
