"""Finding families, specs and workloads by name."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache

import kernelmill.specs.ops
from kernelmill.specs.schema import Family, Spec, Workload


class UnknownName(Exception):
    """A name that does not exist. The message is one line: what was asked for and the nearest valid ones."""

    def __init__(self, kind: str, name: str, valid: Iterable[str]) -> None:
        valid = list(valid)
        near = difflib.get_close_matches(name, valid, n=3, cutoff=0.5) or valid[:6]
        more = "" if len(near) == len(valid) else f" (of {len(valid)})"
        super().__init__(f"no {kind} named {name[:80]!r}; nearest: {', '.join(near)}{more}")


@cache
def families() -> dict[str, Family]:
    """Every family in ``specs/ops``, by name, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(kernelmill.specs.ops.__path__))
    return {n: importlib.import_module(f"kernelmill.specs.ops.{n}").FAMILY for n in names}


def family(name: str) -> Family:
    """Raises UnknownName."""
    try:
        return families()[name]
    except KeyError:
        raise UnknownName("family", name, families()) from None


def find(name: str) -> tuple[Spec, ...]:
    """The specs that ``name`` stands for: all of a family, or one ``family.variant``. Raises UnknownName."""
    if name in families():
        return families()[name].specs
    specs = {s.name: s for f in families().values() for s in f.specs}
    if name not in specs:
        raise UnknownName("spec", name, [*families(), *specs])
    return (specs[name],)


def workloads(specs: Iterable[Spec], names: Iterable[str] | None) -> dict[str, tuple[Workload, ...]]:
    """Spec name to its workloads, those in ``names`` only when given. Raises UnknownName for a name that none has."""
    specs = list(specs)
    if names is None:
        return {s.name: s.workloads for s in specs}
    wanted = set(names)
    valid = {w.name for s in specs for w in s.workloads}
    for name in sorted(wanted - valid):
        raise UnknownName("workload", name, sorted(valid))
    return {s.name: tuple(w for w in s.workloads if w.name in wanted) for s in specs}
