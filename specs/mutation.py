"""Mutants: copies of a reference with one piece of its source replaced, so that each is one visible mistake."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping

from kernelmill.specs.schema import Tensors

Reference = Callable[[Tensors, Mapping[str, int]], Tensors]


def mutants(reference: Reference, edits: Mapping[str, tuple[str, str]]) -> dict[str, Reference]:
    """Name to mutant, from name to (old text, new text) of the reference's source.

    Raises ValueError when an old text does not occur exactly once, so that no edit of the reference silently disarms a
    mutant.
    """
    source = textwrap.dedent(inspect.getsource(reference))
    return {name: _mutant(reference, source, name, old, new) for name, (old, new) in edits.items()}


def _mutant(reference: Reference, source: str, name: str, old: str, new: str) -> Reference:
    found = source.count(old)
    if found != 1:
        raise ValueError(f"mutant {name}: {old!r} occurs {found} times in {reference.__qualname__}, it must once")
    scope = dict(inspect.getmodule(reference).__dict__)
    exec(compile(source.replace(old, new), f"<{reference.__module__}: mutant {name}>", "exec"), scope)
    made: Reference = scope[reference.__name__]
    return made
