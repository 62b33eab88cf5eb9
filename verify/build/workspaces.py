"""Scratch tensors that a candidate declares: evaluated in the sandbox, checked here, added to the units' specs.

``workspace(axes)`` gets the static axes and the variant's flags, and returns name to
``{"shape": (...), "dtype": "f32", "init": "poison"}``, in the order of ``launch``'s parameters after the outputs.
A shape has sizes, dynamic axes by name, and multiples of those (``"4*T"``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from kernelmill.specs.data import Frozen
from kernelmill.specs.schema import DType, Role, TensorSpec
from kernelmill.verify.build.bench import Bench, Unit
from kernelmill.verify.forkserver import Limits
from kernelmill.verify.verdict import Code, Rejected

MAX_BYTES = 1 << 30
"""Of one workspace at one workload."""

LIMITS = Limits(seconds=30.0, memory_bytes=2 << 30, file_bytes=1 << 20, folder_bytes=4 << 20)

Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Named = Annotated[str, Field(max_length=80, pattern=r"^([1-9][0-9]{0,8}\*)?[A-Za-z_][A-Za-z0-9_]*$")]


class Declaration(Frozen):
    """``init`` ``poison``: arbitrary before every call."""

    shape: tuple[Size | Named, ...] = Field(min_length=1, max_length=6)
    dtype: DType
    init: Literal["poison"]


def declare(source: str, names: Sequence[str], units: Sequence[Unit], bench: Bench) -> list[Unit]:
    """The units with the candidate's workspaces among their specs' tensors. ``names``: the parameters of ``launch``
    that must be declared. Raises Rejected."""
    axes = [{**u.spec.flags, **u.binding} for u in units]
    with bench.compiler.folder() as folder:
        (folder / "candidate.py").write_text(source)
        (folder / "request.json").write_text(json.dumps({"lib": str(bench.lib), "axes": axes}))
        (folder / "tmp").mkdir()
        reply = bench.compiler.run("declare", folder, LIMITS, read=[bench.lib])
    try:
        answer = json.loads(reply.result or b"null")
        if error := answer.get("error"):
            raise Rejected(Code.audit_signature, f"workspace: {str(error['message']).splitlines()[0][:300]}")
        declared = list(answer["declared"])
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        raise Rejected(Code.audit_signature, f"workspace: no answer: {reply.describe()}", reply.output) from None
    if len(declared) != len(units):
        raise Rejected(Code.audit_signature, f"workspace: {len(declared)} answers for {len(units)} units")
    return [replace(u, spec=u.spec.with_tensors(_tensors(u, names, d))) for u, d in zip(units, declared, strict=True)]


def _tensors(unit: Unit, names: Sequence[str], declared: Any) -> tuple[TensorSpec, ...]:
    where = f"workspace of {unit.describe()}"
    if not isinstance(declared, dict) or tuple(declared) != tuple(names):
        found = list(declared)[:16] if isinstance(declared, dict) else type(declared).__name__
        raise Rejected(Code.audit_signature, f"{where}: launch has {list(names)}, declared are {found}")
    dynamic = {a.name for a in unit.spec.dynamic_axes}
    made = []
    for name, entry in declared.items():
        try:
            d = Declaration.model_validate(entry)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(p) for p in first["loc"])[:80]
            raise Rejected(Code.audit_signature, f"{where}: {name}.{at}: {first['msg'][:200]}") from None
        unknown = [s for s in d.shape if isinstance(s, str) and s.rpartition("*")[2] not in dynamic]
        if unknown:
            raise Rejected(
                Code.audit_signature, f"{where}: {name}: {unknown[0]} is no dynamic axis of {sorted(dynamic)}"
            )
        tensor = TensorSpec(name=name, role=Role.workspace, dtype=d.dtype, shape=d.shape, doc="scratch", alignment=128)
        for workload in unit.workloads:
            size = math.prod(tensor.size(workload.axes)) * d.dtype.bytes
            if size > MAX_BYTES:
                raise Rejected(
                    Code.audit_signature, f"{where}: {name}: {size} bytes at {workload.name}, at most {MAX_BYTES}"
                )
        made.append(tensor)
    return tuple(made)
