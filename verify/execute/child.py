"""A child process of the runner: it loads cubins, launches plans and hands back raw memory. It judges nothing.

It holds no reference and no secret. One JSON request a line on standard input, one JSON reply a line on what was
standard output; whatever else prints goes to standard error. Memory goes through files in the parent's private folder.
A reply ``{"error": ...}`` is the last: after a failed driver call the context cannot be trusted, so the process ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kernelmill.verify.execute import ptx
from kernelmill.verify.execute.driver import Driver, DriverError, NoDriver

Request = dict[str, Any]

CANARY_BYTES = 64 << 20


class Checker:
    """Handles the requests that need no torch: ``hello``, ``canary``, ``load`` and ``run``."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.stream = self.driver.stream()
        self.own = self.driver.load(ptx.IMAGE)
        self.modules: dict[str, Any] = {}

    def handlers(self) -> dict[str, Callable[[Request], Request]]:
        return {"hello": self.hello, "canary": self.canary, "load": self.load, "run": self.run}

    def hello(self, _: Request) -> Request:
        return {"device": self.driver.describe()}

    def canary(self, request: Request) -> Request:
        """Copy a pattern with our own kernel: is the GPU sane, and as fast as before? ``seed`` makes the pattern."""
        driver = self.driver
        pattern = np.random.default_rng(request["seed"]).integers(0, 256, CANARY_BYTES, dtype=np.uint8)
        source, to = driver.alloc(CANARY_BYTES), driver.alloc(CANARY_BYTES)
        driver.upload(source, pattern)
        driver.upload(to, ~pattern)
        function = driver.function(self.own, ptx.COPY)
        chunks = CANARY_BYTES // 16
        start, end = driver.event(), driver.event()
        best = float("inf")
        for _ in range(10):
            driver.record(start, self.stream)
            driver.launch(function, ptx.grid(chunks // ptx.THREADS), ptx.words(to, source, chunks), self.stream)
            driver.record(end, self.stream)
            driver.synchronize(self.stream)
            best = min(best, driver.elapsed(start, end))
        same = bool(np.array_equal(driver.download(to, CANARY_BYTES), pattern))
        driver.free(source)
        driver.free(to)
        return {"same": same, "bandwidth": 2 * CANARY_BYTES / best}

    def load(self, request: Request) -> Request:
        """Load ``cubin``, whose sha256 must be ``artifact_sha256``, under the name ``artifact``."""
        self.modules[request["artifact"]] = self.driver.load(checked_file(request))
        return {}

    def run(self, request: Request) -> Request:
        """Run a plan: once for its values, ``repeats`` times more, and from a captured graph twice.

        ``before.bin`` holds one region per tensor (guard, data, guard), each described in ``tensors`` by ``name``,
        ``at`` (offset of the region in the file), ``size``, ``base`` (offset of the data in the region) and
        ``writable``; before every run all writable regions are restored. ``after.bin`` gets all regions after the first
        run. ``differs`` lists what a later run left otherwise, ``read_only`` what the runs after the first one changed.
        """
        folder = Path(request["folder"])
        image = np.fromfile(folder / "before.bin", dtype=np.uint8)
        call = _Call(self.driver, self.stream, self.modules[request["artifact"]], request, image)
        try:
            call.once()
            first = call.read(call.tensors)
            np.concatenate([first[t["name"]] for t in call.tensors]).tofile(folder / "after.bin")
            differs = []
            for n in range(request["repeats"]):
                call.once()
                differs += call.differences(first, f"repeat {n + 1}", writable=True)
                if differs:
                    break
            nodes = 0
            if request["graph"] and not differs:
                graph, nodes = call.capture()
                for n in range(2):
                    call.restore()
                    self.driver.replay(graph, self.stream)
                    self.driver.synchronize_all()
                    differs += call.differences(first, f"graph replay {n + 1}", writable=True)
                self.driver.drop_graph(graph)
            changed = call.differences(first, "later", writable=False)
        finally:
            if not isinstance(sys.exc_info()[1], DriverError):
                call.free()
        return {"differs": differs[:8], "read_only": changed[:8], "nodes": nodes}


class _Call:
    """The memory of one run request on the device."""

    def __init__(self, driver: Driver, stream: Any, module: Any, request: Request, image: np.ndarray) -> None:
        self.driver, self.stream = driver, stream
        self.tensors: list[Request] = request["tensors"]
        self.launches = request["launches"]
        self.functions = driver.prepare(module, self.launches)
        self.live: dict[str, int] = {}
        self.pristine: dict[str, int] = {}
        for t in self.tensors:
            region = image[t["at"] : t["at"] + t["size"]]
            self.live[t["name"]] = driver.alloc(t["size"])
            driver.upload(self.live[t["name"]], region)
            if t["writable"]:
                self.pristine[t["name"]] = driver.alloc(t["size"])
                driver.upload(self.pristine[t["name"]], region)
        self.at = {t["name"]: self.live[t["name"]] + t["base"] for t in self.tensors}

    def restore(self) -> None:
        """Poison outputs and workspaces again, put states and guards back."""
        for t in self.tensors:
            if t["writable"]:
                self.driver.copy(self.live[t["name"]], self.pristine[t["name"]], t["size"], self.stream)

    def once(self) -> None:
        self.restore()
        self.driver.run_plan(self.functions, self.launches, self.at, self.stream)
        # The whole context: work that strayed from the stream has no excuse, and its faults are this call's.
        self.driver.synchronize_all()

    def capture(self) -> tuple[Any, int]:
        self.driver.begin_capture(self.stream)
        self.driver.run_plan(self.functions, self.launches, self.at, self.stream)
        return self.driver.end_capture(self.stream)

    def read(self, tensors: list[Request]) -> dict[str, np.ndarray]:
        return {t["name"]: self.driver.download(self.live[t["name"]], t["size"]) for t in tensors}

    def differences(self, first: dict[str, np.ndarray], when: str, *, writable: bool) -> list[Request]:
        found = []
        for t in self.tensors:
            # A workspace may end as it likes: nobody reads it, and atomics' order may show in it.
            if t["writable"] is not writable or t["scratch"]:
                continue
            now = self.driver.download(self.live[t["name"]], t["size"])
            if not np.array_equal(now, first[t["name"]]):
                where = np.flatnonzero(now != first[t["name"]])
                entry = {"when": when, "tensor": t["name"], "byte": int(where[0]) - t["base"], "count": int(where.size)}
                found.append(entry)
        return found

    def free(self) -> None:
        for address in (*self.live.values(), *self.pristine.values()):
            self.driver.free(address)


def checked_file(request: Request) -> bytes:
    """The bytes of ``cubin``. Raises ValueError when they are not those that were packed."""
    data = Path(request["cubin"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != request["cubin_sha256"]:
        raise ValueError(f"{Path(request['cubin']).name} is not the file that was packed")
    return data


def serve(make: Callable[[], dict[str, Callable[[Request], Request]]]) -> None:
    """Answer requests until standard input ends. ``make`` sets up the handlers, on the GPU."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(data: Request) -> None:
        out.write(json.dumps(data) + "\n")
        out.flush()

    handlers: dict[str, Callable[[Request], Request]] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        began = time.monotonic()
        try:
            if handlers is None:
                handlers = make()
            answer = handlers[request["op"]](request)
        except DriverError as error:
            reply({"error": {"kind": "driver", "name": error.name, "call": error.call}})
            os._exit(1)
        except NoDriver as error:
            reply({"error": {"kind": "machine", "name": "", "call": str(error)}})
            os._exit(1)
        except Exception as error:
            reply({"error": {"kind": "ours", "name": type(error).__name__, "call": " ".join(str(error).split())[:400]}})
            raise
        reply({**answer, "seconds": round(time.monotonic() - began, 4)})


def main() -> None:
    """``python -m kernelmill.verify.execute.child check|time``."""
    if sys.argv[1:] == ["check"]:
        serve(lambda: Checker().handlers())
    elif sys.argv[1:] == ["time"]:
        from kernelmill.verify.execute.bench import Timer

        serve(lambda: Timer().handlers())
    else:
        sys.exit("usage: python -m kernelmill.verify.execute.child check|time")


if __name__ == "__main__":
    main()
