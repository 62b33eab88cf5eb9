"""The PTX parser on real kernels and on hostile text."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path

import pytest

from kernelmill.verify.emulator import alu, parser
from kernelmill.verify.emulator.interface import Unsupported
from kernelmill.verify.emulator.ir import (
    Address,
    Immediate,
    Kernel,
    Label,
    Module,
    PtxError,
    Register,
    Special,
    Symbol,
    Vector,
)
from kernelmill.verify.emulator.parser import MAX_TEXT, parse

SAMPLES = Path(__file__).parent / "data" / "ptx"
HEADER = ".version 8.8\n.target sm_103a\n.address_size 64\n"
REGISTERS = ".reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<8>; .reg .b64 %d<4>;\n"


def module(body: str, before: str = "", parameters: str = "") -> Module:
    return parse(f"{HEADER}{before}.visible .entry k({parameters})\n{{\n{REGISTERS}{body}\n}}\n")


def kernel(body: str, before: str = "", parameters: str = "") -> Kernel:
    return module(body, before, parameters).kernels[0]


def operands(text: str, **options: str) -> tuple[object, ...]:
    return kernel(text, **options).blocks[0].instructions[0].operands


def name(k: Kernel, register: object) -> str:
    assert isinstance(register, Register)
    return ("!" if register.negated else "") + k.registers[register.index].name


# Real kernels.


@pytest.mark.parametrize(
    ("file", "target", "threads", "instructions", "opcodes"),
    [
        (
            "rms_norm_sm_103a.ptx",
            "sm_103a",
            256,
            228,
            {"fma": 32, "cvt": 49, "ld": 14, "st": 5, "shfl": 6, "bra": 3, "bar": 1, "rsqrt": 1},
        ),
        ("attn_res_sm_90a.ptx", "sm_90a", 896, 126, {"shfl": 11, "bar": 2}),
    ],
)
def test_real_kernels(file: str, target: str, threads: int, instructions: int, opcodes: dict[str, int]) -> None:
    parsed = parse((SAMPLES / file).read_text())
    (k,) = parsed.kernels
    assert (parsed.target, parsed.version, k.max_threads, k.reqntid) == (target, (8, 8), (threads, 1, 1), True)
    code = [i for b in k.blocks for i in b.instructions]
    assert len(code) == instructions
    counts = Counter(i.opcode for i in code)
    assert {o: counts[o] for o in opcodes} == opcodes
    text = (SAMPLES / file).read_text().splitlines()
    sizes = [int(line.split("[")[1].split("]")[0]) for line in text if line.startswith("\t.param")]
    assert [p.size for p in k.params] == sizes and all(p.align == 8 for p in k.params)
    for i in code:
        assert i.name in text[i.line - 1]
        if alu.is_alu(i):
            alu.signature(i, k)
    # Every branch target is the block that carries the label.
    for i in code:
        for operand in i.operands:
            if isinstance(operand, Label):
                assert k.blocks[operand.block].label in i.text
    # Control leaves a block at its end alone.
    for block in k.blocks:
        assert all(i.opcode not in ("bra", "ret") for i in block.instructions[:-1])


# Operands.


def test_operand_kinds() -> None:
    k = kernel("@!%p1 setp.lt.and.s32 %p2|%p0, %r1, -5, !%p3;")
    (i,) = k.blocks[0].instructions
    assert i.guard is not None and name(k, i.guard) == "!%p1"
    assert [name(k, o) if isinstance(o, Register) else o for o in i.operands] == [
        "%p2", "%p0", "%r1", Immediate(-5), "!%p3",
    ]  # fmt: skip
    assert i.modifiers == ("lt", "and", "s32") and i.text == "@!%p1 setp.lt.and.s32 %p2|%p0, %r1, -5, !%p3"
    assert operands("mov.b32 %r1, 0f3F800000;")[1] == Immediate(0x3F800000, 32)
    assert operands("mov.b64 %d1, 0d3FF0000000000000;")[1] == Immediate(0x3FF << 52, 64)
    assert operands("mov.u32 %r1, 0xFFFFFFFF;")[1] == Immediate(0xFFFFFFFF)
    assert operands("mov.u32 %r1, 0xFU;")[1] == Immediate(15)
    assert operands("mov.u32 %r1, 017;")[1] == Immediate(15)
    assert operands("mov.u32 %r1, 0b101;")[1] == Immediate(5)
    assert operands("mov.u32 %r1, WARP_SZ;")[1] == Immediate(32)
    assert operands("mov.u32 %r1, %tid.x;")[1] == Special("tid.x")
    assert operands("mov.u64 %d1, %clock64;")[1] == Special("clock64")
    vector = operands("mov.b32 {%h1, _}, %r1;")[0]
    assert isinstance(vector, Vector) and vector.items[1] is None


def test_addresses_and_symbols() -> None:
    before = ".extern .shared .align 16 .b8 dyn[];\n.const .align 4 .b32 table[3] = {1, -1, 0x10};\n"
    parameters = ".param .u64 .ptr .global .align 16 a, .param .align 8 .b8 b[24]"
    body = "ld.param.b64 %d1, [b+16]; ld.shared.b32 %r1, [dyn+-4]; ld.const.b32 %r2, [table+8]; mov.b32 %r3, dyn;"
    body += " ld.global.b32 %r4, [%d1-8]; ld.shared.b32 %r5, [mine]; mov.b32 %r6, mine+4;"
    k = kernel(".shared .align 8 .b32 mine[2];\n" + body, before, parameters)
    places = [i.operands[1] for i in k.blocks[0].instructions]
    assert places[0] == Address(Symbol(1), 16)
    # (*params, *variables, *module variables)
    assert places[1] == Address(Symbol(3), -4)
    assert places[2] == Address(Symbol(4), 8)
    assert places[3] == Symbol(3)
    assert isinstance(places[4], Address) and places[4].offset == -8
    assert places[5] == Address(Symbol(2), 0)
    assert places[6] == Symbol(2, 4)
    assert [(p.name, p.size, p.align) for p in k.params] == [("a", 8, 8), ("b", 24, 8)]
    assert [(v.name, v.size, v.align, v.space) for v in k.variables] == [("mine", 8, 8, "shared")]
    dyn, table = module("ret;", before).variables
    assert (dyn.size, dyn.align, dyn.extern) == (0, 16, True)
    assert table.initial == bytes.fromhex("01000000ffffffff10000000") and table.size == 12


def test_directives_of_a_kernel() -> None:
    text = (
        HEADER + ".visible .entry k()\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n.maxntid 128\n.minnctapersm 2\n"
        '{\n.pragma "nounroll";\n.loc 1 2 3, function_name $x, inlined_at 1 2 3\nret;\n}\n'
        ".section .debug_info { .b8 1 \n .b32 0x10 }\n"
    )
    k = parse(text).kernels[0]
    assert (k.cluster, k.max_threads, k.reqntid) == ((2, 1, 1), (128, 1, 1), False)


# Scopes and blocks.


def test_inner_scopes_shadow_registers_and_labels() -> None:
    body = """
    L: mov.b32 %r1, 1;
    { .reg .pred p; .reg .b32 %r1; setp.eq.b32 p, %r1, 0;
      L: @p bra L; mov.b32 %r1, %r2; }
    { .reg .pred p; setp.eq.b32 p, %r1, 0; @p bra L; }
    ret;"""
    k = kernel(body)
    code = [i for b in k.blocks for i in b.instructions]
    outer = code[0].operands[0]
    inner = code[1].operands[1]
    assert outer != inner and name(k, outer) == name(k, inner) == "%r1"
    assert code[3].operands[0] == inner
    assert code[4].operands[1] == outer
    assert code[1].operands[0] != code[4].operands[0], "two scopes, two registers p"
    assert code[2].operands == (Label(1),) and code[5].operands == (Label(0),)


def test_blocks_are_cut_at_labels_and_branches() -> None:
    body = "@%p1 bra DONE; A: B: mov.b32 %r1, 0; bar.sync 0; mov.b32 %r1, 1; C: @%p1 ret; bra.uni A; DONE:"
    k = kernel(body)
    shape = [(b.label, [i.opcode for i in b.instructions]) for b in k.blocks]
    assert shape == [
        ("", ["bra"]),
        ("A", ["mov", "bar", "mov"]),
        ("C", ["ret"]),
        ("", ["bra"]),
        ("DONE", []),
    ]
    assert k.blocks[0].instructions[0].operands == (Label(4),)
    assert k.blocks[3].instructions[0].operands == (Label(1),)


def test_branch_table() -> None:
    k = kernel("t: .branchtargets X, Y; brx.idx %r1, t; X: ret; Y: ret;")
    instruction = k.blocks[0].instructions[0]
    assert instruction.operands[1:] == (Label(1), Label(2))


# Hostile text.


def program(body: str) -> str:
    return f"{HEADER}.entry k()\n{{\n{REGISTERS}{body}\n}}\n"


BAD = {
    "empty": ("", "expected '.version'"),
    "no target": (".version 8.8\n", "expected '.target'"),
    "NUL": (HEADER + "\0", "unexpected character"),
    "non-ASCII": (program("mov.b32 %r1, ٣;"), "unexpected character"),
    "bidirectional": (program("// \u202e\nmov\u202e.b32 %r1, 3;"), "unexpected character"),
    "unclosed comment": (HEADER + "/* ", "comment is not closed"),
    "unclosed string": (program('.pragma "nounroll;'), "unexpected character"),
    "unclosed body": (HEADER + ".entry k() {", "not closed"),
    "extra brace": (program("}"), "unexpected"),
    "deep nesting": (program("{" * 100_000), "nested scopes"),
    "register twice": (program(".reg .b32 %r3;"), "duplicate register"),
    "range over register": (program(".reg .b32 x3; .reg .b32 x<4>;"), "duplicate register"),
    "range twice": (program(".reg .b32 %r<2>;"), "duplicate register"),
    "label twice": (program("A: A: ret;"), "duplicate label"),
    "kernel twice": (HEADER + ".entry k() { ret; } .entry k() { ret; }", "duplicate name"),
    "variable twice": (HEADER + ".shared .b32 a; .shared .b32 a;", "duplicate name"),
    "parameter twice": (HEADER + ".entry k(.param .b32 a, .param .b32 a) { ret; }", "duplicate name"),
    "unknown label": (program("bra NOWHERE;"), "unknown label"),
    "label of another scope": (program("{ A: ret; } bra A;"), "unknown label"),
    "label of another kernel": (HEADER + ".entry k() { A: ret; } .entry l() { bra A; }", "unknown label"),
    "undeclared": (program("mov.b32 %r1, %q1;"), "undeclared name"),
    "beyond the range": (program("mov.b32 %r1, %r8;"), "undeclared name"),
    "leading zero": (program("mov.b32 %r1, %r01;"), "undeclared name"),
    "of a closed scope": (program("{ .reg .b32 z; } mov.b32 z, 1;"), "undeclared name"),
    "guard": (program("@%r1 mov.b32 %r1, 1;"), "not a predicate"),
    "huge count": (program(".reg .b32 z<99999999999>;"), "not within"),
    "negative count": (program(".reg .b32 z<-1>;"), "not within"),
    "huge array": (HEADER + ".global .b8 a[99999999][99999999];", "not within"),
    "huge product": (HEADER + ".global .b8 a[60000000][60000000];", "elements"),
    "huge number": (program("mov.b32 %r1, " + "9" * 100_000 + ";"), "not a number"),
    "65-bit number": (program("mov.b64 %d1, 0x1FFFFFFFFFFFFFFFF;"), "64 bits"),
    "bad octal": (program("mov.b32 %r1, 09;"), "not a number"),
    "alignment": (HEADER + ".shared .align 3 .b8 a[4];", "power of two"),
    "initialiser": (HEADER + ".const .b8 a[1] = {1, 2};", "too many initialisers"),
    "initialiser range": (HEADER + ".const .b8 a[1] = {256};", "does not fit"),
    "shared initialiser": (HEADER + ".shared .b8 a[1] = {1};", "no initialiser"),
    "unsized": (HEADER + ".shared .b8 a[];", "no size"),
    "zero threads": (HEADER + ".entry k() .reqntid 0, 1, 1 { ret; }", "at least 1"),
    "many threads": (HEADER + ".entry k() .reqntid 4096, 1, 1 { ret; }", "not within"),
    "operands": (program("mov.b32 " + "%r1, " * 200 + "%r1;"), "operands"),
    "modifiers": (program("mov" + ".b32" * 1000 + " %r1, %r2;"), "modifiers"),
    "long vector": (program("mov.b32 {" + "%r1, " * 1000 + "%r1}, %r2;"), "128"),
    "nested vector": (program("mov.b32 {{%r1, %r1}, %r1}, %r2;"), "expected an operand"),
    "no semicolon": (program("mov.b32 %r1, %r2"), "expected ';'"),
    "offset": (program("ld.global.b32 %r1, [%d1+0x7FFFFFFFFFFF];"), "offset"),
    "junk directive": (HEADER + ".banana", "unexpected"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_text_is_refused_with_line_and_reason(case: str) -> None:
    text, reason = BAD[case]
    start = time.perf_counter()
    with pytest.raises(PtxError, match=r"PTX line [0-9]+: ") as caught:
        parse(text)
    assert reason in caught.value.message, caught.value.message
    assert len(str(caught.value)) < 300
    assert time.perf_counter() - start < 2


UNKNOWN = {
    "function": HEADER + ".func f() { ret; }",
    "call": program("call (%r1), f, (%r2);"),
    "weak texture": HEADER + ".tex .u32 t;",
    "vector register": program(".reg .v4 .f32 v;"),
    "vector element": program("mov.b32 %r1, %r2.x;"),
    "coordinates": program("cp.async.bulk.tensor.1d [%r1], [%d1, {%r2}], [%r3];"),
    "pragma": program('.pragma "banana";'),
    "decimal float": program("mov.f32 %r1, 1.5;"),
    "expression": program("mov.b32 %r1, (1+2);"),
    "address initialiser": HEADER + ".global .b64 a; .global .b64 b = a;",
    "nested initialiser": HEADER + ".global .b32 a[2][2] = {{1, 2}, {3, 4}};",
    "performance directive": HEADER + ".entry k() .blocksareclusters { ret; }",
    "parameter in the body": program(".param .b32 p;"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_legal_but_unknown_text_is_ours(case: str) -> None:
    with pytest.raises(Unsupported, match=r"PTX line [0-9]+: .* not supported"):
        parse(UNKNOWN[case])


def test_bounds_of_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PtxError, match="exceeds"):
        parse(" " * (MAX_TEXT + 1))
    monkeypatch.setattr(parser, "MAX_INSTRUCTIONS", 1000)
    monkeypatch.setattr(parser, "MAX_REGISTERS", 100)
    monkeypatch.setattr(parser, "MAX_NAMES", 500)
    monkeypatch.setattr(parser, "MAX_INITIAL", 50)
    parse(program("ret;" * 1000))
    with pytest.raises(PtxError, match="more than 1000 instructions"):
        parse(program("ret;" * 1001))
    with pytest.raises(PtxError, match="more than 100 registers"):
        parse(program(".reg .b32 x<101>;" + "".join(f"mov.b32 x{i}, 0;" for i in range(101))))
    with pytest.raises(PtxError, match="more than 500 declarations"):
        parse(program("".join(f"L{i}:" for i in range(501))))
    with pytest.raises(PtxError, match="more than 50 initialisers"):
        parse(HEADER + ".const .b8 a[99] = {" + "0, " * 50 + "0};")
    # A huge range costs nothing until its registers are named.
    k = kernel(".reg .b32 big<2000000000>; mov.b32 big1999999999, %r1;")
    assert [r.name for r in k.registers] == ["big1999999999", "%r1"]


@pytest.mark.parametrize(
    "unit",
    [
        "mov.b32 %r1, %r2;\n",
        "{ .reg .b32 t; mov.b32 t, %r1; }\n",
        "/* * / ** */",
        '"',
        "A{}: bra A{};\n",
        ".reg .b32 a{};\n",
        ".reg .b32 a{}_<9>;\n",
        "0x",
        "%r",
        "......",
        "@",
        "[[[[",
    ],
)
def test_time_is_linear(unit: str) -> None:
    """Twenty times the text takes less than 120 times as long, on a busy machine too: no quadratic path (400 times)."""

    def seconds(count: int) -> float:
        text = program("".join(unit.replace("{}", str(i)) if "{}" in unit else unit for i in range(count)))
        start = time.perf_counter()
        with contextlib.suppress(PtxError, Unsupported):
            parse(text)
        return time.perf_counter() - start

    seconds(100)
    small = max(min(seconds(500) for _ in range(3)), 5e-3)
    assert min(seconds(10_000) for _ in range(2)) < 120 * small
