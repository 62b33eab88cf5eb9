"""The parent's side of a child: start it, ask it with a deadline, end it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

Mode = Literal["check", "time"]


class ChildDied(Exception):
    """The child ended or was killed without an answer. ``hung``: its deadline passed, so it was killed."""

    def __init__(self, message: str, *, hung: bool) -> None:
        super().__init__(message)
        self.hung = hung


class ChildFault(Exception):
    """The child answered with an error and ended. ``kind``: ``driver`` (``name`` is CUDA's), ``machine``, ``ours``."""

    def __init__(self, kind: str, name: str, call: str) -> None:
        super().__init__(f"{name} {call}".strip())
        self.kind, self.name, self.call = kind, name, call


class Child:
    """One fresh process. Its requests are answered in order; after any exception it is gone."""

    def __init__(self, mode: Mode, log: Path) -> None:
        # The same modules as here, wherever they came from.
        paths = os.pathsep.join(p for p in sys.path if p)
        env = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-P", "-m", "kernelmill.verify.execute.child", mode]
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env, start_new_session=True
        )
        self._rest = b""

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer. Raises ChildFault for an error reply, ChildDied for none within ``seconds``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + seconds, seconds))
        if error := answer.get("error"):
            self.close()
            raise ChildFault(str(error["kind"]), str(error["name"]), str(error["call"]))
        return answer

    def _line(self, deadline: float, seconds: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                self.kill()
                raise ChildDied(f"no answer within {seconds:.0f} s; killed", hung=True)
            part = os.read(fd, 1 << 16)
            if not part:
                raise self._died()
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _died(self) -> ChildDied:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)  # Its end of the pipe closes a little before it ends.
        self.kill()
        return ChildDied(f"the process ended with status {self._process.returncode}", hung=False)

    def close(self) -> None:
        """End it in an orderly way; kill it where that takes longer than a few seconds."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()

    def kill(self) -> None:
        """End it and what it started: torch's compiler has processes of its own. It leads a session, so a group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.close()
