"""Races between the warps of a CTA in shared memory, as native code.

Every access is stamped with ``epoch << 6 | warp``. A warp's epoch is the CTA's time when it last arrived at a barrier
or fence; its vector clock says up to which epoch it knows what each other warp did. An access that meets a conflicting
one with a stamp beyond the clock is a race: no barrier orders the two, whatever order they ran in here. Stamps are kept
per cell of 1, 2 or 4 bytes, the narrowest shared access of the kernel, so that neighbours never conflict.

Epochs of all warps are drawn from one clock. Thus one number per warp (``race_limit``, the largest stamp that is known
whoever made it) decides nearly every access; the exact comparison follows where it does not.
Lanes of one warp are not told apart, accesses with an order (volatile, relaxed, atomic) do not take part, and a store
of the bytes that are there already is no access: it makes no difference when it happens.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from kernelmill.verify.emulator.native import I32, I64, PTR, Code, call_helper, need, vec
from kernelmill.verify.emulator.state import LANES, Fault, Space

WARP_BITS = 6
"""Of a stamp: the warp's number and :data:`MIXED`."""
MIXED = 32
"""Set in a cell's latest read stamp when unordered warps have read it: the stamp then stands for all of them."""
NEVER = (1 << 32 - WARP_BITS) - 1
"""Clock entry of a warp that cannot race with this one: itself, or none."""


def cell_offset(code: Code, cell: int, shadow: ir.Value) -> ir.Value:
    """Byte offset, in an array of stamps, of the cell with the shared byte whose flag is at ``shadow`` (i64)."""
    index = code.b.sub(shadow, code.get("shared_shadow", I64))
    return code.b.mul(code.b.udiv(index, code.i64(cell)), code.i64(4))


def stamp(code: Code) -> ir.Value:
    """The mark of what the warp does now."""
    epoch = code.b.shl(code.get("race_epoch", I32), code.i32(WARP_BITS))
    return code.b.or_(epoch, code.get("race_warp", I32))


@dataclass(frozen=True)
class Access:
    """Part of an access to shared memory: ``width`` bytes of each of ``lanes`` lanes, from ``lane`` on one behind the
    other, ``skip`` bytes behind the lane's checked address."""

    cell: int
    width: int
    lanes: int
    lane: ir.Value
    skip: int = 0

    @property
    def cells(self) -> int:
        return self.width * self.lanes // self.cell

    def offset(self, code: Code) -> ir.Value:
        """Byte offset of the first cell's stamp."""
        first = code.load(code.lane_at(code.field("shadow"), self.lane, 8), I64)
        return cell_offset(code, self.cell, code.b.add(first, code.i64(self.skip)))


def doubt(code: Code, access: Access, writes: bool) -> ir.Value:
    """Whether a stamp is beyond what the warp knows for sure; then the exact comparison must decide."""
    b = code.b
    wide = vec(I32, access.cells)
    at = access.offset(code)
    limit = code.splat(code.get("race_limit", I32), access.cells)
    last = code.load(code.at(code.get("race_writes", PTR), at), wide, 4)
    own = code.splat(code.get("race_warp", I32), access.cells)
    late = _by_others(code, last, own, limit)
    if writes:
        read = code.load(code.at(code.get("race_reads", PTR), at), wide, 4)
        late = b.or_(late, _by_others(code, read, own, limit))
    return code.any_bit(b.zext(late, wide))


def _by_others(code: Code, stamps: ir.Value, own: ir.Value, limit: ir.Value) -> ir.Value:
    """Which stamps are not the warp's alone and beyond what it knows whoever made them."""
    b = code.b
    foreign = b.icmp_unsigned("!=", b.and_(stamps, code.const(stamps.type, (1 << WARP_BITS) - 1)), own)
    return b.and_(b.icmp_unsigned(">", stamps, limit), foreign)


def check(code: Code, access: Access, writes: bool) -> None:
    """Emit a return with the fault where the access races."""
    b = code.b
    with code.when(doubt(code, access, writes)):
        code.put("race_first", access.offset(code))
        code.put("race_lane", access.lane)
        address = code.load(code.lane_at(code.field("address"), access.lane, 8), I64)
        code.put("race_address", b.add(address, code.i64(access.skip)))
        result = call_helper(code, _exact(access.cell, access.cells, access.width, writes), code.i32(0))
        with code.when(b.icmp_unsigned("!=", result, code.i32(0))):
            b.ret(result)


def mark(code: Code, access: Access, writes: bool) -> None:
    """Stamp what the access read or wrote."""
    b = code.b
    at = access.offset(code)
    stamps = code.splat(stamp(code), access.cells)
    if writes:
        code.store(stamps, code.at(code.get("race_writes", PTR), at), 4)
        return
    read = code.at(code.get("race_reads", PTR), at)
    known = code.load(read, stamps.type, 4)
    own, limit = (code.splat(code.get(f"race_{name}", I32), access.cells) for name in ("warp", "limit"))
    latest = b.select(b.icmp_unsigned(">", known, stamps), known, stamps)
    mixed = b.or_(latest, code.const(stamps.type, MIXED))
    code.store(b.select(_by_others(code, known, own, limit), mixed, stamps), read, 4)
    mine = code.at(code.get("race_warp_reads", PTR), b.add(at, _row(code, code.get("race_warp", I32))))
    code.store(stamps, mine, 4)


def note(code: Code, access: Access, writes: bool) -> None:
    """Check and stamp."""
    check(code, access, writes)
    mark(code, access, writes)


def _row(code: Code, warp: ir.Value) -> ir.Value:
    """Byte offset of a warp's row of read stamps."""
    return code.b.mul(code.b.mul(code.b.zext(warp, I64), code.get("race_cells", I64)), code.i64(4))


def _exact(cell: int, cells: int, width: int, writes: bool) -> str:
    """The helper that compares the stamps of ``cells`` cells with the warp's clock, one by one."""

    def emit(code: Code) -> None:
        b = code.b
        first = code.get("race_first", I64)
        own = code.get("race_warp", I32)

        def compare(n: ir.Value, theirs: ir.Value, fault: int) -> None:
            warp = b.and_(theirs, code.i32(LANES - 1))
            clock = code.at(code.get("race_clock", PTR), b.mul(b.zext(warp, I64), code.i64(4)))
            unknown = b.icmp_unsigned(">", b.lshr(theirs, code.i32(WARP_BITS)), code.load(clock, I32, 4))
            with code.when(b.and_(unknown, b.icmp_unsigned("!=", warp, own))):
                code.put("fault_code", code.i32(fault))
                offset = b.mul(n, code.i32(cell))
                code.put("fault_space", code.i32(Space.SHARED))
                code.put("fault_lane", b.add(code.get("race_lane", I32), b.udiv(offset, code.i32(max(width, cell)))))
                code.put("fault_address", b.add(code.get("race_address", I64), b.zext(offset, I64)))
                code.put("fault_other", warp)
                b.ret(code.i32(fault))

        with code.loop(cells) as n:
            at = b.add(first, b.mul(b.zext(n, I64), code.i64(4)))
            last = code.load(code.at(code.get("race_writes", PTR), at), I32, 4)
            compare(n, last, Fault.WRITE_AFTER_WRITE if writes else Fault.READ_AFTER_WRITE)
            if writes:
                with code.loop(LANES) as warp, code.when(b.icmp_unsigned("<", warp, code.get("nwarpid", I32))):
                    row = b.add(at, _row(code, warp))
                    theirs = code.load(code.at(code.get("race_warp_reads", PTR), row), I32, 4)
                    compare(n, theirs, Fault.WRITE_AFTER_READ)
        b.ret(code.i32(0))

    return need(f"km.race.{cell}.{width}x{cells}.{'rw'[writes]}", emit)


def synchronise() -> str:
    """The helper for a fence or an access with acquire or release: the warp learns all that earlier ones published
    and publishes what it knows. It has no member lanes to speak of; its argument is ignored."""

    def emit(code: Code) -> None:
        b = code.b
        wide = vec(I32)
        clock, shared = code.get("race_clock", PTR), code.get("race_shared_clock", PTR)
        own = b.icmp_unsigned("==", code.lanes(I32, range(LANES)), code.splat(code.get("race_warp", I32)))
        mine, theirs = code.load(clock, wide, 4), code.load(shared, wide, 4)
        released = b.select(own, code.splat(code.get("race_epoch", I32)), mine)
        # What no warp has (NEVER) must not be published as known.
        released = b.select(b.icmp_unsigned("==", released, code.const(wide, NEVER)), code.const(wide, 0), released)
        both = b.select(b.icmp_unsigned(">", released, theirs), released, theirs)
        code.store(both, shared, 4)
        known = b.select(b.icmp_unsigned(">", both, mine), both, mine)
        known = b.select(own, code.const(wide, NEVER), known)
        code.store(known, clock, 4)
        least = code.intrinsic(f"llvm.vector.reduce.umin.v{LANES}i32", I32, known)
        code.put("race_limit", b.or_(b.shl(least, code.i32(WARP_BITS)), code.i32((1 << WARP_BITS) - 1)))
        time = code.get("race_time", PTR)
        now = b.add(code.load(time, I32, 4), code.i32(1))
        code.store(now, time, 4)
        code.put("race_epoch", now)
        b.ret(code.i32(0))

    return need("km.race.sync", emit)
