"""What a bundle and its results say, as data. Both are JSON files; both sides of the way use these models."""

from __future__ import annotations

import hashlib
from typing import Literal

from kernelmill.specs.data import Frozen, canonical_json
from kernelmill.specs.schema import TensorSpec, Workload
from kernelmill.specs.tolerance import Comparison
from kernelmill.verify.plan import LaunchPlan

SCHEMA = 1
"""Raised when an older import or runner could not read what a newer one wrote."""

MANIFEST, RESULTS, OUTPUTS = "manifest.json", "results.json", "outputs.npz"


class PackedArtifact(Frozen):
    """One artifact in a bundle, for one spec: ``artifacts/ID.SPEC.json``, with ``ID.cubin`` beside it. Specs may share
    an artifact, where a kernel sees no difference. ``candidate``: sha256 of the source.
    ``workspaces``: the candidate's scratch tensors, behind the spec's own. ``plans``: workload name to plan."""

    id: str
    candidate: str
    family: str
    spec: str
    spec_id: str
    target: str
    binding: dict[str, int]
    schedule: dict[str, int | str | bool]
    cubin_sha256: str
    workloads: tuple[Workload, ...]
    workspaces: tuple[TensorSpec, ...]
    plans: dict[str, LaunchPlan]

    @property
    def name(self) -> str:
        """Of its file, without the ending."""
        return f"{self.id}.{self.spec}"


class PackedCandidate(Frozen):
    """``name``: the file's; ``sha256`` of its source."""

    name: str
    sha256: str
    family: str


class Manifest(Frozen):
    """``files``: path to sha256, of every file but the manifest itself. ``artifacts``: id to sha256 of its cubin."""

    schema_version: int = SCHEMA
    candidates: tuple[PackedCandidate, ...]
    artifacts: dict[str, str]
    files: dict[str, str]


class ExecutedCase(Frozen):
    """One run's inputs and what came of them. ``change``: the one element that was changed after generation, as
    ``tensor[index]``, or nothing. ``digests``: output or state to the sha256 of its values. ``kept``: its raw values
    are in the outputs file."""

    seed: int
    change: str = ""
    repeats: int
    graph_nodes: int = 0
    comparisons: tuple[Comparison, ...]
    digests: dict[str, str]
    kept: bool = False


class Executed(Frozen):
    """One workload of one artifact on the GPU. ``code``: ``accepted`` or the verdict's; ``cases`` are those that ran
    until then."""

    artifact: str
    candidate: str
    spec: str
    spec_id: str
    workload: str
    code: str
    reason: str
    cases: tuple[ExecutedCase, ...]
    seconds: float


class Samples(Frozen):
    """Times of one call in microseconds, one per replayed graph; median and the bootstrap 95 % interval of it."""

    values: tuple[float, ...]
    median: float
    low: float
    high: float


class Timed(Frozen):
    """One workload of one artifact, timed. All times in microseconds.

    ``bound``: the spec's cold bytes over the measured read bandwidth plus the measured launch gap per launch;
    activations stay in L2 here, so what moves little else may beat it. ``floor``: what nothing can beat in this
    measurement (see timing.py). ``target``: the spec's target time on this GPU. ``code``: ``accepted`` or
    ``time.impossible``."""

    artifact: str
    candidate: str
    family: str
    spec: str
    workload: str
    samples: Samples
    launches: int
    bound: float
    floor: float
    target: float
    code: str
    reason: str = ""

    @property
    def share_of_bound(self) -> float:
        return self.bound / self.samples.median

    @property
    def share_of_target(self) -> float:
        return self.target / self.samples.median


class PeerTimed(Frozen):
    """The named peer on one workload, interleaved with the candidates. ``relative_l2``: its outputs' distance from the
    reference, output to number, so that a peer that computes something else is seen."""

    spec: str
    workload: str
    name: str
    samples: Samples
    relative_l2: dict[str, float]


class Ceilings(Frozen):
    """Measured in the same process as the times: bytes/s (copy: read and written), the gap in seconds."""

    copy_bandwidth: float
    read_bandwidth: float
    launch_gap: float


class Timing(Frozen):
    """One family's times from one process. ``copies``: workload (``spec workload``) to how many copies of weights and
    states rotated."""

    family: str
    ceilings: Ceilings
    copies: dict[str, int]
    candidates: tuple[Timed, ...]
    peers: tuple[PeerTimed, ...]
    problems: tuple[str, ...] = ()


class Environment(Frozen):
    """``gpu``: what the driver says of the device. ``nvidia_smi``: field to value, before and after."""

    python: str
    platform: str
    versions: dict[str, str]
    gpu: dict[str, int | str]
    nvidia_smi: dict[str, str]
    nvidia_smi_after: dict[str, str] = {}


class Canary(Frozen):
    """Our own copy kernel in a candidate's process: ``when``, whether the copy was right, bytes/s."""

    when: str
    same: bool
    bandwidth: float


class Results(Frozen):
    """What a run of a bundle found. ``manifest``: sha256 of the bundle's manifest file. ``seeds``: the public one, then
    the secret one that this run drew. ``outputs_sha256``: of the outputs file, if any. ``failure``: what stopped the
    run that was the machine's or our fault, if anything."""

    schema_version: int = SCHEMA
    manifest: str
    artifacts: dict[str, str]
    started: str
    seconds: float
    seeds: tuple[int, ...]
    environment: Environment
    canaries: tuple[Canary, ...]
    executed: tuple[Executed, ...]
    timings: tuple[Timing, ...] = ()
    outputs_sha256: str = ""
    failure: str = ""
    status: Literal["complete", "failed"] = "complete"


class Sealed(Frozen):
    """The results file. ``sha256``: over the results' canonical JSON, against damage on the way."""

    sha256: str
    results: Results


def seal(results: Results) -> Sealed:
    return Sealed(sha256=results_digest(results), results=results)


def results_digest(results: Results) -> str:
    return hashlib.sha256(canonical_json(results.model_dump(mode="json")).encode()).hexdigest()
