"""Exchanges between the lanes of a warp: ``shfl``, ``vote``, ``match``, ``redux``, ``elect``.

They are emitted where the lanes of each member mask that have not exited are all active. A value taken from
a lane that is not active is undefined (PTX ISA, shfl.sync): it reads as :data:`POISON` here, so nobody relies on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from llvmlite import ir

from kernelmill.verify.emulator.interface import Unsupported
from kernelmill.verify.emulator.ir import Immediate, Instruction, Operand, PtxError
from kernelmill.verify.emulator.native import I32, I64, Code, call_helper, need, vec
from kernelmill.verify.emulator.state import LANES

if TYPE_CHECKING:
    from kernelmill.verify.emulator.codegen import KernelCode

POISON = 0x7FEDDEAD
"""A NaN as f32, and a large integer."""


def _bad(instr: Instruction) -> NoReturn:
    raise Unsupported(f"PTX line {instr.line}: {instr.name[:120]} is not supported")


def _operands(instr: Instruction, *counts: int) -> tuple[Operand, ...]:
    if len(instr.operands) not in counts:
        raise PtxError(instr.line, f"{instr.name[:100]}: wrong number of operands")
    return instr.operands


def emit(code: KernelCode, instr: Instruction) -> None:
    """Emit one collective. Raises Unsupported or PtxError."""
    if "sync" not in instr.modifiers[: 2 if instr.opcode == "match" else 1]:
        _bad(instr)
    {"shfl": _shuffle, "vote": _vote, "match": _match, "redux": _redux, "elect": _elect}[instr.opcode](code, instr)


def _source_lanes(mode: str, b: int, c: int) -> tuple[list[int], list[int]]:
    """Source lane and in-range flag of each lane (PTX ISA, shfl.sync: the pseudocode's maxLane and minLane)."""
    lanes, inside = [], []
    for lane in range(LANES):
        bound = (lane & (c >> 8)) | (c & 31 & ~(c >> 8))
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": (lane & (c >> 8)) | (b & ~(c >> 8))}[mode]
        ok = j >= bound if mode == "up" else j <= bound
        lanes.append(j & 31 if ok else lane)
        inside.append(int(ok))
    return lanes, inside


def _shuffle(code: KernelCode, instr: Instruction) -> None:
    operands = _operands(instr, 5, 6)
    if len(instr.modifiers) != 3 or instr.modifiers[2] != "b32" or instr.modifiers[1] not in _MODES:
        _bad(instr)
    mode = instr.modifiers[1]
    a, b, c, _ = operands[-4:]
    value = code.fetch(a, 32, instr)
    value = code.b.select(code.active, value, code.const(value.type, POISON))
    if isinstance(b, Immediate) and isinstance(c, Immediate):
        lanes, flags = _source_lanes(mode, b.value & 31, c.value & 0x1F1F)
        result = code.b.shuffle_vector(value, value, code.lanes(I32, lanes))
        inside = code.bits(code.i32(sum(flag << lane for lane, flag in enumerate(flags))))
    else:
        source, inside = _sources(code, mode, code.fetch(b, 32, instr), code.fetch(c, 32, instr))
        code.store(value, code.field("data"))
        code.store(source, code.field("data2"))
        call_helper(code, need("km.permute", _permute), code.mask)
        result = code.load(code.field("data"), value.type)
    code.write(operands[0], result, instr)
    if len(operands) == 6:
        code.write(operands[1], inside, instr)


_MODES = ("up", "down", "bfly", "idx")


def _sources(code: Code, mode: str, b: ir.Value, c: ir.Value) -> tuple[ir.Value, ir.Value]:
    """:func:`_source_lanes` for run-time operands."""
    build, type = code.b, vec(I32)
    lane = code.lanes(I32, range(LANES))
    low = code.const(type, 31)
    b = build.and_(b, low)
    segment = build.and_(build.lshr(c, code.const(type, 8)), low)
    rest = build.not_(segment)
    least = build.and_(lane, segment)
    bound = build.or_(least, build.and_(build.and_(c, low), rest))
    j = {
        "up": lambda: build.sub(lane, b),
        "down": lambda: build.add(lane, b),
        "bfly": lambda: build.xor(lane, b),
        "idx": lambda: build.or_(least, build.and_(b, rest)),
    }[mode]()
    inside = build.icmp_signed(">=" if mode == "up" else "<=", j, bound)
    return build.select(inside, build.and_(j, low), lane), inside


def _permute(code: Code) -> None:
    """Helper: ``data`` lane i becomes the old lane ``data2[i]`` (below 32)."""
    old = code.load(code.field("data"), vec(I32))
    scratch = code.field("units")
    code.store(old, scratch)
    with code.loop(LANES) as lane:
        source = code.load(code.lane_at(code.field("data2"), lane, 4), I32)
        value = code.load(code.lane_at(scratch, source, 4), I32)
        code.store(value, code.lane_at(code.field("data"), lane, 4))
    code.b.ret(code.i32(0))


def _vote(code: KernelCode, instr: Instruction) -> None:
    dest, source, members = _operands(instr, 3)
    mode, kind = (*instr.modifiers[1:], "", "")[:2]
    b = code.b
    mask = code.fetch(members, 32, instr)
    mask = b.and_(mask, code.splat(code.mask))
    ballot = b.and_(mask, code.splat(code.bits(code.fetch(source, 1, instr))))
    zero = code.const(mask.type, 0)
    if (mode, kind) == ("ballot", "b32"):
        code.write(dest, ballot, instr)
        return
    if mode not in ("all", "any", "uni") or kind != "pred":
        _bad(instr)
    every, none = b.icmp_unsigned("==", ballot, mask), b.icmp_unsigned("==", ballot, zero)
    code.write(dest, {"all": every, "any": b.not_(none), "uni": b.or_(every, none)}[mode], instr)


def _elect(code: KernelCode, instr: Instruction) -> None:
    dest, predicate, members = _operands(instr, 3)
    b = code.b
    mask = b.and_(code.fetch(members, 32, instr), code.splat(code.mask))
    lowest = b.and_(mask, b.sub(code.const(mask.type, 0), mask))
    own = code.lanes(I32, [1 << lane for lane in range(LANES)])
    index = code.intrinsic("llvm.ctpop.v32i32", mask.type, b.sub(lowest, code.const(mask.type, 1)))
    code.write(dest, index, instr)
    code.write(predicate, b.icmp_unsigned("==", lowest, own), instr)


def _by_members(code: KernelCode, instr: Instruction, name: str, body: Callable[[Code], None], size: int = 4) -> None:
    """Call a helper with the source operand in ``data`` and the member masks, active lanes only, in ``units``."""
    source, members = instr.operands[-2:]
    code.store(code.fetch(source, 8 * size, instr), code.field("data"))
    mask = code.b.and_(code.fetch(members, 32, instr), code.splat(code.mask))
    code.store(mask, code.field("units"))
    call_helper(code, need(name, body), code.mask)


def _match(code: KernelCode, instr: Instruction) -> None:
    if len(instr.modifiers) != 3 or instr.modifiers[2] not in ("b32", "b64"):
        _bad(instr)
    mode, sync, kind = instr.modifiers
    if mode not in ("any", "all") or sync != "sync":
        _bad(instr)
    operands = _operands(instr, 3, 4)
    size = int(kind[1:]) // 8
    _by_members(code, instr, f"km.match.{size}", lambda c: _equal_lanes(c, size), size)
    equal = code.load(code.field("data2"), vec(I32))
    if mode == "any":
        code.write(operands[0], equal, instr)
        return
    members = code.load(code.field("units"), vec(I32))
    same = code.b.icmp_unsigned("==", equal, members)
    code.write(operands[0], code.b.select(same, members, code.const(members.type, 0)), instr)
    if len(operands) == 4:
        code.write(operands[1], same, instr)


def _equal_lanes(code: Code, size: int) -> None:
    """Helper: for each active lane the members with its value of ``data``, as a mask in ``data2``."""
    b = code.b
    element = I32 if size == 4 else I64
    values = code.load(code.field("data"), vec(element))
    with code.each_lane(code.function.args[1]) as lane:
        mine = code.load(code.lane_at(code.field("data"), lane, size), element)
        same = code.bits(b.icmp_unsigned("==", values, code.splat(mine)))
        members = code.load(code.lane_at(code.field("units"), lane, 4), I32)
        code.store(b.and_(same, members), code.lane_at(code.field("data2"), lane, 4))
    b.ret(code.i32(0))


_REDUCTIONS: dict[str, tuple[str, int]] = {
    "add.s32": ("add", 0),
    "add.u32": ("add", 0),
    "min.s32": ("smin", 0x7FFFFFFF),
    "min.u32": ("umin", 0xFFFFFFFF),
    "max.s32": ("smax", 0x80000000),
    "max.u32": ("umax", 0),
    "and.b32": ("and", 0xFFFFFFFF),
    "or.b32": ("or", 0),
    "xor.b32": ("xor", 0),
}
"""LLVM's vector reduction and the value that changes nothing."""


def _redux(code: KernelCode, instr: Instruction) -> None:
    form = ".".join(instr.modifiers[1:])
    if form not in _REDUCTIONS:
        _bad(instr)
    dest, *_ = _operands(instr, 3)
    name, neutral = _REDUCTIONS[form]
    _by_members(code, instr, f"km.redux.{name}", lambda c: _reduce(c, name, neutral))
    code.write(dest, code.load(code.field("data2"), vec(I32)), instr)


def _reduce(code: Code, name: str, neutral: int) -> None:
    """Helper: for each active lane the reduction of ``data`` over its members, in ``data2``."""
    values = code.load(code.field("data"), vec(I32))
    with code.each_lane(code.function.args[1]) as lane:
        members = code.load(code.lane_at(code.field("units"), lane, 4), I32)
        chosen = code.b.select(code.bits(members), values, code.const(values.type, neutral))
        result = code.intrinsic(f"llvm.vector.reduce.{name}.v{LANES}i32", I32, chosen)
        code.store(result, code.lane_at(code.field("data2"), lane, 4))
    code.b.ret(code.i32(0))
