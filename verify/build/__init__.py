"""The build: a candidate's source to artifacts, with nothing executable leaving the sandbox.

1. ``declare_job`` (sandboxed): what scratch the candidate wants, if any (``workspaces``).
2. ``compile_job`` (sandboxed): source to PTX and host code.
3. ``record_job`` (sandboxed): host code to recorded launches.
4. here, trusted: PTX and recordings checked, plans made, ptxas run (sandboxed) on the PTX.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from kernelmill.specs.schema import Family, Role, Spec, TensorSpec
from kernelmill.verify.artifact import Artifact
from kernelmill.verify.build import cache, plans
from kernelmill.verify.build.abi import runtime_sizes, runtime_strides
from kernelmill.verify.build.assemble import assemble
from kernelmill.verify.build.bench import MAX_CHUNK, Bench, Unit
from kernelmill.verify.build.diagnostics import plain, summary
from kernelmill.verify.build.entries import MAX_PTX_BYTES, entries
from kernelmill.verify.files import ChildFileError, read_child_file
from kernelmill.verify.forkserver import ForkServer, Limits, Reply
from kernelmill.verify.inspect import check_resources
from kernelmill.verify.layout import layout
from kernelmill.verify.verdict import Code, Rejected

COMPILE_LIMITS = Limits(seconds=120.0, memory_bytes=3 << 30, file_bytes=64 << 20, folder_bytes=512 << 20)
RECORD_LIMITS = Limits(seconds=60.0, memory_bytes=2 << 30)
MAX_OBJECT_BYTES = 64 << 20


def build(
    source: str, family: Family, units: Sequence[Unit], bench: Bench, on_done: Callable[[Unit, bool], None]
) -> list[Artifact]:
    """Build every unit, in their order. ``on_done(unit, from_cache)`` is called as each is finished, from any thread.

    Raises Rejected with the first unit's failure, MachineFailure when the machine failed."""
    lib = cache.lib_hash(bench.lib)
    keys = [cache.key(source, lib, _identity(u)) for u in units]
    done: dict[int, Artifact] = {}
    for n, unit in enumerate(units):
        artifact = cache.load(bench.cache, keys[n])
        if artifact is not None and _still_valid(artifact, unit):
            done[n] = artifact
            on_done(unit, True)
    missing = [n for n in range(len(units)) if n not in done]
    size = max(1, min(MAX_CHUNK, -(-len(missing) // bench.parallel)))
    chunks = [missing[i : i + size] for i in range(0, len(missing), size)]

    def finish(chunk: list[int]) -> list[Artifact]:
        made = []
        for n, compiled in zip(chunk, _compile(source, family, [units[n] for n in chunk], bench), strict=True):
            artifact = _artifact(compiled, units[n], bench)
            cache.store(bench.cache, keys[n], artifact)
            on_done(units[n], False)
            made.append(artifact)
        return made

    with ThreadPoolExecutor(bench.parallel) as pool:
        again = pool.submit(_compile, source, family, [units[missing[-1]]], bench) if missing else None
        futures = [pool.submit(finish, chunk) for chunk in chunks]
        try:
            for chunk, future in zip(chunks, futures, strict=True):
                done |= dict(zip(chunk, future.result(), strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        if again is not None and again.result()[0].ptx != done[missing[-1]].ptx:
            where = units[missing[-1]].describe()
            raise Rejected(Code.compile_nondeterministic, f"{where}: two builds of the same source gave different PTX")
    if missing:
        cache.trim(bench.cache)
    return [done[n] for n in range(len(units))]


@dataclass(frozen=True)
class _Compiled:
    ptx: str
    host: bytes
    entry: str


def _identity(unit: Unit) -> list[Any]:
    workloads = [w.model_dump(mode="json") for w in unit.workloads]
    return [unit.spec.id, unit.target, unit.binding, unit.schedule, workloads]


def _still_valid(artifact: Artifact, unit: Unit) -> bool:
    """What a cache entry must pass again."""
    try:
        found = entries(artifact.ptx, unit.target)
        for workload in unit.workloads:
            plans.check(artifact.plans[workload.name], unit.spec, unit.spec.point(workload.axes), found)
    except (Rejected, KeyError):
        return False
    return True


def _compile(source: str, family: Family, units: Sequence[Unit], bench: Bench) -> list[_Compiled]:
    limits = replace(COMPILE_LIMITS, seconds=bench.seconds)
    with bench.compiler.folder() as folder:
        (folder / "candidate.py").write_text(source)
        request = {"lib": str(bench.lib), "units": [_unit_request(family, u) for u in units]}
        (folder / "request.json").write_text(json.dumps(request))
        for name in ("tmp", *(f"dump{n}" for n in range(len(units)))):
            (folder / name).mkdir()
        reply = bench.compiler.run("compile", folder, limits, read=[bench.lib])
        built = _built(reply, units, bench.seconds)
        made = []
        for n, unit in enumerate(units):
            try:
                ptx = read_child_file(folder / f"{n}.ptx", MAX_PTX_BYTES).decode("ascii")
                host = read_child_file(folder / f"host{n}.o", MAX_OBJECT_BYTES)
            except (ChildFileError, UnicodeDecodeError) as error:
                raise Rejected(Code.compile_exit, f"{unit.describe()}: no usable PTX or object: {error}") from None
            made.append(_Compiled(ptx, host, built[n]))
    return made


def _built(reply: Reply, units: Sequence[Unit], seconds: float) -> list[str]:
    """Entry symbols of the units, or the verdict on why there are none."""
    where = units[0].describe()
    if reply.killed:
        code = Code.compile_timeout if "deadline" in reply.killed else Code.compile_output
        raise Rejected(code, f"{where}: the process was stopped: {reply.killed}", reply.output)
    try:
        answer = json.loads(reply.result or b"null")
        built = [str(b["entry"]) for b in answer["built"]]
        error = answer.get("error")
        kind, message = (str(error["kind"]), str(error["message"])) if error else ("", "")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        if reply.out_of_memory:
            raise Rejected(Code.compile_memory, f"{where}: out of memory", reply.output) from None
        raise Rejected(
            Code.compile_exit, f"{where}: the process ended without a result: {reply.describe()}", reply.output
        ) from None
    if kind or len(built) != len(units):
        failed = units[min(len(built), len(units) - 1)].describe()
        codes = {"exit": Code.compile_exit, "sandbox": Code.compile_sandbox, "memory": Code.compile_memory}
        code = codes.get(kind, Code.compile_memory if "MemoryError" in message else Code.compile_error)
        raise Rejected(code, f"{failed}: {summary(message)}", plain(message))
    if reply.status != 0:
        raise Rejected(Code.compile_exit, f"{where}: {reply.describe()}", reply.output)
    return built


def _unit_request(family: Family, unit: Unit) -> dict[str, Any]:
    axes = {**unit.spec.flags, **unit.workloads[0].axes}
    params = [bool(axes[p.name]) if p.kind == "bool" else axes[p.name] for p in family.params]
    # The variant's tensors, in the family's order: one of the same name may have another dtype than the family's.
    present = {t.name: t for t in unit.spec.tensors}
    workspaces = [t.name for t in unit.spec.tensors if t.role is Role.workspace]
    parameters = [*(t.name for t in family.tensors), *workspaces]
    tensors = [_tensor_request(present[n], unit.spec, axes) if n in present else None for n in parameters]
    return {"target": unit.target, "tensors": tensors, "params": params, "schedule": unit.schedule}


def _tensor_request(tensor: TensorSpec, spec: Spec, axes: dict[str, int]) -> dict[str, Any]:
    at = layout(tensor, axes)
    sizes, strides = runtime_sizes(tensor, spec), runtime_strides(tensor, spec, spec.binding(axes))
    return {
        "dtype": tensor.dtype.value,
        "shape": [tensor.shape[dim] if dim in sizes else n for dim, n in enumerate(at.shape)],
        "strides": [None if dim in strides else s for dim, s in enumerate(at.strides)],
        "divisibility": max(1, tensor.alignment // tensor.dtype.bytes),
        "alignment": tensor.alignment,
    }


def _artifact(compiled: _Compiled, unit: Unit, bench: Bench) -> Artifact:
    """Record, check and assemble one compiled unit."""
    spec = unit.spec
    try:
        found = entries(compiled.ptx, unit.target)
    except Rejected as error:
        raise Rejected(error.code, f"{unit.describe()}: {error.reason}", error.detail) from None
    points = [spec.point(w.axes) for w in unit.workloads]
    with bench.native.folder() as folder:
        (folder / "host.o").write_bytes(compiled.host)
        request = {
            "entry": compiled.entry,
            "param_bytes": {name: list(e.param_bytes) for name, e in found.items()},
            "calls": [plans.call(spec, axes, which) for axes in points for which in (0, 1)],
        }
        (folder / "request.json").write_text(json.dumps(request))
        reply = bench.native.run("record", folder, RECORD_LIMITS)
    if not reply.ok or reply.result is None:
        raise Rejected(Code.inspect_plan, f"{unit.describe()}: the host code failed: {reply.describe()}", reply.output)
    recordings = plans.parse_recordings(reply.result, 2 * len(points))
    made = {}
    for n, (workload, axes) in enumerate(zip(unit.workloads, points, strict=True)):
        try:
            made[workload.name] = plans.merge(recordings[2 * n], recordings[2 * n + 1], spec, axes, found)
        except Rejected as error:
            raise Rejected(error.code, f"{unit.describe()} {workload.name}: {error.reason}", error.detail) from None
    cubin, resources = assemble(bench.native, compiled.ptx, unit.target)
    check_resources(made.values(), resources)
    return Artifact(
        target=unit.target,
        spec=spec.name,
        binding=unit.binding,
        schedule=unit.schedule,
        ptx=compiled.ptx,
        plans=made,
        resources=resources,
        cubin=cubin,
    )


def servers(*, weak: bool = False) -> tuple[ForkServer, ForkServer]:
    """The compiling and the native server."""
    return ForkServer("compile", weak=weak), ForkServer("native", weak=weak)
