"""Results that come back from another machine: checked against what this checkout packed, then made evidence.

Nothing in them is taken on trust that can be worked out here: statistics, bounds and verdicts on times are recomputed
from the samples, comparisons from the raw outputs where those were kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import ValidationError

from kernelmill.specs.registry import UnknownName
from kernelmill.specs.schema import Spec, Tensors, Workload
from kernelmill.verify.artifact import Artifact
from kernelmill.verify.cases import Cases
from kernelmill.verify.emulate import MODES, Emulated, emulate
from kernelmill.verify.evidence import GpuEvidence, Rank, Words
from kernelmill.verify.execute import checks
from kernelmill.verify.execute.records import (
    OUTPUTS,
    RESULTS,
    SCHEMA,
    Executed,
    Manifest,
    PackedArtifact,
    Results,
    Samples,
    Sealed,
    Timed,
    Timing,
    results_digest,
)
from kernelmill.verify.execute.runner import MACHINE, REPEATS, kept_name, spec_of
from kernelmill.verify.execute.store import NotHere, packed_here, recall
from kernelmill.verify.execute.timing import bound_us, floor_us, hardware_of, judge, statistics, target_us
from kernelmill.verify.forkserver import ForkServer
from kernelmill.verify.ranking import RANKED, model_cost, rank_correlation
from kernelmill.verify.verdict import Code, MachineFailure, Rejected


class Refused(Exception):
    """The results are not whole, not of this checkout, or contradict themselves. One line."""


@dataclass(frozen=True)
class Returned:
    """Checked results. ``known``: artifact id and spec to what was packed. ``outputs``: raw bytes by ``kept_name``."""

    results: Results
    digest: str
    known: Mapping[tuple[str, str], tuple[PackedArtifact, Artifact]]
    outputs: Mapping[str, np.ndarray]


def read_returned(folder: Path, store: Path) -> Returned:
    """Read and check a results folder. ``store``: the checkout's store. Raises Refused, OSError."""
    try:
        sealed = Sealed.model_validate_json((folder / RESULTS).read_text())
    except (ValidationError, UnicodeDecodeError) as error:
        raise Refused(f"{RESULTS} is not a results file: {str(error).splitlines()[0]}") from None
    results = sealed.results
    if results.schema_version != SCHEMA:
        raise Refused(f"{RESULTS} has schema {results.schema_version}, this version reads {SCHEMA}")
    if results_digest(results) != sealed.sha256:
        raise Refused(f"{RESULTS} was changed after it was written: its sha256 is not the recorded one")
    try:
        known = _known(results, store)
    except (NotHere, UnknownName) as error:
        raise Refused(str(error)) from None
    outputs = _outputs(folder, results)
    returned = Returned(results, sealed.sha256, known, outputs)
    _check_executed(returned)
    for timing in results.timings:
        _check_timing(timing, results, known)
    return returned


def _known(results: Results, store: Path) -> dict[tuple[str, str], tuple[PackedArtifact, Artifact]]:
    manifest = Manifest.model_validate_json(packed_here(store, results.manifest).read_text())
    if manifest.artifacts != results.artifacts:
        raise Refused("the results name other artifacts than the bundle's manifest")
    recalled = (recall(store, results.manifest, name) for name in manifest.artifacts)
    known = {(p.id, p.spec): (p, artifact) for artifact, packed in recalled for p in packed}
    for (name, _), (packed, artifact) in known.items():
        cubin = hashlib.sha256(artifact.cubin).hexdigest()
        if not cubin == packed.cubin_sha256 == manifest.artifacts[name]:
            raise Refused(f"artifact {name[:12]}: the cubin that was packed is not the one in this checkout's store")
        if spec_of(packed).id != packed.spec_id:
            raise Refused(f"artifact {name[:12]}: {packed.spec} has changed since it was packed; pack it again")
    return known


def _outputs(folder: Path, results: Results) -> dict[str, np.ndarray]:
    if not results.outputs_sha256:
        return {}
    path = folder / OUTPUTS
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != results.outputs_sha256:
        raise Refused(f"{OUTPUTS} is missing or not the file that the results were written with")
    with np.load(path, allow_pickle=False) as data:
        return {name: data[name] for name in data.files}


def _workload(packed: PackedArtifact, name: str) -> Workload:
    found = next((w for w in packed.workloads if w.name == name), None)
    if found is None:
        raise Refused(f"artifact {packed.id[:12]} was not packed for workload {name[:80]}")
    return found


def _check_executed(returned: Returned) -> None:
    results, cases = returned.results, Cases()
    seen: set[Key] = set()
    for e in results.executed:
        where = f"{e.spec} {e.workload} artifact {e.artifact[:12]}"
        if (e.artifact, e.spec) not in returned.known or (e.artifact, e.spec, e.workload) in seen:
            raise Refused(f"{where}: not in the bundle, or told twice")
        seen.add((e.artifact, e.spec, e.workload))
        packed, _ = returned.known[e.artifact, e.spec]
        if (e.spec_id, e.candidate) != (packed.spec_id, packed.candidate):
            raise Refused(f"{where}: spec or candidate are not those that were packed")
        workload = _workload(packed, e.workload)
        if e.code not in (*Code, MACHINE):
            raise Refused(f"{where}: {e.code[:40]!r} is no verdict")
        if e.code == Code.accepted:
            _check_accepted(e, packed, results, where)
        _check_kept(e, packed, workload, returned.outputs, cases, where)


def _check_accepted(e: Executed, packed: PackedArtifact, results: Results, where: str) -> None:
    """An accepted workload must show every check: both seeds, the repeats, the graph, and comparisons that pass."""
    launches = len(packed.plans[e.workload].launches)
    plain = [c for c in e.cases if not c.change]
    whole = (
        [c.seed for c in plain] == list(results.seeds)
        and plain[0].repeats >= REPEATS
        and all(c.graph_nodes == launches for c in plain)
    )
    checked = {t.name for t in spec_of(packed).tensors if t.rule is not None}
    within = all(
        {x.output for x in c.comparisons} == checked == set(c.digests)
        and all(x.passed and x.share_of_limit <= 1 for x in c.comparisons)
        for c in e.cases
    )
    if not whole or not within:
        raise Refused(f"{where}: accepted, but not all checks are recorded as passed")


def _check_kept(
    e: Executed,
    packed: PackedArtifact,
    workload: Workload,
    outputs: Mapping[str, np.ndarray],
    cases: Cases,
    where: str,
) -> None:
    """Raw outputs must have the recorded digests, and pass the comparison with a reference computed here."""
    spec = spec_of(packed)
    for c in e.cases:
        if not c.kept:
            continue
        values = kept_values(spec, workload, e.artifact, outputs)
        if {n: checks.digest(v) for n, v in values.items()} != c.digests:
            raise Refused(f"{where}: the kept outputs are not those that were digested")
        try:
            checks.check_values(cases.get(spec, workload, c.seed), values, where)
        except Rejected as error:
            raise Refused(f"{error.reason}; the results call it {e.code}") from None


def kept_values(spec: Spec, workload: Workload, artifact: str, outputs: Mapping[str, np.ndarray]) -> Tensors:
    """The kept outputs of one workload as tensors. Raises Refused when one is missing or of another size."""
    made = {}
    for t in spec.tensors:
        if t.rule is None:
            continue
        raw, shape = (
            outputs.get(kept_name(artifact, spec.name, workload.name, t.name)),
            t.size(spec.point(workload.axes)),
        )
        if raw is None or raw.size != math.prod(shape) * t.dtype.bytes:
            raise Refused(f"{OUTPUTS} lacks {t.name} of {spec.name} {workload.name} artifact {artifact[:12]}")
        made[t.name] = torch.from_numpy(raw.reshape(-1)).view(t.dtype.torch).reshape(shape)
    return made


def _check_timing(
    timing: Timing, results: Results, known: Mapping[tuple[str, str], tuple[PackedArtifact, Artifact]]
) -> None:
    good = {(e.artifact, e.spec, e.workload) for e in results.executed if e.code == Code.accepted}
    for t in timing.candidates:
        where = f"{t.spec} {t.workload} artifact {t.artifact[:12]}"
        if (t.artifact, t.spec, t.workload) not in good:
            raise Refused(f"{where}: timed, but not executed and accepted")
        _check_timed(t, timing, known[t.artifact, t.spec][0], where)
    for p in timing.peers:
        if not _same(p.samples, statistics(p.samples.values)):
            raise Refused(f"{p.spec} {p.workload}: the peer's median is not that of its samples")


def _check_timed(t: Timed, timing: Timing, packed: PackedArtifact, where: str) -> None:
    spec, workload = spec_of(packed), _workload(packed, t.workload)
    if (t.family, t.candidate) != (packed.family, packed.candidate):
        raise Refused(f"{where}: spec or candidate are not those that were packed")
    plan, hardware = packed.plans[t.workload].launches, hardware_of(packed.target)
    copies, pdl = timing.copies.get(f"{t.spec} {t.workload}", 0), any(n.pdl for n in plan)
    if copies < 1 or not t.samples.values or min(t.samples.values) <= 0:
        raise Refused(f"{where}: it has no copies or no samples")
    floor = floor_us(spec, workload, timing.ceilings, len(plan), hardware, copies, pdl)
    figures = (
        (t.bound, bound_us(spec, workload, timing.ceilings, len(plan))),
        (t.floor, floor),
        (t.target, target_us(spec, workload, hardware, len(plan))),
    )
    if not _same(t.samples, statistics(t.samples.values)) or not all(math.isclose(a, b) for a, b in figures):
        raise Refused(f"{where}: its median or bounds are not those of its samples")
    if t.launches != len(plan) or t.code != judge(t.samples, floor)[0]:
        raise Refused(f"{where}: {t.code[:40]} is not the verdict on its samples")


def _same(a: Samples, b: Samples) -> bool:
    return all(math.isclose(x, y) for x, y in ((a.median, b.median), (a.low, b.low), (a.high, b.high)))


def make_evidence(returned: Returned, parallel: int = 2) -> GpuEvidence:
    """Evidence of checked results, with what the emulator says of the same artifacts beside it: its counter model
    against the times, and its values against the kept outputs."""
    with ForkServer("native") as native:
        emulated = _emulated(returned, native, parallel)
    r = returned.results
    return GpuEvidence(
        results=returned.digest,
        manifest=r.manifest,
        seeds=r.seeds,
        environment=r.environment,
        executed=r.executed,
        timings=r.timings,
        ranks=ranks(r.timings, _costs(emulated, returned), _notes(emulated)),
        words=tuple(_words(emulated, returned)),
    )


Key = tuple[str, str, str]
"""Artifact, spec and workload."""


def _emulated(returned: Returned, native: ForkServer, parallel: int) -> dict[Key, Emulated | str]:
    """Every timed or kept workload, once, with nominal arithmetic; a line where the emulator cannot say."""
    kept = {(e.artifact, e.spec, e.workload) for e in returned.results.executed for c in e.cases if c.kept}
    timed = {(t.artifact, t.spec, t.workload) for g in returned.results.timings for t in g.candidates}
    cases = Cases()

    def one(key: Key) -> Emulated | str:
        packed, artifact = returned.known[key[:2]]
        workload = _workload(packed, key[2])
        try:
            spec = spec_of(packed)
            return emulate(native, artifact, spec, [workload], [0], cases, modes=MODES[:1], keep=key in kept)[0]
        except (Rejected, MachineFailure) as error:
            return f"the emulator: {error}"

    keys = sorted(kept | timed)
    with ThreadPoolExecutor(parallel) as pool:
        return dict(zip(keys, pool.map(one, keys), strict=True))


def _costs(emulated: Mapping[Key, Emulated | str], returned: Returned) -> dict[Key, float]:
    return {
        key: model_cost(e.counters, hardware_of(returned.known[key[:2]][0].target))
        for key, e in emulated.items()
        if isinstance(e, Emulated)
    }


def _notes(emulated: Mapping[Key, Emulated | str]) -> dict[Key, str]:
    return {key: e for key, e in emulated.items() if isinstance(e, str)}


def ranks(timings: Iterable[Timing], costs: Mapping[Key, float], notes: Mapping[Key, str]) -> tuple[Rank, ...]:
    """The rank correlation of model and times over the schedules of each spec and workload that has at least three."""
    groups: dict[tuple[str, str], list[Timed]] = {}
    for t in (t for g in timings for t in g.candidates):
        groups.setdefault((t.spec, t.workload), []).append(t)
    made = []
    for (spec, workload), members in groups.items():
        if len(members) < 3:
            continue
        keys = [(t.artifact, spec, workload) for t in members]
        missing = next((notes[k] for k in keys if k in notes), "")
        found = None
        if all(k in costs for k in keys):
            found = rank_correlation([costs[k] for k in keys], [t.samples.median for t in members])
        ranked = found is not None and found >= RANKED
        made.append(
            Rank(
                spec=spec,
                workload=workload,
                schedules=len(members),
                correlation=found,
                ranked=ranked,
                note=missing or ("" if found is not None else "one side has no order"),
            )
        )
    return tuple(made)


def _words(emulated: Mapping[Key, Emulated | str], returned: Returned) -> Iterable[Words]:
    for (artifact, spec_name, name), e in emulated.items():
        if isinstance(e, str) or e.values is None:
            continue
        packed, _ = returned.known[artifact, spec_name]
        got = kept_values(spec_of(packed), _workload(packed, name), artifact, returned.outputs)
        for output, value in e.values.items():
            distance = ulp_distance(value, got[output])
            yield Words(
                artifact=artifact,
                spec=packed.spec,
                workload=name,
                output=output,
                words=value.numel(),
                differing=int((distance > 0).sum()),
                ulps=int(distance.max()) if distance.numel() else 0,
            )


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Steps of the dtype between equally shaped tensors, as int64: 0 exactly where the bits are the same."""
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    x, y = (v.contiguous().view(ints).to(torch.int64) for v in (a, b))
    if not a.dtype.is_floating_point:
        return (x - y).abs()
    low = -(1 << (8 * a.dtype.itemsize - 1))
    # Negative floats count downwards; the two zeros lie one step apart.
    ordered = [torch.where(v < 0, low - v - 1, v) for v in (x, y)]
    return (ordered[0] - ordered[1]).abs()


def verdicts(executed: Sequence[Executed], timings: Sequence[Timing]) -> list[tuple[str, str]]:
    """(code, reason) of everything that was not accepted."""
    found = [(e.code, e.reason) for e in executed if e.code != Code.accepted]
    for t in (t for g in timings for t in g.candidates):
        if t.code != Code.accepted:
            found.append((t.code, f"{t.spec} {t.workload} artifact {t.artifact[:12]}: {t.reason}"))
    return found
