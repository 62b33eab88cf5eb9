"""Native code through llvmlite: small helpers over its IR builder, and the one JIT engine of the process.

No compiler or linker of the system is involved. Names in the modules are ours alone: nothing of the PTX text gets here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

from kernelmill.verify.emulator.state import LANES, OFFSET

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
PTR = ir.PointerType()
VOID = ir.VoidType()
HELPER = ir.FunctionType(I32, [PTR, I32])
"""Helpers take the warp's context and the active lanes; they return 0 or a fault."""


def vec(element: ir.Type, count: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, count)


class Splat(ir.Constant):
    """The same integer in every lane, written short, which llvmlite itself cannot do."""

    def __init__(self, type: ir.VectorType, value: int) -> None:
        self.type = type
        self.constant = value  # no list of lanes, which the base class would insist on

    def _get_reference(self) -> str:
        value = self.constant if self.type.element.width > 1 else str(bool(self.constant)).lower()
        return f"splat ({self.type.element} {value})"

    def _to_string(self) -> str:
        return f"{self.type} {self._get_reference()}"


def guard_stack(function: ir.Function) -> None:
    """Have the function touch its frame page by page: how large it is, an attacker decides, and a frame that is too
    large must hit the guard page rather than jump over it."""
    # llvmlite's own list of known attributes has none with a value.
    set.add(function.attributes, '"probe-stack"="inline-asm"')


class Code:
    """An IR builder at the end of one function whose first argument is the warp's context."""

    def __init__(self, function: ir.Function) -> None:
        self.function = function
        self.module = function.module
        self.context = function.args[0]
        self.b = ir.IRBuilder(function.append_basic_block("entry"))

    # Constants.

    def const(self, type: ir.Type, value: int) -> ir.Value:
        """A scalar, or the splat of one when ``type`` is a vector."""
        if isinstance(type, ir.VectorType):
            return Splat(type, value & ((1 << type.element.width) - 1))
        return ir.Constant(type, value & ((1 << type.width) - 1))

    def i32(self, value: int) -> ir.Value:
        return self.const(I32, value)

    def i64(self, value: int) -> ir.Value:
        return self.const(I64, value)

    def lanes(self, type: ir.Type, values: Sequence[int]) -> ir.Value:
        """A vector constant; ``values`` as they are."""
        return ir.Constant(vec(type, len(values)), list(values))

    # Memory.

    def at(self, base: ir.Value, offset: ir.Value | int) -> ir.Value:
        """The address ``base`` + ``offset`` bytes."""
        if isinstance(offset, int):
            offset = self.i64(offset)
        return self.b.gep(base, [offset], source_etype=I8)

    def load(self, pointer: ir.Value, type: ir.Type, align: int = 1) -> ir.Value:
        return self.b.load(pointer, typ=type, align=align)

    def store(self, value: ir.Value, pointer: ir.Value, align: int = 1) -> None:
        self.b.store(value, pointer, align=align)

    def field(self, name: str) -> ir.Value:
        return self.at(self.context, OFFSET[name])

    def get(self, name: str, type: ir.Type) -> ir.Value:
        return self.load(self.field(name), type, 4)

    def put(self, name: str, value: ir.Value) -> None:
        self.store(value, self.field(name), 4)

    def bump(self, pointer: ir.Value, by: ir.Value) -> ir.Value:
        """Add to the 64-bit counter at ``pointer``; its new value."""
        value = self.b.add(self.load(pointer, I64, 8), by)
        self.store(value, pointer, 8)
        return value

    # Vectors.

    def splat(self, value: ir.Value, count: int = LANES) -> ir.Value:
        type = vec(value.type, count)
        one = self.b.insert_element(ir.Constant(type, ir.Undefined), value, self.i32(0))
        return self.b.shuffle_vector(one, one, self.lanes(I32, [0] * count))

    def bits(self, mask: ir.Value) -> ir.Value:
        """``<32 x i1>`` to i32, lane 0 lowest, or back."""
        return self.b.bitcast(mask, vec(I1) if mask.type == I32 else I32)

    def intrinsic(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        known = self.module.globals.get(name)
        if known is None:
            known = ir.Function(self.module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(known, arguments)

    def popcount(self, value: ir.Value) -> ir.Value:
        return self.intrinsic(f"llvm.ctpop.i{value.type.width}", value.type, value)

    def lowest(self, mask: ir.Value) -> ir.Value:
        """Index of the lowest set bit; 32 for 0."""
        return self.intrinsic("llvm.cttz.i32", I32, mask, self.const(I1, 0))

    def any_bit(self, vector: ir.Value) -> ir.Value:
        """Whether an integer vector has a bit set."""
        n, width = vector.type.count, vector.type.element.width
        word = self.intrinsic(f"llvm.vector.reduce.or.v{n}i{width}", vector.type.element, vector)
        return self.b.icmp_unsigned("!=", word, self.const(word.type, 0))

    # Control flow.

    def block(self, name: str = "") -> ir.Block:
        return self.function.append_basic_block(name)

    def go(self, block: ir.Block) -> None:
        """Branch to ``block`` unless the current one has ended, and continue there."""
        if not self.b.block.is_terminated:
            self.b.branch(block)
        self.b.position_at_end(block)

    @contextmanager
    def when(self, condition: ir.Value) -> Iterator[None]:
        """Code for ``condition`` only; the body may end in a return."""
        body, after = self.block(), self.block()
        self.b.cbranch(condition, body, after)
        self.b.position_at_end(body)
        yield
        self.go(after)

    @contextmanager
    def loop(self, count: int) -> Iterator[ir.Value]:
        """Code for an i32 from 0 to ``count`` - 1."""
        before, body, step, after = self.b.block, self.block(), self.block(), self.block()
        self.b.branch(body)
        self.b.position_at_end(body)
        index = self.b.phi(I32)
        index.add_incoming(self.i32(0), before)
        yield index
        self.go(step)
        following = self.b.add(index, self.i32(1))
        index.add_incoming(following, step)
        self.b.cbranch(self.b.icmp_unsigned("<", following, self.i32(count)), body, after)
        self.b.position_at_end(after)

    @contextmanager
    def each_lane(self, mask: ir.Value) -> Iterator[ir.Value]:
        """Code for the index of every set bit of ``mask``, ascending."""
        before, head, body, step, after = self.b.block, self.block(), self.block(), self.block(), self.block()
        self.b.branch(head)
        self.b.position_at_end(head)
        left = self.b.phi(I32)
        left.add_incoming(mask, before)
        self.b.cbranch(self.b.icmp_unsigned("!=", left, self.i32(0)), body, after)
        self.b.position_at_end(body)
        yield self.lowest(left)
        self.go(step)
        left.add_incoming(self.b.and_(left, self.b.sub(left, self.i32(1))), step)
        self.b.branch(head)
        self.b.position_at_end(after)

    def lane_at(self, base: ir.Value, lane: ir.Value, size: int) -> ir.Value:
        """``base`` + ``lane`` * ``size``, for an i32 lane below 32."""
        return self.at(base, self.b.mul(self.b.zext(lane, I64), self.i64(size)))


# The engine.


@cache
def _target() -> llvm.Target:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


def _machine(level: int) -> llvm.TargetMachine:
    """A target machine for this host. Each engine takes possession of its own."""
    features = llvm.get_host_cpu_features().flatten()
    return _target().create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=level, jit=True)


@dataclass(frozen=True)
class Native:
    """Compiled code; it lives as long as this object. ``addresses`` by function name."""

    engine: llvm.ExecutionEngine
    addresses: dict[str, int]


def jit(module: ir.Module, *names: str, level: int) -> Native:
    """Compile ``module``, which may call any helper that :func:`need` made.

    ``level`` of LLVM's code generator: 1 for helpers. Kernels at 0 compile in half of the time and run as fast within
    the noise. LLVM's own passes over the IR were tried and gain nothing: it is emitted in good order.
    """
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    engine = llvm.create_mcjit_compiler(parsed, _machine(level))
    engine.finalize_object()
    return Native(engine, {name: engine.get_function_address(name) for name in names})


_helpers: dict[str, Native] = {}


def need(name: str, emit: Callable[[Code], None]) -> str:
    """Make sure that the helper ``name`` exists in this process, made by ``emit``; its name.

    ``emit`` may call :func:`call_helper` on other helpers that it needs itself.
    """
    if name not in _helpers:
        module = ir.Module(name)
        emit(Code(ir.Function(module, HELPER, name)))
        _helpers[name] = jit(module, name, level=1)
        llvm.add_symbol(name, _helpers[name].addresses[name])
    return name


def call_helper(code: Code, name: str, mask: ir.Value) -> ir.Value:
    """Call the helper ``name`` (see :func:`need`) with the warp's context."""
    function = code.module.globals.get(name)
    if function is None:
        function = ir.Function(code.module, HELPER, name)
    return code.b.call(function, [code.context, mask])
