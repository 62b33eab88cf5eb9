"""``ldmatrix``, ``stmatrix`` and ``mma.sync.m16n8k16`` of bf16 or f16 with f32 accumulators.

One result of an MMA is a sum of 17 terms, 16 exact products and the accumulator. The tensor core does not round after
each: it aligns all terms to the largest exponent, cuts each to :data:`FRACTION` bits below it, adds, and cuts the sum
to f32. :data:`FRACTION` and the treatment of zeros, subnormals and overflow are what an H200 does (tests/test_mma.py
holds its words); the form of the model is known from the literature (Fasi et al. 2021, "Numerical behavior of NVIDIA
tensor cores").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import ir

from kernelmill.verify.emulator import races
from kernelmill.verify.emulator.forms import operands
from kernelmill.verify.emulator.interface import Unsupported
from kernelmill.verify.emulator.ir import Instruction, PtxError, Vector
from kernelmill.verify.emulator.memory import check_access, pointer_of, require_initialised, require_waited
from kernelmill.verify.emulator.native import I16, I32, I64, Code, need, vec
from kernelmill.verify.emulator.state import LANES, WRITTEN, Fault, Space

if TYPE_CHECKING:
    from kernelmill.verify.emulator.codegen import KernelCode

ROW = 16
"""Bytes of a matrix row: eight 16-bit elements."""
FRACTION = 25
"""Bits of a term below the leading place of the largest one that reach the sum."""
M, N, K = 16, 8, 16


def _unsupported(instr: Instruction) -> Unsupported:
    return Unsupported(f"PTX line {instr.line}: {instr.name[:120]} is not supported")


# Moving matrices.


def _move_form(instr: Instruction) -> tuple[int, bool]:
    """Matrices and whether they are transposed. Raises Unsupported."""
    left = [m for m in instr.modifiers if m not in ("shared", "shared::cta")]
    counts = {"x1": 1, "x2": 2, "x4": 4}
    if left[:3] != ["sync", "aligned", "m8n8"] or left[3:4] == [] or left[3] not in counts:
        raise _unsupported(instr)
    if left[4:] not in (["b16"], ["trans", "b16"]) or len(left) == len(instr.modifiers):
        raise _unsupported(instr)
    return counts[left[3]], left[4] == "trans"


def _transposed(code: Code) -> None:
    """Exchange the two bytes orders of ``data``: rows of 8 halves of four matrices, and what each lane holds of their
    transposes. The exchange is its own inverse."""
    for matrix in range(4):
        place = code.at(code.field("data"), matrix * 8 * ROW)
        halves = code.load(place, vec(I16, 64))
        # Lane l holds elements (2 (l mod 4) + h, l div 4) of the matrix as its halves h.
        pick = code.lanes(I32, [(2 * (n // 2 % 4) + n % 2) * 8 + n // 2 // 4 for n in range(64)])
        code.store(code.b.shuffle_vector(halves, halves, pick), place)


def load_matrix(count: int, transposed: bool, cell: int) -> str:
    """The helper that reads ``count`` 8x8 matrices, one row of 16 bytes at each of the first ``8 * count`` lanes'
    addresses, into ``data``: element k of all lanes is matrix k's part."""

    def emit(code: Code) -> None:
        mask = code.i32((1 << 8 * count) - 1)
        check_access(code, Space.SHARED, mask, ROW, reads=True, writes=False)
        with code.each_lane(mask) as lane:
            require_initialised(code, Space.SHARED, lane, b"\1" * ROW)
            if cell:
                races.note(code, races.Access(cell, ROW, 1, lane), writes=False)
            row = code.load(pointer_of(code, "host", lane), vec(I64, 2))
            code.store(row, code.lane_at(code.field("data"), lane, ROW))
        if transposed:
            _transposed(code)
        code.b.ret(code.i32(0))

    return need(f"km.ldmatrix.x{count}{'.trans' if transposed else ''}.c{cell}", emit)


def store_matrix(count: int, transposed: bool, cell: int) -> str:
    """The helper that writes what :func:`load_matrix` reads."""

    def emit(code: Code) -> None:
        mask = code.i32((1 << 8 * count) - 1)
        check_access(code, Space.SHARED, mask, ROW, reads=False, writes=True)
        code.bump(code.field("stores"), code.i64(1))
        if transposed:
            _transposed(code)
        with code.each_lane(mask) as lane:
            require_waited(code, lane, ROW)
            if cell:
                races.note(code, races.Access(cell, ROW, 1, lane), writes=True)
            row = code.load(code.lane_at(code.field("data"), lane, ROW), vec(I64, 2))
            code.store(row, pointer_of(code, "host", lane))
            flags = code.const(ir.IntType(8 * ROW), WRITTEN * int("01" * ROW, 16))
            code.store(flags, pointer_of(code, "shadow", lane))
        code.b.ret(code.i32(0))

    return need(f"km.stmatrix.x{count}{'.trans' if transposed else ''}.c{cell}", emit)


def _all_lanes(code: KernelCode, instr: Instruction) -> None:
    """All 32 lanes must execute it (PTX ISA: otherwise undefined)."""
    if instr.guard is not None:
        raise Unsupported(f"PTX line {instr.line}: {instr.name[:120]} with a guard is not supported")
    code.fail_where(Fault.NOT_A_MEMBER, instr, code.b.not_(code.mask))


def emit_load_matrix(code: KernelCode, instr: Instruction) -> None:
    count, transposed = _move_form(instr)
    registers, address = operands(instr, 2)
    _all_lanes(code, instr)
    code.put_address(address, instr)
    code.call(load_matrix(count, transposed, code.cell), instr, code.mask)
    for k, item in enumerate(code.items(registers, count, instr)):
        code.write(item, code.load(code.data(k, 4), vec(I32)), instr)


def emit_store_matrix(code: KernelCode, instr: Instruction) -> None:
    count, transposed = _move_form(instr)
    address, registers = operands(instr, 2)
    _all_lanes(code, instr)
    code.put_address(address, instr)
    for k, item in enumerate(code.items(registers, count, instr)):
        code.store(code.fetch(item, 32, instr), code.data(k, 4))
    code.call(store_matrix(count, transposed, code.cell), instr, code.mask)


# Multiplying.


def emit_mma(code: KernelCode, instr: Instruction) -> None:
    kind = instr.modifiers[6] if len(instr.modifiers) == 9 else ""
    shape = ("sync", "aligned", "m16n8k16", "row", "col", "f32", kind, kind, "f32")
    if kind not in ("bf16", "f16") or instr.modifiers != shape:
        raise _unsupported(instr)
    d, a, b, c = operands(instr, 4)
    _all_lanes(code, instr)
    at = 0
    for operand, count in ((a, 4), (b, 2)):
        for item in code.items(operand, count, instr):
            code.store(code.fetch(item, 32, instr), code.data(at, 4))
            at += 1
    for k, item in enumerate(code.items(c, 4, instr)):
        code.store(code.fetch(item, 32, instr), code.data(k, 4, "data2"))
    code.call(multiply(kind), instr, code.mask)
    if not isinstance(d, Vector):
        raise PtxError(instr.line, f"{instr.name[:100]}: needs 4 values")
    for k, item in enumerate(code.items(d, 4, instr)):
        code.write(item, code.load(code.data(k, 4, "data2"), vec(I32)), instr)


_F32, _F64 = ir.FloatType(), ir.DoubleType()
_COLUMNS = vec(I32, N)
_BITS = {"bf16": (8, 7), "f16": (5, 10)}
"""Bits of the exponent and of the fraction."""
_NAN = 0x7FFFFFFF
_NO_TERM = -4096
"""Exponent of a term that is zero: it never decides the alignment."""


def _decode(code: Code, bits: ir.Value, exponent_bits: int, fraction_bits: int) -> tuple[ir.Value, ir.Value]:
    """Magnitude of the significand, and exponent with its bias, of finite floats in integers of any width."""
    b, type = code.b, bits.type
    top = (1 << exponent_bits) - 1
    exponent = b.and_(b.lshr(bits, code.const(type, fraction_bits)), code.const(type, top))
    fraction = b.and_(bits, code.const(type, (1 << fraction_bits) - 1))
    subnormal = b.icmp_unsigned("==", exponent, code.const(type, 0))
    significand = b.select(subnormal, fraction, b.or_(fraction, code.const(type, 1 << fraction_bits)))
    exponent = b.select(subnormal, code.const(type, 1), exponent)
    zero = b.icmp_unsigned("==", significand, code.const(type, 0))
    return significand, b.select(zero, code.const(type, _NO_TERM), exponent)


def _signed(code: Code, magnitude: ir.Value, negative: ir.Value) -> ir.Value:
    """``negative``: all bits set where the sign is minus, else none."""
    return code.b.sub(code.b.xor(magnitude, negative), negative)


def _abs(code: Code, value: ir.Value) -> ir.Value:
    sign = code.b.ashr(value, code.const(value.type, 31))
    return _signed(code, value, sign)


def _aligned(code: Code, magnitude: ir.Value, places: ir.Value) -> ir.Value:
    """A term's magnitude, moved down by ``places`` and cut."""
    b = code.b
    most = code.const(places.type, 31)
    return b.lshr(magnitude, b.select(b.icmp_unsigned("<", places, most), places, most))


def _to_single(code: Code, exact: ir.Value) -> ir.Value:
    """f64 to the bits of f32, towards zero; what is too large becomes infinite."""
    b = code.b
    wide = vec(I64, N)
    bits = b.bitcast(exact, wide)
    cut = b.bitcast(b.and_(bits, code.const(wide, -(1 << 29))), exact.type)
    unit, count = (ir.Constant(exact.type, [float(2.0**p)] * N) for p in (-149, 149))
    whole = code.intrinsic(f"llvm.trunc.v{N}f64", exact.type, b.fmul(exact, count))
    magnitude = b.bitcast(b.and_(bits, code.const(wide, (1 << 63) - 1)), exact.type)
    small = b.fcmp_ordered("<", magnitude, ir.Constant(exact.type, [float(2.0**-126)] * N))
    result = b.select(small, b.fmul(whole, unit), cut)
    return b.bitcast(b.fptrunc(result, vec(_F32, N)), _COLUMNS)


def multiply(kind: str) -> str:
    """The helper for one MMA: A and B in ``data`` as 6 registers per lane, C in ``data2``, where D goes too."""
    exponent_bits, fraction_bits = _BITS[kind]
    bias = (1 << exponent_bits - 1) - 1
    top = (1 << exponent_bits) - 1

    def emit(code: Code) -> None:
        b = code.b
        halves = vec(I32, 2 * LANES)
        a_significands, a_exponents = (b.alloca(halves, size=4) for _ in range(2))
        special = code.const(ir.IntType(1), 0)

        def is_special(bits: ir.Value, exponent: int) -> ir.Value:
            field = b.and_(bits, code.const(bits.type, exponent))
            flags = b.zext(b.icmp_unsigned("==", field, code.const(bits.type, exponent)), bits.type)
            return code.any_bit(flags)

        for r in range(4):
            raw = code.load(code.at(code.field("data"), r * LANES * 4), vec(I16, 2 * LANES), 4)
            special = b.or_(special, is_special(raw, top << fraction_bits))
            bits = b.zext(raw, halves)
            significand, exponent = _decode(code, bits, exponent_bits, fraction_bits)
            negative = b.sub(code.const(halves, 0), b.lshr(bits, code.const(halves, 15)))
            code.store(_signed(code, significand, negative), code.at(a_significands, r * 256), 4)
            code.store(exponent, code.at(a_exponents, r * 256), 4)

        columns, b_significands, b_exponents = [], [], []
        for k in range(K):
            raw = ir.Constant(vec(I16, N), ir.Undefined)
            for n in range(N):
                at = 4 * LANES * 4 + (k // 8 * LANES + n * 4 + k % 8 // 2) * 4 + k % 2 * 2
                raw = b.insert_element(raw, code.load(code.at(code.field("data"), at), I16, 2), code.i32(n))
            special = b.or_(special, is_special(raw, top << fraction_bits))
            bits = b.zext(raw, _COLUMNS)
            significand, exponent = _decode(code, bits, exponent_bits, fraction_bits)
            negative = b.sub(code.const(_COLUMNS, 0), b.lshr(bits, code.const(_COLUMNS, 15)))
            columns.append(raw)
            b_significands.append(_signed(code, significand, negative))
            b_exponents.append(exponent)
        for r in range(4):
            raw = code.load(code.at(code.field("data2"), r * LANES * 4), vec(I32), 4)
            special = b.or_(special, is_special(raw, 0x7F800000))

        with code.loop(8) as group:
            for half in range(2):
                _row(code, kind, bias, fraction_bits, group, half, a_significands, a_exponents, b_significands,
                     b_exponents, columns, special)  # fmt: skip
        b.ret(code.i32(0))

    return need(f"km.mma.{kind}", emit)


def _row(
    code: Code,
    kind: str,
    bias: int,
    fraction_bits: int,
    group: ir.Value,
    half: int,
    a_significands: ir.Value,
    a_exponents: ir.Value,
    b_significands: list[ir.Value],
    b_exponents: list[ir.Value],
    columns: list[ir.Value],
    special: ir.Value,
) -> None:
    """Row ``group + 8 * half`` of D: its N columns are the vector."""
    b = code.b
    base = b.mul(b.zext(group, I64), code.i64(32))
    pair = [code.at(code.at(code.field("data2"), (2 * half + h) * LANES * 4), b.mul(b.zext(group, I64), code.i64(16)))
            for h in range(2)]  # fmt: skip
    quads = [code.load(p, vec(I32, 4), 4) for p in pair]
    c = b.shuffle_vector(*quads, code.lanes(I32, [n // 2 + 4 * (n % 2) for n in range(N)]))
    c_significand, c_exponent = _decode(code, c, 8, 23)
    c_exponent = b.sub(c_exponent, code.const(_COLUMNS, 127))

    def operand(where: ir.Value, k: int) -> ir.Value:
        """a[row, k], decoded, in all columns."""
        at = ((half + 2 * (k // 8)) * LANES + k % 8 // 2) * 8 + k % 2 * 4
        return code.splat(code.load(code.at(code.at(where, at), base), I32, 4), N)

    exponents = [b.add(operand(a_exponents, k), b_exponents[k]) for k in range(K)]
    most = b.add(c_exponent, code.const(_COLUMNS, 2 * bias))
    for exponent in exponents:
        most = b.select(b.icmp_signed(">", exponent, most), exponent, most)
    total = code.const(_COLUMNS, 0)
    for k in range(K):
        product = b.mul(operand(a_significands, k), b_significands[k])
        raised = b.shl(_abs(code, product), code.const(_COLUMNS, FRACTION - 2 * fraction_bits))
        term = _aligned(code, raised, b.sub(most, exponents[k]))
        total = b.add(total, _signed(code, term, b.ashr(product, code.const(_COLUMNS, 31))))
    most = b.sub(most, code.const(_COLUMNS, 2 * bias))
    raised = b.shl(c_significand, code.const(_COLUMNS, FRACTION - 23))
    term = _aligned(code, raised, b.sub(most, c_exponent))
    addend = _signed(code, term, b.ashr(c, code.const(_COLUMNS, 31)))

    # Both parts and their sum are integers below 2^33, exact in f64.
    doubles = vec(_F64, N)
    exact = b.fadd(b.sitofp(total, doubles), b.sitofp(addend, doubles))
    floor = code.const(_COLUMNS, -600)  # all terms zero
    most = b.select(b.icmp_signed(">", most, floor), most, floor)
    scale = b.shl(b.zext(b.add(most, code.const(_COLUMNS, 1023 - FRACTION)), vec(I64, N)), code.const(vec(I64, N), 52))
    d = _to_single(code, b.fmul(exact, b.bitcast(scale, doubles)))

    def store(value: ir.Value) -> None:
        for h in range(2):
            code.store(b.shuffle_vector(value, value, code.lanes(I32, range(h, N, 2))), pair[h], 4)

    store(d)
    with code.when(special):
        # Infinities and NaNs as f64 arithmetic has them; finite f64 sums cannot overflow.
        halves = code.field("data")
        f64 = b.fpext(b.bitcast(c, vec(_F32, N)), doubles)
        for k in range(K):
            at = ((half + 2 * (k // 8)) * LANES + k % 8 // 2) * 4 + k % 2 * 2
            lane = code.load(code.at(code.at(halves, at), b.mul(b.zext(group, I64), code.i64(16))), I16, 2)
            f64 = b.fadd(f64, b.fmul(*(_double(code, kind, v) for v in (code.splat(lane, N), columns[k]))))
        bits = b.bitcast(f64, vec(I64, N))
        magnitude = b.and_(bits, code.const(bits.type, (1 << 63) - 1))
        infinite = b.icmp_unsigned("==", magnitude, code.const(bits.type, 0x7FF << 52))
        nan = b.icmp_unsigned(">", magnitude, code.const(bits.type, 0x7FF << 52))
        high = b.trunc(b.lshr(bits, code.const(bits.type, 32)), _COLUMNS)
        signed = b.or_(b.and_(high, code.const(_COLUMNS, 1 << 31)), code.const(_COLUMNS, 0x7F800000))
        store(b.select(nan, code.const(_COLUMNS, _NAN), b.select(infinite, signed, d)))


def _double(code: Code, kind: str, bits: ir.Value) -> ir.Value:
    """16-bit floats as f64."""
    b = code.b
    doubles = vec(_F64, N)
    if kind == "f16":
        return b.fpext(b.bitcast(bits, vec(ir.HalfType(), N)), doubles)
    return b.fpext(b.bitcast(b.shl(b.zext(bits, _COLUMNS), code.const(_COLUMNS, 16)), vec(_F32, N)), doubles)
