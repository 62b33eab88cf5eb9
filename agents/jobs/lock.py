"""One process per job: an advisory lock that the kernel releases however the process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernelmill.verify.verdict import MachineFailure


def _path(folder: Path, job: str) -> Path:
    locks = folder / "locks"
    locks.mkdir(exist_ok=True)
    return locks / f"{job}.lock"


@contextmanager
def hold(folder: Path, job: str) -> Iterator[None]:
    """Hold the job's lock. Raises MachineFailure naming the process that has it."""
    with _path(folder, job).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineFailure(
                f"job {job} is being run by process {_pid(file.name)}; wait for it, or: kernelmill jobs cancel {job}"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
        # The file stays: removing it would let two processes lock two files of one name.


def holder(folder: Path, job: str) -> str | None:
    """The id of the process that runs the job, or None."""
    with _path(folder, job).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _pid(file.name)
    return None


def _pid(path: str) -> str:
    return Path(path).read_text().strip() or "unknown"
