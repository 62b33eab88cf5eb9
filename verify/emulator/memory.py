"""Native helpers for loads, stores and atomics of one warp, with every check and counter.

A helper finds its lanes' addresses in the context field ``address`` and moves values between memory and ``data``, where
element ``k`` of all lanes follows element ``k - 1``. It returns 0, or a fault after filling the ``fault_*`` fields.
Memory is sequentially consistent: a helper runs to its end before another warp does anything.

Each access is checked against the region table (global), the CTA's window (shared) or the lane's frame (local) before
it is translated to a host address. Addresses that are one dense run, or all the same, are checked and moved as vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from kernelmill.verify.emulator import races
from kernelmill.verify.emulator.native import I8, I32, I64, PTR, Code, call_helper, need, vec
from kernelmill.verify.emulator.races import Access
from kernelmill.verify.emulator.state import (
    LANES,
    LOCAL_BASE,
    LOCAL_WINDOW,
    PENDING,
    REGION_FIELD,
    REGION_SHIFT,
    SHARED_BASE,
    SHARED_WINDOW,
    SPACES,
    WRITTEN,
    Fault,
    Space,
)

ALL = (1 << LANES) - 1
SECTOR = 5
"""log2 of the bytes of a sector, the unit of global-memory traffic."""
BANKS = 32
WORD = 4
"""Shared memory has 32 banks of 4 bytes (CUDA programming guide, compute capability 5.x and later)."""

GENERAL, DENSE, UNIFORM = 0, 1, 2
"""What the addresses of the active lanes look like: anything; all lanes, one after another; all the same."""


@dataclass(frozen=True)
class Row:
    """Where one address may point: ``size`` bytes from ``base``, at ``host``, with flags at ``shadow``."""

    base: ir.Value
    size: ir.Value
    host: ir.Value
    shadow: ir.Value
    writable: ir.Value | None = None
    counters: ir.Value | None = None
    """Row of the region table; None where nothing is counted per tensor."""


def _row(code: Code, space: int, address: ir.Value, lane: ir.Value) -> Row:
    """The memory that ``address`` of ``lane`` may reach; a row of size 0 when there is none."""
    b = code.b
    if space == Space.GLOBAL:
        index = b.lshr(address, code.i64(REGION_SHIFT))
        known = b.icmp_unsigned("<", index, code.get("region_count", I64))
        index = b.select(known, index, code.i64(0))
        row = code.at(code.get("regions", PTR), b.mul(index, code.i64(128)))
        field = {name: code.load(code.at(row, REGION_FIELD[name]), I64, 8) for name in ("base", "size", "host")}
        shadow, writable = (code.load(code.at(row, REGION_FIELD[name]), I64, 8) for name in ("shadow", "writable"))
        return Row(field["base"], field["size"], field["host"], shadow, writable, row)
    if space == Space.SHARED:
        size, host, shadow = (code.get(f"shared_{name}", I64) for name in ("size", "host", "shadow"))
        return Row(code.i64(SHARED_BASE), size, host, shadow)
    size = code.get("local_size", I64)
    frame = b.mul(size, b.zext(lane, I64))
    host, shadow = (b.add(code.get(f"local_{name}", I64), frame) for name in ("host", "shadow"))
    return Row(code.i64(LOCAL_BASE), size, host, shadow)


def fail(code: Code, space: int, fault: int, lane: ir.Value, address: ir.Value) -> None:
    code.put("fault_code", code.i32(fault))
    code.put("fault_space", code.i32(space))
    code.put("fault_lane", lane)
    code.put("fault_address", address)
    code.b.ret(code.i32(fault))


def lane_address(code: Code, lane: ir.Value) -> ir.Value:
    return code.load(code.lane_at(code.field("address"), lane, 8), I64)


def check_access(code: Code, space: int, mask: ir.Value, width: int, reads: bool, writes: bool) -> ir.Value:
    """Check and count an access of ``width`` bytes per lane; fill ``host`` and ``shadow`` of the active lanes.

    Returns the pattern of the addresses. ``mask`` has at least one bit. Emits a return where a check fails; per lane
    alignment comes before bounds, bounds before writability.
    """
    b = code.b
    wide = vec(I64)
    first = code.lowest(mask)
    start = lane_address(code, first)
    active = code.bits(mask)
    address = b.select(active, code.get("address", wide), code.splat(start))
    row = _row(code, space, start, first)

    fast, general, done = code.block("fast"), code.block("general"), code.block("checked")
    offset = b.sub(address, code.splat(row.base))
    limit = b.sub(row.size, code.i64(width))
    outside = b.icmp_unsigned(">", offset, code.splat(limit))
    odd = b.and_(address, code.const(wide, width - 1))
    bad = b.or_(code.bits(outside), b.zext(code.any_bit(odd), I32))
    if writes and row.writable is not None:
        bad = b.or_(bad, b.zext(b.icmp_unsigned("==", row.writable, code.i64(0)), I32))
    steps = b.mul(b.sub(code.lanes(I64, range(LANES)), code.splat(b.zext(first, I64))), code.const(wide, width))
    off_run = b.and_(mask, code.bits(b.icmp_unsigned("!=", address, b.add(code.splat(start), steps))))
    run = b.lshr(mask, first)
    holes = b.and_(run, b.add(run, code.i32(1)))
    is_run = b.icmp_unsigned("==", b.or_(off_run, holes), code.i32(0))
    spread = code.bits(b.icmp_unsigned("!=", address, code.splat(start)))
    is_uniform = b.icmp_unsigned("==", spread, code.i32(0))
    if space == Space.LOCAL:  # frames differ by lane
        is_run = is_uniform = code.const(ir.IntType(1), 0)
    good = b.and_(b.icmp_unsigned("==", bad, code.i32(0)), b.icmp_unsigned(">=", row.size, code.i64(width)))
    b.cbranch(b.and_(good, b.or_(is_run, is_uniform)), fast, general)

    b.position_at_end(fast)
    code.put("host", b.add(offset, code.splat(row.host)))
    code.put("shadow", b.add(offset, code.splat(row.shadow)))
    lanes = b.zext(code.popcount(mask), I64)
    if row.counters is not None:
        begin = b.lshr(start, code.i64(SECTOR))
        last = b.add(start, b.mul(lanes, code.i64(width)))
        end = b.lshr(b.sub(last, code.i64(1)), code.i64(SECTOR))
        sectors = b.select(is_uniform, code.i64(1), b.add(b.sub(end, begin), code.i64(1)))
        _count_global(code, row.counters, lanes, sectors, width, reads, writes)
    if space == Space.SHARED:
        _count_groups(code, mask, width)
    all_lanes = b.icmp_unsigned("==", mask, code.i32(ALL))
    dense = b.select(all_lanes, code.i32(DENSE), code.i32(GENERAL))
    pattern = b.select(is_uniform, code.i32(UNIFORM), dense)
    fast_end = b.block
    b.branch(done)

    b.position_at_end(general)
    unit = b.lshr(address, code.const(wide, SECTOR))
    with code.each_lane(mask) as lane:
        here = lane_address(code, lane)
        row = _row(code, space, here, lane)
        with code.when(b.icmp_unsigned("!=", b.and_(here, code.i64(width - 1)), code.i64(0))):
            fail(code, space, Fault.MISALIGNED, lane, here)
        off = b.sub(here, row.base)
        small = b.icmp_unsigned("<", row.size, code.i64(width))
        beyond = b.icmp_unsigned(">", off, b.sub(row.size, code.i64(width)))
        with code.when(b.or_(small, beyond)):
            fail(code, space, Fault.OUT_OF_BOUNDS, lane, here)
        if writes and row.writable is not None:
            with code.when(b.icmp_unsigned("==", row.writable, code.i64(0))):
                fail(code, space, Fault.TOUCHED, lane, here)
        code.store(b.add(off, row.host), code.lane_at(code.field("host"), lane, 8))
        code.store(b.add(off, row.shadow), code.lane_at(code.field("shadow"), lane, 8))
        if row.counters is not None:
            same = code.bits(b.icmp_unsigned("==", unit, code.splat(b.lshr(here, code.i64(SECTOR)))))
            earlier = b.sub(b.shl(code.i32(1), lane), code.i32(1))
            seen = b.and_(b.and_(same, mask), earlier)
            fresh = b.zext(b.icmp_unsigned("==", seen, code.i32(0)), I64)
            first_lane = b.icmp_unsigned("==", lane, first)
            _count_global(
                code, row.counters, code.i64(1), fresh, width, reads, writes, requests=b.zext(first_lane, I64)
            )
    if space == Space.SHARED:
        _count_conflicts(code, address, mask, width)
    general_end = b.block
    b.branch(done)

    b.position_at_end(done)
    result = b.phi(I32)
    result.add_incoming(pattern, fast_end)
    result.add_incoming(code.i32(GENERAL), general_end)
    return result


def _count_global(
    code: Code,
    row: ir.Value,
    lanes: ir.Value,
    sectors: ir.Value,
    width: int,
    reads: bool,
    writes: bool,
    requests: ir.Value | None = None,
) -> None:
    size = code.b.mul(lanes, code.i64(width))
    for kind, wanted in (("read", reads), ("write", writes)):
        if wanted:
            code.bump(code.at(row, REGION_FIELD[f"{kind}_bytes"]), size)
            code.bump(code.at(row, REGION_FIELD[f"{kind}_sectors"]), sectors)
            code.bump(code.field("global_bytes"), size)
    code.bump(code.at(row, REGION_FIELD["requests"]), code.i64(1) if requests is None else requests)


def _groups(width: int) -> tuple[int, int]:
    """How many groups of lanes one shared access takes, and lanes per group: 128 bytes go in one wavefront, so 8-byte
    accesses are served by half warps and 16-byte ones by quarter warps."""
    count = max(1, width // WORD)
    return count, LANES // count


def _count_groups(code: Code, mask: ir.Value, width: int) -> None:
    """Count a conflict-free access: one wavefront per group with an active lane."""
    b = code.b
    total = code.i64(0)
    groups, lanes = _groups(width)
    for g in range(groups):
        part = b.and_(mask, code.i32(((1 << lanes) - 1) << (g * lanes)))
        total = b.add(total, b.zext(b.icmp_unsigned("!=", part, code.i32(0)), I64))
    code.bump(code.field("shared_cycles"), total)


def _count_conflicts(code: Code, address: ir.Value, mask: ir.Value, width: int) -> None:
    """Count the wavefronts: per group the largest number of different words in one bank, at least 1 where a lane is
    active. Aligned pieces of ``width`` bytes are equal or disjoint, so pieces count like words."""
    b = code.b
    piece = max(width, WORD)
    banks = BANKS * WORD // piece
    counts, most = code.field("banks"), code.field("most")
    unit = b.lshr(address, code.const(vec(I64), piece.bit_length() - 1))
    units = b.trunc(unit, vec(I32))
    code.store(units, code.field("units"))
    groups, lanes = _groups(width)
    for g in range(groups):
        members = ((1 << lanes) - 1) << (g * lanes)
        part = b.and_(mask, code.i32(members))
        code.store(code.const(vec(I8, banks), 0), counts)
        code.store(code.i32(0), most)
        with code.each_lane(part) as lane:
            mine = code.load(code.lane_at(code.field("units"), lane, 4), I32)
            same = b.and_(code.bits(b.icmp_unsigned("==", units, code.splat(mine))), part)
            seen = b.and_(same, b.sub(b.shl(code.i32(1), lane), code.i32(1)))
            with code.when(b.icmp_unsigned("==", seen, code.i32(0))):
                bank = code.at(counts, b.zext(b.and_(mine, code.i32(banks - 1)), I64))
                count = b.add(code.load(bank, I8), code.const(I8, 1))
                code.store(count, bank)
                now = b.zext(count, I32)
                known = code.load(most, I32)
                code.store(b.select(b.icmp_unsigned(">", now, known), now, known), most)
        code.bump(code.field("shared_cycles"), b.zext(code.load(most, I32), I64))


def pointer_of(code: Code, name: str, lane: ir.Value) -> ir.Value:
    """What the field ``host`` or ``shadow`` says of a lane's checked access."""
    return code.load(code.lane_at(code.field(name), lane, 8), PTR)


def require_initialised(code: Code, space: int, lane: ir.Value, pattern: bytes) -> None:
    """Emit the fault for a lane whose checked access has a byte that nobody wrote, or that a copy may still write,
    where ``pattern`` is 1."""
    flags = ir.IntType(8 * len(pattern))
    wanted = code.const(flags, int.from_bytes(pattern, "little"))
    value = code.load(pointer_of(code, "shadow", lane), flags)
    if space == Space.SHARED:
        _require_waited(code, lane, value, pattern)
    with code.when(code.b.icmp_unsigned("!=", code.b.and_(value, wanted), wanted)):
        fail(code, space, Fault.UNINITIALISED, lane, lane_address(code, lane))


def _require_waited(code: Code, lane: ir.Value, flags: ir.Value, pattern: bytes) -> None:
    pending = code.const(flags.type, PENDING * int.from_bytes(pattern, "little"))
    with code.when(code.b.icmp_unsigned("!=", code.b.and_(flags, pending), code.const(flags.type, 0))):
        fail(code, Space.SHARED, Fault.MISSING_WAIT, lane, lane_address(code, lane))


def require_waited(code: Code, lane: ir.Value, width: int) -> None:
    """Emit the fault for a lane whose checked shared access has a byte that a copy may still write."""
    flags = code.load(pointer_of(code, "shadow", lane), ir.IntType(8 * width))
    _require_waited(code, lane, flags, b"\1" * width)


def _element(code: Code, name: str, k: int, size: int) -> ir.Value:
    """Pointer to element ``k`` of lane 0 in ``data`` or ``data2``."""
    return code.at(code.field(name), k * LANES * size)


def load(space: int, size: int, needed: tuple[bool, ...], cell: int) -> str:
    """The helper that reads ``len(needed)`` elements of ``size`` bytes per active lane. Elements that are not needed
    may be uninitialised. ``cell``: bytes per cell of the race check in shared memory, 0 for none."""
    count = len(needed)
    width = size * count
    element = ir.IntType(8 * size)
    pattern = b"".join(bytes([n] * size) for n in needed)
    track = space == Space.SHARED and cell > 0

    def note_lane(code: Code, lane: ir.Value) -> None:
        if not track:
            return
        if all(needed):
            races.note(code, Access(cell, width, 1, lane), writes=False)
            return
        for k in range(count):
            if needed[k]:
                races.note(code, Access(cell, size, 1, lane, skip=k * size), writes=False)

    def load_run(code: Code, general: ir.Block) -> None:
        """All lanes, one behind the other; goes to ``general`` where a byte must not be read."""
        b = code.b
        pointer = pointer_of(code, "host", code.i32(0))
        flags = code.load(pointer_of(code, "shadow", code.i32(0)), vec(I64, LANES * width // 8))
        wanted = code.lanes(I64, np.frombuffer(pattern * LANES, dtype="<u8").tolist())
        either = bytes(flag * (WRITTEN | PENDING if space == Space.SHARED else WRITTEN) for flag in pattern)
        asked = code.lanes(I64, np.frombuffer(either * LANES, dtype="<u8").tolist())
        unset = b.icmp_unsigned("!=", b.and_(flags, asked), wanted)
        move = code.block("move")
        b.cbranch(code.any_bit(unset), general, move)
        b.position_at_end(move)
        if track:
            races.note(code, Access(cell, width, LANES, code.i32(0)), writes=False)
        everything = code.load(pointer, vec(element, LANES * count))
        for k in range(count):
            pick = code.lanes(I32, range(k, LANES * count, count))
            code.store(b.shuffle_vector(everything, everything, pick), _element(code, "data", k, size))
        b.ret(code.i32(0))

    def emit(code: Code) -> None:
        b, mask = code.b, code.function.args[1]
        shape = check_access(code, space, mask, width, reads=True, writes=False)
        uniform, general = code.block("uniform"), code.block("general")
        switch = b.switch(shape, general)
        switch.add_case(code.i32(UNIFORM), uniform)
        if all(needed) or not track:
            dense = code.block("dense")
            switch.add_case(code.i32(DENSE), dense)
            b.position_at_end(dense)
            load_run(code, general)

        b.position_at_end(uniform)
        lane = code.lowest(mask)
        require_initialised(code, space, lane, pattern)
        note_lane(code, lane)
        pointer = pointer_of(code, "host", lane)
        for k in range(count):
            value = code.splat(code.load(code.at(pointer, k * size), element))
            place = _element(code, "data", k, size)
            code.store(b.select(code.bits(mask), value, code.load(place, value.type)), place)
        b.ret(code.i32(0))

        b.position_at_end(general)
        with code.each_lane(mask) as lane:
            require_initialised(code, space, lane, pattern)
            note_lane(code, lane)
            pointer = pointer_of(code, "host", lane)
            for k in range(count):
                value = code.load(code.at(pointer, k * size), element)
                code.store(value, code.lane_at(_element(code, "data", k, size), lane, size))
        b.ret(code.i32(0))

    digits = "".join(str(int(n)) for n in needed)
    return need(f"km.ld.{SPACES[space]}.{size}x{digits}{_tracked(space, cell)}", emit)


def _tracked(space: int, cell: int) -> str:
    return f".c{cell}" if space == Space.SHARED else ""


def _interleave(code: Code, parts: Sequence[ir.Value]) -> ir.Value:
    """The elements of equal vectors in turn: first elements first."""
    if len(parts) == 1:
        return parts[0]
    evens, odds = _interleave(code, parts[0::2]), _interleave(code, parts[1::2])
    n = evens.type.count
    return code.b.shuffle_vector(evens, odds, code.lanes(I32, [i // 2 + n * (i % 2) for i in range(2 * n)]))


def store(space: int, size: int, count: int, cell: int) -> str:
    """The helper that writes ``count`` elements of ``size`` bytes per active lane; the highest lane wins. ``cell``:
    see :func:`load`."""
    width = size * count
    element = ir.IntType(8 * size)
    track = space == Space.SHARED and cell > 0

    def emit(code: Code) -> None:
        b, mask = code.b, code.function.args[1]
        pattern = check_access(code, space, mask, width, reads=False, writes=True)
        code.bump(code.field("stores"), code.i64(1))
        dense, general = code.block("dense"), code.block("general")
        b.cbranch(b.icmp_unsigned("==", pattern, code.i32(DENSE)), dense, general)

        b.position_at_end(dense)
        if space == Space.SHARED:
            flags = code.load(pointer_of(code, "shadow", code.i32(0)), vec(I64, LANES * width // 8))
            pending = b.and_(flags, code.const(flags.type, PENDING * 0x0101010101010101))
            free = code.block("free")
            b.cbranch(code.any_bit(pending), general, free)
            b.position_at_end(free)
        if track:
            access = Access(cell, width, LANES, code.i32(0))
            sure = code.block("sure")
            b.cbranch(races.doubt(code, access, writes=True), general, sure)
            b.position_at_end(sure)
            races.mark(code, access, writes=True)
        parts = [code.load(_element(code, "data", k, size), vec(element)) for k in range(count)]
        code.store(_interleave(code, parts), pointer_of(code, "host", code.i32(0)))
        written = code.const(vec(I64, LANES * width // 8), 0x0101010101010101)
        code.store(written, pointer_of(code, "shadow", code.i32(0)))
        b.ret(code.i32(0))

        b.position_at_end(general)
        with code.each_lane(mask) as lane:
            if space == Space.SHARED:
                require_waited(code, lane, width)
            pointer = pointer_of(code, "host", lane)
            values = [
                code.load(code.lane_at(_element(code, "data", k, size), lane, size), element) for k in range(count)
            ]
            if track:
                there = [code.load(code.at(pointer, k * size), element) for k in range(count)]
                changes = functools.reduce(
                    b.or_, (b.icmp_unsigned("!=", *pair) for pair in zip(values, there, strict=True))
                )
                unset = code.load(pointer_of(code, "shadow", lane), ir.IntType(8 * width))
                unset = b.icmp_unsigned("!=", unset, code.const(unset.type, int("01" * width, 16)))
                with code.when(b.or_(changes, unset)):
                    races.note(code, Access(cell, width, 1, lane), writes=True)
            for k, value in enumerate(values):
                code.store(value, code.at(pointer, k * size))
            flags = code.const(ir.IntType(8 * width), int("01" * width, 16))
            code.store(flags, pointer_of(code, "shadow", lane))
        b.ret(code.i32(0))

    return need(f"km.st.{SPACES[space]}.{size}x{count}{_tracked(space, cell)}", emit)


def generic(name: str, make: Callable[[int], str]) -> str:
    """The helper for generic addresses: ``make(space)`` runs for the lanes of each window."""
    targets = [(SHARED_WINDOW, Space.SHARED), (LOCAL_WINDOW, Space.LOCAL), (0, Space.GLOBAL)]
    helpers = [make(space) for _, space in targets]

    def emit(code: Code) -> None:
        b, mask = code.b, code.function.args[1]
        wide = vec(I64)
        address = code.get("address", wide)
        left = mask
        for (window, _), helper in zip(targets, helpers, strict=True):
            part = left
            if window:
                top = b.lshr(address, code.const(wide, 48))
                inside = b.icmp_unsigned("==", top, code.const(wide, window >> 48))
                part = b.and_(left, code.bits(inside))
            left = b.and_(left, b.not_(part))
            with code.when(b.icmp_unsigned("!=", part, code.i32(0))):
                code.put("address", b.sub(address, code.const(wide, window)))
                result = call_helper(code, helper, part)
                with code.when(b.icmp_unsigned("!=", result, code.i32(0))):
                    b.ret(result)
        b.ret(code.i32(0))

    return need(f"{name}.generic", emit)
