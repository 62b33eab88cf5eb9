"""Floating-point arithmetic with exactly one rounding, and comparisons (PTX ISA 9.7.3, 9.7.4, 9.7.5, 9.7.6).

Floats travel as bits. Results that need more than the host's own round-to-nearest f32 or f64 operation go through f64
values *rounded to odd*: the exact result cut to 53 bits, the last bit set if anything was lost. Such a value rounds to
any format of at most 51 bits, in any direction, as the exact result would (Boldo and Melquiond 2008, "Emulation of a
FMA and correctly rounded sums: proved algorithms using rounding to odd").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from kernelmill.verify.emulator import alu_integer
from kernelmill.verify.emulator.alu_base import F32, F64, HALF, LANES, Emitter, Form, Modifiers, splat, splat_double

Values = Sequence[ir.Value]

HALVES = ("f16", "bf16")
PACKED_HALVES = ("f16x2", "bf16x2")
ROUNDINGS = ("rn", "rz", "rm", "rp")

CANONICAL_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8 << 48}
"""PTX ISA 9.7.3 and 9.7.4: the NaN that single and half precision arithmetic returns. f64 passes payloads on in an
unspecified way; here it always gives this one."""
INFINITY = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF << 52}
ONE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000, "f64": 0x3FF << 52}


# Properties of bits.


def magnitude(e: Emitter, x: ir.Value) -> ir.Value:
    return e.b.and_(x, e.like(x, (1 << (e.width(x) - 1)) - 1))


def sign_of(e: Emitter, x: ir.Value) -> ir.Value:
    return e.b.and_(x, e.like(x, 1 << (e.width(x) - 1)))


def is_negative(e: Emitter, x: ir.Value) -> ir.Value:
    return e.cmp("<", x, e.like(x, 0), True)


def is_nan(e: Emitter, x: ir.Value, kind: str) -> ir.Value:
    if kind in ("f32", "f64"):
        # One host instruction.
        value = e.as_f32(x) if kind == "f32" else e.as_f64(x)
        return e.b.fcmp_unordered("uno", value, value)
    return e.cmp(">", magnitude(e, x), e.like(x, INFINITY[kind]))


def canonical(e: Emitter, x: ir.Value, kind: str) -> ir.Value:
    return e.select(is_nan(e, x, kind), e.like(x, CANONICAL_NAN[kind]), x)


def flush(e: Emitter, x: ir.Value, kind: str) -> ir.Value:
    """Subnormals to zero of the same sign."""
    subnormal = e.cmp("==", e.b.and_(x, e.like(x, INFINITY[kind])), e.like(x, 0))
    return e.select(subnormal, sign_of(e, x), x)


def saturate(e: Emitter, x: ir.Value, kind: str) -> ir.Value:
    """Clamp to [0, 1]; NaN and negative values become +0."""
    x = e.select(e.b.or_(is_negative(e, x), is_nan(e, x, kind)), e.like(x, 0), x)
    return e.select(e.cmp(">", x, e.like(x, ONE[kind])), e.like(x, ONE[kind]), x)


def rectify(e: Emitter, x: ir.Value, kind: str) -> ir.Value:
    """Negative values become +0, NaN the canonical NaN."""
    return canonical(e, e.select(e.b.and_(is_negative(e, x), e.b.not_(is_nan(e, x, kind))), e.like(x, 0), x), kind)


def saturate_finite(e: Emitter, x: ir.Value, kind: str) -> ir.Value:
    """An infinite value becomes the largest finite one of its sign."""
    largest = e.b.or_(e.like(x, INFINITY[kind] - 1), sign_of(e, x))
    return e.select(e.cmp("==", magnitude(e, x), e.like(x, INFINITY[kind])), largest, x)


# Between formats, as bits or as f32/f64 values.


def widen_bits(e: Emitter, x: ir.Value, kind: str) -> ir.Value:
    """f16 or bf16 bits as f32 bits, exactly."""
    if kind == "bf16":
        return e.b.shl(e.zext(x, 32), splat(32, 16))
    return e.bits(e.b.fpext(e.b.bitcast(x, HALF), F32))


def to_f32(e: Emitter, x: ir.Value, kind: str) -> ir.Value:
    return e.as_f32(x if kind == "f32" else widen_bits(e, x, kind))


def to_f64(e: Emitter, x: ir.Value, kind: str) -> ir.Value:
    return e.as_f64(x) if kind == "f64" else e.b.fpext(to_f32(e, x, kind), F64)


def toward(e: Emitter, x: ir.Value, up: ir.Value, down: ir.Value) -> ir.Value:
    """Bits of a float: the next of larger magnitude where ``up``, of smaller where ``down``."""
    width = e.width(x)
    return e.b.sub(e.b.add(x, e.zext(up, width)), e.zext(down, width))


def directed(e: Emitter, rounded: ir.Value, value: ir.Value, exact: ir.Value, mode: str) -> ir.Value:
    """Correct ``rounded`` (bits, rounded to nearest, ``value`` as f64) to ``mode``, given the ``exact`` f64 value."""
    above = e.b.fcmp_ordered(">", value, exact)
    below = e.b.fcmp_ordered("<", value, exact)
    negative = is_negative(e, rounded)
    positive = e.b.not_(negative)
    none = splat(1, 0)
    if mode == "rz":
        return toward(e, rounded, none, e.b.or_(e.b.and_(above, positive), e.b.and_(below, negative)))
    if mode == "rm":
        return toward(e, rounded, e.b.and_(above, negative), e.b.and_(above, positive))
    if mode == "rp":
        return toward(e, rounded, e.b.and_(below, positive), e.b.and_(below, negative))
    raise AssertionError(mode)


def narrow_f32(e: Emitter, exact: ir.Value, mode: str) -> ir.Value:
    """f32 bits of an f64 value that is exact or rounded to odd."""
    value = e.b.fptrunc(exact, F32)
    if mode == "rn":
        return e.bits(value)
    return directed(e, e.bits(value), e.b.fpext(value, F64), exact, mode)


def nearest_half(e: Emitter, x: ir.Value, kind: str) -> ir.Value:
    """f32 bits to the nearest f16 or bf16 bits, ties to even; NaN canonical."""
    if kind == "f16":
        return canonical(e, e.bits(e.b.fptrunc(e.as_f32(x), HALF)), kind)
    even = e.b.and_(e.b.lshr(x, splat(32, 16)), splat(32, 1))
    rounded = e.b.lshr(e.b.add(e.b.add(x, splat(32, 0x7FFF)), even), splat(32, 16))
    return e.trunc(e.select(is_nan(e, x, "f32"), splat(32, CANONICAL_NAN[kind]), rounded), 16)


def narrow_half(e: Emitter, exact: ir.Value, kind: str, mode: str) -> ir.Value:
    """f16 or bf16 bits of an f64 value that is exact or rounded to odd; NaN canonical."""
    value = e.b.fptrunc(exact, F32)
    wide = e.b.fpext(value, F64)
    inexact = e.b.fcmp_ordered("!=", wide, exact)
    cut = directed(e, e.bits(value), wide, exact, "rz")
    odd = e.b.or_(cut, e.zext(inexact, 32))
    rounded = nearest_half(e, odd, kind)
    if mode == "rn":
        return rounded
    return canonical(e, directed(e, rounded, to_f64(e, rounded, kind), exact, mode), kind)


def narrow(e: Emitter, exact: ir.Value, kind: str, mode: str) -> ir.Value:
    """Bits of ``kind`` (f16, bf16, f32) of an f64 value that is exact or rounded to odd; NaN canonical."""
    if kind == "f32":
        return canonical(e, narrow_f32(e, exact, mode), kind)
    return narrow_half(e, exact, kind, mode)


# f64 operations rounded to odd. Operands are f32 or narrower, so that nothing overflows or underflows in f64.


def _to_odd(e: Emitter, value: ir.Value, error: ir.Value) -> ir.Value:
    """``value`` is the exact result rounded to nearest and ``error`` has the sign of exact - value."""
    bits = e.bits(value)
    zero = splat_double(0.0)
    inexact = e.b.fcmp_ordered("!=", error, zero)
    even = e.cmp("==", e.b.and_(bits, splat(64, 1)), splat(64, 0))
    fix = e.b.and_(inexact, even)
    grow = e.b.xor(e.b.fcmp_ordered("<", error, zero), e.b.not_(is_negative(e, bits)))
    return e.as_f64(toward(e, bits, e.b.and_(fix, grow), e.b.and_(fix, e.b.not_(grow))))


def odd_sum(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    """x + y; the error of the rounded sum is exact (Knuth's TwoSum)."""
    value = e.b.fadd(x, y)
    virtual = e.b.fsub(value, x)
    error = e.b.fadd(e.b.fsub(x, e.b.fsub(value, virtual)), e.b.fsub(y, virtual))
    return _to_odd(e, value, error)


def odd_quotient(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    value = e.b.fdiv(x, y)
    remainder = e.fma(e.b.fneg(value), y, x)
    # exact - value = remainder / y.
    sign = e.b.and_(e.bits(y), splat(64, 1 << 63))
    return _to_odd(e, value, e.as_f64(e.b.xor(e.bits(remainder), sign)))


def odd_root(e: Emitter, x: ir.Value) -> ir.Value:
    value = e.call("llvm.sqrt.v32f64", F64, x)
    return _to_odd(e, value, e.fma(e.b.fneg(value), value, x))


# Arithmetic.


def _signed_zero(e: Emitter, result: ir.Value, mode: str, x: ir.Value, y: ir.Value) -> ir.Value:
    """In mode rm a sum that is exactly zero is -0 unless both terms are +0 (IEEE 754-2019, 6.3). The f64 sum gave +0
    or, for two -0, -0. ``x`` and ``y``: f64 terms."""
    if mode != "rm":
        return result
    signs = e.b.or_(e.bits(x), e.bits(y))
    zero = e.cmp("==", magnitude(e, result), splat(32, 0))
    exact = e.b.fcmp_ordered("==", e.b.fadd(x, y), splat_double(0.0))
    negative = e.b.and_(e.b.and_(zero, exact), is_negative(e, signs))
    return e.select(negative, splat(32, 1 << 31), result)


def _f32(e: Emitter, operation: str, mode: str, x: Values) -> ir.Value:
    """add, sub, mul, div, fma, sqrt, rcp of f32 bits; NaN not yet canonical."""
    if mode == "rn":
        v = [e.as_f32(s) for s in x]
        if operation == "fma":
            return e.bits(e.fma(*v))
        if operation == "sqrt":
            return e.bits(e.call("llvm.sqrt.v32f32", F32, *v))
        if operation == "rcp":
            return e.bits(e.b.fdiv(e.as_f32(splat(32, ONE["f32"])), *v))
        return e.bits({"add": e.b.fadd, "sub": e.b.fsub, "mul": e.b.fmul, "div": e.b.fdiv}[operation](*v))

    def body(e: Emitter, *x: ir.Value) -> ir.Value:
        w = [to_f64(e, s, "f32") for s in x]
        if operation == "mul":
            # 24 + 24 bits: exact in f64.
            return narrow_f32(e, e.b.fmul(*w), mode)
        if operation == "div":
            return narrow_f32(e, odd_quotient(e, *w), mode)
        if operation == "rcp":
            return narrow_f32(e, odd_quotient(e, splat_double(1.0), *w), mode)
        if operation == "sqrt":
            return narrow_f32(e, odd_root(e, *w), mode)
        first = e.b.fmul(w[0], w[1]) if operation == "fma" else w[0]
        second = e.b.fneg(w[1]) if operation == "sub" else w[-1]
        result = narrow_f32(e, odd_sum(e, first, second), mode)
        return _signed_zero(e, result, mode, first, second)

    return e.outlined(f"{operation}.{mode}.f32", x[0].type, x, body)


def _pair(e: Emitter, operation: str, x: Values) -> ir.Value:
    """add, sub, mul, fma of f32x2 bits, to nearest, NaN canonical: a warp of pairs is 64 lanes of f32."""
    lanes = ir.VectorType(ir.FloatType(), 2 * LANES)
    v = [e.b.bitcast(s, lanes) for s in x]
    if operation == "fma":
        result = e.call("llvm.fma.v64f32", lanes, *v)
    else:
        result = {"add": e.b.fadd, "sub": e.b.fsub, "mul": e.b.fmul}[operation](*v)
    pair = CANONICAL_NAN["f32"] << 32 | CANONICAL_NAN["f32"]
    nan = e.b.fcmp_unordered("uno", result, result)
    return e.b.bitcast(e.b.select(nan, e.b.bitcast(splat(64, pair), lanes), result), x[0].type)


def _half(e: Emitter, operation: str, kind: str, x: Values) -> ir.Value:
    """add, sub, mul, fma of f16 or bf16 bits, rounded once to nearest; NaN canonical."""
    if operation in ("add", "sub") or (operation == "mul" and kind == "f16"):
        # f32 has at least 2p + 2 bits, so rounding twice is innocuous (Figueroa 1995). A bf16 product may be subnormal
        # in f32, where that fails.
        v = [to_f32(e, s, kind) for s in x]
        f = {"add": e.b.fadd, "sub": e.b.fsub, "mul": e.b.fmul}[operation]
        return nearest_half(e, e.bits(f(*v)), kind)

    def body(e: Emitter, *x: ir.Value) -> ir.Value:
        w = [to_f64(e, s, kind) for s in x]
        product = e.b.fmul(w[0], w[1])
        return narrow_half(e, odd_sum(e, product, w[2]) if operation == "fma" else product, kind, "rn")

    return e.outlined(f"{operation}.{kind}", x[0].type, x, body)


def _per_piece(kind: str, count: int, function: Callable[..., ir.Value]) -> Form:
    """``function(e, piece_kind, *bits)`` on each piece of a packed type."""
    parts = 2 if kind.endswith("x2") else 1
    piece = kind.removesuffix("x2")

    def emit(e: Emitter, sources: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        pieces = zip(*(e.split(s, parts) for s in sources), strict=True)
        results = [function(e, piece, *x) for x in pieces]
        return [results[0] if parts == 1 else e.join(results)]

    return Form((kind,), (kind,) * count, emit)


def _arithmetic(m: Modifiers, operation: str, count: int) -> Form:
    """add, sub, mul, fma in all float types, and the mixed forms ``fma.rn.f32.bf16`` (d, a, b: f32, half, half)."""
    kind = m.type("f32", "f64", "f32x2", *HALVES, *PACKED_HALVES)
    mixed = m.left[-1:] == ["f32"] and kind in HALVES and operation != "mul"
    if mixed:
        m.type("f32")
        mode = m.choice(*ROUNDINGS, default="rn" if operation != "fma" else None)
        sat = m.flag("sat")
        m.done()
        # The half operands come first; the last operand of all is f32.
        kinds = (kind,) * (count - 1) + ("f32",)

        def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
            del seed
            x = [widen_bits(e, v, kind) for v in s[:-1]] + [s[-1]]
            result = canonical(e, _f32(e, operation, mode, x), "f32")
            return [saturate(e, result, "f32") if sat else result]

        return Form(("f32",), kinds, emit)
    piece = kind.removesuffix("x2")
    default = None if operation == "fma" else "rn"
    modes = ROUNDINGS if piece == "f32" else ("rn",)
    mode = m.choice(*modes, default=default)
    ftz = kind not in ("f64", "bf16", "bf16x2") and m.flag("ftz")
    sat = kind not in ("f64", "f32x2", "bf16", "bf16x2") and m.flag("sat")
    relu = operation == "fma" and piece in HALVES and m.flag("relu")
    m.done()

    if kind == "f32x2" and mode == "rn" and not ftz:
        return Form((kind,), (kind,) * count, lambda e, s, _: [_pair(e, operation, s)])

    def function(e: Emitter, piece: str, *x: ir.Value) -> ir.Value:
        if ftz:
            x = tuple(flush(e, v, piece) for v in x)
        if piece == "f64":
            v = [e.as_f64(s) for s in x]
            f = {"add": e.b.fadd, "sub": e.b.fsub, "mul": e.b.fmul, "fma": e.fma}[operation]
            return canonical(e, e.bits(f(*v)), "f64")
        result = canonical(e, _f32(e, operation, mode, x), piece) if piece == "f32" else _half(e, operation, piece, x)
        if ftz:
            result = flush(e, result, piece)
        if sat:
            result = saturate(e, result, piece)
        return rectify(e, result, piece) if relu else result

    return _per_piece(kind, count, function)


def _is_integer(m: Modifiers) -> bool:
    return m.left[-1:] != [] and m.left[-1] in (*alu_integer.INTEGERS, *alu_integer.PACKED)


def add(m: Modifiers) -> Form:
    return alu_integer.add(m) if _is_integer(m) else _arithmetic(m, "add", 2)


def sub(m: Modifiers) -> Form:
    return alu_integer.sub(m) if _is_integer(m) else _arithmetic(m, "sub", 2)


def mul(m: Modifiers) -> Form:
    return alu_integer.mul(m) if _is_integer(m) else _arithmetic(m, "mul", 2)


def fma(m: Modifiers) -> Form:
    return _arithmetic(m, "fma", 3)


def mad(m: Modifiers) -> Form:
    """``mad`` of floats is ``fma`` on every target since sm_20."""
    if _is_integer(m):
        return alu_integer.mad(m)
    if m.left[-1:] not in (["f32"], ["f64"]) or m.left[-2:-1] == ["f32"]:
        m.unknown("unknown type")
    return _arithmetic(m, "fma", 3)


def exact_unary_or_div(m: Modifiers, operation: str, count: int) -> Form:
    """div, rcp, sqrt with an IEEE rounding."""
    kind = m.type("f32", "f64")
    mode = m.choice(*(ROUNDINGS if kind == "f32" else ("rn",)))
    ftz = kind == "f32" and m.flag("ftz")
    m.done()

    def function(e: Emitter, piece: str, *x: ir.Value) -> ir.Value:
        if piece == "f64":
            v = [e.as_f64(s) for s in x]
            if operation == "sqrt":
                result = e.call("llvm.sqrt.v32f64", F64, *v)
            else:
                result = e.b.fdiv(*([splat_double(1.0), *v] if operation == "rcp" else v))
            return canonical(e, e.bits(result), piece)
        if ftz:
            x = tuple(flush(e, v, piece) for v in x)
        result = canonical(e, _f32(e, operation, mode, x), piece)
        return flush(e, result, piece) if ftz else result

    return _per_piece(kind, count, function)


# Signs, minimum and maximum.


def _sign_instruction(m: Modifiers, function: Callable[[Emitter, ir.Value], ir.Value]) -> Form:
    """abs and neg. NaN in gives an unspecified NaN; the canonical one, as an H200 gives."""
    kind = m.type("f32", "f64", *HALVES, *PACKED_HALVES)
    ftz = kind in ("f32", "f16", "f16x2") and m.flag("ftz")
    m.done()

    def each(e: Emitter, piece: str, x: ir.Value) -> ir.Value:
        return canonical(e, function(e, flush(e, x, piece) if ftz else x), piece)

    return _per_piece(kind, 1, each)


def absolute(m: Modifiers) -> Form:
    return alu_integer.absolute(m) if _is_integer(m) else _sign_instruction(m, magnitude)


def neg(m: Modifiers) -> Form:
    if _is_integer(m):
        return alu_integer.neg(m)
    return _sign_instruction(m, lambda e, x: e.b.xor(x, e.like(x, 1 << (e.width(x) - 1))))


def _order(e: Emitter, x: ir.Value) -> ir.Value:
    """Integers in the order of the floats they stand for, -0 below +0."""
    width = e.width(x)
    return e.b.xor(x, magnitude(e, e.b.ashr(x, e.like(x, width - 1))))


def _pick(e: Emitter, kind: str, larger: bool, pass_nan: bool, x: ir.Value, y: ir.Value) -> ir.Value:
    x_nan, y_nan = is_nan(e, x, kind), is_nan(e, y, kind)
    wins = e.cmp(">" if larger else "<", _order(e, x), _order(e, y), True)
    result = e.select(e.b.or_(y_nan, e.b.and_(wins, e.b.not_(x_nan))), x, y)
    nan = (e.b.or_ if pass_nan else e.b.and_)(x_nan, y_nan)
    return e.select(nan, e.like(x, CANONICAL_NAN[kind]), result)


def _extreme(m: Modifiers, larger: bool) -> Form:
    """min and max: a single NaN loses unless ``.NaN``; +0 is above -0."""
    kind = m.type("f32", "f64", *HALVES, *PACKED_HALVES)
    count = 3 if kind == "f32" and len(m.instr.operands) == 4 else 2
    ftz = kind in ("f32", "f16", "f16x2") and m.flag("ftz")
    pass_nan = kind != "f64" and m.flag("NaN")
    xorsign = kind != "f64" and count == 2 and m.flag("xorsign")
    use_abs = (xorsign or count == 3) and m.flag("abs")
    if xorsign and not use_abs:
        m.unknown(".xorsign without .abs")
    m.done()

    def each(e: Emitter, piece: str, *x: ir.Value) -> ir.Value:
        if ftz:
            x = tuple(flush(e, v, piece) for v in x)
        sign = sign_of(e, e.b.xor(x[0], x[1])) if xorsign else None
        if use_abs:
            x = tuple(magnitude(e, v) for v in x)
        result = _pick(e, piece, larger, pass_nan, x[0], x[1])
        if len(x) == 3:
            result = _pick(e, piece, larger, pass_nan, result, x[2])
        if sign is not None:
            result = e.select(is_nan(e, result, piece), result, e.b.or_(result, sign))
        return result

    return _per_piece(kind, count, each)


def minimum(m: Modifiers) -> Form:
    return alu_integer.minimum(m) if _is_integer(m) else _extreme(m, False)


def maximum(m: Modifiers) -> Form:
    return alu_integer.maximum(m) if _is_integer(m) else _extreme(m, True)


def copysign(m: Modifiers) -> Form:
    """The magnitude of b with the sign of a."""
    kind = m.type("f32", "f64")
    m.done()
    return _per_piece(kind, 2, lambda e, piece, x, y: e.b.or_(sign_of(e, x), magnitude(e, y)))


def testp(m: Modifiers) -> Form:
    """Zero counts as normal."""
    kind = m.type("f32", "f64")
    test = m.choice("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    m.done()

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        x = magnitude(e, s[0])
        infinity = e.like(x, INFINITY[kind])
        if test in ("finite", "infinite", "number", "notanumber"):
            how = {"finite": "<", "infinite": "==", "number": "<=", "notanumber": ">"}[test]
            return [e.cmp(how, x, infinity)]
        smallest = e.like(x, INFINITY[kind] & -INFINITY[kind])
        if test == "normal":
            zero = e.cmp("==", x, e.like(x, 0))
            return [e.b.or_(zero, e.b.and_(e.cmp(">=", x, smallest), e.cmp("<", x, infinity)))]
        return [e.b.and_(e.cmp("!=", x, e.like(x, 0)), e.cmp("<", x, smallest))]

    return Form(("pred",), (kind,), emit)


# Comparison.

_INTEGER_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED_COMPARE = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_UNORDERED_COMPARE = {f"{k}u": v for k, v in _INTEGER_COMPARE.items()}


def _compare(m: Modifiers, kind: str) -> Callable[[Emitter, ir.Value, ir.Value], ir.Value]:
    """Takes the comparison and ``.ftz`` from ``m``; the result compares bits of ``kind``."""
    if kind[0] in "bsu" and kind not in ("bf16", "bf16x2"):
        names = ["eq", "ne"]
        if kind[0] != "b":
            names += ["lt", "le", "gt", "ge"]
        if kind[0] == "u":
            names += list(_UNSIGNED_COMPARE)
        name = m.choice(*names)
        how = _INTEGER_COMPARE.get(name) or _UNSIGNED_COMPARE[name]
        return lambda e, x, y: e.cmp(how, x, y, kind[0] == "s")
    name = m.choice(*_INTEGER_COMPARE, *_UNORDERED_COMPARE, "num", "nan")
    ftz = kind in ("f32", "f16", "f16x2") and m.flag("ftz")
    piece = kind.removesuffix("x2")

    def compare(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
        if ftz:
            x, y = flush(e, x, piece), flush(e, y, piece)
        convert = to_f64 if piece == "f64" else to_f32
        v, w = convert(e, x, piece), convert(e, y, piece)
        if name in ("num", "nan"):
            return e.b.fcmp_ordered("ord", v, w) if name == "num" else e.b.fcmp_unordered("uno", v, w)
        if name in _UNORDERED_COMPARE:
            return e.b.fcmp_unordered(_UNORDERED_COMPARE[name], v, w)
        return e.b.fcmp_ordered(_INTEGER_COMPARE[name], v, w)

    return compare


_COMPARABLE = (*alu_integer.BITS, *alu_integer.INTEGERS, "f32", "f64", *HALVES)


def _combine(e: Emitter, how: str, x: ir.Value, c: ir.Value) -> ir.Value:
    return {"and": e.b.and_, "or": e.b.or_, "xor": e.b.xor}[how](x, c)


def setp(m: Modifiers) -> Form:
    """``p = cmp bool c`` and ``q = !cmp bool c``; packed types give p for the low and q for the high half."""
    kind = m.type(*_COMPARABLE, *PACKED_HALVES)
    combine = m.choice("and", "or", "xor", default="")
    compare = _compare(m, kind)
    m.done()
    packed = kind in PACKED_HALVES
    sources = (kind, kind, "pred") if combine else (kind, kind)
    dual = packed or len(m.instr.operands) == len(sources) + 2

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        if packed:
            results = [compare(e, x, y) for x, y in zip(e.split(s[0], 2), e.split(s[1], 2), strict=True)]
        else:
            first = compare(e, s[0], s[1])
            results = [first, e.b.not_(first)] if dual else [first]
        return [_combine(e, combine, r, s[2]) for r in results] if combine else results

    return Form(("pred",) * (2 if dual else 1), sources, emit)


def set_(m: Modifiers) -> Form:
    """All ones (integers) or 1.0 (f32) where the comparison holds, else 0."""
    kind = m.type(*_COMPARABLE)
    result = m.type("u32", "s32", "f32")
    combine = m.choice("and", "or", "xor", default="")
    compare = _compare(m, kind)
    m.done()

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        holds = compare(e, s[0], s[1])
        if combine:
            holds = _combine(e, combine, holds, s[2])
        return [e.select(holds, splat(32, ONE["f32"] if result == "f32" else -1), splat(32, 0))]

    return Form((result,), (kind, kind, "pred") if combine else (kind, kind), emit)


def slct(m: Modifiers) -> Form:
    """a where c >= 0, else b; a NaN c selects b."""
    by = m.type("s32", "f32")
    kind = m.type(*alu_integer.BITS, *alu_integer.INTEGERS, "f32", "f64")
    ftz = by == "f32" and m.flag("ftz")
    m.done()

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        if by == "s32":
            chosen = e.cmp(">=", s[2], splat(32, 0), True)
        else:
            c = flush(e, s[2], "f32") if ftz else s[2]
            chosen = e.b.fcmp_ordered(">=", e.as_f32(c), e.as_f32(splat(32, 0)))
        return [e.select(chosen, s[0], s[1])]

    return Form((kind,), (kind, kind, by), emit)
