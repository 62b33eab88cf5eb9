"""Reading files that a sandboxed child wrote."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class ChildFileError(Exception):
    """A file of a child's is not a regular file of a sensible size. The message is one line."""


def read_child_file(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes; follows no link, waits for no pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ChildFileError(f"{path.name}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ChildFileError(f"{path.name}: not a regular file")
        if status.st_size > limit:
            raise ChildFileError(f"{path.name}: {status.st_size} bytes, at most {limit} allowed")
        return file.read(limit)
