"""Lowering of register-to-register instructions to LLVM IR, one warp (32 lanes) at a time.

A register of N bits is a ``<32 x iN>`` value, a predicate ``<32 x i1>``; floats are held as bits. Operands are
*flattened*: the items of a ``Vector`` count one by one, in order. The first ``len(signature[0])`` flattened operands are
the destinations, the others the sources.
"""

from __future__ import annotations

from llvmlite import ir

from kernelmill.verify.emulator.ir import Instruction, Kernel


def is_alu(instr: Instruction) -> bool:
    """Whether the opcode is a pure register instruction, so that :func:`lower` decides about it (an unknown modifier
    still raises there). ``mov`` is always one: the caller gives special registers and symbol addresses as sources."""
    raise NotImplementedError


def signature(instr: Instruction, kernel: Kernel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths in bits of the flattened destinations and sources, 1 for a predicate.

    The widths are those of the registers (``cvt`` may read a wider register than its type); an immediate gets the width
    of the instruction's type. Raises PtxError when operand count, kind or register width do not fit the instruction,
    Unsupported for an unknown opcode or modifier.
    """
    raise NotImplementedError


def lower(builder: ir.IRBuilder, instr: Instruction, sources: list[ir.Value], seed: ir.Value) -> list[ir.Value]:
    """Emit ``instr`` for all 32 lanes; no traps and no poison for any input bits.

    ``sources``: ``<32 x iW>`` per flattened source at :func:`signature`'s widths, negation of ``!%p`` already applied.
    ``seed``: scalar i32; 0 computes approximate instructions correctly rounded, any other value moves their results
    by a pseudo-random amount (a hash of input bits and seed) within the error that the PTX ISA documents.
    Returns one ``<32 x iW>`` per flattened destination, also for ``_``. May add internal functions to
    ``builder.module`` (names start with ``alu.``). Raises Unsupported.
    """
    raise NotImplementedError
