"""``cp.async``: copies from global to shared memory that end when their lane waits for them, or earlier.

An issued copy is checked at once, so that a fault names the instruction that asked for it. Its bytes in shared memory
are pending until the lane waits (``cp.async.wait_group``): any access to them is ``missing_wait``, whoever makes it.
When the bytes really move is up to the hardware: at once, at the wait, or at random (:data:`MODES`), so that wrong code
also computes wrong values. Groups are counted per lane (PTX ISA, cp.async.commit_group).
"""

from __future__ import annotations

from llvmlite import ir

from kernelmill.verify.emulator import races
from kernelmill.verify.emulator.memory import check_access, fail, require_waited
from kernelmill.verify.emulator.native import I8, I32, I64, PTR, Code, need, vec
from kernelmill.verify.emulator.state import (
    COPY,
    COPY_FIELD,
    MAX_COPIES,
    PENDING,
    WRITTEN,
    Fault,
    Space,
)

SIZES = (4, 8, 16)
"""Bytes that one lane may copy (PTX ISA, cp.async)."""
MODES = ("eager", "late", "random")
"""Index: the header's ``copies_mode``."""
_LCG = (1664525, 1013904223)
"""Multiplier and increment of the generator behind "random" (Numerical Recipes, "quick and dirty")."""


def _record(code: Code, number: ir.Value) -> ir.Value:
    slot = code.b.and_(number, code.i32(MAX_COPIES - 1))
    return code.at(code.get("copies", PTR), code.b.mul(code.b.zext(slot, I64), code.i64(COPY.itemsize)))


def _field(code: Code, record: ir.Value, name: str) -> ir.Value:
    return code.at(record, COPY_FIELD[name])


def issue(size: int, cell: int) -> str:
    """The helper for one ``cp.async`` of ``size`` bytes per lane: from ``address`` to ``data2``, with ``data`` bytes
    read (i64, i64 and i32 per lane). ``cell``: see :func:`.memory.load`."""

    def emit(code: Code) -> None:
        b, mask = code.b, code.function.args[1]
        wide = vec(I64)
        end = code.get("copies_end", I32)
        used = b.sub(end, code.get("copies_first", I32))
        with code.when(b.icmp_unsigned(">=", used, code.i32(MAX_COPIES))):
            fail(code, Space.SHARED, Fault.COPIES_FULL, code.lowest(mask), code.i64(0))
        record = _record(code, end)
        wanted = code.load(code.field("data"), vec(I32))
        limit = code.const(vec(I32), size)
        wanted = b.select(b.icmp_unsigned("<", wanted, limit), wanted, limit)
        whole = b.and_(mask, code.bits(b.icmp_unsigned("==", wanted, limit)))
        none = b.and_(mask, code.bits(b.icmp_unsigned("==", wanted, code.const(vec(I32), 0))))
        part = b.and_(mask, b.not_(b.or_(whole, none)))
        source = code.get("address", wide)
        with code.when(b.icmp_unsigned("!=", part, code.i32(0))):
            # The last byte, then the first: what lies between is in the same tensor.
            last = b.sub(b.add(source, b.zext(wanted, wide)), code.const(wide, 1))
            code.put("address", last)
            check_access(code, Space.GLOBAL, part, 1, reads=True, writes=False)
            code.put("address", source)
            check_access(code, Space.GLOBAL, part, 1, reads=True, writes=False)
        with code.when(b.icmp_unsigned("!=", whole, code.i32(0))):
            check_access(code, Space.GLOBAL, whole, size, reads=True, writes=False)
        code.store(code.get("host", wide), _field(code, record, "from"))
        code.store(code.get("shadow", wide), _field(code, record, "from_shadow"))

        code.put("address", code.load(code.field("data2"), wide))
        check_access(code, Space.SHARED, mask, size, reads=False, writes=True)
        code.bump(code.field("stores"), code.i64(1))
        with code.each_lane(mask) as lane:
            require_waited(code, lane, size)
            if cell:
                races.note(code, races.Access(cell, size, 1, lane), writes=True)
            flags = code.const(ir.IntType(8 * size), PENDING * int("01" * size, 16))
            code.store(flags, code.load(code.lane_at(code.field("shadow"), lane, 8), PTR))
        code.store(code.get("host", wide), _field(code, record, "to"))
        code.store(code.get("shadow", wide), _field(code, record, "to_shadow"))
        code.store(wanted, _field(code, record, "count"))
        code.store(code.get("copies_groups", vec(I32)), _field(code, record, "group"))
        code.store(mask, _field(code, record, "lanes"))
        code.store(code.i32(size), _field(code, record, "size"))
        code.put("copies_end", b.add(end, code.i32(1)))

        draw = b.add(b.mul(code.get("copies_random", I32), code.i32(_LCG[0])), code.i32(_LCG[1]))
        code.put("copies_random", draw)
        mode = code.get("copies_mode", I32)
        heads = b.and_(b.icmp_unsigned("==", mode, code.i32(2)), b.icmp_signed("<", draw, code.i32(0)))
        now = b.or_(b.icmp_unsigned("==", mode, code.i32(0)), heads)
        code.store(b.zext(now, I32), _field(code, record, "moved"))
        with code.when(now), code.each_lane(mask) as lane:
            _move(code, record, lane)
        b.ret(code.i32(0))

    return need(f"km.cp.{size}.c{cell}", emit)


def _lane_of(code: Code, record: ir.Value, name: str, lane: ir.Value, type: ir.Type) -> ir.Value:
    return code.load(code.lane_at(_field(code, record, name), lane, type.width // 8 if type != PTR else 8), type)


def _move(code: Code, record: ir.Value, lane: ir.Value) -> None:
    """Copy a lane's bytes and fill up with zeros."""
    b = code.b
    to, source = (_lane_of(code, record, name, lane, PTR) for name in ("to", "from"))
    count = _lane_of(code, record, "count", lane, I32)
    size = code.load(_field(code, record, "size"), I32)
    for n in SIZES:
        whole = b.and_(b.icmp_unsigned("==", count, code.i32(n)), b.icmp_unsigned("==", size, code.i32(n)))
        with code.when(whole):
            code.store(code.load(source, ir.IntType(8 * n)), to)
    with code.when(b.icmp_unsigned("!=", count, size)), code.loop(max(SIZES)) as i:
        at = b.zext(i, I64)
        with code.when(b.icmp_unsigned("<", i, size)):
            code.store(code.const(I8, 0), code.at(to, at))
        with code.when(b.icmp_unsigned("<", i, count)):
            code.store(code.load(code.at(source, at), I8), code.at(to, at))


def _settle(code: Code, record: ir.Value, lane: ir.Value, cell: int) -> None:
    """The bytes of a lane are no longer pending; those from nobody's writing are uninitialised here too."""
    b = code.b
    shadow, source = (_lane_of(code, record, name, lane, PTR) for name in ("to_shadow", "from_shadow"))
    count = _lane_of(code, record, "count", lane, I32)
    size = code.load(_field(code, record, "size"), I32)
    for n in SIZES:
        with code.when(b.and_(b.icmp_unsigned("==", size, code.i32(n)), b.icmp_unsigned("==", count, size))):
            code.store(code.load(source, ir.IntType(8 * n)), shadow)
    with code.when(b.icmp_unsigned("!=", count, size)), code.loop(max(SIZES)) as i:
        at = b.zext(i, I64)
        with code.when(b.icmp_unsigned("<", i, size)):
            code.store(code.const(I8, WRITTEN), code.at(shadow, at))
        with code.when(b.icmp_unsigned("<", i, count)):
            code.store(code.load(code.at(source, at), I8), code.at(shadow, at))
    if cell:
        first = _lane_of(code, record, "to_shadow", lane, I64)
        place = code.at(code.get("race_writes", PTR), races.cell_offset(code, cell, first))
        for n in SIZES:
            with code.when(b.icmp_unsigned("==", size, code.i32(n))):
                code.store(code.splat(races.stamp(code), n // cell), place, 4)


def wait(newest: int | None, cell: int) -> str:
    """The helper for ``cp.async.wait_group newest``: the lanes wait for all their groups but the ``newest``; None for
    ``cp.async.wait_all``, which also waits for what is in no group yet."""

    def emit(code: Code) -> None:
        b, mask = code.b, code.function.args[1]
        end = code.get("copies_end", I32)
        groups = code.get("copies_groups", vec(I32))
        cursor = b.alloca(I32)
        code.store(code.get("copies_first", I32), cursor, 4)
        head, body, done = code.block(), code.block(), code.block()
        b.branch(head)
        b.position_at_end(head)
        number = code.load(cursor, I32, 4)
        b.cbranch(b.icmp_unsigned("!=", number, end), body, done)
        b.position_at_end(body)
        record = _record(code, number)
        lanes = code.load(_field(code, record, "lanes"), I32)
        over = b.and_(lanes, mask)
        if newest is not None:
            theirs = code.load(_field(code, record, "group"), vec(I32))
            old = b.icmp_unsigned("<", b.add(theirs, code.const(theirs.type, newest)), groups)
            over = b.and_(over, code.bits(old))
        unmoved = b.icmp_unsigned("==", code.load(_field(code, record, "moved"), I32), code.i32(0))
        with code.each_lane(over) as lane:
            with code.when(unmoved):
                _move(code, record, lane)
            _settle(code, record, lane, cell)
        left = b.and_(lanes, b.not_(over))
        code.store(left, _field(code, record, "lanes"))
        following = b.add(number, code.i32(1))
        oldest = b.icmp_unsigned("==", number, code.get("copies_first", I32))
        with code.when(b.and_(oldest, b.icmp_unsigned("==", left, code.i32(0)))):
            code.put("copies_first", following)
        code.store(following, cursor, 4)
        b.branch(head)
        b.position_at_end(done)
        b.ret(code.i32(0))

    return need(f"km.cp.wait.{'all' if newest is None else newest}.c{cell}", emit)
