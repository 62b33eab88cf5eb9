"""A candidate's schedule table, read and rewritten as text: no candidate code runs here.

``Schedule`` is a frozen dataclass whose fields are annotated ``Literal[...]``; ``SCHEDULES`` is a literal tuple of
``(first, last, Schedule(field=value, ...))``: the schedule of every value of the first dynamic axis in first..last.
"""

from __future__ import annotations

import ast
import itertools
import threading
from dataclasses import dataclass

from kernelmill.verify.verdict import Code, Rejected

Value = int | str | bool
Schedule = dict[str, Value]
"""Field to value, every field present, in the order of the class."""

MAX_RANGES = 32
MAX_FIELDS = 32


@dataclass(frozen=True)
class Range:
    """``schedule`` serves ``first``..``last``, both included."""

    first: int
    last: int
    schedule: Schedule


@dataclass(frozen=True)
class Table:
    """``choices``: field to its legal values; ``defaults``: field to default, where it has one."""

    choices: dict[str, tuple[Value, ...]]
    defaults: Schedule
    ranges: tuple[Range, ...]

    def pick(self, value: int) -> Schedule:
        """The schedule of the first range that holds ``value``. Raises Rejected when none does."""
        for r in self.ranges:
            if r.first <= value <= r.last:
                return r.schedule
        raise Rejected(Code.audit_signature, f"SCHEDULES has no range that holds {value}")


_parsing = threading.Lock()


def parse(source: str) -> ast.Module:
    """``ast.parse``, one thread at a time: CPython 3.11 counts the depth of the tree it builds per interpreter, and
    two threads make it raise SystemError ("AST constructor recursion depth mismatch")."""
    with _parsing:
        return ast.parse(source)


def read_table(tree: ast.Module) -> Table:
    """Read ``Schedule`` and ``SCHEDULES``. Raises Rejected(audit.signature) naming the line."""
    choices, defaults = _choices(tree)
    node = _assignment(tree)
    rows = node.value
    if not isinstance(rows, ast.Tuple) or not 1 <= len(rows.elts) <= MAX_RANGES:
        raise _bad(node, f"SCHEDULES must be a literal tuple of 1 to {MAX_RANGES} rows (first, last, Schedule(...))")
    ranges = tuple(_range(row, choices, defaults) for row in rows.elts)
    for row, before, after in zip(rows.elts[1:], ranges, ranges[1:], strict=False):
        if after.first != before.last + 1:
            raise _bad(row, f"a row of SCHEDULES begins where the one before ends: at {before.last + 1}")
    return Table(choices, defaults, ranges)


def rewrite(source: str, ranges: tuple[Range, ...]) -> str:
    """``source`` with its ``SCHEDULES`` replaced; everything else stays byte for byte."""
    node = _assignment(parse(source))
    rows = ",\n    ".join(
        f"({r.first}, {r.last}, Schedule({', '.join(f'{k}={_literal(v)}' for k, v in r.schedule.items())}))"
        for r in ranges
    )
    lines = source.split("\n")
    assert node.end_lineno is not None
    return "\n".join([*lines[: node.lineno - 1], f"SCHEDULES = (\n    {rows},\n)", *lines[node.end_lineno :]])


def all_schedules(table: Table) -> list[Schedule]:
    """Every combination of the fields' choices, in the order of the source."""
    fields = list(table.choices)
    return [dict(zip(fields, values, strict=True)) for values in itertools.product(*table.choices.values())]


def _literal(value: Value) -> str:
    return '"' + value + '"' if isinstance(value, str) else repr(value)


def _bad(node: ast.AST, what: str) -> Rejected:
    return Rejected(Code.audit_signature, f"line {getattr(node, 'lineno', 0)}: {what}")


def _assignment(tree: ast.Module) -> ast.Assign:
    found = [
        n
        for n in tree.body
        if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "SCHEDULES" for t in n.targets)
    ]
    if len(found) != 1 or len(found[0].targets) != 1:
        raise Rejected(Code.audit_signature, f"SCHEDULES must be assigned once at module level, found {len(found)}")
    first, last = found[0].lineno, found[0].end_lineno or 0
    if any(n is not found[0] and n.lineno <= last and (n.end_lineno or 0) >= first for n in tree.body):
        raise _bad(found[0], "SCHEDULES must have its lines to itself")
    return found[0]


def _choices(tree: ast.Module) -> tuple[dict[str, tuple[Value, ...]], Schedule]:
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Schedule"]
    if len(classes) != 1:
        raise Rejected(Code.audit_signature, f"there must be one class Schedule at module level, found {len(classes)}")
    choices: dict[str, tuple[Value, ...]] = {}
    defaults: Schedule = {}
    for node in classes[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        if not isinstance(node.target, ast.Name):
            raise _bad(node, "a field of Schedule must be a plain name")
        values = _literal_choices(node.annotation)
        if not values:
            raise _bad(node, f"Schedule.{node.target.id} must be annotated Literal[...] with its choices")
        choices[node.target.id] = values
        if node.value is not None:
            default = _constant(node.value)
            if default not in values:
                raise _bad(node, f"the default of Schedule.{node.target.id} is none of its choices")
            defaults[node.target.id] = default
    if not 1 <= len(choices) <= MAX_FIELDS:
        raise _bad(classes[0], f"Schedule must have 1 to {MAX_FIELDS} fields annotated Literal[...]")
    return choices, defaults


def _literal_choices(node: ast.expr) -> tuple[Value, ...]:
    if not isinstance(node, ast.Subscript):
        return ()
    name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
    if name != "Literal":
        return ()
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return tuple(_constant(i) for i in items)


def _constant(node: ast.expr) -> Value:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, str) and value.isidentifier() and len(value) <= 64 and sign == 1:
            return value
        if isinstance(value, int) and abs(value) < 2**31:
            return value if sign == 1 else -value
    raise _bad(node, "schedule values are literal integers, booleans or identifier-like strings")


def _range(node: ast.expr, choices: dict[str, tuple[Value, ...]], defaults: Schedule) -> Range:
    call = node.elts[2] if isinstance(node, ast.Tuple) and len(node.elts) == 3 else None
    if not isinstance(node, ast.Tuple) or not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "Schedule":
        raise _bad(node, "a row of SCHEDULES is (first, last, Schedule(field=value, ...))")
    first, last = _constant(node.elts[0]), _constant(node.elts[1])
    if call.args or not isinstance(first, int) or not isinstance(last, int) or not 0 <= first <= last:
        raise _bad(node, "a row of SCHEDULES is (first, last, Schedule(field=value, ...)) with first <= last")
    given: Schedule = {}
    for keyword in call.keywords:
        name = keyword.arg or "**"
        value = _constant(keyword.value)
        if value not in choices.get(name, ()):
            raise _bad(node, f"Schedule({name}={value}) is none of its choices {choices.get(name, ())}")
        given[name] = value
    missing = [f for f in choices if f not in given and f not in defaults]
    if missing:
        raise _bad(node, f"Schedule without a value for {', '.join(missing)}")
    return Range(first, last, {f: given.get(f, defaults.get(f, 0)) for f in choices})
