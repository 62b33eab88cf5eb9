"""Integer, logic, shift, bit-field, comparison-free selection and move instructions (PTX ISA 9.7.1, 9.7.8, 9.7.9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from kernelmill.verify.emulator.alu_base import Emitter, Form, Modifiers, int_type, splat, width_of
from kernelmill.verify.emulator.ir import Immediate, PtxError, Vector

Values = Sequence[ir.Value]

SIGNED = ("s16", "s32", "s64")
UNSIGNED = ("u16", "u32", "u64")
INTEGERS = SIGNED + UNSIGNED
BITS = ("b16", "b32", "b64")
PACKED = ("s16x2", "u16x2")


def _form(kind: str, count: int, function: Callable[..., ir.Value]) -> Form:
    """``count`` sources and one destination, all of one type; packed types are split into halves."""
    parts = 2 if kind.endswith("x2") else 1

    def emit(e: Emitter, sources: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        if parts == 1:
            return [function(e, *sources)]
        halves = zip(*(e.split(s, parts) for s in sources), strict=True)
        return [e.join([function(e, *half) for half in halves])]

    return Form((kind,), (kind,) * count, emit)


def add(m: Modifiers) -> Form:
    kind = m.type(*INTEGERS, *PACKED)
    saturate = kind == "s32" and m.flag("sat")
    m.done()
    if saturate:
        return _form(kind, 2, lambda e, x, y: e.call("llvm.sadd.sat.v32i32", int_type(32), x, y))
    return _form(kind, 2, lambda e, x, y: e.b.add(x, y))


def sub(m: Modifiers) -> Form:
    kind = m.type(*INTEGERS, *PACKED)
    saturate = kind == "s32" and m.flag("sat")
    m.done()
    if saturate:
        return _form(kind, 2, lambda e, x, y: e.call("llvm.ssub.sat.v32i32", int_type(32), x, y))
    return _form(kind, 2, lambda e, x, y: e.b.sub(x, y))


def _product(e: Emitter, x: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    width = 2 * e.width(x)
    return e.b.mul(e.resize(x, width, signed), e.resize(y, width, signed))


def _part(e: Emitter, mode: str, x: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    if mode == "lo":
        return e.b.mul(x, y)
    full = _product(e, x, y, signed)
    return full if mode == "wide" else e.trunc(e.b.lshr(full, e.like(full, e.width(x))), e.width(x))


def _result_type(kind: str, mode: str) -> str:
    return kind[0] + str(2 * width_of(kind)) if mode == "wide" else kind


def mul(m: Modifiers) -> Form:
    kind = m.type(*INTEGERS)
    mode = m.choice("lo", "hi", "wide")
    m.done()
    if mode == "wide" and width_of(kind) == 64:
        m.unknown("no .wide of 64 bits")
    signed = kind[0] == "s"
    return Form((_result_type(kind, mode),), (kind,) * 2, lambda e, s, _: [_part(e, mode, s[0], s[1], signed)])


def mad(m: Modifiers) -> Form:
    kind = m.type(*INTEGERS)
    mode = m.choice("lo", "hi", "wide")
    saturate = kind == "s32" and mode == "hi" and m.flag("sat")
    m.done()
    if mode == "wide" and width_of(kind) == 64:
        m.unknown("no .wide of 64 bits")
    signed = kind[0] == "s"
    result = _result_type(kind, mode)

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        product = _part(e, mode, s[0], s[1], signed)
        if saturate:
            return [e.call("llvm.sadd.sat.v32i32", int_type(32), product, s[2])]
        return [e.b.add(product, s[2])]

    return Form((result,), (kind, kind, result), emit)


def _product24(e: Emitter, mode: str, x: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    """Bits 31..0 (lo) or 47..16 (hi) of the product of the low 24 bits."""
    shift = e.b.ashr if signed else e.b.lshr
    x, y = (shift(e.b.shl(v, e.like(v, 8)), e.like(v, 8)) for v in (x, y))
    full = _product(e, x, y, signed)
    return e.trunc(e.b.lshr(full, e.like(full, 16)) if mode == "hi" else full, 32)


def mul24(m: Modifiers) -> Form:
    kind = m.type("s32", "u32")
    mode = m.choice("lo", "hi")
    m.done()
    return _form(kind, 2, lambda e, x, y: _product24(e, mode, x, y, kind == "s32"))


def mad24(m: Modifiers) -> Form:
    kind = m.type("s32", "u32")
    mode = m.choice("lo", "hi")
    m.done()
    return _form(kind, 3, lambda e, x, y, z: e.b.add(_product24(e, mode, x, y, kind == "s32"), z))


def _divide(kind: str, remainder: bool) -> Form:
    """Division by zero is unspecified in PTX; quotient and remainder are all ones, as an H200 gives.
    The most negative value by -1 gives itself, remainder 0. No input traps the host."""
    signed = kind[0] == "s"

    def body(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
        zero = e.cmp("==", y, e.like(y, 0))
        safe = e.select(zero, e.like(y, 1), y)
        if signed:
            lowest = e.cmp("==", x, e.like(x, 1 << (e.width(x) - 1)))
            safe = e.select(e.b.and_(lowest, e.cmp("==", y, e.like(y, -1))), e.like(y, 1), safe)
        if remainder:
            result = (e.b.srem if signed else e.b.urem)(x, safe)
        else:
            result = (e.b.sdiv if signed else e.b.udiv)(x, safe)
        return e.select(zero, e.like(x, -1), result)

    name = f"{'rem' if remainder else 'div'}.{kind}"
    return _form(kind, 2, lambda e, x, y: e.outlined(name, x.type, (x, y), body))


def div(m: Modifiers) -> Form:
    kind = m.type(*INTEGERS)
    m.done()
    return _divide(kind, False)


def rem(m: Modifiers) -> Form:
    kind = m.type(*INTEGERS)
    m.done()
    return _divide(kind, True)


def absolute(m: Modifiers) -> Form:
    kind = m.type(*SIGNED)
    m.done()
    return _form(kind, 1, lambda e, x: e.select(e.cmp("<", x, e.like(x, 0), True), e.b.sub(e.like(x, 0), x), x))


def neg(m: Modifiers) -> Form:
    kind = m.type(*SIGNED)
    m.done()
    return _form(kind, 1, lambda e, x: e.b.sub(e.like(x, 0), x))


def _extreme(m: Modifiers, larger: bool) -> Form:
    kind = m.type(*INTEGERS, *PACKED)
    relu = kind in ("s32", "s16x2") and m.flag("relu")
    m.done()
    signed = kind[0] == "s"

    def function(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
        result = (e.larger if larger else e.smaller)(x, y, signed)
        return e.larger(result, e.like(x, 0), True) if relu else result

    return _form(kind, 2, function)


def minimum(m: Modifiers) -> Form:
    return _extreme(m, False)


def maximum(m: Modifiers) -> Form:
    return _extreme(m, True)


def _logic(count: int, function: Callable[..., ir.Value]) -> Callable[[Modifiers], Form]:
    def make(m: Modifiers) -> Form:
        kind = m.type("pred", *BITS)
        m.done()
        return _form(kind, count, function)

    return make


and_ = _logic(2, lambda e, x, y: e.b.and_(x, y))
or_ = _logic(2, lambda e, x, y: e.b.or_(x, y))
xor = _logic(2, lambda e, x, y: e.b.xor(x, y))
not_ = _logic(1, lambda e, x: e.b.xor(x, e.like(x, -1)))


def cnot(m: Modifiers) -> Form:
    kind = m.type(*BITS)
    m.done()
    return _form(kind, 1, lambda e, x: e.zext(e.cmp("==", x, e.like(x, 0)), e.width(x)))


def _lookup(e: Emitter, table: int, inputs: Values) -> ir.Value:
    """The Boolean function whose value for inputs (a, b, c, ...) is bit ``abc...`` of ``table``: Shannon expansion,
    first input first."""
    x, *rest = inputs
    half = 1 << len(rest)
    low, high = table & ((1 << half) - 1), table >> half
    if not rest:
        choices = {(0, 0): e.like(x, 0), (1, 1): e.like(x, -1), (0, 1): x}
        return choices.get((low, high)) or e.b.xor(x, e.like(x, -1))
    if low == high:
        return _lookup(e, low, rest)
    f, g = _lookup(e, low, rest), _lookup(e, high, rest)
    return e.b.xor(f, e.b.and_(e.b.xor(f, g), x))


def lop3(m: Modifiers) -> Form:
    m.type("b32")
    combine = m.choice("or", "and", default="")
    m.done()
    position = 5 if combine else 4
    operands = m.instr.operands
    table = operands[position] if position < len(operands) else None
    if not isinstance(table, Immediate) or not 0 <= table.value <= 255:
        raise PtxError(m.instr.line, "lop3 needs a constant look-up table from 0 to 255")
    value = table.value

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        result = _lookup(e, value, s[:3])
        if not combine:
            return [result]
        some = e.cmp("!=", result, e.like(result, 0))
        return [result, (e.b.or_ if combine == "or" else e.b.and_)(some, s[4])]

    if combine:
        return Form(("b32", "pred"), ("b32", "b32", "b32", "b32", "pred"), emit)
    return Form(("b32",), ("b32",) * 4, emit)


def shl(m: Modifiers) -> Form:
    kind = m.type(*BITS)
    m.done()
    return Form((kind,), (kind, "u32"), lambda e, s, _: [e.shift("shl", s[0], s[1])])


def shr(m: Modifiers) -> Form:
    kind = m.type(*BITS, *INTEGERS)
    m.done()
    how = "ashr" if kind[0] == "s" else "lshr"
    return Form((kind,), (kind, "u32"), lambda e, s, _: [e.shift(how, s[0], s[1])])


def shf(m: Modifiers) -> Form:
    m.type("b32")
    left = m.choice("l", "r") == "l"
    clamp = m.choice("clamp", "wrap") == "clamp"
    m.done()

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        both = e.join([s[0], s[1]])
        amount = e.smaller(s[2], splat(32, 32)) if clamp else e.b.and_(s[2], splat(32, 31))
        amount = e.zext(amount, 64)
        if left:
            return [e.trunc(e.b.lshr(e.b.shl(both, amount), splat(64, 32)), 32)]
        return [e.trunc(e.b.lshr(both, amount), 32)]

    return Form(("b32",), ("b32", "b32", "u32"), emit)


def prmt(m: Modifiers) -> Form:
    # The mode follows the type.
    mode = m.choice("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="")
    m.type("b32")
    m.done()

    def control(e: Emitter, c: ir.Value, i: int) -> ir.Value:
        if not mode:
            return e.b.and_(e.b.lshr(c, splat(32, 4 * i)), splat(32, 15))
        n = e.b.and_(c, splat(32, 3))
        if mode == "f4e":
            return e.b.add(n, splat(32, i))
        if mode == "b4e":
            return e.b.and_(e.b.sub(n, splat(32, i)), splat(32, 7))
        if mode == "rc8":
            return n
        if mode == "ecl":
            return e.larger(n, splat(32, i))
        if mode == "ecr":
            return e.smaller(n, splat(32, i))
        return e.b.add(e.b.shl(e.b.and_(n, splat(32, 1)), splat(32, 1)), splat(32, i & 1))

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        both = e.join([s[0], s[1]])
        result = []
        for i in range(4):
            chosen = control(e, s[2], i)
            place = e.b.shl(e.b.and_(chosen, splat(32, 7)), splat(32, 3))
            byte = e.trunc(e.b.lshr(both, e.zext(place, 64)), 8)
            if not mode:
                sign = e.cmp("!=", e.b.and_(chosen, splat(32, 8)), splat(32, 0))
                byte = e.select(sign, e.b.ashr(byte, splat(8, 7)), byte)
            result.append(byte)
        return [e.join(result)]

    return Form(("b32",), ("b32",) * 3, emit)


def _field(e: Emitter, width: int, x: ir.Value) -> ir.Value:
    """Position or length of a bit field. The ISA restricts both to 0..255; beyond, an H200 reads the low 8 bits in the
    32-bit forms and clamps in the 64-bit forms."""
    return e.b.and_(x, splat(32, 255)) if width == 32 else x


def bfe(m: Modifiers) -> Form:
    kind = m.type("u32", "u64", "s32", "s64")
    m.done()
    width, signed = width_of(kind), kind[0] == "s"

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        position, length = (_field(e, width, v) for v in s[1:])
        field = e.shift("ashr" if signed else "lshr", s[0], position)
        # Push the field to the top and back: the sign bit, or zeros, fill from above.
        unused = e.select(e.cmp("<", length, splat(32, width)), e.b.sub(splat(32, width), length), splat(32, 0))
        field = e.shift("ashr" if signed else "lshr", e.shift("shl", field, unused), unused)
        return [e.select(e.cmp("==", length, splat(32, 0)), e.like(field, 0), field)]

    return Form((kind,), (kind, "u32", "u32"), emit)


def bfi(m: Modifiers) -> Form:
    kind = m.type("b32", "b64")
    m.done()

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        position, length = (_field(e, width_of(kind), v) for v in s[2:])
        ones = e.like(s[0], -1)
        mask = e.b.xor(e.shift("shl", ones, length), ones)
        mask = e.shift("shl", mask, position)
        value = e.shift("shl", s[0], position)
        return [e.b.or_(e.b.and_(value, mask), e.b.and_(s[1], e.b.xor(mask, ones)))]

    return Form((kind,), (kind, kind, "u32", "u32"), emit)


def _leading_zeros(e: Emitter, x: ir.Value) -> ir.Value:
    name = f"llvm.ctlz.v32i{e.width(x)}"
    return e.trunc(e.call(name, x.type, x, ir.Constant(ir.IntType(1), 0)), 32)


def bfind(m: Modifiers) -> Form:
    kind = m.type("u32", "u64", "s32", "s64")
    amount = m.flag("shiftamt")
    m.done()
    top = width_of(kind) - 1

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        x = s[0]
        if kind[0] == "s":
            x = e.b.xor(x, e.b.ashr(x, e.like(x, top)))
        zeros = _leading_zeros(e, x)
        found = zeros if amount else e.b.sub(splat(32, top), zeros)
        return [e.select(e.cmp("==", x, e.like(x, 0)), splat(32, -1), found)]

    return Form(("u32",), (kind,), emit)


def clz(m: Modifiers) -> Form:
    kind = m.type("b32", "b64")
    m.done()
    return Form(("u32",), (kind,), lambda e, s, _: [_leading_zeros(e, s[0])])


def popc(m: Modifiers) -> Form:
    kind = m.type("b32", "b64")
    m.done()
    name = f"llvm.ctpop.v32i{width_of(kind)}"
    return Form(("u32",), (kind,), lambda e, s, _: [e.trunc(e.call(name, s[0].type, s[0]), 32)])


def brev(m: Modifiers) -> Form:
    kind = m.type("b32", "b64")
    m.done()
    name = f"llvm.bitreverse.v32i{width_of(kind)}"
    return Form((kind,), (kind,), lambda e, s, _: [e.call(name, s[0].type, s[0])])


def sad(m: Modifiers) -> Form:
    kind = m.type(*INTEGERS)
    m.done()
    signed = kind[0] == "s"

    def function(e: Emitter, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        less = e.cmp("<", x, y, signed)
        return e.b.add(z, e.select(less, e.b.sub(y, x), e.b.sub(x, y)))

    return _form(kind, 3, function)


def _dot(e: Emitter, xs: Values, ys: Values, z: ir.Value, x_signed: bool, y_signed: bool) -> ir.Value:
    for x, y in zip(xs, ys, strict=True):
        z = e.b.add(z, e.b.mul(e.resize(x, 32, x_signed), e.resize(y, 32, y_signed)))
    return z


def dp4a(m: Modifiers) -> Form:
    b = m.type("u32", "s32")
    a = m.type("u32", "s32")
    m.done()
    result = "u32" if a == b == "u32" else "s32"
    return Form(
        (result,),
        (a, b, result),
        lambda e, s, _: [_dot(e, e.split(s[0], 4), e.split(s[1], 4), s[2], a == "s32", b == "s32")],
    )


def dp2a(m: Modifiers) -> Form:
    b = m.type("u32", "s32")
    a = m.type("u32", "s32")
    first = 2 if m.choice("lo", "hi") == "hi" else 0
    m.done()
    result = "u32" if a == b == "u32" else "s32"

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        pieces = e.split(s[1], 4)[first : first + 2]
        return [_dot(e, e.split(s[0], 2), pieces, s[2], a == "s32", b == "s32")]

    return Form((result,), (a, b, result), emit)


def mov(m: Modifiers) -> Form:
    """Copy, pack (``mov.b32 d, {a, b}``) and unpack (``mov.b32 {a, b}, s``)."""
    kind = m.type("pred", "b128", *BITS, *INTEGERS, "f32", "f64")
    m.done()
    operands = m.instr.operands
    if len(operands) != 2:
        raise PtxError(m.instr.line, "mov needs two operands")
    target, source = operands
    if not isinstance(target, Vector) and not isinstance(source, Vector):
        return Form((kind,), (kind,), lambda e, s, _: [s[0]])
    vector = target if isinstance(target, Vector) else source
    if not isinstance(vector, Vector) or isinstance(target, Vector) == isinstance(source, Vector):
        raise PtxError(m.instr.line, "mov has one vector operand at most")
    count = len(vector.items)
    if kind[0] != "b" or count not in (2, 4) or width_of(kind) // count < 8:
        raise PtxError(m.instr.line, f"mov.{kind} cannot have a vector of {count}")
    piece = f"b{width_of(kind) // count}"
    if isinstance(target, Vector):
        return Form((piece,) * count, (kind,), lambda e, s, _: e.split(s[0], count))
    return Form((kind,), (piece,) * count, lambda e, s, _: [e.join(s)])


def selp(m: Modifiers) -> Form:
    kind = m.type(*BITS, *INTEGERS, "f32", "f64")
    m.done()
    return Form((kind,), (kind, kind, "pred"), lambda e, s, _: [e.select(s[2], s[0], s[1])])
