"""Which sizes and strides of a tensor are run-time arguments of the host code, in the order of the C ABI."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kernelmill.specs.schema import Spec, TensorSpec

MAX_STATIC_OFFSET = 2**31 - 1
"""Offsets from static strides are computed in 32 bits (nvidia-cutlass-dsl 4.8.1, tried)."""


def runtime_sizes(tensor: TensorSpec, spec: Spec) -> tuple[int, ...]:
    """Dimensions whose size is a dynamic axis or a multiple of one."""
    dynamic = {a.name for a in spec.dynamic_axes}
    return tuple(n for n, d in enumerate(tensor.shape) if isinstance(d, str) and d.rpartition("*")[2] in dynamic)


def runtime_strides(tensor: TensorSpec, spec: Spec, binding: Mapping[str, int]) -> tuple[int, ...]:
    """Dimensions whose stride is a run-time value: those that may be padded, those outside a run-time size or stride,
    and those by which an offset may exceed :data:`MAX_STATIC_OFFSET` elements at the axes' largest values."""
    sizes = runtime_sizes(tensor, spec)
    largest = tensor.size({**binding, **{a.name: a.maximum for a in spec.dynamic_axes}})
    found: list[int] = []
    for dim in reversed(range(len(tensor.shape))):
        inside = range(dim + 1, len(tensor.shape))
        follows = any(n in sizes or n in found for n in inside)
        far = math.prod(largest[dim:]) > MAX_STATIC_OFFSET and len(inside) > 0
        if dim in tensor.strided or follows or far:
            found.append(dim)
    return tuple(reversed(found))
