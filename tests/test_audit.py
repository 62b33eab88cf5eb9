"""The audit: each rule with a text that breaks it, and texts made to break the audit itself."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from kernelmill.specs.registry import family
from kernelmill.verify.audit import MAX_SOURCE_BYTES, audit
from kernelmill.verify.build.schedules import Range, all_schedules, read_table, rewrite
from kernelmill.verify.verdict import Code, Rejected

ROOT = Path(__file__).parents[1]
SITU = family("situ_and_mul")
GOOD = (Path(__file__).parent / "data" / "hostile" / "skeleton.txt").read_text()
TABLE = "SCHEDULES = ((1, 8192, Schedule(threads=32)),)"
LAUNCH = "def launch(x: cute.Tensor, out: cute.Tensor, schedule: cutlass.Constexpr, stream: cuda.CUstream):"


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def verdict(source: str) -> Rejected:
    with pytest.raises(Rejected) as caught:
        audit(source, SITU)
    return caught.value


@pytest.mark.parametrize("name", ["attn_res", "situ_and_mul"])
def test_the_seeds_pass(name: str) -> None:
    table = audit((ROOT / "agents" / "seeds" / f"{name}.py").read_text(), family(name)).table
    assert table.ranges[0].first == 1 and table.choices["threads"]


def test_a_table() -> None:
    table = audit(GOOD, SITU).table
    assert table.choices == {"threads": (32, 64)}
    assert table.ranges == (Range(1, 8192, {"threads": 32}),)
    assert table.pick(8192) == {"threads": 32}
    with pytest.raises(Rejected, match="no range that holds 8193"):
        table.pick(8193)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (GOOD + "def f(:\n", "line "),
        (GOOD + "x = 'a\x00b'\n", "U+0000"),
        (GOOD + "# \u202e reversed\n", "U+202E"),
        (GOOD.replace("\n", "\r\n"), "U+000D"),
        (GOOD + "x = '\ud800'\n", "UTF-8"),
        (GOOD + "#" * MAX_SOURCE_BYTES, "bytes"),
        ("(" * 10_000, ""),
        ("x = " + "[" * 5_000 + "]" * 5_000, ""),
        ("x = " + "-" * 100_000 + "1", ""),
        ("x" + ".a" * 100_000, ""),
        ("if 1:\n" + "".join(" " * n + "if 1:\n" for n in range(1, 500)), ""),
    ],
    ids=[
        "syntax",
        "nul",
        "bidi",
        "crlf",
        "surrogate",
        "long",
        "parentheses",
        "lists",
        "unary",
        "attributes",
        "indents",
    ],
)
def test_a_text_that_cannot_be_read_is_a_syntax_verdict(source: str, line: str) -> None:
    begun = time.monotonic()
    error = verdict(source)
    assert error.code is Code.audit_syntax
    assert line in error.reason and "\n" not in error.reason
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "statement",
    [
        "import os",
        "import math, subprocess",
        "import cutlassx",
        "from . import sibling",
        "from kernelmill.kernels import ops",
        "from kernelmill import verify",
        "from cuda.bindings import runtime",
        "def f():\n    import socket",
    ],
)
def test_other_imports_are_refused(statement: str) -> None:
    error = verdict(GOOD + statement + "\n")
    assert error.code is Code.audit_import
    assert f"line {GOOD.count(chr(10)) + statement.count(chr(10)) + 1}" in error.reason


@pytest.mark.parametrize(
    "statement",
    [
        "import math",
        "from cutlass.cute import arch",
        "import cutlass.utils",
        "from kernelmill.kernels.lib import reduce",
    ],
)
def test_allowed_imports_pass(statement: str) -> None:
    audit(statement + "\n" + GOOD, SITU)


@pytest.mark.parametrize(
    "source",
    [
        changed("def launch(", "def start("),
        changed("def launch(", "async def launch("),
        GOOD + GOOD,
        changed(LAUNCH, LAUNCH.replace("x: cute.Tensor, out: cute.Tensor", "out: cute.Tensor, x: cute.Tensor")),
        changed(LAUNCH, LAUNCH.replace("x: cute.Tensor", "x")),
        changed(LAUNCH, LAUNCH.replace("stream: cuda.CUstream", "stream: cuda.CUstream = None")),
        changed(LAUNCH, LAUNCH.replace("stream: cuda.CUstream", "stream: cuda.CUstream, *more")),
        changed("@cute.jit", "@cute.kernel\n# @cute.jit"),
        changed("@cute.jit", "@" + "a" + ".a" * 700),
        changed(TABLE, ""),
        changed(TABLE, TABLE + "\n" + TABLE),
        changed(TABLE, TABLE + "; extra = 1"),
        changed(TABLE, "SCHEDULES = make()"),
        changed(TABLE, "SCHEDULES = ()"),
        changed(TABLE, "SCHEDULES = [(1, 8192, Schedule(threads=32))]"),
        changed(TABLE, "SCHEDULES = ((1, 8192, Schedule(threads=33)),)"),
        changed(TABLE, "SCHEDULES = ((1, 8192, Schedule(threads=16 * 2)),)"),
        changed(TABLE, "SCHEDULES = ((1, 8192, Schedule(other=32)),)"),
        changed(TABLE, "SCHEDULES = ((1, 8192, Schedule(**values)),)"),
        changed(TABLE, "SCHEDULES = ((9, 8, Schedule(threads=32)),)"),
        changed(TABLE, "SCHEDULES = ((1, 8, Schedule(threads=32)), (8, 9, Schedule(threads=32)))"),
        changed(TABLE, "SCHEDULES = ((1, 8, Schedule(threads=32)), (10, 11, Schedule(threads=32)))"),
        changed(TABLE, "SCHEDULES = ((9, 16, Schedule(threads=32)), (1, 8, Schedule(threads=32)))"),
        changed(TABLE, "SCHEDULES = ((1, 8192, Other(threads=32)),)"),
        changed("Literal[32, 64] = 32", "int = 32"),
        changed("Literal[32, 64] = 32", "Literal[32, 64] = 48"),
        changed("class Schedule", "class Choices"),
    ],
)
def test_another_form_is_a_signature_verdict(source: str) -> None:
    assert verdict(source).code is Code.audit_signature


def test_rewriting_changes_the_table_and_nothing_else() -> None:
    for text in (
        GOOD,
        GOOD.replace(TABLE, "SCHEDULES = (  # why\n    (1, 8, Schedule()),\n    (9, 10, Schedule()),\n)"),
    ):
        ranges = (Range(1, 8, {"threads": 64}), Range(9, 8192, {"threads": 32}))
        made = rewrite(text, ranges)
        assert read_table(ast.parse(made)).ranges == ranges
        before, after = (t.split("SCHEDULES")[0] for t in (text, made))
        assert before == after
        assert made.split("@cute.kernel")[1] == text.split("@cute.kernel")[1]
        assert rewrite(made, ranges) == made


def test_all_schedules() -> None:
    table = audit((ROOT / "agents" / "seeds" / "situ_and_mul.py").read_text(), SITU).table
    every = all_schedules(table)
    assert len(every) == len({tuple(s.items()) for s in every})
    assert all(s[f] in table.choices[f] for s in every for f in table.choices)
