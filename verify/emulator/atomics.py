"""Native helpers for ``atom`` and ``red``: lanes one after another, lowest first."""

from __future__ import annotations

from llvmlite import ir

from kernelmill.verify.emulator.forms import AtomForm
from kernelmill.verify.emulator.memory import check_access, pointer_of, require_initialised
from kernelmill.verify.emulator.native import I16, I32, I64, Code, need
from kernelmill.verify.emulator.state import LANES, SPACES, Space


def atomic(space: int, form: AtomForm) -> str:
    """The helper that combines ``data`` (and ``data2`` for ``cas``: compare, then value) with memory and leaves the old
    values in ``data``. The context's ``stores`` counts it only where memory changed, so that polling is no progress."""
    size, count = form.size, form.count
    element = ir.IntType(8 * size)
    # "The current implementation of atom.add.f32 on global memory flushes subnormals" (PTX ISA, atom).
    flush = form.kind == "f32" and space == Space.GLOBAL

    def emit(code: Code) -> None:
        b, mask = code.b, code.function.args[1]
        check_access(code, space, mask, size * count, reads=True, writes=True)
        with code.each_lane(mask) as lane:
            require_initialised(code, space, lane, b"\1" * (size * count))
            pointer = pointer_of(code, "host", lane)
            for k in range(count):
                place = code.at(pointer, k * size)
                mine = code.lane_at(code.at(code.field("data"), k * LANES * size), lane, size)
                other = code.lane_at(code.at(code.field("data2"), k * LANES * size), lane, size)
                old, operand = code.load(place, element), code.load(mine, element)
                if form.operation == "cas":
                    same = b.icmp_unsigned("==", old, operand)
                    new = b.select(same, code.load(other, element), old)
                else:
                    new = _combine(code, form, old, operand, flush)
                code.store(new, place)
                code.store(old, mine)
                code.bump(code.field("stores"), b.zext(b.icmp_unsigned("!=", old, new), I64))
        b.ret(code.i32(0))

    return need(f"km.{form.operation}.{form.kind}x{count}.{SPACES[space]}", emit)


def _combine(code: Code, form: AtomForm, old: ir.Value, operand: ir.Value, flush: bool) -> ir.Value:
    b = code.b
    zero, one = code.const(old.type, 0), code.const(old.type, 1)
    match form.operation:
        case "exch":
            return operand
        case "and":
            return b.and_(old, operand)
        case "or":
            return b.or_(old, operand)
        case "xor":
            return b.xor(old, operand)
        case "inc":
            return b.select(b.icmp_unsigned(">=", old, operand), zero, b.add(old, one))
        case "dec":
            wrap = b.or_(b.icmp_unsigned("==", old, zero), b.icmp_unsigned(">", old, operand))
            return b.select(wrap, operand, b.sub(old, one))
        case "min" | "max":
            compare = b.icmp_signed if form.kind.startswith("s") else b.icmp_unsigned
            return b.select(compare("<" if form.operation == "min" else ">", old, operand), old, operand)
    assert form.operation == "add"
    if form.kind[0] in "us":
        return b.add(old, operand)
    if form.kind == "f64":
        return _add_double(code, old, operand)
    if form.kind == "f32":
        return _add_single(code, old, operand, flush)
    half = _add_bf16 if form.kind.startswith("bf16") else _add_half
    if not form.kind.endswith("x2"):
        return half(code, old, operand)
    low, high = (half(code, *(b.trunc(b.lshr(x, code.i32(shift)), I16) for x in (old, operand))) for shift in (0, 16))
    return b.or_(b.zext(low, I32), b.shl(b.zext(high, I32), code.i32(16)))


def _canonical(code: Code, value: ir.Value, nan: int, bits: ir.Type) -> ir.Value:
    """The bits of a float, with PTX's one NaN."""
    number = code.b.fcmp_ordered("ord", value, value)
    return code.b.select(number, code.b.bitcast(value, bits), code.const(bits, nan))


def _add_double(code: Code, x: ir.Value, y: ir.Value) -> ir.Value:
    b = code.b
    total = b.fadd(*(b.bitcast(v, ir.DoubleType()) for v in (x, y)))
    return _canonical(code, total, 0x7FF8000000000000, I64)


def _flush(code: Code, bits: ir.Value) -> ir.Value:
    b = code.b
    subnormal = b.icmp_unsigned("==", b.and_(bits, code.i32(0x7F800000)), code.i32(0))
    return b.select(subnormal, b.and_(bits, code.i32(0x80000000)), bits)


def _add_single(code: Code, x: ir.Value, y: ir.Value, flush: bool) -> ir.Value:
    b = code.b
    if flush:
        x, y = _flush(code, x), _flush(code, y)
    result = _canonical(code, b.fadd(*(b.bitcast(v, ir.FloatType()) for v in (x, y))), 0x7FFFFFFF, I32)
    return _flush(code, result) if flush else result


def _add_half(code: Code, x: ir.Value, y: ir.Value) -> ir.Value:
    """The sum in f32 then rounded: exact, as 24 >= 2 * 11 + 2 bits make the second rounding harmless."""
    b = code.b
    total = b.fadd(*(b.fpext(b.bitcast(v, ir.HalfType()), ir.FloatType()) for v in (x, y)))
    return _canonical(code, b.fptrunc(total, ir.HalfType()), 0x7FFF, I16)


def _add_bf16(code: Code, x: ir.Value, y: ir.Value) -> ir.Value:
    """As :func:`_add_half`: 24 >= 2 * 8 + 2. Rounds to nearest even by an integer addition to the f32's bits."""
    b = code.b
    wide = [b.bitcast(b.shl(b.zext(v, I32), code.i32(16)), ir.FloatType()) for v in (x, y)]
    total = b.fadd(*wide)
    bits = b.bitcast(total, I32)
    odd = b.and_(b.lshr(bits, code.i32(16)), code.i32(1))
    rounded = b.lshr(b.add(bits, b.add(odd, code.i32(0x7FFF))), code.i32(16))
    return b.select(b.fcmp_ordered("ord", total, total), b.trunc(rounded, I16), code.const(I16, 0x7FFF))
