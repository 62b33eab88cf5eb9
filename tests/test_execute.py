"""Bundles, the runner, its children and results, on a fake CUDA driver at the lowest layer; and for real with a GPU."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from kernelmill.agents.cli import main
from kernelmill.specs.hardware import H200
from kernelmill.specs.registry import families, find
from kernelmill.specs.schema import Spec
from kernelmill.verify.artifact import Artifact
from kernelmill.verify.build.bench import Unit
from kernelmill.verify.build.schedules import Range, Table
from kernelmill.verify.cases import make_case
from kernelmill.verify.execute import bundle as bundling
from kernelmill.verify.execute import checks, runner, timing
from kernelmill.verify.execute.bundle import Built, BundleError, pack
from kernelmill.verify.execute.child import Checker, _Call
from kernelmill.verify.execute.driver import Driver
from kernelmill.verify.execute.faults import FAULTS, rejection
from kernelmill.verify.execute.inplace import target_here
from kernelmill.verify.execute.peers import peers
from kernelmill.verify.execute.records import (
    Ceilings,
    Executed,
    Manifest,
    PackedCandidate,
    Results,
    Sealed,
    Timed,
    Timing,
    results_digest,
    seal,
)
from kernelmill.verify.execute.returned import Refused, Returned, ranks, read_returned, ulp_distance
from kernelmill.verify.execute.select import spread
from kernelmill.verify.execute.store import remember
from kernelmill.verify.execute.unpack import NotWhole, read_bundle
from kernelmill.verify.plan import Launch, LaunchPlan, Param, Pointer
from kernelmill.verify.ranking import rank_correlation
from kernelmill.verify.verdict import Code, MachineFailure, Rejected

FAKE = Path(__file__).parent / "fake_cuda"
SEEDS = Path(__file__).parent.parent / "agents" / "seeds"
(SITU,) = find("situ_and_mul.shared")
(ATTN,) = find("attn_res.delta_write_norm")


def fake_artifact(spec: Spec, names: tuple[str, ...], schedule: int = 1, **behaviour: object) -> Built:
    """An artifact whose cubin the fake driver understands."""
    workloads = tuple(w for w in spec.workloads if w.name in names)
    params = tuple(Param(bytes="00" * 8, pointers=(Pointer(at=0, tensor=t.name, offset=0),)) for t in spec.tensors)
    plans = {
        w.name: LaunchPlan(launches=(Launch(kernel=w.name, grid=(1, 1, 1), block=(128, 1, 1), params=params),))
        for w in workloads
    }
    what = {"spec": spec.name, "axes": {w.name: w.axes for w in workloads}, **behaviour}
    unit = Unit(spec, "sm_90a", spec.binding(workloads[0].axes), {"threads": schedule}, workloads)
    artifact = Artifact(
        target="sm_90a",
        spec=spec.name,
        binding=unit.binding,
        schedule=unit.schedule,
        ptx=f"fake {json.dumps(what)}",
        plans=plans,
        resources=(),
        cubin=b"FAKE" + json.dumps(what).encode(),
    )
    return Built(PackedCandidate(name="fake.py", sha256="ab" * 32, family=spec.family), unit, artifact)


situ = functools.partial(fake_artifact, SITU, ("T1_P16", "T3_P16_tiny"))
attn = functools.partial(fake_artifact, ATTN, ("T2_nb3",))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's packages without pydantic, kernelmill and the real driver bindings: the machine with the GPU."""
    folder = tmp_path_factory.mktemp("site")
    for path in Path(str(torch.__file__)).parent.parent.iterdir():
        if not path.name.startswith(("pydantic", "annotated_types", "kernelmill", "__editable__", "cuda", "_", "dist")):
            (folder / path.name).symlink_to(path)
    return folder


def run_alone(site: Path, bundle: Path, out: Path, *arguments: str, world: str = "") -> tuple[int, str]:
    """``python run.py`` where only torch, numpy and the fake driver are."""
    paths = os.pathsep.join(map(str, (FAKE, site)))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FAKE_CUDA": world}
    command = [sys.executable, "-S", str(bundle / "run.py"), *arguments, "--out", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=out.parent)
    return done.returncode, done.stdout + done.stderr


def results_in(folder: Path) -> Results:
    sealed = Sealed.model_validate_json((folder / "results.json").read_text())
    assert results_digest(sealed.results) == sealed.sha256
    return sealed.results


# Packing


def test_a_bundle_runs_where_only_torch_and_the_driver_are(site: Path, tmp_path: Path) -> None:
    pack([situ(), attn()], tmp_path / "bundle")
    # That pydantic is the stand-in there: this import fails where it is not in the path.
    code = "import pydantic, sys; sys.exit(not pydantic.__file__.startswith(sys.path[1]))"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'bundle' / 'standin'}{os.pathsep}{site}"}
    assert subprocess.run([sys.executable, "-S", "-c", code], env=env).returncode == 0
    status, text = run_alone(site, tmp_path / "bundle", tmp_path / "out", "--no-time", "--keep-outputs")
    assert status == 0, text
    results = results_in(tmp_path / "out")
    assert [e.code for e in results.executed] == ["accepted"] * 3
    assert results.status == "complete" and results.seeds[0] == 0 and results.seeds[1] > 1 << 32
    for e in results.executed:
        assert [c.repeats for c in e.cases[:2]] == [100, 2] and all(c.graph_nodes == 1 for c in e.cases[:2])
    # One-element changes on the first workload of each artifact, of every tensor that is read.
    changes = {c.change.partition("[")[0] for c in results.executed[2].cases}
    assert changes == {"", "delta", "norm_weight", "proj_weight", "out_weight", "prefix", "bank"}
    assert [c.change for c in results.executed[1].cases] == ["", ""]
    with np.load(tmp_path / "out" / "outputs.npz") as kept:
        assert len(kept.files) == 1 + 3


def test_no_gpu_or_a_mad_one_is_the_machines_failure(site: Path, tmp_path: Path) -> None:
    pack([situ()], tmp_path / "bundle")
    for world, expected in (
        ("no device", "no usable GPU here: CUDA_ERROR_NO_DEVICE"),
        ("wrong copies", "canary's copy"),
    ):
        status, text = run_alone(site, tmp_path / "bundle", tmp_path / "out", world=world)
        assert status == 3 and expected in text
        assert results_in(tmp_path / "out").status == "failed"


def test_the_manifest_names_every_file_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    built = [situ(), attn()]
    manifest = pack(built, tmp_path / "bundle")
    there = {str(p.relative_to(tmp_path / "bundle")) for p in (tmp_path / "bundle").rglob("*") if p.is_file()}
    assert set(manifest.files) == there - {"manifest.json"}
    assert set(manifest.artifacts) == {b.artifact.id for b in built}
    assert not any("emulator" in name or "build" in name or name.startswith("kernelmill/agents") for name in there)
    name, again, packed = read_bundle(tmp_path / "bundle")
    assert again == manifest and [p.id for p in packed] == list(manifest.artifacts)
    # A program that serves two specs is packed once and described twice.
    (expert,) = find("situ_and_mul.expert")
    twice = [fake_artifact(SITU, ("T1_P16",)), fake_artifact(expert, ("T1_P8",))]
    twice[1] = dataclasses.replace(
        twice[1], artifact=twice[0].artifact.model_copy(update={"plans": twice[1].artifact.plans})
    )
    both = pack(twice, tmp_path / "twice")
    assert len(both.artifacts) == 1 and {p.spec for p in read_bundle(tmp_path / "twice")[2]} == {SITU.name, expert.name}
    assert name == hashlib.sha256((tmp_path / "bundle" / "manifest.json").read_bytes()).hexdigest()
    module = tmp_path / "bundle" / "kernelmill" / "specs" / "tolerance.py"
    module.write_text(module.read_text() + "\n")
    with pytest.raises(NotWhole, match=r"specs/tolerance\.py is missing or not the file"):
        read_bundle(tmp_path / "bundle")


def test_a_bundle_beyond_the_limit_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundling, "MAX_BYTES", 10_000)
    with pytest.raises(BundleError, match=r"at most .* are allowed"):
        pack([situ()], tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(BundleError, match="not an empty folder"):
        pack([situ()], tmp_path / "taken")


def test_the_stand_in_reads_and_writes_what_pydantic_does(site: Path, tmp_path: Path) -> None:
    pack([situ(), attn()], tmp_path / "bundle")
    code = """
from pathlib import Path
from kernelmill.verify.execute.records import Manifest, PackedArtifact
from kernelmill.specs.registry import families
import json, sys
for path in sorted(Path("artifacts").glob("*.json")):
    assert PackedArtifact.model_validate_json(path.read_text()).model_dump_json() == path.read_text()
for bad in ('{}', '{"candidates": [], "artifacts": {}, "files": {}, "more": 1}', '{"candidates": 1}', '[]'):
    try:
        Manifest.model_validate_json(bad)
    except ValueError:
        continue
    sys.exit(bad)
print(json.dumps({s.name: s.id for f in families().values() for s in f.specs}))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([".", "standin", str(site)])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, cwd=tmp_path / "bundle", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {s.name: s.id for n in ("attn_res", "situ_and_mul") for s in families()[n].specs}


def test_schedules_are_the_tables_own_and_then_spread_over_all() -> None:
    table = Table({"a": (1, 2, 3, 4), "b": (1, 2)}, {}, (Range(1, 8, {"a": 3, "b": 1}), Range(9, 10, {"a": 3, "b": 1})))
    assert spread(table, 1) == [{"a": 3, "b": 1}]
    assert spread(table, 3) == [{"a": 3, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 2}]
    assert len(spread(table, 1000)) == len({tuple(s.items()) for s in spread(table, 1000)}) == 8


# The driver layer


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_driver", FAKE / "cuda" / "bindings" / "driver.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_pretend", lambda: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
    return module


def test_launch_attributes_and_limits_reach_the_driver(
    fake_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for name in ("cuLaunchKernel", "cuLaunchKernelEx", "cuFuncSetAttribute"):
        monkeypatch.setattr(fake_driver, name, lambda *a, name=name: (calls.append((name, a)), (fake_driver._OK,))[1])
    driver = Driver()
    plain = {"kernel": "k", "grid": (2, 3, 4), "block": (32, 1, 1), "cluster": (1, 1, 1), "shared": 0}
    plain |= {"pdl": False, "cooperative": False, "params": []}
    wide = plain | {"cluster": (16, 1, 1), "shared": 100_000, "pdl": True, "cooperative": True}
    functions = driver.prepare({"spec": ""}, [plain, wide])
    assert [(int(c[1][1]), c[1][2]) for c in calls] == [(8, 100_000), (14, 1)]
    calls.clear()
    driver.run_plan(functions, [plain, wide], {}, driver.stream())
    (_, first), (name, second) = calls
    assert first[1:8] == (2, 3, 4, 32, 1, 1, 0) and name == "cuLaunchKernelEx"
    assert [int(a.id) for a in second[0].attrs] == [4, 2, 6] and second[0].sharedMemBytes == 100_000
    assert (second[0].attrs[0].value.clusterDim.x, second[0].attrs[1].value.cooperative) == (16, 1)


def test_the_real_bindings_have_what_the_driver_layer_and_the_fault_table_name() -> None:
    real = pytest.importorskip("cuda.bindings.driver")
    assert set(FAULTS) <= set(real.CUresult.__members__)
    text = Path(str(sys.modules[Driver.__module__].__file__)).read_text()
    names = set(re.findall(r"\bcu[A-Z]\w+", text))
    assert len(names) > 25 and all(hasattr(real, n) for n in names)
    config, attribute = real.CUlaunchConfig(), real.CUlaunchAttribute()
    attribute.id = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = 4
    config.attrs, config.numAttrs = [attribute], 1
    assert attribute.value.clusterDim.x == 4


def test_states_are_restored_before_every_repeat(
    fake_driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = attn()
    (workload,) = built.unit.workloads
    case = make_case(ATTN, workload, 0)
    before, regions = checks.image(case, np.random.default_rng(1))
    before.tofile(tmp_path / "before.bin")
    (tmp_path / "cubin").write_bytes(built.artifact.cubin)
    digest = hashlib.sha256(built.artifact.cubin).hexdigest()
    request = {
        "artifact": "a",
        "folder": str(tmp_path),
        "cubin": str(tmp_path / "cubin"),
        "cubin_sha256": digest,
        "tensors": [r.request() for r in regions],
        "launches": built.artifact.plans[workload.name].model_dump(mode="json")["launches"],
        "repeats": 3,
        "graph": True,
    }
    checker = Checker()
    checker.load(request)
    answer = checker.run(request)
    assert answer["differs"] == [] and answer["nodes"] == 1
    after = np.fromfile(tmp_path / "after.bin", dtype=np.uint8)
    checks.check_values(case, checks.read_outputs(case, regions, before, after, "here"), "here")
    monkeypatch.setattr(_Call, "restore", lambda self: None)
    with pytest.raises(Rejected, match="repeat 1: prefix") as error:
        checks.check_repeats(checker.run(request), regions, 1, "here")
    assert error.value.code == Code.execute_nondeterministic
    with pytest.raises(ValueError, match="not the file that was packed"):
        checker.load(request | {"cubin_sha256": "0" * 64})


# Every check can fail

BAD: dict[str, tuple[str, str]] = {
    "poison left": ("execute.mismatch", "still holds the poison"),
    "guard": ("execute.out_of_bounds", "behind out, the nearest 9 bytes"),
    "guard before": ("execute.out_of_bounds", "before out, the nearest 1 bytes"),
    "gap": ("execute.touched", "a gap between rows of out changed"),
    "input": ("execute.touched", "x changed at byte 0"),
    "wrong": ("execute.mismatch", "times its limit"),
    "stale": ("execute.stale", "out kept the values of the call before"),
    "late": ("execute.nondeterministic", "other bits than in the first run"),
    "refused": ("execute.launch", "cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE"),
    "strays": ("execute.stream", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
    "second node": ("execute.stream", "the graph has 2 nodes for 1 launches"),
    "illegal": ("execute.out_of_bounds", "CUDA_ERROR_ILLEGAL_ADDRESS, which ended its context"),
    "misaligned": ("execute.misaligned", "CUDA_ERROR_MISALIGNED_ADDRESS"),
    "trap": ("execute.trap", "CUDA_ERROR_LAUNCH_FAILED"),
    "hang": ("execute.hang", "no answer within 3 s; killed"),
    "no memory": ("machine", "CUDA_ERROR_OUT_OF_MEMORY; no verdict on the candidate"),
    "dies": ("machine", "the process ended with status 5"),
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Executed], Results]:
    """Each kernel that misbehaves, and a good one at the end, through the runner."""
    folder = tmp_path_factory.mktemp("bad")
    built = {
        bad: fake_artifact(SITU, ("T3_P16_tiny" if bad == "gap" else "T1_P16",), bad=bad) for bad in (*BAD, "nothing")
    }
    pack(list(built.values()), folder / "bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FAKE))
        patch.setattr(runner, "RUN_SECONDS", 3.0)
        results = runner.run(folder / "bundle", folder / "out", time_too=False)
    by_id = {e.artifact: e for e in results.executed}
    return {bad: by_id[b.artifact.id] for bad, b in built.items()}, results


@pytest.mark.parametrize("bad", BAD)
def test_each_check_can_fail(judged: tuple[dict[str, Executed], Results], bad: str) -> None:
    found = judged[0][bad]
    assert (found.code, BAD[bad][1] in found.reason) == (BAD[bad][0], True), found.reason


def test_a_good_kernel_is_accepted_after_all_those(judged: tuple[dict[str, Executed], Results]) -> None:
    assert judged[0]["nothing"].code == "accepted"
    assert judged[1].status == "complete" and all(c.same for c in judged[1].canaries)
    # A fresh process, with its canary, for each that its kernel or we ended.
    assert len(judged[1].canaries) > 6


def test_faults_are_classified_and_the_rest_is_the_machines() -> None:
    found = rejection("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "cuLaunchKernelEx", "here")
    assert isinstance(found, Rejected) and found.code == Code.execute_launch
    for name in ("CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_DEVICE_UNAVAILABLE"):
        assert isinstance(rejection(name, "cuCtxSynchronize", "here"), MachineFailure)


def test_a_canary_that_slows_down_stops_the_run(tmp_path: Path) -> None:
    run = runner.Runner(tmp_path, [], tmp_path, False, print)

    class Stub:
        def __init__(self, *speeds: float) -> None:
            self.speeds = list(speeds)

        def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
            return {"same": True, "bandwidth": self.speeds.pop(0)}

    child: Any = Stub(4e12, 3e12, 1e12)
    run.canary(child, "first")
    run.canary(child, "second")
    with pytest.raises(MachineFailure, match="busy or throttled"):
        run.canary(child, "third")


def test_only_chooses_by_candidate_spec_workload_and_artifact(tmp_path: Path) -> None:
    built = [situ(), attn()]
    pack(built, tmp_path / "bundle")
    _, _, packed = read_bundle(tmp_path / "bundle")
    names = {"ab" * 32: "fake.py"}

    def chosen(*words: str) -> list[tuple[str, int]]:
        return [(p.family, len(p.workloads)) for p in runner.choose(packed, names, words)]

    assert chosen() == chosen("fake.py") == [("situ_and_mul", 2), ("attn_res", 1)]
    assert chosen("attn_res") == chosen(built[1].artifact.id[:10]) == [("attn_res", 1)]
    assert chosen("T1_P16", "T2_nb3") == [("situ_and_mul", 1), ("attn_res", 1)]
    assert chosen("T1_P16", "attn_res") == []
    with pytest.raises(NotWhole, match="nothing in the bundle has this name"):
        chosen("T1_P17")


# Timing

CEILINGS = Ceilings(copy_bandwidth=4.2e12, read_bandwidth=4.4e12, launch_gap=1.1e-6)


def test_statistics_are_the_median_and_its_interval() -> None:
    values = [float(v) for v in np.random.default_rng(3).normal(10.0, 1.0, 100)]
    found = timing.statistics(values)
    assert found.low < found.median == float(np.median(values)) < found.high
    assert found.high - found.low < 0.8 and timing.statistics(values) == found
    assert timing.statistics([2.0] * 20).high == 2.0


def test_the_floor_counts_what_must_come_from_memory() -> None:
    """Warm activations and what may stay in L2 are no reason to call a time impossible; weights and states are."""
    workload = next(w for w in ATTN.workloads if w.name == "T64_nb7")
    cold = families()["attn_res"].functions.cost(ATTN, ATTN.point(workload.axes)).cold_bytes
    warm = 2 * 64 * 7168 * 2
    floor = timing.floor_us(ATTN, workload, CEILINGS, 1, H200, 32, False)
    assert math.isclose(floor, (cold - warm - H200.l2_bytes / 32) / 4.4e12 * 1e6)
    small = next(w for w in SITU.workloads if w.name == "T64_P8")
    assert math.isclose(timing.floor_us(SITU, small, CEILINGS, 2, H200, 32, False), 2.2)
    assert timing.floor_us(SITU, small, CEILINGS, 2, H200, 32, True) < 0.1
    assert timing.bound_us(ATTN, workload, CEILINGS, 1) > floor


def test_a_time_under_the_floor_is_impossible() -> None:
    assert timing.judge(timing.statistics([0.8] * 30), 1.0)[0] == Code.time_impossible
    assert timing.judge(timing.statistics([0.95] * 30), 1.0)[0] == Code.accepted


def test_every_family_has_a_peer_that_needs_only_torch() -> None:
    for name, made_for in families().items():
        assert peers(name)[-1].name.startswith("torch eager")
        spec = made_for.specs[0]
        workload = min(spec.workloads, key=lambda w: sum(torch.Size(t.size(w.axes)).numel() for t in spec.tensors))
        case = make_case(spec, workload, 0)
        for peer in peers(name):
            if "compile" in peer.name or "fla" in peer.name:
                continue
            t = made_for.inputs(spec, workload, 0)
            outputs = peer.make()(t, case.axes)
            for output in (t.name for t in spec.tensors if t.rule is not None):
                got, expected = outputs[output].double(), case.reference[output].double()
                assert (got - expected).norm() <= 0.02 * expected.norm(), (name, peer.name, output)


# Results and their import


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store and timed results with kept outputs: three schedules of one workload, and an impossible one."""
    folder = tmp_path_factory.mktemp("home")
    built = [
        *(situ(schedule=n, us=us) for n, us in ((1, 3.0), (2, 2.0), (3, 4.0), (4, 0.5))),
        attn(us=2.5),
    ]
    pack(built, folder / "bundle")
    remember(folder / "store", folder / "bundle", built)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FAKE))
        runner.run(folder / "bundle", folder / "results", keep=True)
    return folder


def tampered(home: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The results with a change, sealed again as a forger would."""
    shutil.copytree(home / "results", tmp_path / "results")
    data = results_in(home / "results").model_dump(mode="json")
    change(data)
    (tmp_path / "results" / "results.json").write_text(seal(Results.model_validate(data)).model_dump_json())
    return tmp_path / "results"


def test_times_come_with_peers_bounds_and_verdicts(home: Path) -> None:
    results = results_in(home / "results")
    situ_times, attn_times = sorted(results.timings, key=lambda t: -len(t.candidates))
    assert [(t.samples.median, t.code) for t in situ_times.candidates] == [
        (3.0, "accepted"),
        (2.0, "accepted"),
        (4.0, "accepted"),
        (0.5, "time.impossible"),
    ]
    assert len(situ_times.candidates[0].samples.values) == 100
    # The workload with adversarial values is executed, not timed.
    assert {t.workload for t in situ_times.candidates} == {"T1_P16"}
    (peer,) = attn_times.peers
    assert peer.name.startswith("torch") and set(peer.relative_l2) == {"out", "bank", "prefix"}
    assert max(peer.relative_l2.values()) < 0.01
    assert math.isclose(attn_times.ceilings.launch_gap, 1.1e-6, rel_tol=0.01)
    assert attn_times.copies == {"attn_res.delta_write_norm T2_nb3": 32}


def test_honest_results_are_read(home: Path) -> None:
    returned = read_returned(home / "results", home / "store")
    assert len(returned.known) == 5 and len(returned.outputs) == 4 + 3


def edit_cases(data: dict[str, Any], **fields: Any) -> None:
    data["executed"][0]["cases"][0].update(fields)


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another bundle": (lambda d: d.update(manifest="0" * 64), "no bundle with manifest 000000000000"),
    "another cubin": (lambda d: d["artifacts"].update({next(iter(d["artifacts"])): "0" * 64}), "other artifacts"),
    "an unknown artifact": (lambda d: d["executed"][0].update(artifact="0" * 64), "not in the bundle"),
    "told twice": (lambda d: d["executed"].append(d["executed"][0]), "told twice"),
    "an unknown workload": (lambda d: d["executed"][0].update(workload="T9"), "was not packed for workload T9"),
    "another spec id": (lambda d: d["executed"][0].update(spec_id="0" * 64), "not those that were packed"),
    "no verdict": (lambda d: d["executed"][0].update(code="fine"), "is no verdict"),
    "fewer repeats": (lambda d: edit_cases(d, repeats=9), "not all checks are recorded as passed"),
    "no graph": (lambda d: edit_cases(d, graph_nodes=0), "not all checks are recorded as passed"),
    "no comparison": (lambda d: edit_cases(d, comparisons=[]), "not all checks are recorded as passed"),
    "no secret seed": (lambda d: d["executed"][0]["cases"].pop(1), "not all checks are recorded as passed"),
    "a wrong digest": (lambda d: edit_cases(d, digests={"out": "0" * 64}), "not those that were digested"),
    "another seed": (lambda d: edit_cases(d, seed=5), "not all checks are recorded as passed"),
    "a better median": (
        lambda d: d["timings"][0]["candidates"][0]["samples"].update(median=1.0),
        "median or bounds are not those of its samples",
    ),
    "a better bound": (
        lambda d: d["timings"][0]["candidates"][0].update(bound=99.0),
        "median or bounds are not those of its samples",
    ),
    "a kinder verdict": (
        lambda d: [t.update(code="accepted") for g in d["timings"] for t in g["candidates"]],
        "is not the verdict on its samples",
    ),
    "a slower peer": (
        lambda d: d["timings"][0]["peers"][0]["samples"].update(median=1e6),
        "the peer's median is not that of its samples",
    ),
    "timed but rejected": (
        lambda d: [e.update(code="execute.mismatch") for e in d["executed"]],
        "timed, but not executed and accepted",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_tampered_results_are_refused(home: Path, tmp_path: Path, forgery: str) -> None:
    change, expected = FORGERIES[forgery]
    with pytest.raises(Refused, match=expected) as error:
        read_returned(tampered(home, tmp_path, change), home / "store")
    assert "\n" not in str(error.value)


def test_damaged_files_are_refused(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "results", tmp_path / "results")
    path = tmp_path / "results" / "results.json"
    path.write_text(path.read_text().replace('"repeats":100', '"repeats":101', 1))
    with pytest.raises(Refused, match="changed after it was written"):
        read_returned(tmp_path / "results", home / "store")
    path.write_text("{}")
    with pytest.raises(Refused, match="not a results file"):
        read_returned(tmp_path / "results", home / "store")
    shutil.rmtree(tmp_path / "results")
    shutil.copytree(home / "results", tmp_path / "results")
    (tmp_path / "results" / "outputs.npz").write_bytes(b"")
    with pytest.raises(Refused, match=r"outputs\.npz is missing or not the file"):
        read_returned(tmp_path / "results", home / "store")


def test_kept_outputs_are_compared_with_a_reference_made_here(home: Path, tmp_path: Path) -> None:
    """A forger who changes outputs, their digests and the file's hash is still found out."""
    shutil.copytree(home / "results", tmp_path / "results")
    results = results_in(home / "results")
    first = results.executed[0]
    name = runner.kept_name(first.artifact, first.spec, first.workload, "out")
    with np.load(home / "results" / "outputs.npz") as data:
        outputs = {n: data[n] for n in data.files}
    outputs[name] = outputs[name].copy()
    outputs[name].reshape(-1)[1] ^= 0x10
    np.savez(tmp_path / "results" / "outputs.npz", **outputs)  # type: ignore[arg-type]
    data = results.model_dump(mode="json")
    digest = hashlib.sha256((tmp_path / "results" / "outputs.npz").read_bytes()).hexdigest()
    data["outputs_sha256"] = digest
    data["executed"][0]["cases"][0]["digests"] = {"out": hashlib.sha256(outputs[name].tobytes()).hexdigest()}
    (tmp_path / "results" / "results.json").write_text(seal(Results.model_validate(data)).model_dump_json())
    with pytest.raises(Refused, match=r"times its limit; .* the results call it accepted"):
        read_returned(tmp_path / "results", home / "store")


def test_another_artifact_in_the_store_is_refused(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "store", tmp_path / "store")
    (path,) = (tmp_path / "store").glob("bundles/*/" + results_in(home / "results").executed[0].artifact + ".json")
    kept = Artifact.model_validate_json(path.read_text())
    path.write_text(kept.model_copy(update={"cubin": b"another"}).model_dump_json())
    with pytest.raises(Refused, match="is not the one in this checkout's store"):
        read_returned(home / "results", tmp_path / "store")
    path.write_text(kept.model_copy(update={"schedule": {"threads": 99}}).model_dump_json())
    with pytest.raises(Refused, match="is damaged"):
        read_returned(home / "results", tmp_path / "store")


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # 1 - 6 * (1 + 1 + 0 + 0) / (4 * 15)
    assert rank_correlation([2, 1, 3, 4], [1, 2, 3, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(0.75))
    assert rank_correlation([1, 2], [1, 2]) is None and rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_a_model_that_orders_badly_is_unranked(home: Path) -> None:
    results = results_in(home / "results")
    timings: tuple[Timing, ...] = results.timings
    times: list[Timed] = [t for g in timings for t in g.candidates if t.family == "situ_and_mul"]

    def found(costs: list[float]) -> tuple[float | None, bool]:
        (rank,) = ranks(timings, {(t.artifact, t.spec, t.workload): c for t, c in zip(times, costs, strict=True)}, {})
        assert rank.schedules == 4
        return rank.correlation, rank.ranked

    assert found([30, 20, 40, 5]) == (pytest.approx(1), True)
    assert found([20, 30, 40, 5]) == (pytest.approx(0.8), True)
    assert found([5, 20, 40, 30]) == (pytest.approx(0.2), False)


def test_distance_in_steps_of_the_dtype() -> None:
    a = torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=torch.bfloat16)
    b = torch.tensor([1.0, -1.0078125, -0.0, 1.9921875], dtype=torch.bfloat16)
    assert ulp_distance(a, b).tolist() == [0, 1, 1, 1]
    assert ulp_distance(torch.tensor([3, 4]), torch.tensor([3, 7])).tolist() == [0, 3]


# The command line


def test_import_keeps_evidence_and_refuses_in_one_line(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(home / "store", tmp_path / ".kernelmill")
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["evidence", "import", str(home / "results"), "--json"])
    assert done.exit_code == 1, done.output  # one time is impossible
    data = json.loads(done.stdout)
    assert (tmp_path / ".kernelmill" / "evidence" / f"{data['results']}.json").is_file()
    # The fake PTX is nothing to the emulator: the ranks say so instead of a number.
    assert data["ranks"][0]["correlation"] is None and "the emulator" in data["ranks"][0]["note"]
    shown = CliRunner().invoke(main, ["evidence", "import", str(home / "results")]).output
    for text in ("9 of 9 workloads", "time.impossible", "unranked", "launch gap"):
        assert text in shown
    refused = CliRunner().invoke(
        main, ["evidence", "import", str(tampered(home, tmp_path, FORGERIES["another bundle"][0]))]
    )
    assert refused.exit_code == 1 and refused.output.count("\n") == 1 and refused.output.startswith("Error: no bundle")
    missing = CliRunner().invoke(main, ["evidence", "import", "nowhere"])
    assert missing.exit_code == 2 and missing.output.count("\n") == 1


def test_bundle_builds_and_packs_real_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    command = ["bundle", str(SEEDS / "situ_and_mul.py"), "--spec", "situ_and_mul.shared", "--workloads", "T1_P16"]
    done = CliRunner().invoke(main, [*command, "--schedules", "2", "-o", "gpu", "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert len(data["artifacts"]) == data["runs"] == 2 and data["skipped"] == []
    _, manifest, packed = read_bundle(tmp_path / "gpu")
    assert isinstance(manifest, Manifest) and {p.target for p in packed} == {"sm_90a"}
    assert [p.schedule for p in packed] == [{"threads": 128, "vectors": 1}, {"threads": 64, "vectors": 1}]
    assert (tmp_path / "gpu" / "artifacts" / f"{packed[0].id}.cubin").read_bytes()[:4] == b"\x7fELF"
    assert (tmp_path / ".kernelmill" / "bundles" / data["manifest"] / f"{packed[0].id}.json").is_file()
    again = CliRunner().invoke(main, [*command, "-o", "gpu"])
    assert again.exit_code == 2 and "not an empty folder" in again.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--arch", "sm_80"], "no target named 'sm_80'"),
        (["--workloads", "T9"], "no workload named 'T9'"),
        (["--schedules", "0"], "neither a positive number nor 'all'"),
        (["--spec", "nope"], "no spec named 'nope'"),
    ],
)
def test_bundle_says_what_was_mistyped(tmp_path: Path, arguments: list[str], expected: str) -> None:
    done = CliRunner().invoke(main, ["bundle", str(SEEDS / "attn_res.py"), "-o", str(tmp_path / "b"), *arguments])
    assert done.exit_code == 2 and expected in done.output and done.output.count("\n") == 1


def test_a_file_that_fits_no_family_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def launch(): ...\n")
    done = CliRunner().invoke(main, ["bundle", str(tmp_path / "x.py"), "-o", str(tmp_path / "b")])
    assert done.exit_code == 2 and "fits no family" in done.output


def test_execute_in_place_says_when_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("FAKE_CUDA", "no device")
    command = ["verify", str(SEEDS / "situ_and_mul.py"), "--spec", "situ_and_mul", "--execute"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 3 and "--execute needs a GPU: no usable GPU here: CUDA_ERROR_NO_DEVICE" in done.output
    monkeypatch.setenv("FAKE_CUDA", "")
    assert target_here() == "sm_90a"
    done = CliRunner().invoke(main, [*command, "--target", "sm_103a"])
    assert done.exit_code == 3 and "this GPU is sm_90a, which is not among the targets" in done.output


@pytest.mark.parametrize("command", [["verify", "--spec", "attn_res"], ["bundle", "-o", "b"]])
def test_a_pipe_is_refused_at_once(tmp_path: Path, command: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = subprocess.run(
        [Path(sys.executable).with_name("kernelmill"), command[0], tmp_path / "pipe", *command[1:]],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "not a regular file" in done.stderr


# For real


@pytest.mark.gpu
def test_the_seeds_on_this_machines_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        target = target_here()
    except MachineFailure as error:
        pytest.skip(str(error))
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    files = [str(SEEDS / f"{f}.py") for f in ("situ_and_mul", "attn_res")]
    command = ["bundle", *files, "--arch", target, "--workloads", "T1_P16,T8_P16,T3_nb1,T8_nb4", "-o", "gpu"]
    assert CliRunner().invoke(main, command).exit_code == 0
    results = runner.run(tmp_path / "gpu", tmp_path / "results", keep=True)
    assert results.failure == "" and {e.code for e in results.executed} == {"accepted"}
    returned: Returned = read_returned(tmp_path / "results", tmp_path / ".kernelmill")
    assert returned.results.timings
