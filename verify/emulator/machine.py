"""One launch: CTAs, their warps, barriers and the order in which they run.

Native code runs one warp until it must stop (:mod:`.codegen`); everything between such runs is here. Order 0 runs CTAs
and warps ascending, each as far as it gets. Order 1 keeps a window of CTAs from the last one down, picks among them at
random and preempts after a random number of memory operations. Both depend on their arguments alone.

Hangs are proved, not guessed: a warp that comes back to a state it has had, while no memory changed in between, spins
until another warp changes memory. When every warp spins or waits and no further CTA can start, nothing ever will.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kernelmill.verify.emulator import copies
from kernelmill.verify.emulator.clocks import Clocks
from kernelmill.verify.emulator.codegen import Generated
from kernelmill.verify.emulator.interface import Unsupported
from kernelmill.verify.emulator.ir import Instruction
from kernelmill.verify.emulator.state import COPY, LANES, MAX_COPIES, OFFSET, SLOTS, WARP, BarrierKind, Status

Dim3 = tuple[int, int, int]
WarpFunction = Callable[[int, int], int]
"""Context address and fuel to a packed status (see :mod:`.codegen`)."""

SLICE = 1 << 15
"""Fuel of one run in order 0, in memory operations or so: some milliseconds, for a warp that never stops by itself."""
PREEMPTIONS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Fuels of one run in order 1."""
PATIENCE = 64
"""Rounds of 64 runs in order 1 after which one more CTA may start although none has ended."""
WINDOW = 8
"""CTAs that order 1 interleaves; more when these cannot go on."""
QUIET = 4
"""Runs without a change of memory after which a warp's states are remembered."""
MAX_CTA_BYTES = 256 << 20
MAX_RESIDENT_BYTES = 1 << 30
MAX_BARRIERS = 16
SMS = 148
"""What %nsmid says: the SMs of a B200; CTA n is said to run on SM n modulo this."""

READY, WAITING, EXITED = range(3)


class Stop(Exception):
    """The run ends with a finding. Code ``fault``: the header holds a native fault; else ``reason`` says what."""

    def __init__(self, cta: Cta, warp: int, code: str, reason: str, lane: int = 0, where: Instruction | None = None):
        super().__init__(reason)
        self.cta, self.warp, self.code, self.reason, self.lane, self.where = cta, warp, code, reason, lane, where


@dataclass
class Grid:
    """Everything of a launch that all CTAs share. ``regions``: the table's address and row count."""

    generated: Generated
    run: WarpFunction
    grid: Dim3
    block: Dim3
    dynamic_shared: int
    regions: tuple[int, int]
    params: int
    seed: int
    copies: str
    """When asynchronous copies arrive (:data:`.copies.MODES`)."""

    @cached_property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @cached_property
    def warps(self) -> int:
        return -(-self.threads // LANES)

    @property
    def ctas(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def shared(self) -> int:
        return self.generated.frame.shared + self.dynamic_shared

    @property
    def cta_bytes(self) -> int:
        """Host memory of one resident CTA."""
        local = self.generated.frame.local * LANES * self.warps
        copies = self.warps * MAX_COPIES * COPY.itemsize if self.generated.copies else 0
        stamps = Clocks.bytes(self.warps, self.shared, self.generated.cell)
        return self.warps * self.generated.context_bytes + 2 * self.shared + 2 * local + copies + stamps

    def template(self) -> np.ndarray:
        """The contexts of a CTA at its start, bytes of shape (warps, context); what differs by CTA is zero."""
        raw = np.zeros((self.warps, self.generated.context_bytes), dtype=np.uint8)
        head = headers(raw)
        thread = np.arange(self.warps * LANES, dtype=np.uint32).reshape(self.warps, LANES)
        head["tid.x"] = thread % self.block[0]
        head["tid.y"] = thread // self.block[0] % self.block[1]
        head["tid.z"] = thread // (self.block[0] * self.block[1])
        exists = thread < self.threads
        head["live"] = (exists.astype(np.uint64) << np.arange(LANES, dtype=np.uint64)).sum(axis=1)
        head["seed"] = self.seed
        for d, name in enumerate("xyz"):
            head[f"ntid.{name}"] = self.block[d]
            head[f"nctaid.{name}"] = self.grid[d]
        head["warpid"] = np.arange(self.warps)
        head["nwarpid"] = self.warps
        head["nsmid"] = SMS
        head["dynamic_smem_size"] = self.dynamic_shared
        head["total_smem_size"] = self.shared
        head["regions"], head["region_count"] = self.regions
        head["param_host"] = self.params
        head["shared_size"] = self.shared
        head["local_size"] = self.generated.frame.local
        head["race_warp"] = np.arange(self.warps)
        head["copies_mode"] = copies.MODES.index(self.copies)
        head["copies_random"] = np.arange(self.warps) * 0x9E3779B1 + self.seed & 0xFFFFFFFF
        return raw


def headers(raw: np.ndarray) -> np.ndarray:
    """The headers of contexts as a structured array that shares their memory."""
    return np.ndarray((raw.shape[0],), dtype=WARP, buffer=raw, strides=(raw.strides[0],))


def _aligned(count: int) -> np.ndarray:
    """``count`` bytes that start at a multiple of 64."""
    raw = np.zeros(count + 64, dtype=np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + count]


@dataclass
class Barrier:
    """One barrier of a CTA in its current phase. ``threads``: the count that arrivals gave, 0 for all."""

    threads: int
    arrived: int = 0
    waiting: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    kind: int = BarrierKind.SYNC
    published: np.ndarray | None = None
    """What the arrived warps know of each other's doings (see :mod:`.clocks`)."""


class Cta:
    """A resident CTA: its memory, reused from CTA to CTA, and the state of its warps."""

    def __init__(self, grid: Grid, template: np.ndarray) -> None:
        self.grid = grid
        self.raw = _aligned(template.size).reshape(template.shape)
        self.head = headers(self.raw)
        self.shared = _aligned(2 * grid.shared)
        self.local = _aligned(2 * grid.generated.frame.local * LANES * grid.warps)
        self.addresses = [int(self.raw.ctypes.data) + w * self.raw.strides[0] for w in range(grid.warps)]
        self.template = template.copy()
        head = headers(self.template)
        head["shared_host"] = self.shared.ctypes.data
        head["shared_shadow"] = self.shared.ctypes.data + grid.shared
        size = self.local.size // 2
        frames = np.arange(grid.warps, dtype=np.uint64) * np.uint64(size // grid.warps)
        head["local_host"] = frames + np.uint64(self.local.ctypes.data)
        head["local_shadow"] = frames + np.uint64(self.local.ctypes.data + size)
        if grid.generated.copies:
            self.copies = _aligned(grid.warps * MAX_COPIES * COPY.itemsize)
            ring = np.arange(grid.warps, dtype=np.uint64) * np.uint64(MAX_COPIES * COPY.itemsize)
            head["copies"] = ring + np.uint64(self.copies.ctypes.data)
        self.clocks = Clocks(grid.warps, grid.shared, grid.generated.cell)
        self.clocks.describe(head)

    def start(self, index: int) -> None:
        """Become CTA number ``index`` (x fastest)."""
        grid = self.grid
        nx, ny, _ = grid.grid
        self.coordinates: Dim3 = (index % nx, index // nx % ny, index // (nx * ny))
        self.raw[:] = self.template
        for d, name in enumerate("xyz"):
            self.head[f"ctaid.{name}"] = self.coordinates[d]
        self.head["smid"] = index % SMS
        self.shared[grid.shared :] = 0
        self.clocks.restart(self.head)
        self.local[self.local.size // 2 :] = 0
        self.state = [READY] * grid.warps
        self.ready = grid.warps
        self.alive = grid.warps
        self.barriers: dict[int, Barrier] = {}
        self.phases = 0
        self.seen: list[set[int]] = [set() for _ in range(grid.warps)]
        self.quiet = [0] * grid.warps
        self.epoch = [-1] * grid.warps
        self.spins_since = [-1] * grid.warps

    def fingerprint(self, warp: int) -> int:
        """A hash of all that decides what the warp does next, but memory."""
        row = self.raw[warp]
        pc = OFFSET["pc"]
        issue = OFFSET["issue"]
        clock = row[issue : issue + (8 if self.grid.generated.reads_clock else 0)]
        control = (row[0:8], row[16:20], row[OFFSET["barrier_id"] : issue], clock, row[pc : pc + 4 * LANES])
        return hash((*(part.tobytes() for part in control), row[SLOTS:].tobytes()))

    def arrive(self, warp: int, number: int, threads: int, kind: int) -> None:
        """All live lanes of ``warp`` came to CTA barrier ``number``, for ``threads`` threads (0: all)."""
        if number >= MAX_BARRIERS or threads % LANES or threads > LANES * self.grid.warps:
            reason = f"barrier {number} for {threads} threads: ids are below 16, counts whole warps of the CTA"
            raise Stop(self, warp, "divergent_barrier", reason)
        barrier = self.barriers.setdefault(number, Barrier(threads))
        if barrier.threads != threads:
            reason = f"barrier {number} is reached with {threads} threads and with {barrier.threads} (0: all)"
            raise Stop(self, warp, "divergent_barrier", reason)
        barrier.arrived += 1
        barrier.published = self.clocks.publish(self.head, warp, barrier.published)
        if kind != BarrierKind.ARRIVE:
            barrier.waiting.append(warp)
            self.state[warp] = WAITING
            self.ready -= 1
        if kind >= BarrierKind.RED_POPC:
            barrier.kind = kind
            barrier.values.append(int(self.head["barrier_value"][warp]))
        self.complete(number)

    def complete(self, number: int) -> None:
        """Release a barrier that has all it waits for. Warps that exited are not waited for (CUDA programming guide,
        ``__syncthreads`` since compute capability 7.0) unless the barrier names a count."""
        barrier = self.barriers[number]
        if barrier.arrived < (barrier.threads // LANES or self.alive):
            return
        del self.barriers[number]
        self.phases += 1
        if barrier.values:
            values = barrier.values
            total = {BarrierKind.RED_POPC: sum(values), BarrierKind.RED_AND: min(values)}.get(barrier.kind, max(values))
            self.head["barrier_value"][barrier.waiting] = total
        self.clocks.learn(self.head, barrier.waiting, barrier.published, whole=not barrier.threads)
        for warp in barrier.waiting:
            self.state[warp] = READY
        self.ready += len(barrier.waiting)

    def exit(self, warp: int) -> None:
        self.state[warp] = EXITED
        self.clocks.leave(self.head, warp)
        self.ready -= 1
        self.alive -= 1
        if self.alive:
            for number in [n for n, b in self.barriers.items() if not b.threads]:
                self.complete(number)

    def blocked(self, warp: int) -> Stop:
        """Every live lane of the warp waits for lanes that cannot come."""
        head, waits = self.head[warp], self.grid.generated.waits
        live, pc = int(head["live"]), head["pc"]
        places: dict[int, list[int]] = {}
        for lane in range(LANES):
            if live >> lane & 1:
                places.setdefault(int(pc[lane]), []).append(lane)
        parts, code, first = [], "deadlock", None
        for place, members in sorted(places.items()):
            instr = waits[place]
            assert instr is not None
            first = first or (instr, members[0])
            if instr.opcode in ("bar", "barrier") and instr.modifiers[:1] != ("warp",):
                code, first = "divergent_barrier", (instr, members[0])
            parts.append(f"lanes {_ranges(members)} wait at line {instr.line} ({instr.name[:40]})")
        assert first is not None
        return Stop(self, warp, code, "lanes wait for each other: " + "; ".join(parts), first[1], first[0])

    def deadlock(self) -> Stop:
        """No warp can run and not all have exited."""
        parts = []
        for number, barrier in sorted(self.barriers.items()):
            wanted = barrier.threads or LANES * self.alive
            who = f"warps {_ranges(barrier.waiting)} wait" if barrier.waiting else "nobody waits"
            parts.append(f"barrier {number}: {who}, {LANES * barrier.arrived} of {wanted} threads arrived")
        gone = [w for w, s in enumerate(self.state) if s == EXITED]
        if gone:
            parts.append(f"warps {_ranges(gone)} have exited")
        warp = self.state.index(WAITING)
        place = int(self.head[warp]["pc"][self.first_lane(warp)])
        where = self.grid.generated.waits[place - 1] if place else None
        return Stop(self, warp, "deadlock", "; ".join(parts), self.first_lane(warp), where)

    def first_lane(self, warp: int) -> int:
        live = int(self.head[warp]["live"])
        return (live & -live).bit_length() - 1 if live else 0


def _ranges(numbers: list[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7."""
    parts: list[str] = []
    start = previous = numbers[0]
    for n in [*numbers[1:], -1]:
        if n != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = n
        previous = n
    return ", ".join(parts)


@dataclass
class Totals:
    """Sums over the CTAs of a launch and the largest CTA, for each header counter."""

    sums: dict[str, int]
    busiest: dict[str, int]
    phases: int = 0


_COUNTED = ("issue", "lanes", "shared_cycles", "global_bytes", "load_rounds")


class Machine:
    """Runs one launch to its end. Raises :class:`Stop` with the first finding."""

    def __init__(self, grid: Grid, order: int, seed: int, deadline: float) -> None:
        self.grid = grid
        self.random = random.Random(seed) if order else None
        self.deadline = deadline
        self.template = grid.template()
        if grid.cta_bytes > MAX_CTA_BYTES:
            raise Unsupported(f"a CTA that needs {grid.cta_bytes >> 20} MiB of the emulator's memory")
        self.capacity = max(1, MAX_RESIDENT_BYTES // max(1, grid.cta_bytes))
        self.pending: Iterator[int] = iter(range(grid.ctas - 1, -1, -1) if order else range(grid.ctas))
        self.resident: list[Cta] = []
        self.free: list[Cta] = []
        self.epoch = 0
        """Grows whenever memory, a barrier or the set of live warps changes."""
        self.ctas_left = grid.ctas
        self.totals = Totals(dict.fromkeys(_COUNTED, 0), dict.fromkeys(_COUNTED, 0))

    def run(self) -> Totals:
        if self.random is None:
            self._run_in_order()
        else:
            self._run_shuffled(self.random)
        return self.totals

    def _admit(self) -> bool:
        """Make one more CTA resident, if there is one and memory for it."""
        if len(self.resident) >= self.capacity:
            return False
        index = next(self.pending, None)
        if index is None:
            return False
        cta = self.free.pop() if self.free else Cta(self.grid, self.template)
        cta.start(index)
        self.resident.append(cta)
        return True

    def _retire(self, cta: Cta) -> None:
        self.resident.remove(cta)
        self.ctas_left -= 1
        self.free.append(cta)
        totals = self.totals
        for name in _COUNTED:
            value = int(cta.head[name].sum())
            totals.sums[name] += value
            totals.busiest[name] = max(totals.busiest[name], value)
        totals.phases = max(totals.phases, cta.phases)

    def _step(self, cta: Cta, warp: int, fuel: int) -> bool:
        """Run one ready warp; whether it stopped for another reason than fuel."""
        if time.monotonic() > self.deadline:
            raise Stop(cta, warp, "livelock", "the time for this run is used up; this warp was still running")
        word = self.grid.run(cta.addresses[warp], fuel)
        status = word & 0xFF
        if status == Status.YIELD:
            if word & 0x8000:
                self.epoch += 1
            else:
                self._watch(cta, warp)
            return False
        self.epoch += 1
        if status == Status.EXIT:
            cta.exit(warp)
        elif status == Status.BARRIER:
            cta.arrive(warp, word >> 16 & 0xFFFF, word >> 32 & 0xFFFF, word >> 8 & 0x7F)
        elif status == Status.BLOCKED:
            raise cta.blocked(warp)
        elif status == Status.FAULT:
            raise Stop(cta, warp, "fault", "")
        if not cta.alive:
            self._retire(cta)
        elif not cta.ready:
            raise cta.deadlock()
        return True

    def _watch(self, cta: Cta, warp: int) -> None:
        """Note whether a warp that only used up its fuel is going round in circles."""
        if cta.epoch[warp] != self.epoch:
            cta.epoch[warp] = self.epoch
            cta.quiet[warp] = 0
            cta.seen[warp].clear()
        cta.quiet[warp] += 1
        if cta.quiet[warp] > QUIET:
            state = cta.fingerprint(warp)
            if state in cta.seen[warp]:
                cta.spins_since[warp] = self.epoch
            cta.seen[warp].add(state)

    def _stuck(self) -> bool:
        """Whether every ready warp of every resident CTA is known to spin on memory that none of them changes."""
        return all(
            state != READY or cta.spins_since[warp] == self.epoch
            for cta in self.resident
            for warp, state in enumerate(cta.state)
        )

    def _livelock(self) -> Stop:
        cta = self.resident[0]
        warp = cta.state.index(READY)
        others = sum(s == READY for c in self.resident for s in c.state) - 1
        lane = cta.first_lane(warp)
        left = sum(1 for _ in self.pending)
        waiting = f"; {left} CTAs never got to run" if left else ""
        reason = f"spins for ever, as do {others} more warps: no warp is left that could change memory{waiting}"
        return Stop(cta, warp, "livelock", reason, lane)

    def _run_in_order(self) -> None:
        warps = range(self.grid.warps)
        while True:
            if not self.resident and not self._admit():
                return
            for cta in list(self.resident):
                going = True
                while going and cta.alive:
                    going = False
                    for warp in warps:
                        if cta.alive and cta.state[warp] == READY:
                            going |= self._step(cta, warp, SLICE)
            # Whoever is left used up its fuel: it may wait for a CTA that has not started.
            if self.resident and not self._admit() and self._stuck():
                raise self._livelock()

    def _run_shuffled(self, rng: random.Random) -> None:
        window, patience = WINDOW, PATIENCE
        while True:
            while len(self.resident) < window and self._admit():
                pass
            if not self.resident:
                return
            left = self.ctas_left
            for _ in range(64):
                cta = self.resident[int(rng.random() * len(self.resident))]
                # Half of the time the last warp goes first, so that ascending luck cannot hide a missing barrier.
                ready = [w for w, s in enumerate(cta.state) if s == READY]
                warp = ready[-1] if rng.random() < 0.5 else ready[int(rng.random() * len(ready))]
                self._step(cta, warp, PREEMPTIONS[int(rng.random() * len(PREEMPTIONS))])
                if not self.resident:
                    break
            if self.ctas_left != left:
                window, patience = WINDOW, PATIENCE
                continue
            patience -= 1
            if patience == 0 or self._stuck():
                window, patience = len(self.resident) + 1, PATIENCE
                if not self._admit() and self._stuck():
                    raise self._livelock()


def warp_function(address: int) -> WarpFunction:
    """The native function at ``address`` as a Python callable."""
    return ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64)(address)
