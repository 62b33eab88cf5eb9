"""How a workload's tensors lie in memory, the same for the recording and the emulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kernelmill.specs.schema import TensorSpec

ROW_PAD_BYTES = 128
"""Gap that a stride which may be non-compact gets, so that a kernel that assumes compact rows is found out. One cache
line, so that padding does not change how many sectors a row takes."""


@dataclass(frozen=True)
class Layout:
    """``shape`` and ``strides`` in elements, ``bytes`` of storage from the first to the last element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize


def layout(tensor: TensorSpec, axes: Mapping[str, int]) -> Layout:
    """Row-major; a dimension in ``tensor.strided`` is padded by :data:`ROW_PAD_BYTES`."""
    shape = tensor.size(axes)
    itemsize = tensor.dtype.bytes
    pad = math.lcm(ROW_PAD_BYTES, tensor.alignment) // itemsize
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape))):
        if dim + 1 < len(shape):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
        if dim in tensor.strided:
            strides[dim] += pad
    return Layout(shape, tuple(strides), itemsize)
