"""The data model of a spec: one operation in one variant, as frozen data plus the functions that define it.

A *family* is one file in ``specs/ops/``; each of its *variants* has its own signature and is a :class:`Spec`.
Vocabulary: an :class:`Axis` is *static* when it is compiled in and *dynamic* when it is a run-time size; a
:class:`Workload` is one point of all axes with a weight; the *reference* is float64 mathematics on the stored inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field, model_validator

from kernelmill.specs.data import Frozen, canonical_json

Tensors = dict[str, torch.Tensor]
"""Tensor name to tensor; absent optional tensors have no key."""


class DType(StrEnum):
    """Storage types. Sub-byte and packed formats are ``u8`` with the packing told in the tensor's ``doc``."""

    bf16 = "bf16"
    f16 = "f16"
    f32 = "f32"
    i32 = "i32"
    i64 = "i64"
    u8 = "u8"

    @property
    def torch(self) -> torch.dtype:
        return _TORCH[self]

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return _TORCH[self].itemsize


_TORCH: dict[DType, torch.dtype] = {
    DType.bf16: torch.bfloat16,
    DType.f16: torch.float16,
    DType.f32: torch.float32,
    DType.i32: torch.int32,
    DType.i64: torch.int64,
    DType.u8: torch.uint8,
}


class Role(StrEnum):
    """What a tensor is to the operation, in the order of the candidate's parameters.

    ``state`` is updated in place and checked like an output; every byte that is neither state nor output must be
    unchanged after the call. ``weight`` is static: the same values on every call.
    """

    input = "input"
    weight = "weight"
    state = "state"
    output = "output"
    workspace = "workspace"


class Stage(StrEnum):
    """Part of a decode step, in the order of the step."""

    embedding = "embedding"
    residual = "residual"
    kda = "kda"
    mla = "mla"
    projection = "projection"
    mlp = "mlp"
    moe = "moe"
    head = "head"
    sampling = "sampling"
    draft = "draft"
    collective = "collective"


class Axis(Frozen):
    """A size. ``values`` lists the legal values of a static axis; a dynamic axis has a closed range instead."""

    name: str
    kind: Literal["static", "dynamic"]
    doc: str
    values: tuple[int, ...] = ()
    minimum: int = 1
    maximum: int = 1

    def allows(self, value: int) -> bool:
        if self.kind == "static":
            return value in self.values
        return self.minimum <= value <= self.maximum


class OutputRule(Frozen):
    """How one output or state is compared with the reference; the arithmetic is in ``specs/tolerance.py``.

    ``exact``: bit for bit.
    ``derived``: the error against the float64 reference, in ulps of the stored dtype, as a root mean square over each
    row and over the tensor, is at most ``factor`` times the baseline's on the same inputs plus ``floor``; and each
    element is off by at most ``element_floor`` ulps beyond float32 noise. The defaults suit an output whose error is
    its rounding to storage (0.29 ulp): they let approximate special functions through (0.35, at 2^-10 relative), but no
    second rounding to 16 bits (0.42). An output behind an inner rounding needs a larger ``element_floor``, as that
    rounding may fall the other way. ``noise``: float32 error of an element before it is stored, as a share of its row's
    largest value: half an ulp (2^-24) times 64, the square root of 4096 terms; only a float32 output shows it.
    """

    kind: Literal["exact", "derived"]
    factor: float = 1.2
    floor: float = 0.05
    element_floor: float = 1.0
    noise: float = 2.0**-18


class TensorSpec(Frozen):
    """One parameter of the operation.

    ``shape`` has axis names, multiples of them (``2*N``) and literal sizes, outermost first; storage is row-major.
    ``strided`` names dimensions (by index) whose stride may be larger than compact; their strides are 64-bit run-time
    values, multiples of ``alignment``, which is in bytes and holds for the base address and for every non-unit stride.
    ``sharded`` is the dimension split over P ranks, or None when every rank holds all of it. Of a ``sparse`` tensor a
    call touches a part that depends on values (slots, pages, experts, rows of a table); the cost counts that part.
    """

    name: str
    role: Role
    dtype: DType
    shape: tuple[str | int, ...]
    doc: str
    rule: OutputRule | None = None
    strided: tuple[int, ...] = ()
    alignment: int = 16
    sharded: int | None = None
    sparse: bool = False

    @model_validator(mode="after")
    def _check(self) -> TensorSpec:
        written = self.role in (Role.state, Role.output)
        if written != (self.rule is not None):
            raise ValueError(f"{self.name}: outputs and states need a rule, nothing else has one")
        return self

    def size(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape at a point of the axes."""
        return tuple(d if isinstance(d, int) else _dimension(d, axes) for d in self.shape)


def _dimension(text: str, axes: Mapping[str, int]) -> int:
    factor, star, name = text.rpartition("*")
    return axes[name] * int(factor) if star else axes[name]


class Param(Frozen):
    """A compile-time parameter of ``launch`` (``cutlass.Constexpr``), computed from variant and static axes."""

    name: str
    kind: Literal["int", "bool"]
    doc: str


class Workload(Frozen):
    """One point of a spec's axes. ``weight`` is how often it occurs in one decode step of the model (0: only a test).

    ``values`` names the generator's distribution: ``realistic`` or one of the family's adversarial ones.
    """

    name: str
    axes: dict[str, int]
    weight: float = 1.0
    values: str = "realistic"


class Cost(Frozen):
    """Work of one call that no implementation can avoid. ``cold``: bytes that must come from or go to HBM when
    nothing is cached (each input, weight and state byte read once, each written byte once)."""

    cold_bytes: int = Field(ge=0)
    flops: int = Field(ge=0)
    link_bytes: int = Field(default=0, ge=0)


@dataclass(frozen=True)
class Functions:
    """The executable half of a family. ``t`` holds the tensors of the spec's variant, ``p`` its parameters and axes.

    ``reference(t, p)`` returns every output and state: float64 for ``derived`` rules (not rounded to the stored
    dtype), the exact stored values for ``exact`` rules. It never changes its arguments.
    ``baseline(t, p)`` is the plain same-dtype implementation the tolerance is derived from, in stored dtypes.
    ``generate(spec, axes, values, generator)`` makes inputs, weights and states (not outputs).
    ``cost(spec, axes)`` counts unavoidable work.
    ``mutants``: name -> wrong reference that lint must see killed by the tolerance.
    """

    reference: Callable[[Tensors, Mapping[str, int]], Tensors]
    baseline: Callable[[Tensors, Mapping[str, int]], Tensors]
    generate: Callable[[Spec, Mapping[str, int], str, torch.Generator], Tensors]
    cost: Callable[[Spec, Mapping[str, int]], Cost]
    mutants: Mapping[str, Callable[[Tensors, Mapping[str, int]], Tensors]]


class Spec(Frozen):
    """One operation in one variant. ``tensors`` are those of the family's that the variant has, in parameter order.

    ``flags`` are the values of the compile-time parameters that the variant fixes. All workloads with the same
    :meth:`binding` (and schedule) share one artifact.
    """

    family: str
    variant: str
    title: str
    formula: str
    stage: Stage
    tensors: tuple[TensorSpec, ...]
    axes: tuple[Axis, ...]
    params: tuple[Param, ...]
    flags: dict[str, int]
    workloads: tuple[Workload, ...]
    neighbours: tuple[str, ...] = ()
    source_hash: str

    @property
    def name(self) -> str:
        """``family.variant``, the name used on the command line."""
        return f"{self.family}.{self.variant}"

    @cached_property
    def id(self) -> str:
        """Content hash (sha256, hex): data above plus the family's source text."""
        text = canonical_json(self.model_dump(mode="json"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def static_axes(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind == "static")

    @property
    def dynamic_axes(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind == "dynamic")

    def tensor(self, name: str) -> TensorSpec:
        return next(t for t in self.tensors if t.name == name)

    def with_tensors(self, more: tuple[TensorSpec, ...]) -> Spec:
        """This spec with a candidate's workspaces behind its own tensors; another spec, with another id."""
        # Not model_copy, which would carry the cached id along.
        fields = {name: getattr(self, name) for name in Spec.model_fields}
        return Spec(**fields | {"tensors": (*self.tensors, *more)})

    def binding(self, axes: Mapping[str, int]) -> dict[str, int]:
        """The static part of a point of the axes."""
        return {a.name: axes[a.name] for a in self.static_axes}

    def point(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Axes plus the variant's flags: what reference, baseline and ``launch`` get. Raises ValueError when an
        axis is missing, unknown or out of its range."""
        known = {a.name for a in self.axes}
        if set(axes) != known:
            raise ValueError(f"{self.name}: axes are {sorted(known)}, got {sorted(axes)}")
        for a in self.axes:
            if not a.allows(axes[a.name]):
                legal = a.values if a.kind == "static" else f"{a.minimum}..{a.maximum}"
                raise ValueError(f"{self.name}: axis {a.name} = {axes[a.name]} is not in {legal}")
        return {**self.flags, **axes}


@dataclass(frozen=True)
class Family:
    """All variants of one operation: what a candidate file is written for.

    ``tensors`` is the union over variants in the order of ``launch``'s parameters; a tensor absent from a variant is
    passed as None at compile time. ``params`` follow the tensors as ``cutlass.Constexpr``, then ``schedule`` and
    ``stream``.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    params: tuple[Param, ...]
    specs: tuple[Spec, ...]
    functions: Functions

    def spec(self, variant: str) -> Spec:
        return next(s for s in self.specs if s.variant == variant)

    def inputs(self, spec: Spec, workload: Workload, seed: int) -> Tensors:
        """The generated inputs, weights and states of a workload; seeded by spec, workload and ``seed`` together."""
        digest = hashlib.sha256(f"{spec.name}/{workload.name}/{seed}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return self.functions.generate(spec, spec.point(workload.axes), workload.values, generator)

    @property
    def signature(self) -> tuple[str, ...]:
        """Names of ``launch``'s parameters, in order."""
        return (*(t.name for t in self.tensors), *(p.name for p in self.params), "schedule", "stream")
