"""Recordings to launch plans, on the trusted side: every word is checked, every address becomes (tensor, offset)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from kernelmill.specs.data import Frozen
from kernelmill.specs.schema import Spec
from kernelmill.verify.build.abi import runtime_sizes, runtime_strides
from kernelmill.verify.build.entries import Entry
from kernelmill.verify.inspect import MAX_SHARED_BYTES
from kernelmill.verify.layout import Layout, layout
from kernelmill.verify.plan import MAX_LAUNCHES, MAX_PARAM_BYTES, Launch, LaunchPlan, Param, Pointer, short_name
from kernelmill.verify.verdict import Code, Rejected

STREAM = 0x5000
"""The stream handle that recordings pass; every launch must go there."""

SPACING = 1 << 40
FIRST = (0x0100_0000_0000, 0x4000_0000_1000)
"""First tensor address of the two recordings; tensors lie ``SPACING`` apart, so the two sets never meet."""

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_CLUSTER = 16
"""CUDA C++ Programming Guide, technical specifications for compute capability 9.0 and 10.x."""

Word = Annotated[int, Field(ge=0, le=2**32 - 1)]


class RecordedLaunch(Frozen):
    kernel: str = Field(max_length=2048)
    grid: tuple[Word, Word, Word]
    block: tuple[Word, Word, Word]
    shared: int = Field(ge=0, le=2**63)
    stream: int = Field(ge=0, le=2**64)
    params: tuple[Annotated[str, Field(max_length=2 * MAX_PARAM_BYTES, pattern=r"^[0-9a-f]*$")], ...]
    cluster: tuple[Word, Word, Word] = (1, 1, 1)
    cooperative: bool = False
    pdl: bool = False


class Recording(Frozen):
    """One call of the host code. ``status``: what it returned (cudaError_t); ``problem``: why the stand-in refused."""

    status: int
    problem: str | None = Field(max_length=2000)
    launches: tuple[RecordedLaunch, ...] = Field(max_length=MAX_LAUNCHES)


_RECORDINGS = TypeAdapter(list[Recording])


def parse_recordings(data: bytes, expected: int) -> list[Recording]:
    """Raises Rejected(inspect.plan) when the text is not ``expected`` recordings."""
    try:
        recordings = _RECORDINGS.validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])[:100]
        raise Rejected(Code.inspect_plan, f"the recording is malformed: {where}: {first['msg'][:200]}") from None
    problem = next((r.problem for r in recordings if r.problem), None)
    if problem:
        raise Rejected(Code.inspect_plan, problem)
    if len(recordings) != expected:
        raise Rejected(Code.inspect_plan, f"{len(recordings)} recordings, {expected} expected")
    return recordings


def addresses(spec: Spec, which: int) -> dict[str, int]:
    """Made-up base addresses of a spec's tensors for recording 0 or 1."""
    return {t.name: FIRST[which] + n * SPACING for n, t in enumerate(spec.tensors)}


def call(spec: Spec, axes: Mapping[str, int], which: int) -> list[list[tuple[str, int]]]:
    """The C ABI arguments of one call: per tensor its address, run-time sizes and run-time strides; then the stream."""
    arguments = []
    for tensor in spec.tensors:
        at = layout(tensor, axes)
        words = [("pointer", addresses(spec, which)[tensor.name])]
        words += [("i32", at.shape[dim]) for dim in runtime_sizes(tensor, spec)]
        words += [("i64", at.strides[dim]) for dim in runtime_strides(tensor, spec, spec.binding(axes))]
        arguments.append(words)
    return [*arguments, [("pointer", STREAM)]]


def merge(
    first: Recording, second: Recording, spec: Spec, axes: Mapping[str, int], ptx: Mapping[str, Entry]
) -> LaunchPlan:
    """The launch plan that two recordings of one workload agree on. Raises Rejected(inspect.*)."""
    for recording in (first, second):
        if recording.problem or recording.status:
            raise Rejected(Code.inspect_plan, recording.problem or f"launch returned status {recording.status}")
    if not first.launches:
        raise Rejected(Code.inspect_plan, "launch launches nothing")
    if [_shape(a) for a in first.launches] != [_shape(b) for b in second.launches]:
        raise Rejected(Code.inspect_plan, "the launches depend on the tensors' addresses")
    layouts = {t.name: layout(t, axes) for t in spec.tensors}
    launches = []
    for a, b in zip(first.launches, second.launches, strict=True):
        _check(a, ptx)
        params = [_param(p, q, spec, layouts, a.kernel) for p, q in zip(a.params, b.params, strict=True)]
        launches.append(
            Launch(
                kernel=a.kernel,
                grid=a.grid,
                block=a.block,
                cluster=a.cluster,
                shared=a.shared,
                pdl=a.pdl,
                cooperative=a.cooperative,
                params=tuple(params),
            )
        )
    return LaunchPlan(launches=tuple(launches))


def check(plan: LaunchPlan, spec: Spec, axes: Mapping[str, int], ptx: Mapping[str, Entry]) -> None:
    """Check a plan that was stored: as strict as when it was recorded. Raises Rejected(inspect.*)."""
    layouts = {t.name: layout(t, axes) for t in spec.tensors}
    for launch in plan.launches:
        fields = launch.model_dump(exclude={"params"})
        _check(RecordedLaunch(**fields, stream=STREAM, params=tuple(p.bytes for p in launch.params)), ptx)
        for pointer in (q for p in launch.params for q in p.pointers):
            if pointer.tensor not in layouts or pointer.offset > layouts[pointer.tensor].bytes:
                where = short_name(launch.kernel)
                raise Rejected(Code.inspect_plan, f"kernel {where}: pointer outside {pointer.tensor}")


def _shape(launch: RecordedLaunch) -> tuple[object, ...]:
    return (*launch.model_dump(exclude={"params"}).values(), tuple(len(p) for p in launch.params))


def _check(launch: RecordedLaunch, ptx: Mapping[str, Entry]) -> None:
    where = f"kernel {short_name(launch.kernel)}"
    entry = ptx.get(launch.kernel)
    if entry is None:
        raise Rejected(Code.inspect_plan, f"{where} is not in the PTX")
    threads = math.prod(launch.block)
    problems = (
        (launch.stream != STREAM, "launches on another stream than the given one"),
        (any(not 1 <= n <= m for n, m in zip(launch.grid, MAX_GRID, strict=True)), f"grid {launch.grid}"),
        (any(not 1 <= n <= m for n, m in zip(launch.block, MAX_BLOCK, strict=True)), f"block {launch.block}"),
        (threads > MAX_THREADS, f"{threads} threads per CTA"),
        (entry.threads is not None and threads > entry.threads, f"{threads} threads, the entry allows {entry.threads}"),
        (entry.exactly and threads != entry.threads, f"{threads} threads, the entry needs {entry.threads}"),
        (math.prod(launch.cluster) > MAX_CLUSTER or 0 in launch.cluster, f"cluster {launch.cluster}"),
        (
            0 not in launch.cluster and any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)),
            f"grid {launch.grid} is no multiple of cluster {launch.cluster}",
        ),
        (tuple(len(p) // 2 for p in launch.params) != entry.param_bytes, "parameter sizes differ from the PTX"),
    )
    for bad, what in problems:
        if bad:
            raise Rejected(Code.inspect_plan, f"{where}: {what}")
    if launch.shared > MAX_SHARED_BYTES:
        raise Rejected(
            Code.inspect_resources,
            f"{where}: {launch.shared} bytes of dynamic shared memory, at most {MAX_SHARED_BYTES}",
        )


def _param(first: str, second: str, spec: Spec, layouts: Mapping[str, Layout], kernel: str) -> Param:
    """Words that differ between the recordings must be the same place in the same tensor; all others must be equal."""
    a, b = bytes.fromhex(first), bytes.fromhex(second)
    pointers = []
    data = bytearray(a)
    for at in range(0, len(a), 8):
        if a[at : at + 8] == b[at : at + 8]:
            continue
        if at + 8 > len(a):
            where = short_name(kernel)
            raise Rejected(Code.inspect_plan, f"kernel {where}: a parameter depends on an address but holds none")
        if a[at : at + 4] == b[at : at + 4]:
            # A 32-bit size and four bytes of padding, which hold whatever the host's stack held.
            data[at + 4 : at + 8] = bytes(4)
            continue
        places = [_place(struct.unpack_from("<Q", p, at)[0], which, spec, layouts) for which, p in enumerate((a, b))]
        if places[0] is None or places[0] != places[1]:
            value = struct.unpack_from("<Q", a, at)[0]
            where = short_name(kernel)
            raise Rejected(Code.inspect_plan, f"kernel {where}: parameter word {value:#x} is no tensor's address")
        pointers.append(Pointer(at=at, tensor=places[0][0], offset=places[0][1]))
        data[at : at + 8] = bytes(8)
    return Param(bytes=bytes(data).hex(), pointers=tuple(pointers))


def _place(value: int, which: int, spec: Spec, layouts: Mapping[str, Layout]) -> tuple[str, int] | None:
    for name, base in addresses(spec, which).items():
        if 0 <= value - base <= layouts[name].bytes:
            return name, value - base
    return None
