"""Which source files a module of ours rests on: for content hashes, and for packing code that runs elsewhere."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PLUMBING = frozenset(
    {
        "kernelmill.specs",
        "kernelmill.specs.ops",
        "kernelmill.specs.data",
        "kernelmill.specs.mutation",
        "kernelmill.specs.schema",
        "kernelmill.specs.sources",
    }
)
"""Modules that every family imports and that hold none of its mathematics: what they hold of a spec is data in it."""


class NoSource(Exception):
    """A module has no source file. One line."""


def source_hash(module: str) -> str:
    """sha256 over the source texts of a family's module and of all that it computes with, so that a spec's id changes
    when its mathematics does, wherever that is written. Raises NoSource."""
    digest = hashlib.sha256()
    for name, path in sorted(closure([module]).items()):
        if name not in PLUMBING:
            digest.update(f"{name}\0{path.read_text()}\0".encode())
    return digest.hexdigest()


def closure(names: Iterable[str]) -> dict[str, Path]:
    """The modules of ours that the named ones import, themselves and their packages included: name to file.

    Raises NoSource."""
    found: dict[str, Path] = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found or name == "kernelmill":
            continue
        found[name] = source(name)
        todo.append(name.rpartition(".")[0])
        todo += _imports(found[name])
    return found


@cache
def source(name: str) -> Path:
    """The file of a module. Raises NoSource."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise NoSource(f"{name} has no source file")
    return Path(spec.origin)


@cache
def _imports(path: Path) -> tuple[str, ...]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernelmill"):
            module = str(node.module)
            found += [module, *(n for a in node.names if _is_module(n := f"{module}.{a.name}"))]
    return tuple(n for n in found if n.startswith("kernelmill."))


@cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # Its parent is no package: a name in a module.
        return False
