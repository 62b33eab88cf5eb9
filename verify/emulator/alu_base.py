"""What the lowerings share: modifier parsing, the description of one instruction form, and vector IR helpers."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from llvmlite import ir

from kernelmill.verify.emulator.interface import Unsupported
from kernelmill.verify.emulator.ir import Instruction

LANES = 32

F32 = ir.VectorType(ir.FloatType(), LANES)
F64 = ir.VectorType(ir.DoubleType(), LANES)
HALF = ir.VectorType(ir.HalfType(), LANES)


@functools.cache
def int_type(width: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(width), LANES)


class _Splat(ir.Constant):
    """One value in every lane, in the short form ``splat (i32 1)``, which llvmlite itself cannot write."""

    def __init__(self, type_: ir.VectorType, text: str) -> None:
        self.type = type_
        self.constant = text

    def _get_reference(self) -> str:
        return f"splat ({self.type.element} {self.constant})"


@functools.cache
def splat(width: int, value: int) -> ir.Value:
    """``value`` (any Python int, two's complement) in every lane of ``<32 x iwidth>``."""
    value &= (1 << width) - 1
    if width == 1:
        return _Splat(int_type(1), "true" if value else "false")
    return _Splat(int_type(width), str(value))


@functools.cache
def splat_double(value: float) -> ir.Value:
    return _Splat(F64, f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}")


def width_of(kind: str) -> int:
    """Bits of a PTX type, packed types included: ``pred`` 1, ``bf16`` 16, ``f16x2`` 32, ``e2m1x2`` 8."""
    if kind == "pred":
        return 1
    widths = {"e2m1x2": 8, "e4m3x2": 16, "e5m2x2": 16, "e2m3x2": 16, "e3m2x2": 16, "ue8m0x2": 16, "tf32": 32}
    if kind in widths:
        return widths[kind]
    digits, _, count = kind.lstrip("bfsu").partition("x")
    return int(digits) * int(count or 1)


class Modifiers:
    """The modifiers of one instruction, taken one by one; what nobody took is unknown."""

    def __init__(self, instr: Instruction) -> None:
        self.instr = instr
        self.left = list(instr.modifiers)

    def flag(self, name: str) -> bool:
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def choice(self, *names: str, default: str | None = None) -> str:
        """The one of ``names`` that is present. Raises Unsupported when there is none and no default."""
        for name in names:
            if self.flag(name):
                return name
        if default is None:
            self.unknown(f"needs one of .{', .'.join(names)}")
        return default

    def type(self, *names: str) -> str:
        """The last modifier, which must be one of ``names``."""
        if not self.left or self.left[-1] not in names:
            self.unknown("unknown type")
        return self.left.pop()

    def done(self) -> None:
        if self.left:
            self.unknown(f"unknown modifier .{self.left[0][:40]}")

    def unknown(self, why: str) -> NoReturn:
        raise Unsupported(f"PTX line {self.instr.line}: {self.instr.name[:120]} is not supported: {why}")


@dataclass(frozen=True)
class Form:
    """One form of an instruction: PTX types of its flattened operands and how to emit it.

    ``wide``: sources may sit in registers wider than their type (``cvt`` only). ``emit(e, sources, seed)`` returns one
    value per destination.
    """

    dests: tuple[str, ...]
    sources: tuple[str, ...]
    emit: Callable[[Emitter, Sequence[ir.Value], ir.Value], list[ir.Value]]
    wide: bool = False


class Emitter:
    """Vector IR over 32 lanes. Integer vectors are bits; ``f32``/``f64`` values are made by ``as_*``."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    # Integers.

    def like(self, x: ir.Value, value: int) -> ir.Value:
        """``value`` in every lane, at the width of ``x``."""
        return splat(self.width(x), value)

    @staticmethod
    def width(x: ir.Value) -> int:
        return int(x.type.element.width)

    def zext(self, x: ir.Value, width: int) -> ir.Value:
        return x if self.width(x) == width else self.b.zext(x, int_type(width))

    def sext(self, x: ir.Value, width: int) -> ir.Value:
        return x if self.width(x) == width else self.b.sext(x, int_type(width))

    def trunc(self, x: ir.Value, width: int) -> ir.Value:
        return x if self.width(x) == width else self.b.trunc(x, int_type(width))

    def resize(self, x: ir.Value, width: int, signed: bool) -> ir.Value:
        if self.width(x) >= width:
            return self.trunc(x, width)
        return self.sext(x, width) if signed else self.zext(x, width)

    def cmp(self, how: str, x: ir.Value, y: ir.Value, signed: bool = False) -> ir.Value:
        return self.b.icmp_signed(how, x, y) if signed else self.b.icmp_unsigned(how, x, y)

    def select(self, condition: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.b.select(condition, x, y)

    def smaller(self, x: ir.Value, y: ir.Value, signed: bool = False) -> ir.Value:
        return self.select(self.cmp("<", x, y, signed), x, y)

    def larger(self, x: ir.Value, y: ir.Value, signed: bool = False) -> ir.Value:
        return self.select(self.cmp(">", x, y, signed), x, y)

    def shift(self, how: str, x: ir.Value, amount: ir.Value) -> ir.Value:
        """Shift by a u32 amount; amounts of the width and more give 0, or the sign for ``ashr``."""
        width = self.width(x)
        last = self.smaller(amount, splat(32, width - 1))
        result = getattr(self.b, how)(x, self.resize(last, width, False))
        if how == "ashr":
            return result
        return self.select(self.cmp(">=", amount, splat(32, width)), self.like(x, 0), result)

    def split(self, x: ir.Value, parts: int) -> list[ir.Value]:
        """Equal pieces of each lane, low bits first."""
        width = self.width(x) // parts
        return [self.trunc(self.b.lshr(x, self.like(x, i * width)) if i else x, width) for i in range(parts)]

    def join(self, pieces: Sequence[ir.Value]) -> ir.Value:
        width = self.width(pieces[0])
        total = width * len(pieces)
        result = self.zext(pieces[0], total)
        for i, piece in enumerate(pieces[1:], 1):
            result = self.b.or_(result, self.b.shl(self.zext(piece, total), splat(total, i * width)))
        return result

    # Floats.

    def as_f32(self, x: ir.Value) -> ir.Value:
        return self.b.bitcast(x, F32)

    def as_f64(self, x: ir.Value) -> ir.Value:
        return self.b.bitcast(x, F64)

    def bits(self, x: ir.Value) -> ir.Value:
        widths = {"half": 16, "float": 32, "double": 64}
        return self.b.bitcast(x, int_type(widths[str(x.type.element)]))

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Call an LLVM intrinsic by its full name."""
        function = self.b.module.globals.get(name)
        if function is None:
            function = ir.Function(self.b.module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(function, arguments)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self.call("llvm.fma.v32f32" if x.type == F32 else "llvm.fma.v32f64", x.type, x, y, z)

    def outlined(
        self, name: str, result: ir.Type, arguments: Sequence[ir.Value], body: Callable[..., ir.Value]
    ) -> ir.Value:
        """Call the internal function ``alu.name``, made by ``body(emitter, *arguments)`` on first use in the module:
        a long sequence is emitted once, so code stays small and linear in the program."""
        full = f"alu.{name}"
        function = self.b.module.globals.get(full)
        if function is None:
            function = ir.Function(self.b.module, ir.FunctionType(result, [a.type for a in arguments]), full)
            function.linkage = "internal"
            function.attributes.add("noinline")
            function.attributes.add("nounwind")
            inner = ir.IRBuilder(function.append_basic_block())
            inner.ret(body(Emitter(inner), *function.args))
        return self.b.call(function, arguments)
