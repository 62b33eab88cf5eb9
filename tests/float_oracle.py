"""Floats in exact rational arithmetic: an oracle that shares nothing with the emulator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    exponent: int
    mantissa: int

    @property
    def width(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def sign(self) -> int:
        return 1 << (self.width - 1)


FORMATS = {"f32": Format(8, 23), "f64": Format(11, 52), "f16": Format(5, 10), "bf16": Format(8, 7)}
NAN = {"f32": 0x7FFFFFFF, "f64": 0x7FF8 << 48, "f16": 0x7FFF, "bf16": 0x7FFF}


class Special(Exception):
    """Carries the bits of a result that is no rounding of a rational."""

    def __init__(self, bits: int) -> None:
        self.bits = bits


def is_nan(bits: int, kind: str) -> bool:
    f = FORMATS[kind]
    return bits & ~f.sign > f.infinity


def is_infinite(bits: int, kind: str) -> bool:
    f = FORMATS[kind]
    return bits & ~f.sign == f.infinity


def negative(bits: int, kind: str) -> bool:
    return bool(bits & FORMATS[kind].sign)


def parts(bits: int, kind: str) -> tuple[int, int]:
    """(n, e) with the finite value n * 2^e."""
    f = FORMATS[kind]
    exponent = (bits & f.infinity) >> f.mantissa
    mantissa = bits & ((1 << f.mantissa) - 1)
    if exponent:
        mantissa |= 1 << f.mantissa
    return (-mantissa if bits & f.sign else mantissa), max(exponent, 1) - f.bias - f.mantissa


def value(bits: int, kind: str) -> Fraction:
    """Of a finite float."""
    n, e = parts(bits, kind)
    return Fraction(n) * Fraction(2) ** e


def rounded(q: Fraction, kind: str, mode: str, zero_negative: bool = False) -> int:
    """Bits of ``q`` in ``kind``; an exact zero takes the given sign."""
    # 1200 fraction bits and a sticky bit decide every rounding; dyadic values are exact.
    scaled, rest = divmod(abs(q.numerator) << 1200, q.denominator)
    n = scaled << 1 | (rest != 0)
    return round_dyadic(-n if q < 0 else n, -1201, kind, mode, zero_negative)


def round_dyadic(n: int, e: int, kind: str, mode: str, zero_negative: bool = False) -> int:
    """Bits of n * 2^e in ``kind``."""
    f = FORMATS[kind]
    if n == 0:
        return f.sign if zero_negative else 0
    below, n = n < 0, abs(n)
    # Exponent of the last place kept: that of the value's binade, or of the subnormals.
    last = max(e + n.bit_length() - 1, 1 - f.bias) - f.mantissa
    shift = last - e
    if shift <= 0:
        whole, rest, half = n << -shift, 0, 1
    else:
        whole, rest, half = n >> shift, n & ((1 << shift) - 1), 1 << (shift - 1)
    if mode == "rn":
        whole += rest > half or (rest == half and whole & 1)
    elif (mode == "rm" and below) or (mode == "rp" and not below):
        whole += rest > 0
    # A carry out of the mantissa moves into the exponent field by itself.
    bits = whole + ((last + f.mantissa - 1 + f.bias) << f.mantissa)
    if bits >= f.infinity:
        to_infinity = mode == "rn" or (mode == "rm" and below) or (mode == "rp" and not below)
        bits = f.infinity if to_infinity else f.infinity - 1
    return (f.sign if below else 0) | bits


def _special_sum(x: int, y: int, kind: str) -> None:
    if is_nan(x, kind) or is_nan(y, kind):
        raise Special(NAN[kind])
    if is_infinite(x, kind) and is_infinite(y, kind) and x != y:
        raise Special(NAN[kind])
    for v in (x, y):
        if is_infinite(v, kind):
            raise Special(v)


def _add(x: int, y: int, kind: str, mode: str) -> int:
    _special_sum(x, y, kind)
    return _sum(parts(x, kind), parts(y, kind), (negative(x, kind), negative(y, kind)), kind, mode)


def _sum(x: tuple[int, int], y: tuple[int, int], signs: tuple[bool, bool], kind: str, mode: str) -> int:
    e = min(x[1], y[1])
    n = (x[0] << (x[1] - e)) + (y[0] << (y[1] - e))
    return round_dyadic(n, e, kind, mode, any(signs) if mode == "rm" else all(signs))


def _product_special(x: int, y: int, kind: str) -> int | None:
    f = FORMATS[kind]
    if is_nan(x, kind) or is_nan(y, kind):
        raise Special(NAN[kind])
    if is_infinite(x, kind) or is_infinite(y, kind):
        if not x & ~f.sign or not y & ~f.sign:
            raise Special(NAN[kind])
        return f.infinity | ((x ^ y) & f.sign)
    return None


def _mul(x: int, y: int, kind: str, mode: str) -> int:
    infinite = _product_special(x, y, kind)
    if infinite is not None:
        return infinite
    (n, e), (m, d) = parts(x, kind), parts(y, kind)
    return round_dyadic(n * m, e + d, kind, mode, bool((x ^ y) & FORMATS[kind].sign))


def _fma(x: int, y: int, z: int, kind: str, mode: str) -> int:
    if is_nan(z, kind):
        raise Special(NAN[kind])
    infinite = _product_special(x, y, kind)
    if infinite is not None:
        _special_sum(infinite, z, kind)
    if is_infinite(z, kind):
        raise Special(z)
    signs = bool((x ^ y) & FORMATS[kind].sign), negative(z, kind)
    (n, e), (m, d) = parts(x, kind), parts(y, kind)
    return _sum((n * m, e + d), parts(z, kind), signs, kind, mode)


def _div(x: int, y: int, kind: str, mode: str) -> int:
    f = FORMATS[kind]
    if is_nan(x, kind) or is_nan(y, kind):
        raise Special(NAN[kind])
    sign = (x ^ y) & f.sign
    if is_infinite(x, kind) or is_infinite(y, kind):
        if is_infinite(x, kind) and is_infinite(y, kind):
            raise Special(NAN[kind])
        return sign | (f.infinity if is_infinite(x, kind) else 0)
    (n, e), (m, d) = parts(x, kind), parts(y, kind)
    if m == 0:
        raise Special(NAN[kind] if n == 0 else sign | f.infinity)
    # 160 bits more than the divisor and a sticky bit decide every rounding.
    quotient, rest = divmod(abs(n) << 160, abs(m))
    n = quotient << 1 | (rest != 0)
    return round_dyadic(-n if sign else n, e - d - 161, kind, mode, bool(sign))


def _sqrt(x: int, kind: str, mode: str) -> int:
    if is_nan(x, kind):
        raise Special(NAN[kind])
    if is_infinite(x, kind) or not x & ~FORMATS[kind].sign:
        raise Special(NAN[kind] if is_infinite(x, kind) and negative(x, kind) else x)
    if negative(x, kind):
        raise Special(NAN[kind])
    n, e = parts(x, kind)
    # More than 60 bits of root and a sticky bit decide every rounding.
    n, e = n << (160 + (e & 1)), e - (160 + (e & 1))
    root = math.isqrt(n)
    return round_dyadic(root << 1 | (root * root != n), e // 2 - 1, kind, mode)


def flushed(bits: int, kind: str) -> int:
    f = FORMATS[kind]
    return bits & f.sign if bits & f.infinity == 0 else bits


def saturated(bits: int, kind: str) -> int:
    if is_nan(bits, kind) or negative(bits, kind):
        return 0
    return min(bits, FORMATS[kind].bias << FORMATS[kind].mantissa)


def arithmetic(operation: str, kind: str, mode: str, *x: int, ftz: bool = False, sat: bool = False) -> int:
    """Bits of add, sub, mul, fma, div, rcp or sqrt of bits."""
    if ftz:
        x = tuple(flushed(v, kind) for v in x)
    f = FORMATS[kind]
    try:
        if operation == "add":
            result = _add(x[0], x[1], kind, mode)
        elif operation == "sub":
            result = _add(x[0], x[1] ^ f.sign, kind, mode)
        elif operation == "mul":
            result = _mul(x[0], x[1], kind, mode)
        elif operation == "fma":
            result = _fma(x[0], x[1], x[2], kind, mode)
        elif operation == "div":
            result = _div(x[0], x[1], kind, mode)
        elif operation == "rcp":
            result = _div(f.bias << f.mantissa, x[0], kind, mode)
        else:
            result = _sqrt(x[0], kind, mode)
    except Special as special:
        result = NAN[kind] if is_nan(special.bits, kind) else special.bits
    if ftz:
        result = flushed(result, kind)
    return saturated(result, kind) if sat else result


def convert(bits: int, source: str, target: str, mode: str) -> int:
    """Float to float. NaN becomes canonical, but keeps sign and payload, quieted, from f64, to f64 and from bf16."""
    sign = FORMATS[target].sign if negative(bits, source) else 0
    if is_nan(bits, source):
        if "f64" not in (source, target) and (source, target) != ("bf16", "f32"):
            return NAN[target]
        f, t = FORMATS[source], FORMATS[target]
        payload = bits & ((1 << f.mantissa) - 1)
        shift = t.mantissa - f.mantissa
        payload = payload << shift if shift >= 0 else payload >> -shift
        quiet = 0 if (source, target) == ("bf16", "f32") else 1 << (t.mantissa - 1)
        return sign | t.infinity | payload | quiet
    if is_infinite(bits, source):
        return FORMATS[target].infinity | sign
    return round_dyadic(*parts(bits, source), target, mode, bool(sign))


def to_integer(bits: int, source: str, width: int, signed: bool, mode: str) -> int:
    """Float to integer bits with saturation and PTX's rule for NaN."""
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    if is_nan(bits, source):
        return 1 << (width - 1) if source == "f64" or width == 64 else 0
    if is_infinite(bits, source):
        return (low if negative(bits, source) else high) & ((1 << width) - 1)
    n, e = parts(bits, source)
    if e >= 0:
        whole = n << e
    else:
        floor, rest, half = n >> -e, n & ((1 << -e) - 1), 1 << (-e - 1)
        up = {
            "rmi": False,
            "rpi": rest > 0,
            "rzi": rest > 0 and n < 0,
            "rni": rest > half or (rest == half and floor & 1 == 1),
        }
        whole = floor + up[mode]
    return min(max(whole, low), high) & ((1 << width) - 1)
