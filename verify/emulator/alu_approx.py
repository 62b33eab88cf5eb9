"""Approximate instructions: ``ex2 lg2 sin cos tanh rcp rsqrt sqrt div`` with ``.approx`` or ``.full``.

Nominal: the f64 result of the host's libm rounded to the destination type, which is correctly rounded except where the
exact result lies within about 2^-28 ulp of a tie. Perturbed: moved by a pseudo-random whole number of destination
steps so that the result stays within the error bound that the PTX ISA documents for the
instruction; one result in four stays. With a bound of one ulp a moved result is the exact value's other neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from kernelmill.verify.emulator.alu_base import F64, Emitter, Form, Modifiers, int_type, splat, splat_double, width_of
from kernelmill.verify.emulator.alu_float import (
    INFINITY,
    canonical,
    flush,
    magnitude,
    narrow,
    sign_of,
    to_f64,
)

Values = Sequence[ir.Value]


@dataclass(frozen=True)
class Precision:
    """Steps of a destination type: ``digits`` of the significand, exponent of the smallest subnormal."""

    digits: int
    smallest: int


PRECISIONS = {"f32": Precision(24, -149), "f16": Precision(11, -24), "bf16": Precision(8, -133)}


@dataclass(frozen=True)
class Bound:
    """Documented maximum error: in ulp of the result, relative, or absolute. ``absolute`` may be a function of the
    input (an f64 vector), for instructions whose bound depends on its range."""

    ulp: float = 0.0
    relative: float = 0.0
    absolute: float | Callable[[Emitter, ir.Value], ir.Value] = 0.0


def _sine_bound(e: Emitter, x: ir.Value) -> ir.Value:
    """PTX ISA 9.0, sin and cos: 2^-20.5 within [-2pi, 2pi], 2^-14.7 within [-100pi, 100pi]; none is given outside,
    where the latter is used too."""
    near = e.b.fcmp_ordered("<=", _fabs(e, x), splat_double(2 * math.pi))
    return e.b.select(near, splat_double(2.0**-20.5), splat_double(2.0**-14.7))


def _log_bound(e: Emitter, x: ir.Value) -> ir.Value:
    """PTX ISA 9.0, lg2: absolute 2^-22 for inputs within (0.5, 2), relative 2^-22 elsewhere."""
    inside = e.b.and_(e.b.fcmp_ordered(">", x, splat_double(0.5)), e.b.fcmp_ordered("<", x, splat_double(2.0)))
    size = _fabs(e, e.call("llvm.log2.v32f64", F64, x))
    return e.b.fmul(e.b.select(inside, splat_double(1.0), size), splat_double(2.0**-22))


BOUNDS = {
    # PTX ISA 9.0, 9.7.3 (f32) and 9.7.4 (half precision), section of each instruction.
    ("ex2", "f32"): Bound(ulp=2),
    ("ex2", "f16"): Bound(relative=2.0**-9.9),
    ("ex2", "bf16"): Bound(relative=2.0**-7),
    ("tanh", "f32"): Bound(relative=2.0**-11),
    ("tanh", "f16"): Bound(absolute=2.0**-10.987),
    ("tanh", "bf16"): Bound(absolute=2.0**-8),
    ("rcp", "f32"): Bound(ulp=1),
    ("rsqrt", "f32"): Bound(relative=2.0**-22.9),
    ("sqrt", "f32"): Bound(relative=2.0**-23),
    ("lg2", "f32"): Bound(absolute=_log_bound),
    ("sin", "f32"): Bound(absolute=_sine_bound),
    ("cos", "f32"): Bound(absolute=_sine_bound),
    ("div.approx", "f32"): Bound(ulp=2),
    ("div.full", "f32"): Bound(ulp=2),
}


def _fabs(e: Emitter, x: ir.Value) -> ir.Value:
    return e.call("llvm.fabs.v32f64", F64, x)


def _hash(e: Emitter, words: Sequence[ir.Value], seed: ir.Value, salt: int) -> ir.Value:
    """32 well-mixed bits per lane from the input bits, the scalar seed and the instruction (the finaliser of
    MurmurHash3 after each word)."""
    vector = int_type(32)
    first = e.b.insert_element(ir.Constant(vector, ir.Undefined), seed, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(vector, [0] * 32)
    state = e.b.xor(e.b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask), splat(32, salt))
    for word in words:
        state = e.b.add(e.b.mul(state, splat(32, 0x9E3779B1)), word)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            state = e.b.mul(e.b.xor(state, e.b.lshr(state, splat(32, shift))), splat(32, factor))
        state = e.b.xor(state, e.b.lshr(state, splat(32, 16)))
    return state


def _step(e: Emitter, x: ir.Value, precision: Precision) -> ir.Value:
    """Distance of neighbouring values of the type around the f64 value ``x``, as f64."""
    power = e.as_f64(e.b.and_(e.bits(x), splat(64, INFINITY["f64"])))
    step = e.b.fmul(power, splat_double(2.0 ** (1 - precision.digits)))
    least = splat_double(2.0**precision.smallest)
    return e.b.select(e.b.fcmp_ordered(">", step, least), step, least)


def _bound(e: Emitter, bound: Bound, x: ir.Value, exact: ir.Value, precision: Precision) -> ir.Value:
    if bound.ulp:
        return e.b.fmul(_step(e, exact, precision), splat_double(bound.ulp))
    if bound.relative:
        return e.b.fmul(_fabs(e, exact), splat_double(bound.relative))
    return bound.absolute(e, x) if callable(bound.absolute) else splat_double(bound.absolute)


def _floor(e: Emitter, x: ir.Value) -> ir.Value:
    return e.call("llvm.floor.v32f64", F64, x)


def _perturb(e: Emitter, kind: str, bound: ir.Value, exact: ir.Value, nominal: ir.Value, random: ir.Value) -> ir.Value:
    """Bits of a value of ``kind`` within ``bound`` of ``exact``, in three cases of four another than ``nominal`` (bits)
    if there is one."""
    zero, one = splat_double(0.0), splat_double(1.0)
    value = to_f64(e, nominal, kind)
    step = _step(e, value, PRECISIONS[kind])
    error = e.b.fsub(value, exact)

    def steps(room: ir.Value) -> ir.Value:
        count = _floor(e, e.b.fdiv(room, step))
        return e.b.select(e.b.fcmp_ordered(">", count, zero), count, zero)

    up, down = steps(e.b.fsub(bound, error)), steps(e.b.fadd(bound, error))
    unit = e.b.fmul(e.b.uitofp(random, F64), splat_double(2.0**-32))
    # Uniform over -down .. -1, 1 .. up.
    chosen = e.b.fsub(_floor(e, e.b.fmul(unit, e.b.fadd(up, down))), down)
    chosen = e.b.select(e.b.fcmp_ordered(">=", chosen, zero), e.b.fadd(chosen, one), chosen)
    moved = narrow(e, e.b.fadd(value, e.b.fmul(chosen, step)), kind, "rn")
    # Where steps change size, at powers of two, the move may overshoot; there, and without room, the value stays.
    moved_value = to_f64(e, moved, kind)
    inside = e.b.fcmp_ordered("<=", _fabs(e, e.b.fsub(moved_value, exact)), bound)
    finite = e.cmp("<", magnitude(e, nominal), e.like(nominal, INFINITY[kind]))
    finite = e.b.and_(finite, e.cmp("<", magnitude(e, moved), e.like(nominal, INFINITY[kind])))
    room = e.b.fcmp_ordered(">", e.b.fadd(up, down), zero)
    # A quarter stays, so that seeds differ even where a single other value is allowed.
    move = e.cmp("!=", e.b.and_(random, splat(32, 3)), splat(32, 0))
    for condition in (inside, finite, room):
        move = e.b.and_(move, condition)
    return e.select(move, moved, nominal)


def _approximate(
    e: Emitter,
    name: str,
    kind: str,
    ftz: bool,
    sources: Values,
    seed: ir.Value,
    function: Callable[..., ir.Value],
) -> ir.Value:
    """``function(e, *f64 values)`` approximated in ``kind``. Zero, infinite and NaN inputs have fixed results in the
    ISA's tables and are never perturbed."""

    def body(e: Emitter, *arguments: ir.Value) -> ir.Value:
        *x, seed = arguments
        if ftz:
            x = [flush(e, v, kind) for v in x]
        values = [to_f64(e, v, kind) for v in x]
        exact = function(e, *values)
        nominal = narrow(e, exact, kind, "rn")
        start = e.b.block
        perturbed_block = e.b.function.append_basic_block()
        end = e.b.function.append_basic_block()
        e.b.cbranch(e.b.icmp_unsigned("==", seed, ir.Constant(ir.IntType(32), 0)), end, perturbed_block)
        e.b.position_at_end(perturbed_block)
        salt = int.from_bytes(name.encode()[:3].ljust(4, b"."), "little")
        words = [e.zext(v, 32) for v in x]
        bound = _bound(e, BOUNDS[name, kind], values[0], exact, PRECISIONS[kind])
        moved = _perturb(e, kind, bound, exact, nominal, _hash(e, words, seed, salt))
        ordinary = splat(1, 1)
        for v in x:
            size = magnitude(e, v)
            ordinary = e.b.and_(ordinary, e.cmp("!=", size, e.like(size, 0)))
            ordinary = e.b.and_(ordinary, e.cmp("<", size, e.like(size, INFINITY[kind])))
        moved = e.select(ordinary, moved, nominal)
        e.b.branch(end)
        e.b.position_at_end(end)
        result = e.b.phi(nominal.type)
        result.add_incoming(nominal, start)
        result.add_incoming(moved, perturbed_block)
        return flush(e, result, kind) if ftz else result

    full = f"{name}{'.ftz' if ftz else ''}.{kind}"
    return e.outlined(full, sources[0].type, [*sources, seed], body)


def _intrinsic(name: str) -> Callable[..., ir.Value]:
    return lambda e, x: e.call(f"llvm.{name}.v32f64", F64, x)


def _reciprocal(e: Emitter, x: ir.Value) -> ir.Value:
    return e.b.fdiv(splat_double(1.0), x)


def _reciprocal_root(e: Emitter, x: ir.Value) -> ir.Value:
    # sqrt(-0) is -0 and its reciprocal -inf, as the ISA's table says.
    return _reciprocal(e, e.call("llvm.sqrt.v32f64", F64, x))


def _quotient(e: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    return e.b.fdiv(x, y)


FUNCTIONS: dict[str, Callable[..., ir.Value]] = {
    "ex2": _intrinsic("exp2"),
    "lg2": _intrinsic("log2"),
    "sin": _intrinsic("sin"),
    "cos": _intrinsic("cos"),
    "tanh": _intrinsic("tanh"),
    "sqrt": _intrinsic("sqrt"),
    "rcp": _reciprocal,
    "rsqrt": _reciprocal_root,
}


def unary(m: Modifiers) -> Form:
    """``NAME.approx{.ftz}.type d, a``; ex2 and tanh also in half precision, where ``.ftz`` is the rule for
    ``ex2.bf16`` and not offered elsewhere."""
    name = m.instr.opcode
    kinds = ("f32", "f16", "f16x2", "bf16", "bf16x2") if name in ("ex2", "tanh") else ("f32",)
    kind = m.type(*kinds)
    m.choice("approx")
    piece = kind.removesuffix("x2")
    ftz = False
    if name == "ex2" and piece == "bf16":
        m.choice("ftz")
        ftz = True
    elif name != "tanh" and piece == "f32":
        ftz = m.flag("ftz")
    m.done()
    parts = width_of(kind) // width_of(piece)

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        pieces = [_approximate(e, name, piece, ftz, [x], seed, FUNCTIONS[name]) for x in e.split(s[0], parts)]
        return [e.join(pieces)]

    return Form((kind,), (kind,), emit)


def div(m: Modifiers) -> Form:
    """``div.approx`` computes a * (1/b): a divisor above 2^126 gives NaN for an infinite a, else a signed zero."""
    m.type("f32")
    name = "div." + m.choice("approx", "full")
    ftz = m.flag("ftz")
    m.done()

    def emit(e: Emitter, s: Values, seed: ir.Value) -> list[ir.Value]:
        result = _approximate(e, name, "f32", ftz, s, seed, _quotient)
        if name == "div.approx":
            size = magnitude(e, s[1])
            huge = e.b.and_(
                e.cmp(">", size, splat(32, (127 + 126) << 23)), e.cmp("<", size, splat(32, INFINITY["f32"]))
            )
            zero = sign_of(e, e.b.xor(s[0], s[1]))
            infinite = e.cmp(">=", magnitude(e, s[0]), splat(32, INFINITY["f32"]))
            special = e.select(infinite, splat(32, 0x7FFFFFFF), zero)
            result = e.select(huge, special, result)
        return [canonical(e, result, "f32")]

    return Form(("f32",), ("f32", "f32"), emit)
