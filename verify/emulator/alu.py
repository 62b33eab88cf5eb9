"""Lowering of register-to-register instructions to LLVM IR, one warp (32 lanes) at a time.

A register of N bits is a ``<32 x iN>`` value, a predicate ``<32 x i1>``; floats are held as bits. Operands are
*flattened*: the items of a ``Vector`` count one by one, in order. The first ``len(signature[0])`` flattened operands
are the destinations, the others the sources.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from kernelmill.verify.emulator import alu_approx, alu_convert, alu_float, alu_integer
from kernelmill.verify.emulator.alu_base import Emitter, Form, Modifiers, width_of
from kernelmill.verify.emulator.interface import Unsupported
from kernelmill.verify.emulator.ir import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Label,
    Operand,
    PtxError,
    Register,
    Symbol,
    Vector,
)


def _div(m: Modifiers) -> Form:
    if "approx" in m.left or "full" in m.left:
        return alu_approx.div(m)
    if m.left[-1:] in (["f32"], ["f64"]):
        return alu_float.exact_unary_or_div(m, "div", 2)
    return alu_integer.div(m)


def _approximate_or(operation: str) -> Callable[[Modifiers], Form]:
    def make(m: Modifiers) -> Form:
        return alu_approx.unary(m) if "approx" in m.left else alu_float.exact_unary_or_div(m, operation, 1)

    return make


TABLE: dict[str, Callable[[Modifiers], Form]] = {
    "abs": alu_float.absolute,
    "add": alu_float.add,
    "and": alu_integer.and_,
    "bfe": alu_integer.bfe,
    "bfi": alu_integer.bfi,
    "bfind": alu_integer.bfind,
    "brev": alu_integer.brev,
    "clz": alu_integer.clz,
    "cnot": alu_integer.cnot,
    "copysign": alu_float.copysign,
    "cos": alu_approx.unary,
    "cvt": alu_convert.cvt,
    "div": _div,
    "dp2a": alu_integer.dp2a,
    "dp4a": alu_integer.dp4a,
    "ex2": alu_approx.unary,
    "fma": alu_float.fma,
    "lg2": alu_approx.unary,
    "lop3": alu_integer.lop3,
    "mad": alu_float.mad,
    "mad24": alu_integer.mad24,
    "max": alu_float.maximum,
    "min": alu_float.minimum,
    "mov": alu_integer.mov,
    "mul": alu_float.mul,
    "mul24": alu_integer.mul24,
    "neg": alu_float.neg,
    "not": alu_integer.not_,
    "or": alu_integer.or_,
    "popc": alu_integer.popc,
    "prmt": alu_integer.prmt,
    "rcp": _approximate_or("rcp"),
    "rem": alu_integer.rem,
    "rsqrt": alu_approx.unary,
    "sad": alu_integer.sad,
    "selp": alu_integer.selp,
    "set": alu_float.set_,
    "setp": alu_float.setp,
    "shf": alu_integer.shf,
    "shl": alu_integer.shl,
    "shr": alu_integer.shr,
    "sin": alu_approx.unary,
    "slct": alu_float.slct,
    "sqrt": _approximate_or("sqrt"),
    "sub": alu_float.sub,
    "tanh": alu_approx.unary,
    "testp": alu_float.testp,
    "xor": alu_integer.xor,
}
"""Opcode to what reads its modifiers and gives the form. Carries (``.cc``, ``addc``) and video instructions are
absent: CuTe DSL does not emit them."""


def is_alu(instr: Instruction) -> bool:
    """Whether the opcode is a pure register instruction, so that :func:`lower` decides about it (an unknown modifier
    still raises there). ``mov`` is always one: the caller gives special registers and symbol addresses as sources."""
    return instr.opcode in TABLE


def _form(instr: Instruction) -> Form:
    make = TABLE.get(instr.opcode)
    if make is None:
        raise Unsupported(f"PTX line {instr.line}: {instr.name[:120]} is not supported")
    return make(Modifiers(instr))


def flatten(instr: Instruction) -> list[Operand]:
    """Operands in order, vectors replaced by their items."""
    result: list[Operand] = []
    for operand in instr.operands:
        if isinstance(operand, Vector):
            result.extend(operand.items)
        else:
            result.append(operand)
    return result


def _check(instr: Instruction, kernel: Kernel, operand: Operand, kind: str, source: bool, wide: bool) -> int:
    """The width at which ``operand`` travels, given its PTX type."""
    width = width_of(kind)
    if isinstance(operand, Register):
        held = kernel.registers[operand.index].width
        if operand.negated and (kind != "pred" or not source):
            raise PtxError(instr.line, f"{instr.name[:60]}: '!' needs a predicate source")
        if held == width:
            return held
        if wide and held > width > 1:
            if source:
                return held
            raise Unsupported(f"PTX line {instr.line}: {instr.name[:60]} into a {held}-bit register is not supported")
        raise PtxError(
            instr.line,
            f"{instr.name[:60]}: register {kernel.registers[operand.index].name[:40]!r} has {held} bits, "
            f".{kind} needs {width}",
        )
    if not source:
        if operand is None:
            return width
        raise PtxError(instr.line, f"{instr.name[:60]}: the destination must be a register")
    if isinstance(operand, Immediate):
        if operand.bits is not None:
            if operand.bits != width:
                raise PtxError(instr.line, f"{instr.name[:60]}: a {operand.bits}-bit float literal is not .{kind}")
        elif kind in ("f32", "f64"):
            raise PtxError(instr.line, f"{instr.name[:60]}: an integer constant is not .{kind}")
        elif kind[0] == "f" or (kind[0] == "b" and kind[1] == "f"):
            raise Unsupported(
                f"PTX line {instr.line}: {instr.name[:60]} with a half-precision constant is not supported"
            )
        return width
    if operand is None or isinstance(operand, (Address, Label, Vector)):
        raise PtxError(instr.line, f"{instr.name[:60]}: a source must be a register or a constant")
    if instr.opcode != "mov":
        raise PtxError(instr.line, f"{instr.name[:60]}: only mov reads special registers and addresses")
    if isinstance(operand, Symbol) and width not in (32, 64):
        raise PtxError(instr.line, f"{instr.name[:60]}: an address has 32 or 64 bits")
    return width


def signature(instr: Instruction, kernel: Kernel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths in bits of the flattened destinations and sources, 1 for a predicate.

    The widths are those of the registers (``cvt`` may read a wider register than its type); an immediate gets the width
    of the instruction's type. Raises PtxError when operand count, kind or register width do not fit the instruction,
    Unsupported for an unknown opcode or modifier.
    """
    form = _form(instr)
    operands = flatten(instr)
    if len(operands) != len(form.dests) + len(form.sources):
        raise PtxError(instr.line, f"{instr.name[:60]} needs {len(form.dests) + len(form.sources)} operands")
    split = len(form.dests)
    dests = [
        _check(instr, kernel, operand, kind, source=False, wide=form.wide)
        for operand, kind in zip(operands[:split], form.dests, strict=True)
    ]
    sources = [
        _check(instr, kernel, operand, kind, source=True, wide=form.wide)
        for operand, kind in zip(operands[split:], form.sources, strict=True)
    ]
    return tuple(dests), tuple(sources)


def lower(builder: ir.IRBuilder, instr: Instruction, sources: list[ir.Value], seed: ir.Value) -> list[ir.Value]:
    """Emit ``instr`` for all 32 lanes; no traps and no poison for any input bits.

    ``sources``: ``<32 x iW>`` per flattened source at :func:`signature`'s widths, negation of ``!%p`` already applied.
    ``seed``: scalar i32; 0 computes approximate instructions correctly rounded, any other value moves their results
    by a pseudo-random amount (a hash of input bits and seed) within the error that the PTX ISA documents.
    Returns one ``<32 x iW>`` per flattened destination, also for ``_``. May add internal functions to
    ``builder.module`` (names start with ``alu.``). Raises Unsupported.
    """
    return _form(instr).emit(Emitter(builder), sources, seed)
