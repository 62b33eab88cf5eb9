"""The audit stage: what a candidate's text must look like. Hygiene, no security: cutlass reaches everything."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from kernelmill.specs.schema import Family
from kernelmill.verify.build.schedules import Table, parse, read_table
from kernelmill.verify.verdict import Code, Rejected

MAX_SOURCE_BYTES = 256 * 1024
MAX_WORKSPACES = 16
ALLOWED_MODULES = (
    "cutlass",
    "cuda.bindings.driver",
    "kernelmill.kernels.lib",
    "math",
    "typing",
    "dataclasses",
    "functools",
    "enum",
    "__future__",
)

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""Control characters but line feed and tab; characters without width or that turn the direction of the text."""


@dataclass(frozen=True)
class Audited:
    """What the text says: the schedule table, and the parameters of ``launch`` that are workspaces."""

    table: Table
    workspaces: tuple[str, ...]


def audit(source: str, family: Family) -> Audited:
    """Check syntax, imports and signature. Raises Rejected(audit.*) naming the line."""
    tree = _parse(source)
    for node in ast.walk(tree):
        for name in _imported(node):
            if not any(name == m or name.startswith(m + ".") for m in ALLOWED_MODULES):
                raise Rejected(Code.audit_import, f"line {node.lineno}: import of {name[:80]}")  # type: ignore[attr-defined]
    return Audited(workspaces=_check_launch(tree, family), table=read_table(tree))


def _parse(source: str) -> ast.Module:
    try:
        size = len(source.encode("utf-8"))
    except UnicodeEncodeError:
        raise Rejected(Code.audit_syntax, "the file is not UTF-8") from None
    if size > MAX_SOURCE_BYTES:
        raise Rejected(Code.audit_syntax, f"the file has more than {MAX_SOURCE_BYTES} bytes")
    if found := _HIDDEN.search(source):
        line = source.count("\n", 0, found.start()) + 1
        raise Rejected(Code.audit_syntax, f"line {line}: character U+{ord(found.group()):04X}, which nobody sees")
    try:
        return parse(source)
    except SyntaxError as error:
        raise Rejected(Code.audit_syntax, f"line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Rejected(Code.audit_syntax, f"the file cannot be parsed: {error or 'nested too deeply'}") from None


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level:
            return ["." * node.level + (node.module or "")]
        # `from kernelmill.kernels import lib` names a module in its second half.
        return [f"{node.module}.{a.name}" for a in node.names]
    return []


def _check_launch(tree: ast.Module, family: Family) -> tuple[str, ...]:
    """The workspaces: parameters between the family's tensors and the rest, when there is a ``workspace``."""
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "launch"]
    if len(found) != 1:
        raise Rejected(Code.audit_signature, f"there must be one function launch at module level, found {len(found)}")
    (launch,) = found
    where = f"line {launch.lineno}"
    arguments = launch.args
    names = tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args))
    tensors = len(family.tensors)
    extra = len(names) - len(family.signature)
    declares = any(isinstance(n, ast.FunctionDef) and n.name == "workspace" for n in tree.body)
    workspaces = names[tensors : tensors + extra] if declares and 0 < extra <= MAX_WORKSPACES else ()
    without = names[:tensors] + names[tensors + len(workspaces) :]
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults or without != family.signature:
        raise Rejected(
            Code.audit_signature,
            f"{where}: launch takes ({', '.join(family.signature)}), found ({', '.join(names)[:400]})",
        )
    bare = [a.arg for a in arguments.args if a.annotation is None]
    if bare:
        raise Rejected(Code.audit_signature, f"{where}: parameters without annotation: {', '.join(bare)}")
    if not any(_dotted(d) in ("cute.jit", "cutlass.cute.jit") for d in launch.decorator_list):
        raise Rejected(Code.audit_signature, f"{where}: launch must be decorated with @cute.jit")
    return workspaces


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` of at most three names, else nothing: an attacker's expression may be too deep to unparse."""
    names: list[str] = []
    while isinstance(node, ast.Attribute) and len(names) < 2:
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""
