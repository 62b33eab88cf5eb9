"""Cut a kernel into segments: the runs of instructions between the points where a warp may stop or be joined.

A segment's index is a lane's program counter. Control enters a segment at its first instruction only. Warps can be
preempted between segments, so a new one begins before every memory instruction except a plain load after a plain load:
what other warps do can come between any two accesses whose order matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from kernelmill.verify.emulator import alu
from kernelmill.verify.emulator.interface import Unsupported
from kernelmill.verify.emulator.ir import Address, Immediate, Instruction, Kernel, Operand, Register, Vector

COLLECTIVES = frozenset({"shfl", "vote", "match", "redux", "elect"})
"""Instructions with ``.sync`` that wait for the lanes of a member mask; ``bar.warp.sync`` is another."""
BARRIERS = frozenset({"bar", "barrier"})
ENDS = frozenset({"bra", "brx", "ret", "exit", "trap"})
MATRIX = frozenset({"ldmatrix", "stmatrix", "mma"})
"""Instructions of the whole warp that have no member mask."""
ACCESSES = frozenset({"ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix"})
MEMORY = ACCESSES | {"ldu"}
RESULT = "bar.result"
"""Pseudo opcode after ``bar.red``: fetches what the barrier computed."""

_DESTINATIONS = {
    "ld": 1,
    "ldu": 1,
    "atom": 1,
    "redux": 1,
    "vote": 1,
    "activemask": 1,
    "cvta": 1,
    "isspacep": 1,
    "createpolicy": 1,
    "elect": 2,
    "ldmatrix": 1,
    "mma": 1,
    RESULT: 1,
}


def is_warp_barrier(instr: Instruction) -> bool:
    return instr.opcode == "bar" and instr.modifiers[:1] == ("warp",)


def waits_for_lanes(instr: Instruction) -> bool:
    """Whether the instruction acts only when the lanes of its member mask have all come."""
    return is_warp_barrier(instr) or (instr.opcode in COLLECTIVES | MATRIX and "sync" in instr.modifiers)


def names_no_lanes(instr: Instruction) -> bool:
    """Whether it waits for all lanes without naming them."""
    return instr.opcode in MATRIX


def is_barrier(instr: Instruction) -> bool:
    """Whether it is a barrier of the CTA."""
    return instr.opcode in BARRIERS and not is_warp_barrier(instr)


@dataclass
class Segment:
    """``head``: what the first instruction needs of the warp. ``end``: the terminator, None to go on to ``following``.

    ``skip``: lanes where this guard holds leave to ``target`` instead of ``following``; made for guarded collectives.
    """

    index: int
    head: Literal["plain", "collective", "barrier"] = "plain"
    instructions: list[Instruction] = field(default_factory=list)
    end: Instruction | None = None
    skip: Register | None = None
    target: int = -1
    following: int = -1
    """-1: the end of the kernel."""


def registers(operand: Operand) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for item in operand.items:
            if isinstance(item, Register):
                yield item
    elif isinstance(operand, Address) and isinstance(operand.base, Register):
        yield operand.base


def flatten(operands: tuple[Operand, ...]) -> list[Operand]:
    """Operands with the items of vectors one by one."""
    return [item for o in operands for item in (o.items if isinstance(o, Vector) else (o,))]


def uses(instr: Instruction, kernel: Kernel) -> tuple[list[Register], list[Register]]:
    """Registers that the instruction writes and reads. Raises Unsupported for an unknown opcode."""
    if alu.is_alu(instr):
        operands: list[Operand] = flatten(instr.operands)
        count = len(alu.signature(instr, kernel)[0])
    else:
        operands = list(instr.operands)
        if instr.opcode == "shfl":
            count = max(0, len(operands) - 4)
        elif instr.opcode == "match":
            count = max(0, len(operands) - 2)
        else:
            count = _DESTINATIONS.get(instr.opcode, 0)
    writes = [r for o in operands[:count] for r in registers(o)]
    reads = [r for o in operands[count:] for r in registers(o)]
    if instr.guard is not None:
        reads.append(instr.guard)
    return writes, reads


def _names_all_lanes(instr: Instruction) -> bool:
    """Whether the member mask is the constant that names every lane."""
    members = instr.operands[-1] if instr.operands else None
    return names_no_lanes(instr) or (isinstance(members, Immediate) and members.value & 0xFFFFFFFF == 0xFFFFFFFF)


def _plain_load(instr: Instruction) -> bool:
    """Whether no other warp's doings between it and a neighbour of its kind make a difference: reads, and copies whose
    arrival is not fixed anyway."""
    ordered = {"volatile", "relaxed", "acquire", "mmio"}
    return instr.opcode in ("ld", "ldu", "cp", "ldmatrix") and not ordered & set(instr.modifiers)


def cut(kernel: Kernel) -> tuple[list[Segment], list[int]]:
    """The segments of a kernel, and the segment where each block begins.

    Once all live lanes have met (at a barrier, or where a member mask names all) they stay together to the end of the
    block, so that the collectives there need not wait for anybody and begin no segment.
    """
    segments: list[Segment] = []
    starts: list[int] = []

    def begin() -> Segment:
        segment = Segment(len(segments), following=len(segments) + 1)
        segments.append(segment)
        return segment

    def place(now: Segment, instr: Instruction, plain: bool) -> tuple[Segment, bool]:
        """Where a memory instruction goes after ``now``, whose memory instructions are all plain if ``plain``."""
        read = _plain_load(instr)
        return begin() if now.instructions and not (plain and read) else now, read

    for block in kernel.blocks:
        now = begin()
        starts.append(now.index)
        plain = together = False
        for instr in block.instructions:
            if waits_for_lanes(instr) and together and instr.guard is None:
                if instr.opcode in MEMORY:
                    now, plain = place(now, instr, plain)
                now.instructions.append(instr)
            elif waits_for_lanes(instr) or is_barrier(instr):
                if instr.guard is not None:
                    now.skip = Register(instr.guard.index, not instr.guard.negated)
                    now.target = len(segments) + 1
                    now = begin()
                elif now.instructions:
                    now = begin()
                now.head = "barrier" if is_barrier(instr) else "collective"
                now.instructions.append(instr)
                plain = _plain_load(instr)
                together = instr.guard is None and (is_barrier(instr) or _names_all_lanes(instr))
                if is_barrier(instr) or instr.guard is not None:
                    now = begin()
                if is_barrier(instr) and "red" in instr.modifiers:
                    now.instructions.append(
                        Instruction(RESULT, instr.modifiers, instr.operands[:1], instr.guard, instr.line, instr.text)
                    )
            elif instr.opcode in ENDS:
                now.end = instr
            else:
                if now.end is not None:
                    raise Unsupported(f"PTX line {instr.line}: instruction after the end of a block")
                if instr.opcode in MEMORY:
                    now, plain = place(now, instr, plain)
                now.instructions.append(instr)
    if segments:
        segments[-1].following = -1
    return segments, starts


@dataclass(frozen=True)
class Registers:
    """``slots``: byte offset of every register that must survive a segment; the others never leave native registers.

    ``slot_bytes``: of all slots. ``read``: registers that some instruction reads.
    """

    slots: dict[int, int]
    slot_bytes: int
    read: frozenset[int]


def allocate(segments: list[Segment], kernel: Kernel) -> Registers:
    """Give slots to the registers that two segments name, or that one segment reads before it writes them."""
    home: dict[int, int] = {}
    kept: set[int] = set()
    read: set[int] = set()
    for segment in segments:
        written: set[int] = set()
        for writes, reads, guarded in _accesses(segment, kernel):
            read.update(r.index for r in reads)
            # Lanes without the guard keep the old value.
            needed = [*reads, *writes] if guarded else reads
            kept.update(r.index for r in needed if r.index not in written)
            written.update(r.index for r in writes)
            for r in (*reads, *writes):
                if home.setdefault(r.index, segment.index) != segment.index:
                    kept.add(r.index)
    slots: dict[int, int] = {}
    at = 0
    for index in sorted(kept):
        slots[index] = at
        at += max(64, kernel.registers[index].width * 4)
    return Registers(slots, at, frozenset(read))


def _accesses(segment: Segment, kernel: Kernel) -> Iterator[tuple[list[Register], list[Register], bool]]:
    """Writes, reads and whether there is a guard, for all that a segment does, in order."""
    for instr in segment.instructions:
        yield *uses(instr, kernel), instr.guard is not None
    end = segment.end
    if end is not None:
        yield [], [r for o in end.operands for r in registers(o)] + ([end.guard] if end.guard else []), False
    if segment.skip is not None:
        yield [], [segment.skip], False
