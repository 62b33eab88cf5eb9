"""What the modifiers of memory instructions mean. Every modifier is known or refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kernelmill.verify.emulator.interface import Unsupported
from kernelmill.verify.emulator.ir import Immediate, Instruction, Operand, PtxError
from kernelmill.verify.emulator.state import MAX_ACCESS

SCOPES = frozenset({"cta", "cluster", "gpu", "sys"})
_ORDERS = frozenset({"weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"})
_CACHE = frozenset({"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L2::64B", "L2::128B", "L2::256B"})
_EVICT = frozenset(
    f"{level}::{how}"
    for level in ("L1", "L2")
    for how in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
)
HINT = "L2::cache_hint"
"""Brings a trailing operand, the cache policy."""
_SPACES = {
    "global": "global",
    "const": "const",
    "local": "local",
    "shared": "shared",
    "shared::cta": "shared",
    "param": "param",
    "param::entry": "param",
}
_TYPES = {f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)} | {"f32": 4, "f64": 8}
_COUNTS = {"v2": 2, "v4": 4, "v8": 8}


@dataclass(frozen=True)
class MemoryForm:
    """``space``: "" for generic. Each lane moves ``count`` elements of ``size`` bytes; loads are sign-extended into
    wider registers when ``signed``. ``hint``: a cache policy operand follows."""

    space: str
    size: int
    count: int
    signed: bool
    hint: bool

    @property
    def bytes(self) -> int:
        return self.size * self.count


@dataclass(frozen=True)
class AtomForm(MemoryForm):
    """``kind``: the type of the arithmetic, e.g. ``u32``, ``f32``, ``bf16x2``."""

    operation: str
    kind: str


def _unsupported(instr: Instruction, modifier: str = "") -> Unsupported:
    why = f": unknown modifier .{modifier[:40]}" if modifier else ""
    return Unsupported(f"PTX line {instr.line}: {instr.name[:120]} is not supported{why}")


def _common(instr: Instruction, left: list[str], known: Collection[str]) -> tuple[str, int, bool]:
    """Space, element count and cache hint; takes what is known out of ``left``."""
    space, count, hint = "", 1, False
    for modifier in list(left):
        if modifier in _SPACES and not space:
            space = _SPACES[modifier]
        elif modifier in _COUNTS and count == 1:
            count = _COUNTS[modifier]
        elif modifier == HINT:
            hint = True
        elif modifier not in known:
            continue
        left.remove(modifier)
    return space, count, hint


def operands(instr: Instruction, count: int) -> tuple[Operand, ...]:
    """The operands. Raises PtxError when they are not ``count``."""
    if len(instr.operands) != count:
        raise PtxError(instr.line, f"{instr.name[:100]}: {count} operands expected, {len(instr.operands)} given")
    return instr.operands


def is_ordered(instr: Instruction) -> bool:
    """Whether a load or store is strong: meant to be seen by, or to see, others without a barrier."""
    return bool((_ORDERS - {"weak"}) & set(instr.modifiers))


def synchronises(instr: Instruction) -> bool:
    """Whether it orders the accesses before and after it for other warps."""
    if instr.opcode == "fence":
        return instr.modifiers[:1] != ("proxy",)
    return instr.opcode == "membar" or bool({"acquire", "release", "acq_rel"} & set(instr.modifiers))


def copy_size(instr: Instruction) -> tuple[int, bool, bool]:
    """Of a ``cp.async``: bytes, whether a register says how many of them are read, whether a cache policy follows.
    Raises Unsupported for other copies, PtxError for a bad size."""
    kind, left = instr.modifiers[:3], list(instr.modifiers[3:])
    if kind[:1] != ("async",) or kind[1:2] not in (("ca",), ("cg",)) or kind[2:] not in (("shared",), ("shared::cta",)):
        raise _unsupported(instr)
    hint = HINT in left
    left = [m for m in left if m != HINT and not (m.startswith("L2::") and m in _CACHE)]
    if left != ["global"]:
        raise _unsupported(instr)
    size = instr.operands[2] if len(instr.operands) > 2 else None
    if not isinstance(size, Immediate) or size.value not in ((16,) if kind[1] == "cg" else (4, 8, 16)):
        raise PtxError(instr.line, f"{instr.name[:100]}: the size must be 16, or 4 or 8 with .ca")
    return size.value, len(instr.operands) == 4 + hint, hint


def memory_form(instr: Instruction) -> MemoryForm:
    """The form of ``ld``, ``ldu`` or ``st``. Caches and orders have no effect here: the memory is sequentially
    consistent. Raises Unsupported for a modifier it does not know, PtxError for a bad vector."""
    left = list(instr.modifiers)
    space, count, hint = _common(instr, left, _ORDERS | SCOPES | _CACHE | _EVICT)
    if len(left) != 1 or left[0] not in _TYPES:
        raise _unsupported(instr, next((m for m in left if m not in _TYPES), ""))
    size = _TYPES[left[0]]
    if size * count > MAX_ACCESS:
        raise PtxError(instr.line, f"{instr.name[:100]}: a vector has at most {MAX_ACCESS} bytes")
    return MemoryForm(space, size, count, left[0].startswith("s"), hint)


_INTEGERS = ("u32", "s32", "u64", "s64")
_FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
_ATOMS = {
    "add": (*_INTEGERS, *_FLOATS),
    "min": _INTEGERS,
    "max": _INTEGERS,
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "cas": ("b16", "b32", "b64"),
    "inc": ("u32",),
    "dec": ("u32",),
}
_SIZES = dict.fromkeys(("f16x2", "bf16x2"), 4) | {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}


def atom_form(instr: Instruction) -> AtomForm:
    """The form of ``atom`` or ``red``. Raises Unsupported or PtxError."""
    left = list(instr.modifiers)
    space, count, hint = _common(instr, left, _ORDERS | SCOPES | {"noftz"})
    if len(left) != 2 or left[1] not in _ATOMS.get(left[0], ()):
        raise _unsupported(instr)
    operation, kind = left
    if count > 1 and (kind not in _FLOATS or operation != "add"):
        raise _unsupported(instr)
    size = _SIZES.get(kind) or int(kind[1:]) // 8
    if size * count > 16:
        raise PtxError(instr.line, f"{instr.name[:100]}: an atomic vector has at most 16 bytes")
    return AtomForm(space, size, count, False, hint, operation, kind)


_PROXIES = frozenset({"alias", "async", "async.global", "async.shared::cta", "generic"})
_NO_OPS: dict[str, Collection[str]] = {
    "membar": {"cta", "gl", "sys"},
    "fence": {"sc", "acq_rel", "acquire", "release", *SCOPES},
    "griddepcontrol": {"launch_dependents", "wait"},
    "prefetch": {"global", "local", "L1", "L2", *_EVICT},
    "prefetchu": {"L1"},
    "nanosleep": {"u32"},
    "createpolicy": {"fractional", "b64", "range", "global", *_EVICT},
}


def check_no_op(instr: Instruction) -> None:
    """Raise Unsupported unless the instruction is one that changes nothing here.

    Fences: memory is sequentially consistent. ``griddepcontrol``: launches run one after another. Prefetches and cache
    policies: caches are not modelled. ``setmaxnreg``: registers are not limited.
    """
    if instr.opcode == "setmaxnreg":
        if instr.modifiers not in (("inc", "sync", "aligned", "u32"), ("dec", "sync", "aligned", "u32")):
            raise _unsupported(instr)
        return
    if instr.opcode == "fence" and instr.modifiers[:1] == ("proxy",):
        if ".".join(instr.modifiers[1:]) not in _PROXIES:
            raise _unsupported(instr)
        return
    known = _NO_OPS[instr.opcode]
    for modifier in instr.modifiers:
        if modifier not in known:
            raise _unsupported(instr, modifier)
