"""What goes into the emulator and what comes out: plain data, so that it can run in a sandboxed child."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kernelmill.specs.data import Frozen

Approx = Literal["nominal", "perturbed"]
"""How approximate instructions (ex2, rsqrt, rcp, tanh, ...) compute: correctly rounded, or moved by a
deterministic pseudo-random amount within the error that the PTX ISA documents for them."""


Copies = Literal["eager", "late", "random"]
"""When the bytes of ``cp.async`` arrive: at once, when they are waited for, or either by a pseudo-random choice."""


@dataclass
class Buffer:
    """Device memory of one tensor. ``data`` (uint8, guard bands not included) is changed in place by a run.

    ``initialised``: one bool per byte; reading a byte whose flag is False is ``emulate.uninitialised``; a store sets
    it. The emulator surrounds each buffer by unmapped guard space, so a neighbour is never reached by a small overrun.
    ``shape``, ``strides`` (elements) and ``itemsize`` serve the messages only: they turn an address into an index.
    ``writable`` False: a store is ``emulate.touched``.
    """

    name: str
    data: np.ndarray
    initialised: np.ndarray
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    writable: bool


class Finding(Frozen):
    """Something a GPU would not have reported. ``code`` is the part after ``emulate.`` of a verdict code."""

    code: Literal[
        "out_of_bounds",
        "misaligned",
        "uninitialised",
        "divergent_barrier",
        "deadlock",
        "livelock",
        "touched",
        "trap",
        "missing_wait",
        "race",
    ]
    kernel: str
    cta: tuple[int, int, int]
    warp: int
    lane: int
    address: int | None = None
    space: Literal["global", "shared", "local", "param", "const"] | None = None
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    line: int = 0
    instruction: str = ""
    message: str = ""


class TensorCounters(Frozen):
    """Global-memory traffic of one tensor: bytes asked for by lanes, 32-byte sectors, and warp-level requests."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_sectors: int = 0
    write_sectors: int = 0
    requests: int = 0


class KernelCounters(Frozen):
    """Counters of one launch. ``*_busiest`` are per CTA: the largest over the grid's CTAs.

    ``issue_slots``: warp instructions issued (all CTAs). ``lane_instructions``: those times active lanes.
    ``shared_cycles``: shared-memory wavefronts including bank conflicts (32 banks of 4 bytes). ``load_rounds``: groups
    of loads from global memory with no barrier, global store or loop turn between them, summed over warps.
    ``barriers``: barrier phases that a CTA completed, largest over CTAs. What is not ``busiest`` sums over the grid.
    """

    kernel: str
    ctas: int
    threads: int
    shared_bytes: int
    issue_slots: int
    issue_slots_busiest: int
    lane_instructions: int
    shared_cycles: int
    shared_cycles_busiest: int
    global_bytes: int
    global_bytes_busiest: int
    load_rounds: int
    load_rounds_busiest: int
    barriers: int
    tensors: dict[str, TensorCounters] = {}


@dataclass
class Result:
    """Outcome of one run: findings in order of discovery (the run stops at the first fatal one) and counters."""

    findings: list[Finding] = field(default_factory=list)
    counters: list[KernelCounters] = field(default_factory=list)
    seconds: float = 0.0


class PlanError(ValueError):
    """The launch plan does not fit the PTX or the buffers: the candidate's fault."""


class Unsupported(Exception):
    """The PTX has something this emulator does not know. Ours, not the candidate's: the process exits 3.

    The message names the opcode and the source line."""
