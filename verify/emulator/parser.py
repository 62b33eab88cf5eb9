"""PTX text to :mod:`.ir`. The text is an attacker's: bounded size, linear time, nothing skipped silently.

Grammar: PTX ISA 9.0, the part that NVVM and inline assembly in CuTe DSL kernels emit (one ``.entry`` per kernel, no
``.func``, no texture). Bad text raises :class:`~.ir.PtxError`; legal PTX outside that part raises
:class:`~.interface.Unsupported`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from kernelmill.verify.emulator.interface import Unsupported
from kernelmill.verify.emulator.ir import (
    Address,
    Block,
    Immediate,
    Instruction,
    Kernel,
    Label,
    Module,
    Operand,
    PtxError,
    Register,
    RegisterDecl,
    Special,
    Symbol,
    Variable,
    Vector,
)

MAX_TEXT = 8 << 20
"""Characters of one module."""
MAX_INSTRUCTIONS = 200_000
"""Instructions of one module."""
MAX_REGISTERS = 1 << 17
"""Registers that the instructions of one kernel name."""
MAX_NAMES = 1 << 17
"""Declarations (registers, variables, labels) of one module."""
MAX_DEPTH = 32
"""Nesting of ``{ }`` in a kernel body."""
MAX_OPERANDS = 32
MAX_VARIABLE = 1 << 26
"""Bytes of one variable."""
MAX_INITIAL = 1 << 20
"""Elements of all initialisers of one module."""

TYPES = {"pred": 1} | {
    f"{kind}{bits}": bits
    for kind, widths in {
        "b": (8, 16, 32, 64, 128),
        "u": (8, 16, 32, 64),
        "s": (8, 16, 32, 64),
        "f": (16, 32, 64),
    }.items()
    for bits in widths
}
"""Fundamental types and their width in bits (PTX ISA 5.2)."""

_DIMENSIONS = ("x", "y", "z")
SPECIALS = frozenset(
    {f"{name}.{d}" for name in ("tid", "ntid", "ctaid", "nctaid") for d in _DIMENSIONS}
    | {f"{name}.{d}" for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid") for d in _DIMENSIONS}
    | {f"lanemask_{r}" for r in ("eq", "le", "lt", "ge", "gt")}
    | {f"envreg{i}" for i in range(32)}
    | {"laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid", "is_explicit_cluster", "cluster_ctarank"}
    | {"cluster_nctarank", "clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi"}
    | {"total_smem_size", "aggr_smem_size", "dynamic_smem_size"}
)
"""Special registers (PTX ISA 10), without the ``%``."""

_KNOWN_PRAGMAS = re.compile(r'"(nounroll|enable_smem_spilling|used_bytes_mask [0-9a-fA-Fx]+|frequency [0-9]+)"')
"""Pragmas that only steer ptxas: they change no result."""

_TERMINATORS = frozenset({"bra", "brx", "ret", "exit", "trap"})

# One alternative per token class, each a plain run of a character class: matching is linear.
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f\v]+)
  | (?P<newline>\n)
  | (?P<comment>//[^\n]*)
  | (?P<open_comment>/\*)
  | (?P<float>0[fF][0-9a-fA-F]{8}(?![0-9a-zA-Z_$]) | 0[dD][0-9a-fA-F]{16}(?![0-9a-zA-Z_$]))
  | (?P<number>[0-9][0-9a-zA-Z_]*(?:\.[0-9][0-9a-zA-Z_]*)?)
  | (?P<name>[a-zA-Z_$%][a-zA-Z0-9_$]*)
  | (?P<dotted>(?:\.|::)[a-zA-Z0-9_]+)
  | (?P<string>"[^"\n]*")
  | (?P<mark>[{}()\[\],;:|!+\-=<>@~.])
    """,
    re.VERBOSE,
)
_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)U?")
_RANGE_NAME = re.compile(r"(.*?)(0|[1-9][0-9]{0,9})")


class _Token(NamedTuple):
    kind: str
    text: str
    line: int
    glued: bool
    """No white space before it: tells ``%tid.x`` from ``%tid .x``."""


def _tokens(text: str) -> list[_Token]:
    result: list[_Token] = []
    position, line, glued = 0, 1, False
    match = _TOKEN.match
    while position < len(text):
        found = match(text, position)
        if found is None:
            raise PtxError(line, f"unexpected character {text[position]!r}")
        kind = str(found.lastgroup)
        token = found.group()
        position = found.end()
        if kind == "newline":
            line += 1
            glued = False
        elif kind in ("space", "comment"):
            glued = False
        elif kind == "open_comment":
            end = text.find("*/", position)
            if end < 0:
                raise PtxError(line, "comment is not closed")
            line += text.count("\n", position, end)
            position = end + 2
            glued = False
        elif token in (".loc", ".file"):
            # Debug lines end with the line, not with a semicolon.
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        else:
            result.append(_Token(kind, token, line, glued))
            glued = True
    return result


@dataclass
class _Scope:
    """Names of one ``{ }``. Register ranges (``%r<8>``) are resolved on use, so a huge count costs nothing."""

    parent: _Scope | None
    names: dict[str, str | Symbol] = field(default_factory=dict)
    """Register name to type, or variable name to symbol."""
    ranges: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Prefix to (type, count)."""
    lowest: dict[str, int] = field(default_factory=dict)
    """Prefix to the lowest number of an explicitly declared name: clashes with a range are found in O(1)."""
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    """Register name to index in the kernel, filled on use."""


@dataclass(frozen=True)
class _Target:
    """A branch target before the body is complete."""

    name: str
    scope: _Scope


_Parsed = tuple[str, tuple[str, ...], "list[Operand | _Target]", "Register | None", int, str]


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0
        self.instructions = 0
        self.declared = 0
        self.initialised = 0
        last = self.tokens[-1].line if self.tokens else 1
        self.end = _Token("end", "end of text", last, False)

    # Tokens.

    @property
    def now(self) -> _Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else self.end

    def take(self) -> _Token:
        token = self.now
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.now.text == text and self.now.kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> _Token:
        if self.now.text != text:
            self.fail(f"expected {text!r}, found {self.now.text[:60]!r}")
        return self.take()

    def fail(self, message: str) -> NoReturn:
        raise PtxError(self.now.line, message)

    def unsupported(self, what: str) -> NoReturn:
        raise Unsupported(f"PTX line {self.now.line}: {what[:200]} is not supported")

    def name(self) -> str:
        token = self.take()
        if token.kind != "name":
            raise PtxError(token.line, f"expected a name, found {token.text[:60]!r}")
        return token.text

    def integer(self) -> int:
        """A signed integer constant."""
        sign = 1
        while self.now.text in ("-", "+"):
            sign = -sign if self.take().text == "-" else sign
        token = self.take()
        if token.kind == "name" and token.text == "WARP_SZ":
            return sign * 32
        if token.kind != "number":
            raise PtxError(token.line, f"expected an integer, found {token.text[:60]!r}")
        found = _INTEGER.fullmatch(token.text)
        if found is None or len(token.text) > 70:
            if "." in token.text or "e" in token.text.lower().removeprefix("0x"):
                raise Unsupported(f"PTX line {token.line}: decimal float literal {token.text[:40]!r} is not supported")
            raise PtxError(token.line, f"{token.text[:60]!r} is not a number")
        digits = found.group(1)
        if digits[:2] in ("0x", "0X"):
            value = int(digits[2:], 16)
        elif digits[:2] in ("0b", "0B"):
            value = int(digits[2:], 2)
        elif digits[0] == "0":
            value = int(digits, 8)
        else:
            value = int(digits)
        if value >= 1 << 64:
            raise PtxError(token.line, "integer constant exceeds 64 bits")
        return sign * value

    def size(self, most: int) -> int:
        value = self.integer()
        if not 0 <= value <= most:
            self.fail(f"{value} is not within 0 to {most}")
        return value

    def count_name(self) -> None:
        self.declared += 1
        if self.declared > MAX_NAMES:
            self.fail(f"more than {MAX_NAMES} declarations")

    # Module.

    def module(self) -> Module:
        self.expect(".version")
        token = self.take()
        version = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", token.text)
        if version is None:
            raise PtxError(token.line, "bad .version")
        self.expect(".target")
        target = self.name()
        while self.accept(","):
            if self.name() != "debug":
                self.unsupported("target option")
        if self.accept(".address_size") and self.integer() != 64:
            self.fail(".address_size must be 64")
        scope = _Scope(None)
        variables: list[Variable] = []
        bodies: list[Callable[[tuple[Variable, ...]], Kernel]] = []
        kernels: set[str] = set()
        while self.now.kind != "end":
            linkage = ""
            while self.now.text in (".visible", ".extern", ".weak"):
                linkage = self.take().text
            directive = self.now.text
            if directive == ".entry":
                self.take()
                body, name = self.entry(scope)
                if name in kernels or name in scope.names:
                    self.fail(f"duplicate name {name[:60]!r}")
                kernels.add(name)
                bodies.append(body)
            elif directive in (".shared", ".const", ".global"):
                self.variables(scope, variables, linkage == ".extern", own=False)
            elif directive == ".section":
                self.section()
            elif directive == ".pragma":
                self.pragma()
            elif directive in (".func", ".alias", ".tex", ".common", ".reg", ".local"):
                self.unsupported(f"module-level {directive}")
            else:
                self.fail(f"unexpected {directive[:60]!r}")
        for name in kernels & scope.names.keys():
            self.fail(f"duplicate name {name[:60]!r}")
        shared = tuple(variables)
        return Module(
            target=target,
            version=(int(version[1]), int(version[2])),
            variables=shared,
            kernels=tuple(body(shared) for body in bodies),
        )

    def section(self) -> None:
        """DWARF data: checked to be a closed block, of no meaning to execution."""
        self.take()
        if not self.now.text.startswith(".debug"):
            self.fail("only .debug sections are known")
        self.take()
        self.expect("{")
        while not self.accept("}"):
            if self.now.kind == "end" or self.now.text == "{":
                self.fail("section is not closed")
            self.take()

    def pragma(self) -> None:
        self.take()
        if _KNOWN_PRAGMAS.fullmatch(self.now.text) is None:
            self.unsupported(f".pragma {self.now.text}")
        self.take()
        self.expect(";")

    def variables(self, scope: _Scope, into: list[Variable], extern: bool, own: bool) -> None:
        """``.shared .align 16 .b8 a[4] = {1, 2}, b;``. ``own``: the symbols' indices belong to a kernel."""
        space = self.take().text[1:]
        align = 0
        while self.now.text in (".align", ".attribute", ".v2", ".v4", ".v8"):
            if self.now.text != ".align":
                self.unsupported(f"{self.now.text} on a variable")
            self.take()
            align = self.size(1 << 16)
            if align == 0 or align & (align - 1):
                self.fail(f"alignment {align} is not a power of two")
        kind = self.type()
        width = TYPES[kind] // 8
        if width == 0:
            self.fail("a variable cannot be .pred")
        while True:
            self.count_name()
            line = self.now
            name = self.name()
            elements, unsized = self.dimensions()
            initial = b""
            if self.accept("="):
                if space not in ("const", "global"):
                    self.fail(f".{space} variables have no initialiser")
                initial = self.initialiser(width)
                if unsized:
                    elements, unsized = len(initial) // width, False
                if len(initial) > elements * width:
                    self.fail(f"too many initialisers for {name[:60]!r}")
            if unsized and not (extern and space == "shared"):
                self.fail(f"{name[:60]!r} has no size")
            if elements * width > MAX_VARIABLE:
                self.fail(f"{name[:60]!r} is larger than {MAX_VARIABLE} bytes")
            if name in scope.names or self.declares(scope, name):
                raise PtxError(line.line, f"duplicate name {name[:60]!r}")
            # Module symbols get their final index when the kernel is complete: until then they count down from -1.
            scope.names[name] = Symbol(len(into) if own else -1 - len(into))
            into.append(Variable(name, space, elements * width, align or width, initial, extern))
            if not self.accept(","):
                break
        self.expect(";")

    def type(self) -> str:
        kind = self.now.text[1:]
        if self.now.kind != "dotted" or kind not in TYPES:
            if kind in ("f16x2", "bf16", "bf16x2", "texref", "samplerref", "surfref", "tf32"):
                self.unsupported(f"variable type {self.now.text}")
            self.fail(f"unknown type {self.now.text[:60]!r}")
        self.take()
        return kind

    def dimensions(self) -> tuple[int, bool]:
        """Elements of ``[a][b]`` (1 without), and whether the first is empty."""
        elements, unsized, first = 1, False, True
        while self.accept("["):
            if first and self.now.text == "]":
                unsized = True
            else:
                elements *= self.size(MAX_VARIABLE)
                if elements > MAX_VARIABLE:
                    self.fail(f"array has more than {MAX_VARIABLE} elements")
            self.expect("]")
            first = False
        return (0 if unsized else elements), unsized

    def initialiser(self, width: int) -> bytes:
        if not self.accept("{"):
            return self.element(width)
        parts: list[bytes] = []
        while True:
            if self.now.text == "{":
                self.unsupported("nested initialiser")
            parts.append(self.element(width))
            if not self.accept(","):
                break
        self.expect("}")
        return b"".join(parts)

    def element(self, width: int) -> bytes:
        self.initialised += 1
        if self.initialised > MAX_INITIAL:
            self.fail(f"more than {MAX_INITIAL} initialisers")
        if self.now.kind == "name" and self.now.text != "WARP_SZ":
            self.unsupported("initialiser with an address")
        if self.now.kind == "float":
            literal = self.float_literal()
            if literal.bits != 8 * width:
                self.fail("float initialiser of another width than its variable")
            return literal.value.to_bytes(width, "little")
        value = self.integer()
        if not -(1 << (8 * width - 1)) <= value < 1 << (8 * width):
            self.fail(f"initialiser {value} does not fit {width} bytes")
        return (value & ((1 << (8 * width)) - 1)).to_bytes(width, "little")

    def float_literal(self) -> Immediate:
        text = self.take().text
        return Immediate(int(text[2:], 16), 32 if text[1] in "fF" else 64)

    # Kernels.

    def entry(self, module_scope: _Scope) -> tuple[Callable[[tuple[Variable, ...]], Kernel], str]:
        name = self.name()
        params: list[Variable] = []
        scope = _Scope(module_scope)
        if self.accept("(") and not self.accept(")"):
            while True:
                self.parameter(scope, params)
                if not self.accept(","):
                    break
            self.expect(")")
        max_threads: tuple[int, int, int] | None = None
        reqntid = False
        cluster: tuple[int, int, int] | None = None
        while self.now.text != "{":
            directive = self.take().text
            if directive in (".maxntid", ".reqntid"):
                max_threads = self.triple(1024)
                reqntid = directive == ".reqntid"
            elif directive == ".reqnctapercluster":
                cluster = self.triple(16)
            elif directive in (".maxclusterrank", ".minnctapersm", ".maxnreg"):
                self.size(1 << 16)
            elif directive == ".pragma":
                self.at -= 1
                self.pragma()
            elif directive != ".explicitcluster":
                self.at -= 1
                if self.now.kind == "dotted":
                    self.unsupported(f"performance directive {directive}")
                self.fail(f"expected '{{', found {directive[:60]!r}")
        body = _Body(self, scope, len(params))
        body.parse()

        def finish(module_variables: tuple[Variable, ...]) -> Kernel:
            return Kernel(
                name=name,
                params=tuple(params),
                variables=tuple(body.variables),
                registers=tuple(body.registers),
                blocks=body.blocks(),
                max_threads=max_threads,
                reqntid=reqntid,
                cluster=cluster,
            )

        return finish, name

    def triple(self, most: int) -> tuple[int, int, int]:
        values = [self.size(most)]
        while len(values) < 3 and self.accept(","):
            values.append(self.size(most))
        if min(values) < 1:
            self.fail("a dimension must be at least 1")
        x, y, z = (*values, 1, 1)[:3]
        return x, y, z

    def parameter(self, scope: _Scope, params: list[Variable]) -> None:
        self.expect(".param")
        align = 0
        kind = ""
        while self.now.kind == "dotted":
            if self.accept(".align"):
                align = self.size(1 << 10)
            elif self.accept(".ptr"):
                while self.now.text in (".global", ".shared", ".const", ".local", ".generic"):
                    self.take()
                # The alignment of what the pointer points to, not of the parameter.
                if self.accept(".align"):
                    self.size(1 << 16)
            else:
                kind = self.type()
        if not kind or kind == "pred":
            self.fail("a parameter needs a type")
        self.count_name()
        name = self.name()
        elements, unsized = self.dimensions()
        size = elements * TYPES[kind] // 8
        if unsized or size > 1 << 16:
            self.fail(f"parameter {name[:60]!r} has a bad size")
        if name in scope.names:
            self.fail(f"duplicate name {name[:60]!r}")
        align = align or TYPES[kind] // 8
        if align & (align - 1):
            self.fail(f"alignment {align} is not a power of two")
        scope.names[name] = Symbol(len(params))
        params.append(Variable(name, "param", size, align))

    @staticmethod
    def declares(scope: _Scope, name: str) -> bool:
        """Whether a register range of this very scope contains ``name``."""
        found = _RANGE_NAME.fullmatch(name) if len(name) <= 64 else None
        if found is None:
            return False
        held = scope.ranges.get(found[1])
        return held is not None and int(found[2]) < held[1]


class _Body:
    """The instructions of one kernel."""

    def __init__(self, parser: _Parser, outer: _Scope, params: int) -> None:
        self.p = parser
        self.scope = outer
        self.params = params
        self.depth = 0
        self.variables: list[Variable] = []
        self.registers: list[RegisterDecl] = []
        self.code: list[_Parsed] = []
        self.positions: dict[int, str] = {}
        """Label text by the number of the instruction that follows it."""
        self.tables: dict[int, dict[str, list[_Target]]] = {}
        """``.branchtargets`` by the scope's identity and name."""

    def parse(self) -> None:
        p = self.p
        p.expect("{")
        # The body shares its braces' scope with the parameters, so that a register may not redeclare one.
        self.depth = 1
        while self.depth:
            token = p.now
            if token.kind == "end":
                p.fail("kernel body is not closed")
            if p.accept("{"):
                self.depth += 1
                if self.depth > MAX_DEPTH:
                    p.fail(f"more than {MAX_DEPTH} nested scopes")
                self.scope = _Scope(self.scope)
            elif p.accept("}"):
                self.depth -= 1
                if self.depth:
                    assert self.scope.parent is not None
                    self.scope = self.scope.parent
            elif token.kind == "dotted":
                self.directive()
            elif token.kind == "name" and p.at + 1 < len(p.tokens) and p.tokens[p.at + 1].text == ":":
                self.label()
            else:
                self.instruction()

    def directive(self) -> None:
        p = self.p
        text = p.now.text
        if text == ".reg":
            self.register_declaration()
        elif text in (".shared", ".local", ".const", ".global"):
            first = len(self.variables)
            p.variables(self.scope, self.variables, extern=False, own=True)
            for offset, variable in enumerate(self.variables[first:]):
                self.scope.names[variable.name] = Symbol(self.params + first + offset)
        elif text == ".pragma":
            p.pragma()
        elif text in (".param", ".callprototype", ".calltargets", ".extern"):
            p.unsupported(f"{text} in a kernel body")
        else:
            p.fail(f"unexpected {text[:60]!r} in a kernel body")

    def register_declaration(self) -> None:
        p = self.p
        p.take()
        if p.now.text in (".v2", ".v4"):
            p.unsupported(f"{p.now.text} register")
        kind = p.type()
        scope = self.scope
        while True:
            p.count_name()
            name = p.name()
            if len(name) > 64:
                p.fail("register name exceeds 64 characters")
            if p.accept("<"):
                count = p.size(1 << 31)
                p.expect(">")
                if name in scope.ranges or scope.lowest.get(name, count) < count:
                    p.fail(f"duplicate register {name!r}")
                scope.ranges[name] = (kind, count)
            else:
                if name in scope.names or p.declares(scope, name):
                    p.fail(f"duplicate register {name!r}")
                scope.names[name] = kind
                found = _RANGE_NAME.fullmatch(name)
                if found is not None:
                    number = int(found[2])
                    scope.lowest[found[1]] = min(number, scope.lowest.get(found[1], number))
            if not p.accept(","):
                break
        p.expect(";")

    def label(self) -> None:
        p = self.p
        p.count_name()
        name = p.name()
        p.expect(":")
        if p.now.text == ".branchtargets":
            p.take()
            targets = [_Target(p.name(), self.scope)]
            while p.accept(","):
                targets.append(_Target(p.name(), self.scope))
                if len(targets) > 4096:
                    p.fail("more than 4096 branch targets")
            p.expect(";")
            table = self.tables.setdefault(id(self.scope), {})
            if name in table:
                p.fail(f"duplicate label {name[:60]!r}")
            table[name] = targets
            return
        if name in self.scope.labels:
            p.fail(f"duplicate label {name[:60]!r}")
        self.scope.labels[name] = len(self.code)
        self.positions.setdefault(len(self.code), name)

    # Names.

    def find(self, name: str) -> Register | Symbol | None:
        scope: _Scope | None = self.scope
        while scope is not None:
            index = scope.registers.get(name)
            if index is not None:
                return Register(index)
            held = scope.names.get(name)
            if isinstance(held, Symbol):
                return held
            if held is None and self.p.declares(scope, name):
                found = _RANGE_NAME.fullmatch(name)
                assert found is not None
                held = scope.ranges[found[1]][0]
            if held is not None:
                if len(self.registers) >= MAX_REGISTERS:
                    self.p.fail(f"kernel uses more than {MAX_REGISTERS} registers")
                scope.registers[name] = len(self.registers)
                self.registers.append(RegisterDecl(name, held))
                return Register(scope.registers[name])
            scope = scope.parent
        return None

    def resolve(self, target: _Target, line: int) -> int:
        scope: _Scope | None = target.scope
        while scope is not None:
            if target.name in scope.labels:
                return scope.labels[target.name]
            scope = scope.parent
        raise PtxError(line, f"branch to unknown label {target.name[:60]!r}")

    # Instructions.

    def instruction(self) -> None:
        p = self.p
        start = p.at
        p.instructions += 1
        if p.instructions > MAX_INSTRUCTIONS:
            p.fail(f"more than {MAX_INSTRUCTIONS} instructions")
        guard: Register | None = None
        if p.accept("@"):
            negated = p.accept("!")
            token = p.now
            found = self.find(p.name())
            if not isinstance(found, Register) or self.registers[found.index].type != "pred":
                raise PtxError(token.line, f"guard {token.text[:60]!r} is not a predicate register")
            guard = Register(found.index, negated)
        line = p.now.line
        if p.now.kind != "name":
            p.fail(f"expected an instruction, found {p.now.text[:60]!r}")
        opcode = p.take().text
        modifiers: list[str] = []
        while p.now.kind == "dotted":
            text = p.take().text
            if text.startswith("::"):
                if not modifiers:
                    p.fail("'::' without a modifier before it")
                modifiers[-1] += text
            else:
                modifiers.append(text[1:])
            if len(modifiers) > 24:
                p.fail("more than 24 modifiers")
        if opcode == "call":
            p.unsupported("call")
        operands: list[Operand | _Target] = []
        if p.now.text != ";":
            while True:
                if opcode in ("bra", "brx") and p.now.kind == "name":
                    self.branch_operand(opcode, operands)
                else:
                    operands.append(self.operand())
                    while p.accept("|"):
                        operands.append(self.operand())
                if len(operands) > MAX_OPERANDS and opcode != "brx":
                    p.fail(f"more than {MAX_OPERANDS} operands")
                if not p.accept(","):
                    break
        p.expect(";")
        text = self.text(start, p.at)
        self.code.append((opcode, tuple(modifiers), operands, guard, line, text))

    def branch_operand(self, opcode: str, operands: list[Operand | _Target]) -> None:
        p = self.p
        if opcode == "bra":
            operands.append(_Target(p.name(), self.scope))
            return
        if not operands:
            operands.append(self.operand())
            return
        token = p.now
        name = p.name()
        scope: _Scope | None = self.scope
        while scope is not None:
            targets = self.tables.get(id(scope), {}).get(name)
            if targets is not None:
                operands.extend(targets)
                return
            scope = scope.parent
        raise PtxError(token.line, f"unknown branch targets {name[:60]!r}")

    def text(self, start: int, end: int) -> str:
        parts: list[str] = []
        length = 0
        for token in self.p.tokens[start:end]:
            if token.text == ";":
                break
            space = "" if token.glued or not parts else " "
            parts.append(space + token.text)
            length += len(parts[-1])
            if length > 200:
                break
        return "".join(parts)[:200]

    def operand(self) -> Operand:
        p = self.p
        token = p.now
        if token.text == "{":
            return self.vector()
        if token.text == "[":
            return self.address()
        return self.scalar()

    def scalar(self) -> Register | Immediate | Special | Symbol | None:
        p = self.p
        token = p.now
        if token.kind == "float":
            return p.float_literal()
        if token.text == "-" and p.at + 1 < len(p.tokens) and p.tokens[p.at + 1].kind == "float":
            p.unsupported("negated float literal")
        if token.kind == "number" or token.text in ("-", "+") or token.text == "WARP_SZ":
            return Immediate(p.integer())
        if p.accept("!"):
            found = self.find(p.name())
            if not isinstance(found, Register):
                raise PtxError(token.line, "'!' needs a predicate register")
            return Register(found.index, True)
        if token.text in ("~", "("):
            p.unsupported("constant expression")
        if token.kind != "name":
            p.fail(f"expected an operand, found {token.text[:60]!r}")
        p.take()
        if token.text == "_":
            return None
        found = self.find(token.text)
        if isinstance(found, Register):
            if p.now.kind == "dotted" and p.now.glued:
                p.unsupported(f"vector element {token.text}{p.now.text}")
            return found
        if isinstance(found, Symbol):
            if p.now.text in ("+", "-"):
                return Symbol(found.index, p.integer())
            return found
        if token.text.startswith("%"):
            name = token.text[1:]
            if p.now.kind == "dotted" and p.now.glued:
                name += p.take().text
            if name in SPECIALS:
                return Special(name)
        raise PtxError(token.line, f"undeclared name {token.text[:60]!r}")

    def vector(self) -> Vector:
        p = self.p
        p.expect("{")
        items: list[Register | Immediate | None] = []
        while True:
            token = p.now
            item = self.scalar()
            if isinstance(item, (Special, Symbol)):
                raise PtxError(token.line, "a vector holds registers and constants only")
            items.append(item)
            if len(items) > 128:
                p.fail("vector of more than 128 items")
            if not p.accept(","):
                break
        p.expect("}")
        return Vector(tuple(items))

    def address(self) -> Address:
        p = self.p
        p.expect("[")
        token = p.now
        base = self.scalar()
        if isinstance(base, Special) or base is None:
            raise PtxError(token.line, "bad address")
        offset = 0
        if isinstance(base, Symbol):
            base, offset = Symbol(base.index), base.offset
        if p.now.text in ("+", "-"):
            offset += p.integer()
        if p.now.text == ",":
            p.unsupported("address with coordinates")
        p.expect("]")
        if not -(1 << 32) < offset < 1 << 32:
            p.fail("address offset exceeds 32 bits")
        return Address(base, offset)

    # Blocks.

    def blocks(self) -> tuple[Block, ...]:
        """Cut the code at labels and after branches; symbols of module variables get their final index."""
        starts = {0, *self.positions}
        starts.update(i + 1 for i, parsed in enumerate(self.code) if parsed[0] in _TERMINATORS)
        if len(self.code) not in self.positions:
            starts.discard(len(self.code))
        order = sorted(starts) or [0]
        number = {start: i for i, start in enumerate(order)}
        shift = self.params + len(self.variables)

        def final(operand: Operand | _Target, line: int) -> Operand:
            if isinstance(operand, _Target):
                return Label(number[self.resolve(operand, line)])
            if isinstance(operand, Symbol) and operand.index < 0:
                return Symbol(shift - 1 - operand.index, operand.offset)
            if isinstance(operand, Address) and isinstance(operand.base, Symbol) and operand.base.index < 0:
                return Address(Symbol(shift - 1 - operand.base.index), operand.offset)
            return operand

        result = []
        for start, end in zip(order, [*order[1:], len(self.code)], strict=True):
            instructions = tuple(
                Instruction(opcode, modifiers, tuple(final(o, line) for o in operands), guard, line, text)
                for opcode, modifiers, operands, guard, line, text in self.code[start:end]
            )
            result.append(Block(self.positions.get(start, ""), instructions))
        return tuple(result)


def parse(text: str) -> Module:
    """Parse one PTX module. Raises :class:`~.ir.PtxError` for bad text and :class:`~.interface.Unsupported` for legal
    PTX that this emulator does not know. ``Kernel.registers`` lists the registers that an instruction names."""
    if len(text) > MAX_TEXT:
        raise PtxError(1, f"text exceeds {MAX_TEXT} characters")
    return _Parser(text).module()
