"""``python run.py``: execute and time a bundle's kernels on the GPU of this machine.

This parent holds references and secret seeds and never loads a kernel: every candidate and schedule runs in a fresh
child (``child.py``), which gets bytes and hands bytes back. Exit status: 0 all accepted, 1 something was rejected,
2 usage, 3 the machine or we could not do it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernelmill.specs.registry import find
from kernelmill.specs.schema import Role, Spec, Tensors, TensorSpec, Workload
from kernelmill.verify.cases import Case, Cases, make_case
from kernelmill.verify.execute import checks
from kernelmill.verify.execute.faults import rejection
from kernelmill.verify.execute.process import Child, ChildDied, ChildFault
from kernelmill.verify.execute.records import (
    OUTPUTS,
    RESULTS,
    Canary,
    Environment,
    Executed,
    ExecutedCase,
    PackedArtifact,
    Results,
    Timing,
    seal,
)
from kernelmill.verify.execute.timing import time_family
from kernelmill.verify.execute.unpack import NotWhole, read_bundle
from kernelmill.verify.verdict import Code, MachineFailure, Rejected

PUBLIC_SEED = 0
REPEATS = 100
START_SECONDS = 120.0
"""Deadline of a child's first answers: interpreter, context, assembling our own kernels."""
RUN_SECONDS = 20.0
SLOWEST_COPY = 0.5e9
"""Bytes/s of memory to and from the GPU that deadlines count with."""
CANARY_SHARE = 0.5
"""The canary's bandwidth may fall to this share of its first before the GPU counts as not sane."""
CACHE_BYTES = 16 << 30
KEPT_BYTES = 64 << 20
"""Raw outputs kept at most."""
TRIES = 8
"""Elements tried until one is found that changes the reference's output."""

CAPABILITY = {"sm_90a": "9.0", "sm_100a": "10.0", "sm_103a": "10.3"}
VERSIONS = ("torch", "numpy", "triton", "cuda-bindings", "cuda-python", "flash-linear-attention")
SMI_FIELDS = "name,driver_version,temperature.gpu,clocks.sm,clocks.mem,power.draw,pstate"

MACHINE = "machine"
"""``code`` of what could not be judged."""


def spec_of(packed: PackedArtifact) -> Spec:
    """The spec that an artifact was built for, with the candidate's workspaces."""
    (spec,) = find(packed.spec)
    return spec.with_tensors(packed.workspaces) if packed.workspaces else spec


class Runner:
    """One run of a bundle. ``private``: a folder that only this user can read, for the children's memory."""

    def __init__(
        self, bundle: Path, packed: Sequence[PackedArtifact], private: Path, keep: bool, tell: Callable[[str], None]
    ) -> None:
        self.bundle, self.packed, self.private, self.keep, self.tell = bundle, packed, private, keep, tell
        self.secret = int.from_bytes(os.urandom(8), "little") >> 1
        self.rng = np.random.default_rng(int.from_bytes(os.urandom(16), "little"))
        self.cases = Cases(CACHE_BYTES)
        self.changed: dict[tuple[str, str, str], tuple[str, Case]] = {}
        self.executed: list[Executed] = []
        self.timings: list[Timing] = []
        self.canaries: list[Canary] = []
        self.kept: dict[str, np.ndarray] = {}
        self.device: dict[str, Any] = {}
        self.log = private / "children.log"

    # Children

    def start(self, when: str) -> Child:
        """A fresh child whose canary lives. Raises MachineFailure when there is no GPU or it is not sane."""
        child = Child("check", self.log)
        try:
            self.device = child.ask({"op": "hello"}, START_SECONDS)["device"]
            self.canary(child, when)
        except BaseException:
            child.__exit__()
            raise
        return child

    def canary(self, child: Child, when: str) -> None:
        try:
            answer = child.ask({"op": "canary", "seed": int(self.rng.integers(1 << 31))}, START_SECONDS)
        except (ChildFault, ChildDied) as error:
            raise MachineFailure(f"the canary died {when}: {error}{self.last_words()}") from None
        self.canaries.append(Canary(when=when, same=answer["same"], bandwidth=answer["bandwidth"]))
        if not answer["same"]:
            raise MachineFailure(f"the canary's copy was wrong {when}: this GPU cannot be trusted now")
        if answer["bandwidth"] < CANARY_SHARE * self.canaries[0].bandwidth:
            raise MachineFailure(
                f"the canary copied {answer['bandwidth'] / 1e9:.0f} GB/s {when}, "
                f"{self.canaries[0].bandwidth / 1e9:.0f} at first: the GPU is busy or throttled"
            )

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f" ({lines[-1].strip()[:200]})" if lines else ""

    # Checking

    def check_all(self) -> Iterator[None]:
        """Run every artifact's checks; yields after each candidate and schedule, so that results can be saved."""
        groups = itertools.groupby(sorted(self.packed, key=_group), key=_group)
        for (candidate, schedule), members in groups:
            self._check_group(f"{candidate[:8]} {schedule}", list(members))
            yield

    def _check_group(self, what: str, members: list[PackedArtifact]) -> None:
        child: Child | None = None
        try:
            for packed in members:
                for workload in packed.workloads:
                    if child is None:
                        child = self.start(f"before {what}")
                        loaded: set[str] = set()
                    if packed.id not in loaded:
                        self._load(child, packed)
                        loaded.add(packed.id)
                    alive, code = self._check(child, packed, workload)
                    if not alive:
                        child.__exit__()
                        child = None
                    if code != Code.accepted:
                        break
            # Its context is what the candidate's kernels may have harmed; where that is gone, look at the GPU.
            child = child or self.start(f"after {what}, in a fresh process")
            self.canary(child, f"after {what}")
        finally:
            if child is not None:
                child.__exit__()

    def _load(self, child: Child, packed: PackedArtifact) -> None:
        """Nothing of a cubin runs while it is loaded; a refusal shows when the plan is prepared."""
        request = {"op": "load", "artifact": packed.id, **self.cubin(packed)}
        child.ask(request, START_SECONDS)

    def cubin(self, packed: PackedArtifact) -> dict[str, str]:
        path = self.bundle / "artifacts" / f"{packed.id}.cubin"
        return {"cubin": str(path), "cubin_sha256": packed.cubin_sha256}

    def _check(self, child: Child, packed: PackedArtifact, workload: Workload) -> tuple[bool, str]:
        """Whether the child still lives, and the verdict's code."""
        began = time.monotonic()
        done: list[ExecutedCase] = []
        code, reason, alive = str(Code.accepted), "", True
        where = f"{packed.spec} {workload.name} {packed.target} artifact {packed.id[:12]}"
        try:
            for case in self._cases(child, packed, workload, where):
                done.append(case)
            reason = f"{len(done)} cases within tolerance, {REPEATS} repeats bit-identical"
        except Rejected as error:
            code, reason = str(error.code), error.reason
        except MachineFailure as error:
            code, reason, alive = MACHINE, str(error), False
        except ChildFault as error:
            alive = False
            found: Exception = MachineFailure(f"{where}: {error}")
            if error.kind == "driver":
                found = rejection(error.name, error.call, where)
            code = str(found.code) if isinstance(found, Rejected) else MACHINE
            reason = found.reason if isinstance(found, Rejected) else str(found)
        except ChildDied as error:
            alive = False
            code, reason = (str(Code.execute_hang) if error.hung else MACHINE), f"{where}: {error}"
        seconds = time.monotonic() - began
        self.executed.append(
            Executed(
                artifact=packed.id,
                candidate=packed.candidate,
                spec=packed.spec,
                spec_id=packed.spec_id,
                workload=workload.name,
                code=code,
                reason=reason,
                cases=tuple(done),
                seconds=round(seconds, 3),
            )
        )
        self.tell(f"{code:24} {where if code == Code.accepted else reason}, {seconds:.1f} s")
        return alive, code

    def _cases(self, child: Child, packed: PackedArtifact, workload: Workload, where: str) -> Iterator[ExecutedCase]:
        """The public seed with all repeats and the graph, a secret seed, and one-element changes of the secret one on
        the artifact's first workload: same addresses, other contents."""
        spec = spec_of(packed)
        first = workload == packed.workloads[0]
        public = self.cases.get(spec, workload, PUBLIC_SEED)
        ran, values = self._run(child, packed, public, REPEATS, where)
        keep = self.keep and first and self._keep(packed, workload, values)
        yield ran.model_copy(update={"kept": True}) if keep else ran
        base = self.cases.get(spec, workload, self.secret)
        ran, old = self._run(child, packed, base, 2, f"{where}, hidden seed")
        yield ran
        for tensor in spec.tensors if first else ():
            if tensor.role in (Role.output, Role.workspace) or not tensor.dtype.torch.is_floating_point:
                continue
            change, case = self._changed(spec, workload, tensor, base)
            there = f"{where}, hidden seed with {change} changed"
            ran, values = self._run(child, packed, case, 0, there, change=change, after=(base, old))
            yield ran

    def _run(
        self,
        child: Child,
        packed: PackedArtifact,
        case: Case,
        repeats: int,
        where: str,
        *,
        change: str = "",
        after: tuple[Case, Tensors] | None = None,
    ) -> tuple[ExecutedCase, Tensors]:
        before, regions = checks.image(case, self.rng)
        before.tofile(self.private / "before.bin")
        launches = packed.plans[case.workload.name].model_dump(mode="json")["launches"]
        written = sum(r.size for r in regions if r.placed.writable)
        answer = child.ask(
            {
                "op": "run",
                "artifact": packed.id,
                "folder": str(self.private),
                "tensors": [r.request() for r in regions],
                "launches": launches,
                "repeats": repeats,
                "graph": repeats > 0,
            },
            RUN_SECONDS + (3 * before.nbytes + (repeats + 3) * written) / SLOWEST_COPY,
        )
        after_run = np.fromfile(self.private / "after.bin", dtype=np.uint8)
        values = checks.read_outputs(case, regions, before, after_run, where)
        if after is not None:
            checks.check_follows(case, after[0], values, after[1], where)
        comparisons = checks.check_values(case, values, where)
        checks.check_repeats(answer, regions, len(launches), where)
        ran = ExecutedCase(
            seed=case.seed,
            change=change,
            repeats=repeats,
            graph_nodes=answer["nodes"],
            comparisons=comparisons,
            digests={name: checks.digest(v) for name, v in values.items()},
        )
        return ran, values

    def _changed(self, spec: Spec, workload: Workload, tensor: TensorSpec, base: Case) -> tuple[str, Case]:
        """The base case with one element of ``tensor`` changed, such that an output should move."""
        key = (spec.id, workload.name, tensor.name)
        if key not in self.changed:
            for _ in range(TRIES):
                shape = tensor.size(spec.point(workload.axes))
                index = tuple(int(self.rng.integers(n)) for n in shape)
                case = make_case(spec, workload, base.seed, partial(_with_change, tensor.name, index))
                self.changed[key] = (f"{tensor.name}{list(index)}", case)
                outputs = [t.name for t in spec.tensors if t.role is Role.output]
                if any(not torch.equal(case.reference[n], base.reference[n]) for n in outputs):
                    break
        return self.changed[key]

    def _keep(self, packed: PackedArtifact, workload: Workload, values: Tensors) -> bool:
        size = sum(v.nbytes for v in values.values())
        if size + sum(v.nbytes for v in self.kept.values()) > KEPT_BYTES:
            return False
        for name, value in values.items():
            raw = value.contiguous().view(torch.uint8).numpy()
            self.kept[kept_name(packed.id, packed.spec, workload.name, name)] = raw
        return True

    # Timing

    def time_all(self) -> Iterator[None]:
        """Time what was accepted, a family at a time; yields after each."""
        good = {(e.artifact, e.spec, e.workload) for e in self.executed if e.code == Code.accepted}
        by_family: dict[str, list[tuple[PackedArtifact, Workload]]] = {}
        for p in self.packed:
            for w in p.workloads:
                if (p.id, p.spec, w.name) in good and w.values == "realistic":
                    by_family.setdefault(p.family, []).append((p, w))
        for name, members in by_family.items():
            self.tell(f"timing {name}: {len(members)} workloads of artifacts")
            self.timings.append(time_family(self, name, members))
            yield


def kept_name(artifact: str, spec: str, workload: str, tensor: str) -> str:
    """The name in the outputs file of a tensor's raw bytes."""
    return f"{artifact}.{spec}.{workload}.{tensor}"


def _group(packed: PackedArtifact) -> tuple[str, str]:
    return packed.candidate, " ".join(f"{k}={v}" for k, v in packed.schedule.items())


def _with_change(name: str, index: tuple[int, ...], inputs: Tensors) -> Tensors:
    """``inputs`` with one element twice as large as the tensor's largest, of the other sign."""
    changed = inputs[name].clone()
    old = float(changed[index])
    largest = float(torch.where(torch.isfinite(changed), changed, 0).abs().max()) or 0.5
    changed[index] = min(2 * largest, torch.finfo(changed.dtype).max / 4) * (1 if old < 0 else -1)
    return {**inputs, name: changed}


def nvidia_smi() -> dict[str, str]:
    """Clocks, temperature, power and driver of the first GPU; nothing where nvidia-smi does not answer."""
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(SMI_FIELDS.split(","), (v.strip() for v in done.stdout.split(",")), strict=False))


def environment(device: dict[str, Any], before: dict[str, str], after: dict[str, str]) -> Environment:
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        versions=versions,
        gpu=device,
        nvidia_smi=before,
        nvidia_smi_after=after,
    )


def run(
    bundle: Path,
    out: Path,
    only: Sequence[str] = (),
    *,
    time_too: bool = True,
    keep: bool = False,
    tell: Callable[[str], None] = print,
) -> Results:
    """Run a bundle and write results to ``out``, after every step anew. ``tell`` gets a line per step. What the machine
    or we could not do is the results' ``failure``. Raises NotWhole."""
    manifest_id, manifest, packed = read_bundle(bundle)
    names = {c.sha256: c.name for c in manifest.candidates}
    chosen = choose(packed, names, only)
    if not chosen:
        raise NotWhole(f"nothing in the bundle matches all of --only {' '.join(only)}")
    out.mkdir(parents=True, exist_ok=True)
    started, began, smi = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic(), nvidia_smi()
    with tempfile.TemporaryDirectory(prefix="kernelmill-", ignore_cleanup_errors=True) as name:
        runner = Runner(bundle, chosen, Path(name), keep, tell)

        def save(failure: str | None) -> Results:
            digest = ""
            if runner.kept:
                np.savez_compressed(out / OUTPUTS, **runner.kept)  # type: ignore[arg-type]
                digest = hashlib.sha256((out / OUTPUTS).read_bytes()).hexdigest()
            results = Results(
                manifest=manifest_id,
                artifacts=manifest.artifacts,
                started=started,
                seconds=round(time.monotonic() - began, 1),
                seeds=(PUBLIC_SEED, runner.secret),
                environment=environment(runner.device, smi, nvidia_smi()),
                canaries=tuple(runner.canaries),
                executed=tuple(runner.executed),
                timings=tuple(runner.timings),
                outputs_sha256=digest,
                failure=failure or "",
                status="complete" if failure is None else "failed",
            )
            (out / RESULTS).write_text(seal(results).model_dump_json())
            return results

        failure: str | None = None
        try:
            _keep_fitting(runner)
            for _ in runner.check_all():
                save("did not finish")
            for _ in runner.time_all() if time_too else ():
                save("did not finish")
        except MachineFailure as error:
            failure = str(error)
        except (ChildFault, ChildDied) as error:
            machine = isinstance(error, ChildFault) and error.kind == "machine"
            failure = str(error) if machine else f"a child failed: {error}{runner.last_words()}"
        return save(failure)


def _keep_fitting(runner: Runner) -> None:
    """Leave out what was built for another GPU. Raises MachineFailure when nothing is left."""
    runner.start("at first").__exit__()
    here = runner.device["capability"]
    fitting = [p for p in runner.packed if CAPABILITY[p.target] == here]
    if not fitting:
        targets = ", ".join(sorted({p.target for p in runner.packed}))
        raise MachineFailure(f"this GPU has compute capability {here}; the bundle is for {targets}")
    runner.packed = fitting


def choose(packed: Sequence[PackedArtifact], names: Mapping[str, str], only: Sequence[str]) -> list[PackedArtifact]:
    """What the words of ``only`` leave. A word names a candidate, a family or spec, a workload, or begins an artifact's
    id; words of one kind add up, kinds restrict each other. ``names``: candidate to its file. Raises NotWhole."""
    asked: dict[str, set[str]] = {}
    for word in only:
        kinds = [
            k for p in packed for w in p.workloads for k, text in _labels(p, w, names).items() if _fits(k, text, word)
        ]
        if not kinds:
            raise NotWhole(f"--only {word[:80]}: nothing in the bundle has this name")
        asked.setdefault(kinds[0], set()).add(word)
    left = []
    for p in packed:
        workloads = tuple(
            w
            for w in p.workloads
            if all(any(_fits(k, _labels(p, w, names)[k], word) for word in words) for k, words in asked.items())
        )
        if workloads:
            left.append(p.model_copy(update={"workloads": workloads}))
    return left


def _labels(packed: PackedArtifact, workload: Workload, names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {
        "candidate": (names[packed.candidate],),
        "spec": (packed.family, packed.spec),
        "workload": (workload.name,),
        "artifact": (packed.id,),
    }


def _fits(kind: str, texts: Sequence[str], word: str) -> bool:
    return word in texts or (kind == "artifact" and len(word) >= 8 and texts[0].startswith(word))


EXAMPLES = """\
examples:
  python run.py
  python run.py --only attn_res --only T8_nb4 --no-time
  python run.py --keep-outputs --out results

exit status: 0 all accepted, 1 something was rejected, 2 usage, 3 the machine or we could not do it
"""


def main(bundle: Path, arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Execute and time this bundle's kernels on the GPU of this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="default: results")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="a candidate's file, family, spec, workload, or the beginning of an artifact's id; repeatable",
    )
    parser.add_argument("--no-time", action="store_true", help="execute only")
    parser.add_argument("--keep-outputs", action="store_true", help=f"raw outputs of first workloads in {OUTPUTS}")
    options = parser.parse_args(arguments)
    try:
        results = run(
            bundle,
            options.out,
            options.only,
            time_too=not options.no_time,
            keep=options.keep_outputs,
            tell=partial(print, flush=True),
        )
    except NotWhole as error:
        print(error, file=sys.stderr)
        return 2
    codes = [e.code for e in results.executed] + [t.code for g in results.timings for t in g.candidates]
    rejected = sum(c not in (Code.accepted, MACHINE) for c in codes)
    print(f"{len(codes)} results, {rejected} rejected; {options.out / RESULTS}")
    if results.failure or MACHINE in codes:
        print(results.failure or "some could not be judged", file=sys.stderr)
        return 3
    return 1 if rejected else 0
