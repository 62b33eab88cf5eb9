"""``verify --execute``: the same bundle, packed into a private folder and run by the same runner on this machine."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kernelmill.verify.artifact import Artifact
from kernelmill.verify.build.bench import Unit
from kernelmill.verify.evidence import GpuEvidence
from kernelmill.verify.execute.bundle import Built, BundleError, pack
from kernelmill.verify.execute.process import Child, ChildDied, ChildFault
from kernelmill.verify.execute.records import PackedCandidate, results_digest
from kernelmill.verify.execute.returned import ranks, verdicts
from kernelmill.verify.execute.runner import CAPABILITY, MACHINE, START_SECONDS, run
from kernelmill.verify.execute.unpack import NotWhole
from kernelmill.verify.verdict import Code, MachineFailure, Rejected


def target_here() -> str:
    """The target of this machine's GPU. Raises MachineFailure where there is none that kernels are built for."""
    advice = "`kernelmill bundle` packs for a machine that has one"
    with tempfile.TemporaryDirectory(prefix="kernelmill-") as folder:
        try:
            with Child("check", Path(folder) / "log") as child:
                device = child.ask({"op": "hello"}, START_SECONDS)["device"]
        except (ChildFault, ChildDied) as error:
            raise MachineFailure(f"--execute needs a GPU: {error}; {advice}") from None
    for target, capability in CAPABILITY.items():
        if capability == device["capability"]:
            return target
    raise MachineFailure(f"--execute: {device['name']} has compute capability {device['capability']}; {advice}")


def execute_here(
    name: str,
    source: str,
    units: Sequence[Unit],
    artifacts: Sequence[Artifact],
    costs: Mapping[tuple[str, str, str], float],
    tell: Callable[[str], None],
) -> GpuEvidence:
    """Execute and time artifacts that were built for this GPU. ``costs``: (artifact, spec, workload) to model cost.

    Raises Rejected with the first verdict against the candidate, MachineFailure."""
    sha256 = hashlib.sha256(source.encode(errors="surrogateescape")).hexdigest()
    candidate = PackedCandidate(name=name, sha256=sha256, family=units[0].spec.family)
    built = [Built(candidate, u, a) for u, a in zip(units, artifacts, strict=True)]
    with tempfile.TemporaryDirectory(prefix="kernelmill-") as folder:
        try:
            pack(built, Path(folder) / "bundle")
            results = run(Path(folder) / "bundle", Path(folder) / "results", tell=tell)
        except (BundleError, NotWhole) as error:
            raise MachineFailure(f"--execute: {error}") from None
    if results.failure:
        raise MachineFailure(f"--execute: {results.failure}")
    for code, reason in verdicts(results.executed, results.timings):
        if code == MACHINE:
            raise MachineFailure(f"--execute: {reason}")
        raise Rejected(Code(code), reason)
    return GpuEvidence(
        results=results_digest(results),
        manifest=results.manifest,
        seeds=results.seeds,
        environment=results.environment,
        executed=results.executed,
        timings=results.timings,
        ranks=ranks(results.timings, costs, {}),
    )
