"""The emulate stage, trusted side: send PTX, plans and inputs to a sandboxed child, compare what comes back.

Every workload runs three times: two adversarial warp orders with nominal arithmetic, and one with every approximate
instruction moved within its documented error; asynchronous copies arrive early, late and at random. All three must be
within tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kernelmill.specs.schema import Role, Spec, Tensors, Workload
from kernelmill.specs.tolerance import Comparison, compare
from kernelmill.verify.artifact import Artifact
from kernelmill.verify.cases import Case, Cases, Placed, element_mask, read_back
from kernelmill.verify.emulate_job import BufferRequest, EmulateReply, EmulateRequest, RunRequest
from kernelmill.verify.emulator.interface import Approx, Copies, Finding, KernelCounters
from kernelmill.verify.files import ChildFileError, read_child_file
from kernelmill.verify.forkserver import ForkServer, Limits
from kernelmill.verify.layout import layout
from kernelmill.verify.plan import short_name
from kernelmill.verify.verdict import Code, MachineFailure, Rejected

Mode = tuple[int, Approx, Copies]
MODES: tuple[Mode, ...] = (
    (0, "nominal", "eager"),
    (1, "nominal", "late"),
    (1, "perturbed", "random"),
)
"""(warp order, approximate instructions, arrival of asynchronous copies) of each run."""

RUN_SECONDS = 60.0
"""Deadline of one emulated run; the longest honest one here takes under a second."""

BATCH_BYTES = 128 << 20
"""Tensors of the workloads that share one emulating process."""

CHILD_LIMITS = Limits(seconds=600.0, memory_bytes=6 << 30, file_bytes=2 << 30, output_bytes=1 << 16)


@dataclass(frozen=True)
class Emulated:
    """One workload's result: the worst comparison of each checked tensor over the runs, counters of the first run,
    whether both warp orders gave the same bits, and the outputs of the first run where they were to be kept."""

    workload: Workload
    seed: int
    comparisons: tuple[Comparison, ...]
    counters: tuple[KernelCounters, ...]
    order_independent: bool
    values: Tensors | None = None


class FoundByEmulator(Rejected):
    """A rejection that rests on a finding of the emulator."""

    def __init__(self, code: Code, reason: str, finding: Finding) -> None:
        super().__init__(code, reason)
        self.finding = finding


def emulate(
    server: ForkServer,
    artifact: Artifact,
    spec: Spec,
    workloads: Sequence[Workload],
    seeds: Sequence[int],
    cases: Cases,
    *,
    modes: Sequence[Mode] = MODES,
    keep: bool = False,
) -> list[Emulated]:
    """Emulate one artifact on its workloads; ``keep`` the outputs' values.

    Raises Rejected with the first failure, MachineFailure when the emulator does not know an instruction or its child
    failed."""
    done: list[Emulated] = []
    for batch in _batches(spec, [(w, seed) for seed in seeds for w in workloads]):
        done += _emulate_batch(server, artifact, spec, [cases.get(spec, w, seed) for w, seed in batch], modes, keep)
    return done


def _batches(spec: Spec, todo: Sequence[tuple[Workload, int]]) -> Iterator[list[tuple[Workload, int]]]:
    """The same in portions whose tensors have at most :data:`BATCH_BYTES`, or that are a single workload."""
    batch: list[tuple[Workload, int]] = []
    total = 0
    for workload, seed in todo:
        axes = spec.point(workload.axes)
        size = sum(layout(t, axes).bytes for t in spec.tensors)
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append((workload, seed))
        total += size
    yield batch


def _emulate_batch(
    server: ForkServer,
    artifact: Artifact,
    spec: Spec,
    todo: Sequence[Case],
    modes: Sequence[Mode],
    keep: bool,
) -> list[Emulated]:
    seed = todo[0].seed
    with server.folder() as folder:
        spans = _write_inputs(folder, todo)
        runs = tuple(
            RunRequest(
                plan=artifact.plans[case.workload.name], buffers=buffers, order=order, approx=approx, copies=copies
            )
            for case, buffers in zip(todo, spans, strict=True)
            for order, approx, copies in modes
        )
        request = EmulateRequest(ptx=artifact.ptx, seed=seed & 0x7FFFFFFF, seconds=RUN_SECONDS, runs=runs)
        (folder / "request.json").write_text(request.model_dump_json())
        reply = server.run("emulate", folder, CHILD_LIMITS)
        if not reply.ok or reply.result is None:
            raise MachineFailure(f"the emulator's process failed on {spec.name} {artifact.target}: {reply.describe()}")
        outcome = EmulateReply.model_validate_json(reply.result)
        _check_whole(outcome, artifact, spec)
        return [_judge(folder, case, artifact, outcome, n, modes, keep) for n, case in enumerate(todo)]


def _write_inputs(folder: Path, todo: Sequence[Case]) -> list[tuple[BufferRequest, ...]]:
    spans, at = [], 0
    with (folder / "inputs.bin").open("wb") as file:
        for case in todo:
            buffers = []
            for p in case.placed:
                file.write(p.data.tobytes())
                file.write(p.initialised.astype(np.uint8).tobytes())
                buffers.append(
                    BufferRequest(
                        name=p.tensor.name,
                        at=at,
                        bytes=p.layout.bytes,
                        shape=p.layout.shape,
                        strides=p.layout.strides,
                        itemsize=p.layout.itemsize,
                        writable=p.writable,
                    )
                )
                at += 2 * p.layout.bytes
            spans.append(tuple(buffers))
    return spans


def _check_whole(outcome: EmulateReply, artifact: Artifact, spec: Spec) -> None:
    if outcome.unsupported:
        raise MachineFailure(f"{spec.name} {artifact.target}: the emulator does not support {outcome.unsupported}")
    if outcome.malformed:
        raise Rejected(Code.inspect_ptx, f"{spec.name} {artifact.target}: {outcome.malformed}")


def _judge(
    folder: Path,
    case: Case,
    artifact: Artifact,
    outcome: EmulateReply,
    n: int,
    modes: Sequence[Mode],
    keep: bool,
) -> Emulated:
    where = f"{case.spec.name} {case.workload.name} {artifact.target}"
    raw: list[bytes] = []
    worst: dict[str, Comparison] = {}
    kept: Tensors | None = None
    first = n * len(modes)
    for k, (order, approx, copies) in enumerate(modes, start=first):
        if k >= len(outcome.runs):
            raise MachineFailure(f"{where}: the emulator's process returned {len(outcome.runs)} runs, {k + 1} expected")
        finding = outcome.runs[k].finding
        if finding:
            raise FoundByEmulator(Code(f"emulate.{finding.code}"), f"{where}: {describe(finding)}", finding)
        values, memory = _read_run(folder / f"run{k}.bin", case, where)
        for c in compare(case.spec, case.reference, case.baseline, values):
            if not c.passed:
                raise Rejected(
                    Code.emulate_mismatch, f"{where}, warp order {order}, {approx}, {copies} copies: {c.describe()}"
                )
            if c.output not in worst or c.share_of_limit > worst[c.output].share_of_limit:
                worst[c.output] = c
        raw.append(memory)
        kept = values if keep and kept is None else kept
    return Emulated(
        workload=case.workload,
        seed=case.seed,
        comparisons=tuple(worst.values()),
        counters=outcome.runs[first].counters,
        order_independent=all(memory == raw[0] for memory in raw[:2]),
        values=kept,
    )


def _read_run(path: Path, case: Case, where: str) -> tuple[Tensors, bytes]:
    """The outputs and states of one run. Raises Rejected when something changed that must not, or was not written."""
    writable = [p for p in case.placed if p.writable]
    size = sum(2 * p.layout.bytes for p in writable)
    try:
        memory = read_child_file(path, size)
    except ChildFileError as error:
        raise MachineFailure(f"{where}: the emulator's process: {error}") from None
    if len(memory) != size:
        raise MachineFailure(f"{where}: the emulator's process returned {len(memory)} bytes, {size} expected")
    flat = np.frombuffer(bytearray(memory), dtype=np.uint8)
    values: Tensors = {}
    at = 0
    for p in writable:
        data, written = flat[at : at + p.layout.bytes], flat[at + p.layout.bytes : at + 2 * p.layout.bytes]
        at += 2 * p.layout.bytes
        # The gaps between rows must not change. Inputs and weights cannot: the emulator's process maps them read-only.
        changed = np.flatnonzero((data != p.data) & ~element_mask(p.layout))
        if changed.size:
            raise Rejected(
                Code.emulate_touched,
                f"{where}: {p.tensor.name} changed at byte {changed[0]} and {changed.size - 1} more",
            )
        if p.tensor.role is Role.output:
            _check_written(p, written, where)
        if p.tensor.rule is not None:
            values[p.tensor.name] = read_back(p, data)
    return values, memory


def _check_written(placed: Placed, written: np.ndarray, where: str) -> None:
    elements = torch.from_numpy(written[:: placed.layout.itemsize].copy())
    missing = elements.as_strided(placed.layout.shape, placed.layout.strides) == 0
    if missing.any():
        index = tuple(int(i) for i in missing.nonzero()[0])
        raise Rejected(
            Code.emulate_mismatch,
            f"{where}: {placed.tensor.name}{list(index)} was never written, nor {int(missing.sum()) - 1} more",
        )


def describe(finding: Finding) -> str:
    """A finding as one line: what, where in the grid, where in memory, which instruction."""
    parts = [finding.message or finding.code]
    if finding.tensor is not None:
        parts.append(f"tensor {finding.tensor}{list(finding.index or ())}")
    if finding.address is not None:
        parts.append(f"{finding.space} address {finding.address:#x}")
    parts.append(f"kernel {short_name(finding.kernel)} CTA {finding.cta} warp {finding.warp} lane {finding.lane}")
    if finding.instruction:
        parts.append(f"PTX line {finding.line}: {finding.instruction}")
    return "; ".join(parts)
