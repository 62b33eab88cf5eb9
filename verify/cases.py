"""Cases: one workload with one seed, as bytes in memory and as the values that the reference expects.

Runs on the trusted side; no candidate code is ever in this process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kernelmill.specs.registry import family
from kernelmill.specs.schema import Role, Spec, Tensors, TensorSpec, Workload
from kernelmill.verify.layout import Layout, layout

POISON = 0xFF
"""Fill of outputs and of the gaps between rows: NaN in every float format, -1 as an integer."""


@dataclass(frozen=True)
class Placed:
    """One tensor in memory. ``data`` and ``initialised`` have one entry per byte of ``layout.bytes``."""

    tensor: TensorSpec
    layout: Layout
    data: np.ndarray
    initialised: np.ndarray

    @property
    def writable(self) -> bool:
        return self.tensor.role in (Role.state, Role.output, Role.workspace)


@dataclass(frozen=True)
class Case:
    """``axes``: the workload's point with the variant's flags. For the values see ``specs.schema.Functions``."""

    spec: Spec
    workload: Workload
    seed: int
    axes: dict[str, int]
    placed: tuple[Placed, ...]
    reference: Tensors
    baseline: Tensors

    @property
    def bytes(self) -> int:
        values = (*self.reference.values(), *self.baseline.values())
        return sum(2 * p.data.nbytes for p in self.placed) + sum(v.nbytes for v in values)


def make_case(spec: Spec, workload: Workload, seed: int, edit: Callable[[Tensors], Tensors] | None = None) -> Case:
    """Generate inputs, changed by ``edit`` if given, and expected values."""
    made_for = family(spec.family)
    axes = spec.point(workload.axes)
    inputs = made_for.inputs(spec, workload, seed)
    if edit is not None:
        inputs = edit(inputs)
    placed = tuple(_place(t, layout(t, axes), inputs.get(t.name)) for t in spec.tensors)
    reference = made_for.functions.reference(inputs, axes)
    baseline = made_for.functions.baseline(inputs, axes)
    return Case(spec, workload, seed, axes, placed, reference, baseline)


def read_back(placed: Placed, data: np.ndarray) -> torch.Tensor:
    """The tensor's values in ``data`` (its storage after a run), compact."""
    flat = torch.from_numpy(data).view(placed.tensor.dtype.torch)
    return flat.as_strided(placed.layout.shape, placed.layout.strides).clone()


def element_mask(at: Layout) -> np.ndarray:
    """One bool per byte of storage: True where an element lies, False in the gaps between rows."""
    mask = torch.zeros(at.bytes // at.itemsize, dtype=torch.bool)
    mask.as_strided(at.shape, at.strides).fill_(True)
    return np.repeat(mask.numpy(), at.itemsize)


def _place(tensor: TensorSpec, at: Layout, value: torch.Tensor | None) -> Placed:
    data = np.full(at.bytes, POISON, dtype=np.uint8)
    if value is None:
        return Placed(tensor, at, data, np.zeros(at.bytes, dtype=bool))
    if value.dtype != tensor.dtype.torch or tuple(value.shape) != at.shape:
        raise ValueError(f"{tensor.name}: generated {value.dtype} {tuple(value.shape)}, the spec says {at.shape}")
    torch.from_numpy(data).view(tensor.dtype.torch).as_strided(at.shape, at.strides).copy_(value)
    return Placed(tensor, at, data, element_mask(at))


class Cases:
    """The most recently used cases, up to ``limit`` bytes; safe to use from several threads."""

    def __init__(self, limit: int = 2 << 30) -> None:
        self._limit = limit
        self._bytes = 0
        self._lock = threading.Lock()
        self._cases: OrderedDict[tuple[str, str, int], Case] = OrderedDict()

    def get(self, spec: Spec, workload: Workload, seed: int) -> Case:
        key = (spec.id, workload.name, seed)
        with self._lock:
            if key in self._cases:
                self._cases.move_to_end(key)
                return self._cases[key]
        case = make_case(spec, workload, seed)
        with self._lock:
            if key not in self._cases:
                self._cases[key] = case
                self._bytes += case.bytes
            while self._bytes > self._limit and len(self._cases) > 1:
                _, old = self._cases.popitem(last=False)
                self._bytes -= old.bytes
        return case
