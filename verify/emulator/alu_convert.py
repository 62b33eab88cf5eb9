"""``cvt`` (PTX ISA 9.7.9.21): between integers and floats, packed halves, and the 8-, 6- and 4-bit floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from kernelmill.verify.emulator.alu_base import (
    F32,
    F64,
    Emitter,
    Form,
    Modifiers,
    int_type,
    splat,
    splat_double,
    width_of,
)
from kernelmill.verify.emulator.alu_float import (
    CANONICAL_NAN,
    HALVES,
    INFINITY,
    PACKED_HALVES,
    ROUNDINGS,
    canonical,
    flush,
    is_nan,
    magnitude,
    narrow,
    nearest_half,
    odd_sum,
    rectify,
    saturate,
    saturate_finite,
    sign_of,
    to_f64,
    widen_bits,
)

Values = Sequence[ir.Value]

INTEGERS = tuple(f"{s}{w}" for s in "su" for w in (8, 16, 32, 64))
FLOATS = ("f32", "f64", *HALVES)
_INTEGRAL = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@dataclass(frozen=True)
class _Small:
    """A float format below 16 bits, of which two fill a packed type. ``largest``: code of the largest finite value;
    ``nan``: code that a NaN becomes (the formats without NaN give the largest finite value)."""

    exponent: int
    mantissa: int
    largest: int
    nan: int
    field: int
    """Bits that one value takes in the packed form."""

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1


SMALL = {
    "e4m3x2": _Small(4, 3, 0x7E, 0x7F, 8),
    "e5m2x2": _Small(5, 2, 0x7B, 0x7F, 8),
    "e2m3x2": _Small(2, 3, 0x1F, 0x1F, 8),
    "e3m2x2": _Small(3, 2, 0x1F, 0x1F, 8),
    "e2m1x2": _Small(2, 1, 0x7, 0x7, 4),
}


def _encode(e: Emitter, x: ir.Value, small: _Small) -> ir.Value:
    """f32 bits to codes (low bits of i32), nearest with ties to even, saturating to the largest finite value."""
    size = magnitude(e, x)
    drop = 23 - small.mantissa
    even = e.b.and_(e.b.lshr(size, splat(32, drop)), splat(32, 1))
    rounded = e.b.lshr(e.b.add(e.b.add(size, splat(32, (1 << (drop - 1)) - 1)), even), splat(32, drop))
    normal = e.b.sub(rounded, splat(32, (127 - small.bias) << small.mantissa))
    # Adding a power of two whose last bit weighs one subnormal step rounds to that step, in the host's own rounding.
    magic = splat(32, (127 + 23 + 1 - small.bias - small.mantissa) << 23)
    subnormal = e.b.sub(e.bits(e.b.fadd(e.as_f32(size), e.as_f32(magic))), magic)
    is_normal = e.cmp(">=", size, splat(32, (128 - small.bias) << 23))
    code = e.smaller(e.select(is_normal, normal, subnormal), splat(32, small.largest))
    sign = e.b.lshr(sign_of(e, x), splat(32, 31 - small.exponent - small.mantissa))
    return e.select(is_nan(e, x, "f32"), splat(32, small.nan), e.b.or_(code, sign))


def _decode(e: Emitter, code: ir.Value, small: _Small) -> ir.Value:
    """Codes (low bits of i32) to f32 bits, exactly. All values, subnormals included, scale from an f32 whose exponent
    field holds the code's."""
    top = small.exponent + small.mantissa
    size = e.b.and_(code, splat(32, (1 << top) - 1))
    raw = e.as_f32(e.b.shl(size, splat(32, 23 - small.mantissa)))
    scale = e.as_f32(splat(32, (254 - small.bias) << 23))
    value = e.bits(e.b.fmul(raw, scale))
    if small.nan != small.largest:
        special = splat(32, CANONICAL_NAN["f32"])
        if small.exponent == 5:
            infinite = e.cmp("==", size, splat(32, small.largest + 1))
            special = e.select(infinite, splat(32, INFINITY["f32"]), special)
        value = e.select(e.cmp(">", size, splat(32, small.largest)), special, value)
    sign = e.b.shl(e.b.and_(code, splat(32, 1 << top)), splat(32, 31 - top))
    return e.select(is_nan(e, value, "f32"), value, e.b.or_(value, sign))


def _pack_small(m: Modifiers, target: str, source: str) -> Form:
    """``cvt.rn.satfinite.e4m3x2.f32 d, a, b`` (a in the upper half) and ``cvt.rn.satfinite.e4m3x2.f16x2 d, a``."""
    small = SMALL[target]
    m.choice("rn")
    m.choice("satfinite")
    relu = m.flag("relu")
    m.done()
    if source not in ("f32", "f16x2") or (source == "f16x2" and small.nan == small.largest):
        m.unknown("unknown source type")

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        if source == "f32":
            high, low = s
        else:
            low, high = (widen_bits(e, v, "f16") for v in e.split(s[0], 2))
        codes = [_encode(e, rectify(e, v, "f32") if relu else v, small) for v in (low, high)]
        return [e.join([e.trunc(c, small.field) for c in codes])]

    return Form((target,), ("f32", "f32") if source == "f32" else ("f16x2",), emit)


def _unpack_small(m: Modifiers, source: str) -> Form:
    """``cvt.rn.f16x2.e4m3x2 d, a``: exact."""
    small = SMALL[source]
    m.choice("rn")
    relu = m.flag("relu")
    m.done()

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        halves = []
        for code in e.split(s[0], 2):
            half = nearest_half(e, _decode(e, e.zext(code, 32), small), "f16")
            halves.append(rectify(e, half, "f16") if relu else half)
        return [e.join(halves)]

    return Form(("f16x2",), (source,), emit)


def _scale(m: Modifiers, source: str) -> Form:
    """To ``ue8m0x2``, powers of two 2^(code - 127): code 255 for NaN; the sign is dropped by taking the magnitude of
    finite values, which the ISA leaves open, so negative inputs are read by their magnitude."""
    mode = m.choice("rz", "rp")
    finite = m.flag("satfinite")
    m.done()
    if source not in ("f32", "bf16x2"):
        m.unknown("unknown source type")

    def code(e: Emitter, x: ir.Value) -> ir.Value:
        size = magnitude(e, x)
        exponent = e.b.lshr(size, splat(32, 23))
        if mode == "rp":
            rest = e.b.and_(size, splat(32, (1 << 23) - 1))
            # Code 0 is 2^-127, the f32 subnormal 0x00400000: only what lies above it rounds up.
            limit = e.select(e.cmp("==", exponent, splat(32, 0)), splat(32, 1 << 22), splat(32, 0))
            exponent = e.b.add(exponent, e.zext(e.cmp(">", rest, limit), 32))
        largest = splat(32, 254)
        infinite = e.cmp("==", size, splat(32, INFINITY["f32"]))
        over = e.cmp(">", exponent, largest)
        exponent = e.select(over, largest if finite else splat(32, 255), exponent)
        if finite:
            exponent = e.select(infinite, largest, exponent)
        return e.trunc(e.select(is_nan(e, x, "f32"), splat(32, 255), exponent), 8)

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        low, high = (s[1], s[0]) if source == "f32" else (widen_bits(e, v, "bf16") for v in e.split(s[0], 2))
        return [e.join([code(e, low), code(e, high)])]

    return Form(("ue8m0x2",), ("f32", "f32") if source == "f32" else ("bf16x2",), emit)


def _unscale(m: Modifiers) -> Form:
    """``cvt.rn.bf16x2.ue8m0x2``: 2^(code - 127), exact; 255 is NaN."""
    m.choice("rn")
    m.done()

    def value(e: Emitter, code: ir.Value) -> ir.Value:
        wide = e.zext(code, 16)
        power = e.select(e.cmp("==", wide, splat(16, 0)), splat(16, 0x40), e.b.shl(wide, splat(16, 7)))
        return e.select(e.cmp("==", wide, splat(16, 255)), splat(16, CANONICAL_NAN["bf16"]), power)

    return Form(("bf16x2",), ("ue8m0x2",), lambda e, s, _: [e.join([value(e, c) for c in e.split(s[0], 2)])])


def _pack_half(m: Modifiers, target: str) -> Form:
    """``cvt.rn.bf16x2.f32 d, a, b``: a in the upper half."""
    kind = target.removesuffix("x2")
    mode = m.choice("rn", "rz")
    relu, finite = m.flag("relu"), m.flag("satfinite")
    m.done()

    def one(e: Emitter, x: ir.Value) -> ir.Value:
        return _finish_half(e, _half_from_f32(e, x, kind, mode), kind, relu, finite)

    return Form((target,), ("f32", "f32"), lambda e, s, _: [e.join([one(e, s[1]), one(e, s[0])])])


def _half_from_f32(e: Emitter, x: ir.Value, kind: str, mode: str) -> ir.Value:
    if mode == "rn":
        return nearest_half(e, x, kind)
    return narrow(e, to_f64(e, x, "f32"), kind, mode)


def _finish_half(e: Emitter, x: ir.Value, kind: str, relu: bool, finite: bool) -> ir.Value:
    if finite:
        x = saturate_finite(e, x, kind)
    return rectify(e, x, kind) if relu else x


def _tf32(m: Modifiers) -> Form:
    """f32 with the mantissa cut to 10 bits. ``rna``: to nearest, ties away from zero. NaN as an H200 gives it: cut by
    ``rna``, 0x7fffe000 by the other modes."""
    mode = m.choice("rna", "rn", "rz")
    relu, finite = mode != "rna" and m.flag("relu"), m.flag("satfinite")
    m.done()

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        x = s[0]
        if mode == "rna":
            rounded = e.b.add(x, splat(32, 0x1000))
        elif mode == "rn":
            even = e.b.and_(e.b.lshr(x, splat(32, 13)), splat(32, 1))
            rounded = e.b.add(e.b.add(x, splat(32, 0xFFF)), even)
        else:
            rounded = x
        mask = splat(32, -0x2000)
        nan = e.b.and_(x if mode == "rna" else splat(32, CANONICAL_NAN["f32"]), mask)
        result = e.select(is_nan(e, x, "f32"), nan, e.b.and_(rounded, mask))
        if finite:
            largest = e.b.or_(splat(32, 0x7F7FE000), sign_of(e, x))
            result = e.select(e.cmp("==", magnitude(e, result), splat(32, INFINITY["f32"])), largest, result)
        if relu:
            negative = e.cmp("<", result, splat(32, 0), True)
            result = e.select(negative, splat(32, 0), result)
        return [result]

    return Form(("tf32",), ("f32",), emit)


def _held(target: str) -> str:
    """The type of the register that takes ``target``: there are no 8-bit integer registers, so those extend to 16."""
    return target[0] + "16" if width_of(target) == 8 else target


def _integer_to_integer(m: Modifiers, target: str, source: str) -> Form:
    """Truncation or extension by the source's sign; ``.sat`` clamps to the target's range."""
    sat = m.flag("sat")
    m.done()
    width, signed = width_of(target), source[0] == "s"
    low = -(1 << (width - 1)) if target[0] == "s" else 0
    high = (1 << (width - 1 if target[0] == "s" else width)) - 1

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        x = e.trunc(s[0], width_of(source))
        if sat:
            # One bit more than both types, so that every bound and value fits.
            wide = max(width_of(source), width) + 1
            x = e.resize(x, wide, signed)
            x = e.smaller(e.larger(x, splat(wide, low), True), splat(wide, high), True)
        result = e.resize(x, width, signed)
        return [e.resize(result, width_of(_held(target)), target[0] == "s")]

    return Form((_held(target),), (source,), emit, wide=True)


def _integer_to_float(m: Modifiers, target: str, source: str) -> Form:
    width, signed = width_of(source), source[0] == "s"
    mode = m.choice(*ROUNDINGS)
    sat = m.flag("sat")
    m.done()
    if target == "f64" and width == 64 and mode != "rn":
        m.unknown("directed rounding from 64 bits to f64")

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        x = e.trunc(s[0], width)
        convert = e.b.sitofp if signed else e.b.uitofp
        if target == "f64" or (target == "f32" and mode == "rn"):
            result = e.bits(convert(x, F64 if target == "f64" else F32))
        elif width < 64:
            result = narrow(e, convert(x, F64), target, mode)
        else:
            shift = e.b.ashr if signed else e.b.lshr
            high = e.b.fmul(convert(shift(x, splat(64, 32)), F64), splat_double(2.0**32))
            low = e.b.uitofp(e.b.and_(x, splat(64, (1 << 32) - 1)), F64)
            result = narrow(e, odd_sum(e, high, low), target, mode)
        return [saturate(e, result, target) if sat else result]

    return Form((target,), (source,), emit, wide=True)


def _float_to_integer(m: Modifiers, target: str, source: str) -> Form:
    """Saturates to the target's range. NaN gives 0, or for f64 sources and 64-bit targets the value with the top bit
    set alone (PTX ISA, cvt)."""
    mode = m.choice(*_INTEGRAL)
    ftz = source == "f32" and m.flag("ftz")
    # Saturation is the rule for float sources; the modifier may say so.
    m.flag("sat")
    m.done()
    width, signed = width_of(target), target[0] == "s"

    def body(e: Emitter, x: ir.Value) -> ir.Value:
        value = e.call(f"llvm.{_INTEGRAL[mode]}.v32f64", F64, to_f64(e, x, source))
        name = f"llvm.fpto{'s' if signed else 'u'}i.sat.v32i{width}.v32f64"
        result = e.call(name, int_type(width), value)
        if source == "f64" or width == 64:
            result = e.select(is_nan(e, x, source), splat(width, 1 << (width - 1)), result)
        return result

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        x = e.trunc(s[0], width_of(source))
        if ftz:
            x = flush(e, x, source)
        result = e.outlined(f"cvt.{mode}.{target}.{source}", int_type(width), [x], body)
        return [e.resize(result, width_of(_held(target)), signed)]

    return Form((_held(target),), (source,), emit, wide=True)


def _cut_nan(e: Emitter, x: ir.Value, target: str) -> ir.Value:
    """A quiet NaN with the sign and the top payload bits of f64 NaN bits, as an H200 gives."""
    width, field = width_of(target), INFINITY[target]
    step = field & -field
    payload = e.b.lshr(x, splat(64, 52 - (step.bit_length() - 1)))
    bits = e.b.or_(e.b.and_(e.trunc(payload, width), splat(width, step - 1)), splat(width, field | step >> 1))
    return e.b.or_(bits, e.trunc(e.b.lshr(sign_of(e, x), splat(64, 64 - width)), width))


def _float_to_float(m: Modifiers, target: str, source: str) -> Form:
    narrowing = width_of(target) < width_of(source) or (target != source and width_of(target) == width_of(source) == 16)
    if narrowing:
        mode = m.choice(*ROUNDINGS)
    elif target == source:
        mode = m.choice(*_INTEGRAL, default="")
    else:
        # Widening is exact: a rounding mode is accepted and has no effect.
        mode = m.choice(*ROUNDINGS, default="")
    ftz = "f32" in (source, target) and m.flag("ftz")
    sat = m.flag("sat")
    relu = target in HALVES and source == "f32" and m.flag("relu")
    finite = target in HALVES and source == "f32" and m.flag("satfinite")
    m.done()

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        del seed
        x = e.trunc(s[0], width_of(source))
        if ftz and source == "f32":
            x = flush(e, x, source)
        if narrowing and source == "f32":
            result = _half_from_f32(e, x, target, mode)
        elif narrowing:
            result = narrow(e, to_f64(e, x, source), target, mode)
            if source == "f64":
                result = e.select(is_nan(e, x, source), _cut_nan(e, x, target), result)
        elif target == source and not mode:
            result = x
        elif target == source:
            value = e.call(f"llvm.{_INTEGRAL[mode]}.v32f64", F64, to_f64(e, x, source))
            result = e.bits(value) if target == "f64" else narrow(e, value, target, "rn")
        elif target == "f64":
            result = e.bits(to_f64(e, x, source))
        else:
            # A NaN keeps its payload from bf16, not from f16: an H200 shifts the one and converts the other.
            result = widen_bits(e, x, source) if source == "bf16" else canonical(e, widen_bits(e, x, source), target)
        if ftz and target == "f32":
            result = flush(e, result, target)
        if sat:
            result = saturate(e, result, target)
        return [_finish_half(e, result, target, relu, finite) if relu or finite else result]

    return Form((target,), (source,), emit, wide=True)


def cvt(m: Modifiers) -> Form:
    known = (*INTEGERS, *FLOATS, *PACKED_HALVES, *SMALL, "ue8m0x2", "tf32")
    source = m.type(*known)
    target = m.type(*known)
    if target in SMALL:
        return _pack_small(m, target, source)
    if source in SMALL and target == "f16x2":
        return _unpack_small(m, source)
    if target == "ue8m0x2":
        return _scale(m, source)
    if source == "ue8m0x2" and target == "bf16x2":
        return _unscale(m)
    if target in PACKED_HALVES and source == "f32":
        return _pack_half(m, target)
    if target == "tf32" and source == "f32":
        return _tf32(m)
    if target in INTEGERS and source in INTEGERS:
        return _integer_to_integer(m, target, source)
    if target in FLOATS and source in INTEGERS:
        return _integer_to_float(m, target, source)
    if target in INTEGERS and source in FLOATS:
        return _float_to_integer(m, target, source)
    if target in FLOATS and source in FLOATS:
        return _float_to_float(m, target, source)
    return m.unknown("unknown pair of types")
