"""The memory that Python and generated code share: a warp's context, the region table, the address map.

One warp's context is a run of bytes: :data:`WARP` (the header), then the kernel's register slots. One region of global
memory is one row of :data:`REGION`.
"""

from __future__ import annotations

import numpy as np

LANES = 32
MAX_ACCESS = 32
"""Bytes that one lane moves with one instruction: ``.v8.b32`` and ``.v4.b64``."""

REGION_SHIFT = 36
"""A global address is ``region << REGION_SHIFT | REGION_OFFSET + byte``: the region is found by a shift, and each
region has at least 32 GiB of unmapped space on both sides."""
REGION_OFFSET = 1 << 35
MAX_REGIONS = 1 << 12
PARAM_REGION = 1
"""Region 0 is never mapped (null pointers), 1 holds the parameters, then the module's variables, then the tensors."""

SHARED_BASE = 1024
"""First shared address: sm_90 and later keep the first KiB for the system (CUDA programming guide, compute
capability 9.0), and it makes a null shared pointer invalid."""
SHARED_WINDOW = 1 << 56
LOCAL_BASE = 64
LOCAL_WINDOW = 1 << 57
"""Generic address = window + address in the state space."""


class Status:
    """What a warp's run returned."""

    YIELD = 0
    EXIT = 1
    BLOCKED = 2
    """Every live lane waits for other lanes of the warp."""
    BARRIER = 3
    """All live lanes arrived at a barrier; fields ``barrier_*`` say which."""
    FAULT = 4


class Fault:
    """Why an access stopped the run (``fault_code``)."""

    OUT_OF_BOUNDS = 16
    MISALIGNED = 17
    TOUCHED = 18
    UNINITIALISED = 19
    TRAP = 20
    NOT_A_MEMBER = 21
    """A lane executes a collective whose member mask does not name it: undefined (PTX ISA, shfl.sync)."""
    MISSING_WAIT = 22
    """An access to shared bytes that a ``cp.async`` may still be writing."""
    READ_AFTER_WRITE = 23
    WRITE_AFTER_READ = 24
    WRITE_AFTER_WRITE = 25
    COPIES_FULL = 26
    """More than :data:`MAX_COPIES` of a warp's ``cp.async`` are in flight: too many for this emulator."""


class Space:
    """Where a faulting access went (``fault_space``): an index into :data:`SPACES`."""

    GLOBAL = 0
    SHARED = 1
    LOCAL = 2


SPACES = ("global", "shared", "local")

FAULTS = {
    Fault.OUT_OF_BOUNDS: "out_of_bounds",
    Fault.MISALIGNED: "misaligned",
    Fault.TOUCHED: "touched",
    Fault.UNINITIALISED: "uninitialised",
    Fault.TRAP: "trap",
    Fault.NOT_A_MEMBER: "divergent_barrier",
    Fault.MISSING_WAIT: "missing_wait",
    Fault.READ_AFTER_WRITE: "race",
    Fault.WRITE_AFTER_READ: "race",
    Fault.WRITE_AFTER_WRITE: "race",
}

RACES = {
    Fault.READ_AFTER_WRITE: ("a read of", "written"),
    Fault.WRITE_AFTER_READ: ("a write of", "read"),
    Fault.WRITE_AFTER_WRITE: ("a write of", "written"),
}
"""What the later and the earlier access of a race did."""

ACCESS_FAULTS = frozenset(set(FAULTS) - {Fault.TRAP, Fault.NOT_A_MEMBER})
"""Faults that come with an address."""

WRITTEN, PENDING = 1, 2
"""Flags of a byte in a shadow: somebody wrote it; a ``cp.async`` to it has not been waited for (shared only)."""


class BarrierKind:
    SYNC = 0
    ARRIVE = 1
    RED_POPC = 2
    RED_AND = 3
    RED_OR = 4


_SCALARS = ("ntid.x", "ntid.y", "ntid.z", "ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y", "nctaid.z")
_MORE = ("warpid", "nwarpid", "smid", "nsmid", "dynamic_smem_size", "total_smem_size")
SCALARS = (*_SCALARS, *_MORE)
"""Special registers that are one u32 for the whole warp, kept in the header under these names."""

WARP = np.dtype(
    [
        # Control.
        ("live", "u4"),
        ("waiting", "u4"),
        ("fuel", "i8"),
        ("rotate", "u4"),
        ("seed", "u4"),
        # Findings and barriers.
        ("fault_code", "u4"),
        ("fault_lane", "u4"),
        ("fault_instr", "u4"),
        ("fault_space", "u4"),
        ("fault_address", "u8"),
        ("barrier_id", "u4"),
        ("barrier_threads", "u4"),
        ("barrier_kind", "u4"),
        ("barrier_value", "u4"),
        # Counters.
        ("issue", "u8"),
        ("lanes", "u8"),
        ("shared_cycles", "u8"),
        ("global_bytes", "u8"),
        ("stores", "u8"),
        ("load_rounds", "u8"),
        ("loads_grouped", "u8"),
        # Memory.
        ("shared_host", "u8"),
        ("shared_shadow", "u8"),
        ("shared_size", "u8"),
        ("regions", "u8"),
        ("region_count", "u8"),
        ("local_host", "u8"),
        ("local_shadow", "u8"),
        ("local_size", "u8"),
        ("param_host", "u8"),
        *((name, "u4") for name in SCALARS),
        # Asynchronous copies (see copies.py).
        ("copies_first", "u4"),
        ("copies", "u8"),
        ("copies_end", "u4"),
        ("copies_mode", "u4"),
        ("copies_random", "u4"),
        # Races in shared memory (see races.py).
        ("fault_other", "u4"),
        ("race_epoch", "u4"),
        ("race_limit", "u4"),
        ("race_cells", "u8"),
        ("race_writes", "u8"),
        ("race_reads", "u8"),
        ("race_warp_reads", "u8"),
        ("race_clock", "u8"),
        ("race_shared_clock", "u8"),
        ("race_time", "u8"),
        ("race_warp", "u4"),
        ("race_lane", "u4"),
        ("race_first", "u8"),
        ("race_address", "u8"),
        ("pad", "u4", 4),
        # Per lane.
        ("pc", "u4", LANES),
        ("tid.x", "u4", LANES),
        ("tid.y", "u4", LANES),
        ("tid.z", "u4", LANES),
        ("address", "u8", LANES),
        ("host", "u8", LANES),
        ("shadow", "u8", LANES),
        ("copies_groups", "u4", LANES),
        # Scratch of the bank conflict count.
        ("units", "u4", LANES),
        ("banks", "u1", 32),
        ("most", "u4"),
        ("pad2", "u4", 23),
        # Operands of memory and warp helpers: element k of all lanes, then element k + 1.
        ("data", "u1", LANES * MAX_ACCESS),
        ("data2", "u1", LANES * MAX_ACCESS),
    ]
)
assert WARP.fields is not None and WARP.fields["pc"][1] % 64 == 0  # vectors start at cache lines
OFFSET = {name: WARP.fields[name][1] for name in WARP.names or ()}
SLOTS = (WARP.itemsize + 63) // 64 * 64
"""Offset of the first register slot."""

MAX_COPIES = 256
"""``cp.async`` instructions of one warp that may be in flight, a ring of :data:`COPY`."""

COPY = np.dtype(
    [
        ("lanes", "u4"),
        ("size", "u4"),
        ("moved", "u4"),
        ("pad", "u4", 13),
        ("group", "u4", LANES),
        ("count", "u4", LANES),
        ("to", "u8", LANES),
        ("to_shadow", "u8", LANES),
        ("from", "u8", LANES),
        ("from_shadow", "u8", LANES),
    ]
)
"""One ``cp.async`` of a warp: ``count`` of ``size`` bytes come from global memory, the others are zero. ``lanes``: not
yet waited for. ``group``: number of the lane's group. ``moved``: the bytes are in place already."""
assert COPY.fields is not None
COPY_FIELD = {name: COPY.fields[name][1] for name in COPY.names or ()}

REGION = np.dtype(
    [
        ("base", "u8"),
        ("size", "u8"),
        ("host", "u8"),
        ("shadow", "u8"),
        ("writable", "u8"),
        ("read_bytes", "u8"),
        ("write_bytes", "u8"),
        ("read_sectors", "u8"),
        ("write_sectors", "u8"),
        ("requests", "u8"),
        ("pad", "u8", 6),
    ]
)
assert REGION.fields is not None and REGION.itemsize == 128
REGION_FIELD = {name: REGION.fields[name][1] for name in REGION.names or ()}


def region_base(index: int) -> int:
    """Device address of a region's first byte."""
    return index << REGION_SHIFT | REGION_OFFSET
