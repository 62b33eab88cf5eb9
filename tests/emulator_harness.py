"""Runs one PTX instruction on many lanes: parse, lower, compile, call."""

from __future__ import annotations

import ctypes
import functools

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from kernelmill.verify.emulator import alu
from kernelmill.verify.emulator.alu_base import LANES, int_type
from kernelmill.verify.emulator.ir import Instruction, Kernel, Register
from kernelmill.verify.emulator.parser import parse

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

_MODULE = """
.version 8.8
.target sm_103a
.address_size 64
.visible .entry k()
{{
    .reg .pred %p<8>;
    .reg .b8 %b<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<8>;
    .reg .b64 %d<8>;
    {instruction};
    ret;
}}
"""


def single(instruction: str) -> tuple[Kernel, Instruction]:
    kernel = parse(_MODULE.format(instruction=instruction)).kernels[0]
    return kernel, kernel.blocks[0].instructions[0]


def storage(width: int) -> int:
    """Bits of the numpy element that holds a register."""
    return max(8, width)


class Compiled:
    """``run(*sources)`` gives one array per destination register; arrays are unsigned and of any multiple of 32
    lanes. Sources are the instruction's source registers in order; constants come from its text."""

    def __init__(self, text: str, lower: object = alu.lower) -> None:
        kernel, instr = single(text)
        dests, sources = alu.signature(instr, kernel)
        operands = alu.flatten(instr)
        self.dests = dests
        self.sources = [w for w, o in zip(sources, operands[len(dests) :], strict=True) if isinstance(o, Register)]
        pointer = ir.IntType(8).as_pointer()
        module = ir.Module()
        count = len(self.sources)
        signature = ir.FunctionType(ir.VoidType(), [pointer] * (count + len(dests)) + [ir.IntType(64), ir.IntType(32)])
        function = ir.Function(module, signature, "run")
        builder = ir.IRBuilder(function.append_basic_block())
        loop = function.append_basic_block()
        done = function.append_basic_block()
        entry = builder.block
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(ir.IntType(64))
        index.add_incoming(ir.Constant(ir.IntType(64), 0), entry)

        def place(argument: ir.Value, width: int) -> ir.Value:
            wide = builder.bitcast(argument, int_type(storage(width)).as_pointer())
            return builder.gep(wide, [index])

        values = []
        position = 0
        for width, operand in zip(sources, operands[len(dests) :], strict=True):
            if isinstance(operand, Register):
                loaded = builder.load(place(function.args[position], width), align=1)
                value = loaded if storage(width) == width else builder.trunc(loaded, int_type(width))
                values.append(builder.not_(value) if operand.negated else value)
                position += 1
            else:
                values.append(ir.Constant(int_type(width), [operand.value & ((1 << width) - 1)] * LANES))
        results = lower(builder, instr, values, function.args[-1])  # type: ignore[operator]
        for i, (width, result) in enumerate(zip(dests, results, strict=True)):
            assert result.type == int_type(width), (text, str(result.type), width)
            stored = result if storage(width) == width else builder.zext(result, int_type(storage(width)))
            builder.store(stored, place(function.args[count + i], width), align=1)
        following = builder.add(index, ir.Constant(ir.IntType(64), 1))
        index.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", following, function.args[-2]), loop, done)
        builder.position_at_end(done)
        builder.ret_void()
        self.ir = str(module)
        self.engine = _compile(self.ir)
        address = self.engine.get_function_address("run")
        kinds = [ctypes.c_void_p] * (count + len(dests)) + [ctypes.c_int64, ctypes.c_int32]
        self.function = ctypes.CFUNCTYPE(None, *kinds)(address)

    def run(self, *sources: np.ndarray, seed: int = 0) -> list[np.ndarray]:
        assert len(sources) == len(self.sources)
        n = len(sources[0])
        padded = -(-n // LANES) * LANES
        inputs = []
        for width, source in zip(self.sources, sources, strict=True):
            array = np.zeros(padded, f"u{storage(width) // 8}")
            array[:n] = source.astype(array.dtype) if source.dtype.kind == "b" else source.view(array.dtype)
            inputs.append(array)
        outputs = [np.zeros(padded, f"u{storage(w) // 8}") for w in self.dests]
        self.function(*(a.ctypes.data for a in (*inputs, *outputs)), padded // LANES, seed)
        return [o[:n] for o in outputs]


def _compile(text: str) -> llvm.ExecutionEngine:
    module = llvm.parse_assembly(text)
    module.verify()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        module, llvm.create_pass_builder(machine, options)
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


@functools.cache
def compiled(text: str) -> Compiled:
    return Compiled(text)


def run(text: str, *sources: np.ndarray, seed: int = 0) -> np.ndarray:
    """The first destination of the instruction."""
    return compiled(text).run(*sources, seed=seed)[0]
