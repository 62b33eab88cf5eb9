"""The parsed form of PTX: what the parser makes and the code generator reads. All text here is an attacker's."""

from __future__ import annotations

from dataclasses import dataclass


class PtxError(ValueError):
    """The text is not PTX: the candidate's fault. ``line`` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"PTX line {line}: {message}")
        self.line = line
        self.message = message


@dataclass(frozen=True)
class Register:
    """A virtual register, by its index in :attr:`Kernel.registers`. ``~name`` never occurs in operands: predicates
    used negated appear as :class:`Guard` or with ``negated``."""

    index: int
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """An integer as Python int (two's complement at the width of use) or the raw bits of a float (0f…, 0d…)."""

    value: int
    bits: int | None = None
    """32 or 64 for 0f/0d literals (value then holds the raw bits), None for integers."""


@dataclass(frozen=True)
class Special:
    """A special register such as ``tid.x``, ``laneid``, ``nctaid.y``, ``clock64``."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A variable (shared, const, global, param) plus a byte offset, used as an address or moved into a register."""

    index: int
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; base is a register, a symbol or an absolute immediate."""

    base: Register | Symbol | Immediate
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``; an ignored destination (``_``) is None."""

    items: tuple[Register | Immediate | None, ...]


@dataclass(frozen=True)
class Label:
    block: int
    """Index of the target in :attr:`Kernel.blocks`."""


Operand = Register | Immediate | Special | Symbol | Address | Vector | Label | None
"""None is the ignored destination ``_``. A paired destination ``d|p`` becomes two operands in order. The target list of
``brx.idx`` is flattened: ``(index register, Label, Label, ...)``."""


@dataclass(frozen=True)
class Instruction:
    """``@guard opcode.modifiers operands;`` e.g. opcode ``fma``, modifiers ``("rn", "f32", "bf16")``."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    text: str
    """The source text, at most 200 characters, for messages only."""

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True)
class RegisterDecl:
    """``type``: PTX type without the dot: pred, b8/b16/b32/b64, u*/s*/f* (kept as declared)."""

    name: str
    type: str

    @property
    def width(self) -> int:
        """Bits: 1 for predicates."""
        return 1 if self.type == "pred" else int(self.type[1:])


@dataclass(frozen=True)
class Variable:
    """A module- or kernel-level variable. ``space``: shared, const, global, local, param. ``size`` in bytes; 0 for the
    unsized ``extern .shared`` array (dynamic shared memory). ``initial``: initial bytes for const and global."""

    name: str
    space: str
    size: int
    align: int
    initial: bytes = b""
    extern: bool = False


@dataclass(frozen=True)
class Block:
    """A basic block: control enters at the first instruction only and leaves at the last (bra, ret, exit, trap,
    brx) or falls through to the next block. A predicated ``bra`` ends a block. A block may be empty (a label at the end
    of the body); falling off the last block leaves the kernel like ``ret``. ``label`` is ``""`` where there is none."""

    label: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Kernel:
    """One ``.entry``. ``params`` and ``variables`` are indexed together by :class:`Symbol`:
    ``(*params, *variables, *module variables)``."""

    name: str
    params: tuple[Variable, ...]
    variables: tuple[Variable, ...]
    registers: tuple[RegisterDecl, ...]
    blocks: tuple[Block, ...]
    max_threads: tuple[int, int, int] | None
    """``.reqntid``/``.maxntid`` when given."""
    reqntid: bool
    cluster: tuple[int, int, int] | None


@dataclass(frozen=True)
class Module:
    target: str
    version: tuple[int, int]
    variables: tuple[Variable, ...]
    kernels: tuple[Kernel, ...]

    def kernel(self, name: str) -> Kernel:
        """Raises KeyError when the module has no such entry."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise KeyError(name)
