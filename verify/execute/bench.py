"""The timing child: graphs of calls over rotating copies of weights and states, replayed in turn with the peer's.

One sample is the time of one replayed graph of ``copies`` calls, over ``copies``, between two events; each call has its
own copy of the weights and states. Before each sample states are restored and L2 is filled with other data, so that
weights and states come from memory, while inputs and outputs are warm from the second call on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernelmill.specs.schema import DType, Tensors
from kernelmill.verify.execute import ptx
from kernelmill.verify.execute.child import Request, checked_file
from kernelmill.verify.execute.driver import Driver, DriverError
from kernelmill.verify.execute.peers import peers

COPIES = 32
"""Calls in a graph, each with its own weights and states; fewer where they would need more than ``COPY_BYTES``."""
MIN_COPIES = 4
COPY_BYTES = 24 << 30
FLUSH_SHARE = 4
"""Times the L2 that is read between samples."""
CEILING_BYTES = 2 << 30
SAMPLES = 100
MIN_SAMPLES = 20
WARM_UPS = 5
ALIGN = 256
DEVICE = "cuda"


class Timer:
    """Handles ``hello``, ``ceilings`` and ``time``. Memory is torch's, launches are the driver's, on one stream."""

    def __init__(self) -> None:
        self.driver = Driver()
        torch.zeros(1, device=DEVICE)
        self.torch_stream = torch.cuda.Stream()
        self.stream = self.driver.cu.CUstream(self.torch_stream.cuda_stream)
        self.own = self.driver.load(ptx.IMAGE)
        self.read = self.driver.function(self.own, ptx.READ)
        self.ctas = 8 * self.driver.attribute("MULTIPROCESSOR_COUNT")
        self.l2 = self.driver.attribute("L2_CACHE_SIZE")
        self.start, self.end = self.driver.event(), self.driver.event()
        flush = max(FLUSH_SHARE * self.l2, ptx.read_bytes(1, self.ctas))
        self.flush_rounds = ptx.read_rounds(flush, self.ctas)
        self.flush = torch.zeros(ptx.read_bytes(self.flush_rounds, self.ctas), dtype=torch.uint8, device=DEVICE)
        self.sink = torch.zeros(4, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()

    def handlers(self) -> dict[str, Callable[[Request], Request]]:
        return {"hello": self.hello, "ceilings": self.ceilings, "time": self.time}

    def hello(self, _: Request) -> Request:
        return {"device": self.driver.describe(), "torch": torch.__version__}

    def sample(self, work: Callable[[], None]) -> float:
        """Seconds between two events around ``work``, behind a flush of L2 that also hides the host's enqueueing."""
        self.read_through(self.flush, self.flush_rounds)
        self.driver.record(self.start, self.stream)
        work()
        self.driver.record(self.end, self.stream)
        self.driver.synchronize(self.stream)
        return self.driver.elapsed(self.start, self.end)

    def read_through(self, data: torch.Tensor, rounds: int) -> None:
        params = ptx.words(data.data_ptr(), rounds, self.sink.data_ptr())
        self.driver.launch(self.read, ptx.grid(self.ctas), params, self.stream)

    def ceilings(self, request: Request) -> Request:
        """What this GPU reaches now: copy and read-only bandwidth (best of 20), the gap of a launch in a graph."""
        rounds = ptx.read_rounds(CEILING_BYTES, self.ctas)
        size = ptx.read_bytes(rounds, self.ctas)
        source = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        to = torch.empty_like(source)
        copy, read = float("inf"), float("inf")
        with torch.cuda.stream(self.torch_stream):
            for _ in range(20):
                read = min(read, self.sample(lambda: self.read_through(source, rounds)))
                copy = min(
                    copy, self.sample(lambda: self.driver.copy(to.data_ptr(), source.data_ptr(), size, self.stream))
                )
            empty = self.driver.function(self.own, ptx.EMPTY)

            def call(_: int) -> None:
                self.driver.launch(empty, ptx.grid(1), [], self.stream)

            call(0)  # Loads the kernel, which a capture must not.
            self.driver.synchronize(self.stream)
            graph = self.capture(call, COPIES)
            gaps = [self.sample(lambda: self.driver.replay(graph, self.stream)) / COPIES for _ in range(SAMPLES)]
            self.driver.drop_graph(graph)
        return {
            "copy_bandwidth": 2 * size / copy,
            "read_bandwidth": size / read,
            "launch_gap": statistics.median(gaps[WARM_UPS:]),
        }

    def capture(self, call: Callable[[int], None], count: int) -> Any:
        self.driver.begin_capture(self.stream)
        for k in range(count):
            call(k)
        return self.driver.end_capture(self.stream)[0]

    def time(self, request: Request) -> Request:
        """Time the ``entries`` (key, cubin, launches, workspaces) and the peer on one workload, in turn.

        ``inputs.bin`` in ``folder`` holds the ``tensors`` (name, role, dtype, shape, strides, bytes, at). ``seconds``
        bounds the sampling. The peer's outputs of one call go to ``peer.npz`` as raw bytes."""
        with torch.cuda.stream(self.torch_stream), torch.no_grad():
            memory = _Memory(request)
            works: dict[str, Callable[[], None]] = {}
            graphs = []
            for entry in request["entries"]:
                graph = self.capture_entry(entry, memory)
                graphs.append(graph)
                works[entry["key"]] = lambda graph=graph: self.driver.replay(graph, self.stream)  # type: ignore[misc]
            name, peer, problems = self.peer(request, memory)
            if peer is not None:
                works["peer"] = peer
            samples = self.rounds(works, memory, request["seconds"])
            for graph in graphs:
                self.driver.drop_graph(graph)
        answer = {"samples": samples, "peer": name, "copies": memory.copies, "problems": problems}
        del memory, works, peer
        torch.cuda.empty_cache()
        return answer

    def capture_entry(self, entry: Request, memory: _Memory) -> Any:
        module = self.driver.load(checked_file(entry))
        launches = entry["launches"]
        functions = self.driver.prepare(module, launches)
        scratch = {w["name"]: memory.scratch(w["bytes"]) for w in entry["workspaces"]}

        def call(n: int) -> None:
            self.driver.run_plan(functions, launches, memory.addresses(n) | scratch, self.stream)

        call(0)
        self.driver.synchronize(self.stream)
        return self.capture(call, memory.copies)

    def peer(self, request: Request, memory: _Memory) -> tuple[str, Callable[[], None] | None, list[str]]:
        """The first of the family's peers that runs and can be captured; why the ones before it did not."""
        problems: list[str] = []
        for candidate in peers(request["family"]):
            try:
                call = candidate.make()
                memory.restore()
                outputs = call(memory.views(0), request["point"])
                _save(outputs, Path(request["folder"]) / "peer.npz")
                views = [memory.views(n) for n in range(memory.copies)]
                for view in views:
                    call(view, request["point"])
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self.torch_stream):
                    for view in views:
                        call(view, request["point"])
                graph.replay()
                torch.cuda.synchronize()
                return candidate.name, graph.replay, problems
            except DriverError:
                raise
            except Exception as error:
                torch.cuda.synchronize()
                problems.append(f"{candidate.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return "", None, problems

    def rounds(
        self, works: Mapping[str, Callable[[], None]], memory: _Memory, seconds: float
    ) -> dict[str, list[float]]:
        """Microseconds per call: every work once per round, each round starting with another one."""
        keys = list(works)
        samples: dict[str, list[float]] = {k: [] for k in keys}
        began = time.monotonic()
        for n in range(WARM_UPS + SAMPLES):
            if n >= WARM_UPS + MIN_SAMPLES and time.monotonic() - began > seconds:
                break
            for k in range(len(keys)):
                key = keys[(n + k) % len(keys)]
                memory.restore()
                taken = self.sample(works[key]) / memory.copies
                if n >= WARM_UPS:
                    samples[key].append(round(taken * 1e6, 4))
        return samples


class _Memory:
    """One workload's tensors on the GPU: inputs and outputs once, weights and states ``copies`` times."""

    def __init__(self, request: Request) -> None:
        self.tensors: list[Request] = request["tensors"]
        data = np.fromfile(Path(request["folder"]) / "inputs.bin", dtype=np.uint8)
        rotating = sum(_aligned(t["bytes"]) for t in self.tensors if t["role"] in ("weight", "state"))
        self.copies = max(MIN_COPIES, min(COPIES, COPY_BYTES // max(1, rotating)))
        self.arenas: dict[str, torch.Tensor] = {}
        self.pristine: dict[str, torch.Tensor] = {}
        self.scratches: list[torch.Tensor] = []
        for t in self.tensors:
            count = self.copies if t["role"] in ("weight", "state") else 1
            arena = torch.empty((count, _aligned(t["bytes"])), dtype=torch.uint8, device=DEVICE)
            once = torch.from_numpy(data[t["at"] : t["at"] + t["bytes"]].copy()).to(DEVICE)
            arena[:, : t["bytes"]].copy_(once.expand(count, -1))
            self.arenas[t["name"]] = arena
            if t["role"] == "state":
                self.pristine[t["name"]] = once

    def _row(self, t: Request, n: int) -> torch.Tensor:
        arena = self.arenas[t["name"]]
        return arena[n if arena.shape[0] > 1 else 0]

    def addresses(self, n: int) -> dict[str, int]:
        """Tensor to address in call ``n``."""
        return {t["name"]: self._row(t, n).data_ptr() for t in self.tensors}

    def views(self, n: int) -> Tensors:
        """The tensors of call ``n``, as the spec shapes them."""
        made = {}
        for t in self.tensors:
            flat = self._row(t, n)[: t["bytes"]].view(DType(t["dtype"]).torch)
            made[t["name"]] = flat.as_strided(t["shape"], t["strides"])
        return made

    def scratch(self, size: int) -> int:
        """The address of a workspace full of poison."""
        self.scratches.append(torch.full((max(1, size),), 0xFF, dtype=torch.uint8, device=DEVICE))
        return self.scratches[-1].data_ptr()

    def restore(self) -> None:
        """Put all states back, so that every sample starts from the same values."""
        for name, once in self.pristine.items():
            self.arenas[name][:, : once.numel()].copy_(once.expand(self.copies, -1))


def _aligned(size: int) -> int:
    return -(-max(1, size) // ALIGN) * ALIGN


def _save(outputs: Tensors, path: Path) -> None:
    raw = {n: v.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy() for n, v in outputs.items()}
    np.savez(path, **raw)  # type: ignore[arg-type]
