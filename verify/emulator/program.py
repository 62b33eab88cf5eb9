"""A compiled module and its runs: launch plans in, findings and counters out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir as llvm_ir

from kernelmill.verify.emulator import memory
from kernelmill.verify.emulator.codegen import Generated, generate
from kernelmill.verify.emulator.findings import Place, finding_of
from kernelmill.verify.emulator.interface import (
    Approx,
    Buffer,
    Copies,
    KernelCounters,
    PlanError,
    Result,
    TensorCounters,
    Unsupported,
)
from kernelmill.verify.emulator.ir import Kernel, Module
from kernelmill.verify.emulator.machine import Grid, Machine, Stop, Totals, warp_function
from kernelmill.verify.emulator.native import Native, jit
from kernelmill.verify.emulator.parser import parse
from kernelmill.verify.emulator.state import MAX_REGIONS, PARAM_REGION, REGION, Space, region_base
from kernelmill.verify.plan import Launch, LaunchPlan, short_name

MAX_INSTRUCTIONS = 50_000
"""Instructions of one module: code generation takes about 1 ms for each."""
MAX_THREADS = 1024
MAX_SHARED = 227 * 1024
"""Shared memory of one CTA on sm_90 and later (CUDA programming guide, compute capabilities)."""


@dataclass(frozen=True)
class Program:
    """A module in native code. Make it with :func:`compile`; runs do not change it."""

    module: Module
    kernels: dict[str, Generated]
    native: Native

    def run(
        self,
        plan: LaunchPlan,
        buffers: list[Buffer],
        *,
        order: int,
        approx: Approx,
        seed: int,
        max_seconds: float,
        copies: Copies = "late",
    ) -> Result:
        """Run the launches of ``plan`` one after another on ``buffers``, in place.

        ``order``: 0 ascending, 1 descending with preemption (see :mod:`.machine`). ``seed`` drives preemption and
        perturbed arithmetic. ``copies``: when asynchronous copies arrive. A run that takes more than ``max_seconds``
        ends in a ``livelock`` finding.
        Raises PlanError when plan, module and buffers do not fit together, Unsupported for clusters.
        """
        started = time.monotonic()
        result = Result()
        memory = _Memory(self.module, buffers)
        arithmetic = 0 if approx == "nominal" else (seed * 0x9E3779B1 + 1) & 0xFFFFFFFF or 1
        for number, launch in enumerate(plan.launches):
            kernel, generated = self._check(launch)
            params = memory.set_params(launch, generated)
            memory.reset_counters()
            grid = Grid(
                generated=generated,
                run=warp_function(self.native.addresses[generated.symbol]),
                grid=launch.grid,
                block=launch.block,
                dynamic_shared=launch.shared,
                regions=(int(memory.table.ctypes.data), len(memory.table)),
                params=params,
                seed=arithmetic,
                copies=copies,
            )
            machine = Machine(grid, order, seed + number, started + max_seconds)
            try:
                totals = machine.run()
            except Stop as stop:
                result.findings.append(finding_of(stop, kernel.name, memory.places))
                break
            result.counters.append(_counters(kernel.name, grid, totals, memory))
        result.seconds = time.monotonic() - started
        return result

    def _check(self, launch: Launch) -> tuple[Kernel, Generated]:
        name = launch.kernel
        if name not in self.kernels:
            raise PlanError(f"the plan launches {name[:80]!r}, which the PTX does not define")
        kernel, generated = self.module.kernel(name), self.kernels[name]
        if launch.cluster != (1, 1, 1) or (kernel.cluster or (1, 1, 1)) != (1, 1, 1):
            raise Unsupported(f"a cluster launch of {name[:80]}")
        limit = kernel.max_threads
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        if threads > MAX_THREADS or (limit and threads > limit[0] * limit[1] * limit[2]):
            raise PlanError(f"{name[:80]}: {threads} threads per block are more than the kernel or the device allows")
        if kernel.reqntid and limit != launch.block:
            raise PlanError(f"{name[:80]}: block {launch.block} is not the kernel's .reqntid {limit}")
        if launch.grid[1] > 65535 or launch.grid[2] > 65535:
            raise PlanError(f"{name[:80]}: grid {launch.grid} exceeds 65535 in y or z")
        shared = generated.frame.shared + launch.shared
        if shared > MAX_SHARED:
            raise PlanError(f"{name[:80]}: {shared} bytes of shared memory exceed {MAX_SHARED}")
        sizes = [v.size for v in kernel.params]
        given = [len(p.bytes) // 2 for p in launch.params]
        if sizes != given:
            raise PlanError(f"{name[:80]}: parameters of {given} bytes given, {sizes} declared")
        return kernel, generated


class _Memory:
    """Global memory of a run: the region table and what its rows point to."""

    def __init__(self, module: Module, buffers: Sequence[Buffer]) -> None:
        variables = [v for v in module.variables if v.space in ("global", "const")]
        self.first = PARAM_REGION + 1 + len(variables)
        if self.first + len(buffers) > MAX_REGIONS:
            raise PlanError(f"{len(buffers)} buffers and {len(variables)} variables are more than {MAX_REGIONS}")
        self.buffers = buffers
        self.table = np.zeros(self.first + len(buffers), dtype=REGION)
        self.kept: list[np.ndarray] = []
        self.places: dict[int, Place] = {PARAM_REGION: Place("kernel parameters", "param", None)}
        for n, v in enumerate(variables, PARAM_REGION + 1):
            data = np.zeros(v.size, dtype=np.uint8)
            data[: len(v.initial)] = np.frombuffer(v.initial, dtype=np.uint8)
            self._map(n, data, np.ones(v.size, dtype=np.uint8), v.space == "global")
            self.places[n] = Place("a module variable", "const" if v.space == "const" else "global", None)
        for n, buffer in enumerate(buffers, self.first):
            for array, kind in ((buffer.data, np.uint8), (buffer.initialised, np.bool_)):
                if array.dtype != kind or array.ndim != 1 or not array.flags.c_contiguous:
                    raise PlanError(f"buffer {buffer.name}: data must be flat uint8 and initialised flat bool")
            if buffer.data.size != buffer.initialised.size or (buffer.writable and not buffer.data.flags.writeable):
                raise PlanError(f"buffer {buffer.name}: data and initialised differ in size, or data is read-only")
            self._map(n, buffer.data, buffer.initialised, buffer.writable)
            self.places[n] = Place(buffer.name, "global", buffer)

    def _map(self, n: int, data: np.ndarray, flags: np.ndarray, writable: bool) -> None:
        row = self.table[n]
        row["base"], row["size"], row["writable"] = region_base(n), data.size, writable
        row["host"], row["shadow"] = data.ctypes.data, flags.ctypes.data
        self.kept += [data, flags]

    def set_params(self, launch: Launch, generated: Generated) -> int:
        """Lay out the launch's parameters; their host address."""
        frame = generated.frame
        data = np.zeros(frame.param_bytes, dtype=np.uint8)
        regions = {b.name: (n, b) for n, b in enumerate(self.buffers, self.first)}
        where = short_name(launch.kernel)
        for at, param in zip(frame.params, launch.params, strict=True):
            raw = bytes.fromhex(param.bytes)
            data[at : at + len(raw)] = np.frombuffer(raw, dtype=np.uint8)
            for pointer in param.pointers:
                if pointer.tensor not in regions or pointer.at + 8 > len(raw):
                    raise PlanError(f"{where}: no tensor {pointer.tensor!r} or no room for its pointer")
                n, buffer = regions[pointer.tensor]
                if pointer.offset > buffer.data.size:
                    raise PlanError(f"{where}: offset {pointer.offset} is outside {pointer.tensor!r}")
                address = np.array([region_base(n) + pointer.offset], dtype="<u8").view(np.uint8)
                data[at + pointer.at : at + pointer.at + 8] = address
        self._map(PARAM_REGION, data, np.ones(data.size, dtype=np.uint8), False)
        return int(data.ctypes.data)

    def reset_counters(self) -> None:
        for name in TensorCounters.model_fields:
            self.table[name] = 0


def _counters(name: str, grid: Grid, totals: Totals, memory: _Memory) -> KernelCounters:
    tensors = {}
    for n, buffer in enumerate(memory.buffers, memory.first):
        row = memory.table[n]
        if row["requests"]:
            tensors[buffer.name] = TensorCounters(**{f: int(row[f]) for f in TensorCounters.model_fields})
    return KernelCounters(
        kernel=name,
        ctas=grid.ctas,
        threads=grid.threads,
        shared_bytes=grid.shared,
        issue_slots=totals.sums["issue"],
        issue_slots_busiest=totals.busiest["issue"],
        lane_instructions=totals.sums["lanes"],
        shared_cycles=totals.sums["shared_cycles"],
        shared_cycles_busiest=totals.busiest["shared_cycles"],
        global_bytes=totals.sums["global_bytes"],
        global_bytes_busiest=totals.busiest["global_bytes"],
        load_rounds=totals.sums["load_rounds"],
        load_rounds_busiest=totals.busiest["load_rounds"],
        barriers=totals.phases,
        tensors=tensors,
    )


def compile(ptx: str) -> Program:
    """Parse a module and compile its kernels to native code.

    Raises :class:`~.ir.PtxError` when the text is not PTX, :class:`~.interface.Unsupported` for legal PTX that this
    emulator does not know.
    """
    module = parse(ptx)
    count = sum(len(b.instructions) for k in module.kernels for b in k.blocks)
    if count > MAX_INSTRUCTIONS:
        raise Unsupported(f"a module of {count} instructions; at most {MAX_INSTRUCTIONS} are supported")
    code = llvm_ir.Module("kernels")
    kernels = {
        kernel.name: generate(code, f"kernel{n}", kernel, module.variables) for n, kernel in enumerate(module.kernels)
    }
    return Program(module, kernels, jit(code, *(g.symbol for g in kernels.values()), level=0))


def preload() -> None:
    """Make the helpers that most kernels use, once in a process that forks children which :func:`compile`."""
    for space in (Space.GLOBAL, Space.SHARED):
        for size, count in ((4, 1), (4, 4)):
            memory.load(space, size, (True,) * count, cell=4)
            memory.store(space, size, count, cell=4)
