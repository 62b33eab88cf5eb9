"""Times, on the parent's side: what to ask the timing child for, statistics, bounds, and ``time.impossible``.

The *floor* is what nothing beats in this measurement: the larger of
    (cold bytes of the spec - inputs and outputs, which are warm - L2 bytes / copies) / the best measured bandwidth,
    FLOPs / the peak rate,
    the measured launch gap times the launches, unless they overlap by programmatic dependent launch.
Bytes written to states late in a sample may still be in L2 when it ends; that is what the L2 term allows for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernelmill.specs.hardware import HARDWARE, Hardware, target_seconds
from kernelmill.specs.registry import family, find
from kernelmill.specs.schema import Role, Spec, Workload
from kernelmill.verify.cases import Case
from kernelmill.verify.execute.process import Child, ChildDied, ChildFault
from kernelmill.verify.execute.records import Ceilings, PackedArtifact, PeerTimed, Samples, Timed, Timing
from kernelmill.verify.layout import layout
from kernelmill.verify.verdict import Code

if TYPE_CHECKING:
    from kernelmill.verify.execute.runner import Runner

MARGIN = 0.9
"""A median under this share of the floor is impossible; clocks and measured ceilings vary by a few per cent."""
RESAMPLES = 2000
WORKLOAD_SECONDS = 4.0
"""Sampling time of one workload, over all its schedules and the peer."""
CHILD_SECONDS = 300.0
"""Deadline of one workload: reading inputs, compiling the peer, sampling."""


def statistics(values: Sequence[float]) -> Samples:
    """Median and its 95 % interval by the bootstrap (percentiles of resampled medians; fixed generator)."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(0)
    medians = np.median(data[rng.integers(0, data.size, (RESAMPLES, data.size))], axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return Samples(values=tuple(values), median=float(np.median(data)), low=float(low), high=float(high))


def bound_us(spec: Spec, workload: Workload, ceilings: Ceilings, launches: int) -> float:
    """Cold bytes over the measured read bandwidth, plus the launch gaps; microseconds."""
    cost = family(spec.family).functions.cost(spec, spec.point(workload.axes))
    return (cost.cold_bytes / ceilings.read_bandwidth + launches * ceilings.launch_gap) * 1e6


def target_us(spec: Spec, workload: Workload, hardware: Hardware, launches: int) -> float:
    """The spec's target time; microseconds."""
    return target_seconds(family(spec.family).functions.cost(spec, spec.point(workload.axes)), hardware, launches) * 1e6


def floor_us(
    spec: Spec, workload: Workload, ceilings: Ceilings, launches: int, hardware: Hardware, copies: int, pdl: bool
) -> float:
    """See the module's docstring; microseconds."""
    axes = spec.point(workload.axes)
    cost = family(spec.family).functions.cost(spec, axes)
    warm = sum(math.prod(t.size(axes)) * t.dtype.bytes for t in spec.tensors if t.role in (Role.input, Role.output))
    cold = max(0.0, cost.cold_bytes - warm - hardware.l2_bytes / copies)
    bandwidth = max(ceilings.read_bandwidth, ceilings.copy_bandwidth)
    gaps = 0.0 if pdl else launches * ceilings.launch_gap
    return max(cold / bandwidth, cost.flops / hardware.peak_bf16.value, gaps) * 1e6


def judge(samples: Samples, floor: float) -> tuple[Code, str]:
    """``time.impossible`` when the median is under the floor by more than the margin."""
    if samples.median < MARGIN * floor:
        return Code.time_impossible, f"{samples.median:.2f} us, nothing can take less than {floor:.2f} us here"
    return Code.accepted, ""


def hardware_of(target: str) -> Hardware:
    return next(h for h in HARDWARE.values() if h.target == target)


def time_family(runner: Runner, name: str, members: Sequence[tuple[PackedArtifact, Workload]]) -> Timing:
    """Time a family's accepted artifacts in one fresh process: ceilings, then a workload at a time, all schedules and
    the peer in turn. After a workload that fails, a new process goes on with the next one."""
    workloads: dict[tuple[str, str], list[tuple[PackedArtifact, Workload]]] = {}
    for packed, workload in members:
        workloads.setdefault((packed.spec, workload.name), []).append((packed, workload))
    timed: list[Timed] = []
    peers: list[PeerTimed] = []
    problems: list[str] = []
    copies: dict[str, int] = {}
    ceilings: Ceilings | None = None
    child: Child | None = None
    try:
        for (spec, workload_name), group in workloads.items():
            try:
                if child is None:
                    child = Child("time", runner.log)
                    child.ask({"op": "hello"}, CHILD_SECONDS)
                if ceilings is None:
                    ceilings = Ceilings(**_without_seconds(child.ask({"op": "ceilings"}, CHILD_SECONDS)))
                case, answer = _ask(runner, child, group)
            except (ChildFault, ChildDied) as error:
                problems.append(f"{spec} {workload_name}: {error}{runner.last_words()}")
                runner.tell(f"  not timed: {problems[-1]}")
                if ceilings is None:
                    raise
                child = None
                continue
            copies[f"{spec} {workload_name}"] = answer["copies"]
            problems += [f"{spec} {workload_name}: {p}" for p in answer["problems"]]
            new = [_timed(p, w, answer, ceilings) for p, w in group]
            timed += new
            if answer["peer"]:
                peers.append(_peer(runner.private, case, answer))
            runner.tell(_describe(new, peers[-1] if answer["peer"] else None))
    finally:
        if child is not None:
            child.__exit__()
    assert ceilings is not None
    return Timing(
        family=name,
        ceilings=ceilings,
        copies=copies,
        candidates=tuple(timed),
        peers=tuple(peers),
        problems=tuple(problems),
    )


def _without_seconds(answer: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in answer.items() if k != "seconds"}


def _ask(runner: Runner, child: Child, group: Sequence[tuple[PackedArtifact, Workload]]) -> tuple[Case, dict[str, Any]]:
    """Time one workload. Inputs are those of the secret seed."""
    (spec,) = find(group[0][0].spec)
    workload = group[0][1]
    case = runner.cases.get(spec, workload, runner.secret)
    tensors, at = [], 0
    with (runner.private / "inputs.bin").open("wb") as file:
        for p in case.placed:
            file.write(p.data.tobytes())
            tensors.append(
                {
                    "name": p.tensor.name,
                    "role": p.tensor.role.value,
                    "dtype": p.tensor.dtype.value,
                    "shape": p.layout.shape,
                    "strides": p.layout.strides,
                    "bytes": p.layout.bytes,
                    "at": at,
                }
            )
            at += p.layout.bytes
    entries = [
        {
            "key": p.id,
            **runner.cubin(p),
            "launches": p.plans[w.name].model_dump(mode="json")["launches"],
            "workspaces": [{"name": t.name, "bytes": layout(t, case.axes).bytes} for t in p.workspaces],
        }
        for p, w in group
    ]
    request = {
        "op": "time",
        "folder": str(runner.private),
        "family": spec.family,
        "point": case.axes,
        "tensors": tensors,
        "entries": entries,
        "seconds": WORKLOAD_SECONDS,
    }
    return case, child.ask(request, CHILD_SECONDS)


def _timed(packed: PackedArtifact, workload: Workload, answer: dict[str, Any], ceilings: Ceilings) -> Timed:
    (spec,) = find(packed.spec)
    plan = packed.plans[workload.name].launches
    hardware = hardware_of(packed.target)
    samples = statistics(answer["samples"][packed.id])
    pdl = any(n.pdl for n in plan)
    floor = floor_us(spec, workload, ceilings, len(plan), hardware, answer["copies"], pdl)
    code, reason = judge(samples, floor)
    return Timed(
        artifact=packed.id,
        candidate=packed.candidate,
        family=packed.family,
        spec=packed.spec,
        workload=workload.name,
        samples=samples,
        launches=len(plan),
        bound=bound_us(spec, workload, ceilings, len(plan)),
        floor=floor,
        target=target_us(spec, workload, hardware, len(plan)),
        code=code,
        reason=reason,
    )


def _peer(folder: Path, case: Case, answer: dict[str, Any]) -> PeerTimed:
    """The peer's times, and how far its outputs are from the reference."""
    distances = {}
    with np.load(folder / "peer.npz") as outputs:
        for t in case.spec.tensors:
            if t.rule is None or t.name not in outputs:
                continue
            got = torch.from_numpy(outputs[t.name]).view(t.dtype.torch).reshape(t.size(case.axes)).to(torch.float64)
            expected = case.reference[t.name].to(torch.float64)
            both = torch.isfinite(expected)
            norm = expected[both].norm().clamp_min(1e-30)
            distances[t.name] = float((got[both] - expected[both]).norm() / norm)
    return PeerTimed(
        spec=case.spec.name,
        workload=case.workload.name,
        name=answer["peer"],
        samples=statistics(answer["samples"]["peer"]),
        relative_l2=distances,
    )


def _describe(timed: Sequence[Timed], peer: PeerTimed | None) -> str:
    best = min(timed, key=lambda t: t.samples.median)
    against = f", {peer.name} {peer.samples.median:.2f} us" if peer else ", no peer"
    return (
        f"  {best.spec} {best.workload}: best of {len(timed)} {best.samples.median:.2f} us "
        f"[{best.samples.low:.2f}, {best.samples.high:.2f}]{against}; "
        f"bound {best.bound:.2f} us, {best.share_of_bound:.0%} of it; {best.share_of_target:.0%} of the target"
    )
