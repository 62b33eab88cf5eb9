"""What the parent checks on raw memory that came back from a GPU. Pure functions over bytes; each raises Rejected."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernelmill.specs.lint import stored
from kernelmill.specs.schema import Role, Tensors
from kernelmill.specs.tolerance import Comparison, compare
from kernelmill.verify.cases import POISON, Case, Placed, element_mask, read_back
from kernelmill.verify.verdict import Code, Rejected

GUARD = 256 << 10
"""Bytes of guard band on either side of a tensor: more than a row of anything here, and it keeps every alignment."""


@dataclass(frozen=True)
class Region:
    """A tensor between its guard bands, ``size`` bytes at ``at`` in an image."""

    placed: Placed
    at: int
    size: int

    def request(self) -> dict[str, Any]:
        """What the child is told of it."""
        return {
            "name": self.placed.tensor.name,
            "at": self.at,
            "size": self.size,
            "base": GUARD,
            "writable": self.placed.writable,
            "scratch": self.placed.tensor.role is Role.workspace,
        }


def image(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, tuple[Region, ...]]:
    """A case's memory: inputs and states, poison in outputs, gaps and workspaces, secret bytes in the guard bands."""
    parts, regions, at = [], [], 0
    for p in case.placed:
        front, back = (rng.integers(0, 256, GUARD, dtype=np.uint8) for _ in range(2))
        parts += [front, p.data, back]
        size = 2 * GUARD + p.layout.bytes
        regions.append(Region(p, at, size))
        at += size
    return np.concatenate(parts), tuple(regions)


def read_outputs(case: Case, regions: Sequence[Region], before: np.ndarray, after: np.ndarray, where: str) -> Tensors:
    """The outputs and states of one run. Raises Rejected for a guard band that was hit, memory that changed and must
    not have, and elements that still hold the poison."""
    values: Tensors = {}
    expected = stored(case.spec, case.reference)
    for r in regions:
        name = r.placed.tensor.name
        old, new = before[r.at : r.at + r.size], after[r.at : r.at + r.size]
        _check_guards(r, old, new, where)
        data = new[GUARD : GUARD + r.placed.layout.bytes]
        _check_untouched(r.placed, data, where)
        if r.placed.tensor.rule is None:
            continue
        values[name] = read_back(r.placed, data.copy())
        if r.placed.tensor.role is Role.output:
            _check_written(name, values[name], expected[name], where)
    return values


def _check_guards(region: Region, old: np.ndarray, new: np.ndarray, where: str) -> None:
    end = GUARD + region.placed.layout.bytes
    for side, part in (("before", slice(0, GUARD)), ("behind", slice(end, None))):
        changed = np.flatnonzero(old[part] != new[part])
        if changed.size:
            distance = GUARD - int(changed[-1]) if side == "before" else int(changed[0]) + 1
            raise Rejected(
                Code.execute_out_of_bounds,
                f"{where}: wrote {changed.size} bytes {side} {region.placed.tensor.name}, "
                f"the nearest {distance} bytes from it",
            )


def _check_untouched(placed: Placed, data: np.ndarray, where: str) -> None:
    """All of an input or weight, and the gaps between the rows of anything that is written."""
    changed = np.flatnonzero((data != placed.data) & ~(element_mask(placed.layout) if placed.writable else False))
    if changed.size:
        what = "a gap between rows of " if placed.writable else ""
        raise Rejected(
            Code.execute_touched,
            f"{where}: {what}{placed.tensor.name} changed at byte {changed[0]} and {changed.size - 1} more",
        )


def _check_written(name: str, got: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    missing = _poisoned(got) & ~_poisoned(expected)
    if missing.any():
        index = [int(i) for i in missing.nonzero()[0]]
        raise Rejected(
            Code.execute_mismatch,
            f"{where}: {name}{index} still holds the poison, and {int(missing.sum()) - 1} more: never written",
        )


def _poisoned(values: torch.Tensor) -> torch.Tensor:
    raw = values.contiguous().view(torch.uint8).view(*values.shape, values.dtype.itemsize)
    return (raw == POISON).all(-1)


def check_values(case: Case, values: Tensors, where: str) -> tuple[Comparison, ...]:
    """Raises Rejected(execute.mismatch) with the first comparison that fails."""
    comparisons = tuple(compare(case.spec, case.reference, case.baseline, values))
    for c in comparisons:
        if not c.passed:
            raise Rejected(Code.execute_mismatch, f"{where}: {c.describe()}")
    return comparisons


def check_follows(case: Case, base: Case, values: Tensors, old: Tensors, where: str) -> None:
    """Raises Rejected(execute.stale) when an output did not move although the reference did."""
    expected, before = stored(case.spec, case.reference), stored(base.spec, base.reference)
    for t in case.spec.tensors:
        if t.role is not Role.output or torch.equal(expected[t.name], before[t.name]):
            continue
        if torch.equal(values[t.name], old[t.name]):
            raise Rejected(Code.execute_stale, f"{where}: {t.name} kept the values of the call before")


def check_repeats(answer: Mapping[str, Any], regions: Sequence[Region], launches: int, where: str) -> None:
    """What the child saw in later runs and in the graph. ``launches``: nodes that the captured graph must have."""
    by_name = {r.placed.tensor.name: r.placed for r in regions}
    for d in (*answer["differs"], *answer["read_only"]):
        placed, at = by_name[d["tensor"]], int(d["byte"])
        place = f"{where}, {d['when']}: {d['tensor']}, byte {at} and {d['count'] - 1} more"
        if not 0 <= at < placed.layout.bytes:
            raise Rejected(Code.execute_out_of_bounds, f"{place}: a guard band was hit")
        if not placed.writable or not element_mask(placed.layout)[at]:
            raise Rejected(Code.execute_touched, f"{place}: changed")
        raise Rejected(Code.execute_nondeterministic, f"{place}: other bits than in the first run")
    if answer["nodes"] and answer["nodes"] != launches:
        raise Rejected(Code.execute_stream, f"{where}: the graph has {answer['nodes']} nodes for {launches} launches")


def digest(values: torch.Tensor) -> str:
    """sha256 of a tensor's bytes, compact and row-major."""
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
