"""``ldmatrix``, ``stmatrix`` and ``mma.sync.m16n8k16`` of bf16 or f16 with f32 accumulators.

One result of an MMA is a sum of 17 terms, 16 exact products and the accumulator. The tensor core does not round after
each: it aligns all terms to the largest exponent, cuts each to :data:`FRACTION` bits below it, adds, and cuts the sum
to f32. :data:`FRACTION` and the treatment of zeros, subnormals and overflow are what an H200 does (tests/test_mma.py
holds its words); the form of the model is known from the literature (Fasi et al. 2021, "Numerical behavior of NVIDIA
tensor cores").
"""

from __future__ import annotations

from dataclasses import dataclass
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


def _bfloat_or_half(code: Code, kind: str, bits: ir.Value) -> ir.Value:
    """f32 of 16-bit floats that are the low halves of 32-bit lanes."""
    b = code.b
    count = bits.type.count
    if kind == "f16":
        return b.fpext(b.bitcast(b.trunc(bits, vec(I16, count)), vec(ir.HalfType(), count)), vec(_F32, count))
    return b.bitcast(b.shl(bits, code.const(bits.type, 16)), vec(_F32, count))


@dataclass(frozen=True)
class _Operands:
    """A in memory, 4 registers of 64 elements; B and its parts as one vector of columns per k."""

    kind: str
    a_bits: ir.Value
    a_values: ir.Value
    a_exponents: ir.Value
    b_bits: list[ir.Value]
    b_exponents: list[ir.Value]

    @property
    def bias(self) -> int:
        return (1 << _BITS[self.kind][0] - 1) - 1

    def a(self, code: Code, where: ir.Value, type: ir.Type, group: ir.Value, half: int, k: int) -> ir.Value:
        """Element [group + 8 * half, k] of an array over A, in all columns."""
        at = ((half + 2 * (k // 8)) * LANES + k % 8 // 2) * 8 + k % 2 * 4
        row = code.b.mul(code.b.zext(group, I64), code.i64(32))
        return code.splat(code.load(code.at(code.at(where, at), row), type, 4), N)


NEAR = 40
"""Binades around 1 within which f32 holds every product, scaled to any alignment, exactly."""


def multiply(kind: str) -> str:
    """The helper for one MMA: A and B in ``data`` as 6 registers per lane, C in ``data2``, where D goes too.

    Operands whose exponents are moderate, nearly all there are, take a path through f32, where the conversion to an
    integer is the cut; the others one through integers.
    """
    exponent_bits, fraction_bits = _BITS[kind]
    bias = (1 << exponent_bits - 1) - 1
    top = (1 << exponent_bits) - 1

    def emit(code: Code) -> None:
        b = code.b
        halves = vec(I32, 2 * LANES)
        arrays = [b.alloca(vec(element, 2 * LANES), size=4) for element in (I32, _F32, I32)]
        special = far = code.const(ir.IntType(1), 0)

        def look(bits: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
            """Exponents, whether any is infinite or NaN, whether any is out of the f32 path's range."""
            field = b.and_(b.lshr(bits, code.const(bits.type, fraction_bits)), code.const(bits.type, top))
            zero = b.icmp_unsigned("==", b.and_(bits, code.const(bits.type, 0x7FFF)), code.const(bits.type, 0))
            infinite = b.icmp_unsigned("==", field, code.const(bits.type, top))
            subnormal = b.icmp_unsigned("==", field, code.const(bits.type, 0))
            exponent = b.select(subnormal, code.const(bits.type, 1), field)
            least, most = max(bias - NEAR, 0), min(bias + NEAR, top - 1)
            beyond = b.icmp_unsigned(
                ">", b.sub(field, code.const(bits.type, least)), code.const(bits.type, most - least)
            )
            beyond = b.and_(beyond, b.not_(zero))
            exponent = b.select(zero, code.const(bits.type, _NO_TERM), exponent)
            return exponent, *(code.any_bit(b.zext(f, bits.type)) for f in (infinite, beyond))

        for r in range(4):
            bits = b.zext(code.load(code.at(code.field("data"), r * LANES * 4), vec(I16, 2 * LANES), 4), halves)
            exponent, infinite, beyond = look(bits)
            special, far = b.or_(special, infinite), b.or_(far, beyond)
            for where, value in zip(arrays, (bits, _bfloat_or_half(code, kind, bits), exponent), strict=True):
                code.store(value, code.at(where, r * 256), 4)
        b_bits, b_exponents = [], []
        for k in range(0, K, 2):
            words = code.load(code.at(code.field("data"), (4 + k // 8) * LANES * 4), vec(I32), 4)
            pair = b.shuffle_vector(words, words, code.lanes(I32, [n * 4 + k % 8 // 2 for n in range(N)]))
            b_bits += [b.and_(pair, code.const(_COLUMNS, 0xFFFF)), b.lshr(pair, code.const(_COLUMNS, 16))]
        for bits in b_bits:
            exponent, infinite, beyond = look(bits)
            special, far = b.or_(special, infinite), b.or_(far, beyond)
            b_exponents.append(exponent)
        for r in range(4):
            raw = code.load(code.at(code.field("data2"), r * LANES * 4), vec(I32), 4)
            field = b.and_(b.lshr(raw, code.const(raw.type, 23)), code.const(raw.type, 255))
            zero = b.icmp_unsigned("==", b.shl(raw, code.const(raw.type, 1)), code.const(raw.type, 0))
            small = b.and_(b.icmp_unsigned("<", field, code.const(raw.type, 127 - 2 * NEAR)), b.not_(zero))
            infinite = b.icmp_unsigned("==", field, code.const(raw.type, 255))
            special = b.or_(special, code.any_bit(b.zext(infinite, raw.type)))
            far = b.or_(far, code.any_bit(b.zext(small, raw.type)))

        a_bits, a_values, a_exponents = arrays
        operands_ = _Operands(kind, a_bits, a_values, a_exponents, b_bits, b_exponents)
        exact = code.block()
        quick = code.block()
        b.cbranch(b.or_(far, special), exact, quick)
        b.position_at_end(quick)
        b_values = [_bfloat_or_half(code, kind, bits) for bits in b_bits]
        with code.loop(8) as group:
            for half in range(2):
                row = _Row(code, group, half)
                row.store(_quick(code, operands_, b_values, row))
        b.ret(code.i32(0))
        b.position_at_end(exact)
        with code.loop(8) as group:
            for half in range(2):
                row = _Row(code, group, half)
                d = _exact(code, operands_, row)
                row.store(d)
                with code.when(special):
                    row.store(_special(code, operands_, row, d))
        b.ret(code.i32(0))

    return need(f"km.mma.{kind}", emit)


class _Row:
    """Row ``group + 8 * half`` of C and D, whose N columns are a vector."""

    def __init__(self, code: Code, group: ir.Value, half: int) -> None:
        self.code, self.group, self.half = code, group, half
        at = code.b.mul(code.b.zext(group, I64), code.i64(16))
        self.places = [code.at(code.at(code.field("data2"), (2 * half + h) * LANES * 4), at) for h in range(2)]
        quads = [code.load(place, vec(I32, 4), 4) for place in self.places]
        self.c = code.b.shuffle_vector(*quads, code.lanes(I32, [n // 2 + 4 * (n % 2) for n in range(N)]))

    def store(self, value: ir.Value) -> None:
        for h, place in enumerate(self.places):
            part = self.code.b.shuffle_vector(value, value, self.code.lanes(I32, range(h, N, 2)))
            self.code.store(part, place, 4)


def _most(code: Code, o: _Operands, row: _Row, c_exponent: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
    """The largest exponent of any term, and those of the products; all with twice the bias."""
    b = code.b
    most = b.add(c_exponent, code.const(_COLUMNS, 2 * o.bias - 127))
    exponents = []
    for k in range(K):
        exponents.append(b.add(o.a(code, o.a_exponents, I32, row.group, row.half, k), o.b_exponents[k]))
        most = code.intrinsic(f"llvm.smax.v{N}i32", _COLUMNS, exponents[k], most)
    return most, exponents


def _power(code: Code, exponent: ir.Value) -> ir.Value:
    """f64 of two to the ``exponent``."""
    wide = vec(I64, N)
    biased = code.b.add(exponent, code.const(_COLUMNS, 1023))
    return code.b.bitcast(code.b.shl(code.b.zext(biased, wide), code.const(wide, 52)), vec(_F64, N))


def _sum(code: Code, total: ir.Value, addend: ir.Value, most: ir.Value) -> ir.Value:
    """D of both parts, integers below 2^33 in units of two to the (``most`` - FRACTION): exact in f64."""
    b = code.b
    doubles = vec(_F64, N)
    exact = b.fadd(b.sitofp(total, doubles), b.sitofp(addend, doubles))
    most = code.intrinsic(f"llvm.smax.v{N}i32", _COLUMNS, most, code.const(_COLUMNS, -600))  # all terms zero
    return _to_single(code, b.fmul(exact, _power(code, b.sub(most, code.const(_COLUMNS, FRACTION)))))


def _quick(code: Code, o: _Operands, b_values: list[ir.Value], row: _Row) -> ir.Value:
    b = code.b
    singles = vec(_F32, N)
    _, c_exponent = _decode(code, row.c, 8, 23)
    most, _ = _most(code, o, row, c_exponent)
    most = b.sub(most, code.const(_COLUMNS, 2 * o.bias))
    least = code.const(_COLUMNS, -2 * NEAR)  # where all terms are zero
    most = code.intrinsic(f"llvm.smax.v{N}i32", _COLUMNS, most, least)
    unit = b.sub(code.const(_COLUMNS, FRACTION + 127), most)
    scale = b.bitcast(b.shl(unit, code.const(_COLUMNS, 23)), singles)
    total = code.const(_COLUMNS, 0)
    for k in range(K):
        product = b.fmul(o.a(code, o.a_values, _F32, row.group, row.half, k), b_values[k])
        total = b.add(total, b.fptosi(b.fmul(product, scale), _COLUMNS))
    addend = b.fptosi(b.fmul(b.bitcast(row.c, singles), scale), _COLUMNS)
    return _sum(code, total, addend, most)


def _exact(code: Code, o: _Operands, row: _Row) -> ir.Value:
    b = code.b
    exponent_bits, fraction_bits = _BITS[o.kind]
    c_significand, c_exponent = _decode(code, row.c, 8, 23)
    most, exponents = _most(code, o, row, c_exponent)
    total = code.const(_COLUMNS, 0)
    for k in range(K):
        a_bits = o.a(code, o.a_bits, I32, row.group, row.half, k)
        pair = [_decode(code, bits, exponent_bits, fraction_bits)[0] for bits in (a_bits, o.b_bits[k])]
        raised = b.shl(b.mul(*pair), code.const(_COLUMNS, FRACTION - 2 * fraction_bits))
        term = _aligned(code, raised, b.sub(most, exponents[k]))
        sign = b.shl(b.xor(a_bits, o.b_bits[k]), code.const(_COLUMNS, 16))
        total = b.add(total, _signed(code, term, b.ashr(sign, code.const(_COLUMNS, 31))))
    most = b.sub(most, code.const(_COLUMNS, 2 * o.bias))
    raised = b.shl(c_significand, code.const(_COLUMNS, FRACTION - 23))
    term = _aligned(code, raised, b.sub(most, b.sub(c_exponent, code.const(_COLUMNS, 127))))
    return _sum(code, total, _signed(code, term, b.ashr(row.c, code.const(_COLUMNS, 31))), most)


def _special(code: Code, o: _Operands, row: _Row, finite: ir.Value) -> ir.Value:
    """Infinities and NaNs as f64 arithmetic has them, which cannot overflow; elsewhere ``finite``."""
    b = code.b
    doubles, wide = vec(_F64, N), vec(I64, N)
    total = b.fpext(b.bitcast(row.c, vec(_F32, N)), doubles)
    for k in range(K):
        a_bits = o.a(code, o.a_bits, I32, row.group, row.half, k)
        pair = [b.fpext(_bfloat_or_half(code, o.kind, bits), doubles) for bits in (a_bits, o.b_bits[k])]
        total = b.fadd(total, b.fmul(*pair))
    bits = b.bitcast(total, wide)
    magnitude = b.and_(bits, code.const(wide, (1 << 63) - 1))
    infinite = b.icmp_unsigned("==", magnitude, code.const(wide, 0x7FF << 52))
    nan = b.icmp_unsigned(">", magnitude, code.const(wide, 0x7FF << 52))
    high = b.trunc(b.lshr(bits, code.const(wide, 32)), _COLUMNS)
    signed = b.or_(b.and_(high, code.const(_COLUMNS, 1 << 31)), code.const(_COLUMNS, 0x7F800000))
    return b.select(nan, code.const(_COLUMNS, _NAN), b.select(infinite, signed, finite))
