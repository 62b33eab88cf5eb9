"""Bundles, the runner, its children and results, on a fake CUDA driver at the lowest layer; and for real with a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kernelmill.specs.registry import find
from kernelmill.specs.schema import Spec, Workload
from kernelmill.verify.artifact import Artifact
from kernelmill.verify.build.bench import Unit
from kernelmill.verify.execute.bundle import Built, pack
from kernelmill.verify.execute.records import PackedCandidate, Results, Sealed, results_digest
from kernelmill.verify.plan import Launch, LaunchPlan, Param, Pointer

FAKE = Path(__file__).parent / "fake_cuda"


def fake_artifact(spec: Spec, workloads: tuple[Workload, ...], schedule: int = 1, **behaviour: object) -> Built:
    """An artifact whose cubin the fake driver understands."""
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


def situ(**behaviour: object) -> Built:
    (spec,) = find("situ_and_mul.shared")
    return fake_artifact(spec, tuple(w for w in spec.workloads if w.name in ("T1_P16", "T3_P16_tiny")), **behaviour)


def attn(**behaviour: object) -> Built:
    (spec,) = find("attn_res.delta_write_norm")
    return fake_artifact(spec, tuple(w for w in spec.workloads if w.name in ("T2_nb3",)), **behaviour)


def run_bundle(bundle: Path, out: Path, *arguments: str) -> tuple[int, Results, str]:
    """``python run.py`` in a process where pydantic and the installed kernelmill are missing, with the fake driver."""
    code = f"""
import sys, runpy, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "pydantic" and not any(p.endswith("standin") for p in sys.path):
            raise ModuleNotFoundError(name)
sys.meta_path = [f for f in sys.meta_path if "__editable__" not in str(f)]
sys.path[:] = [p for p in sys.path if "__editable__" not in p]
sys.argv = ["run.py", *{[*arguments, "--out", str(out)]!r}]
runpy.run_path({str(bundle / "run.py")!r}, run_name="__main__")
"""
    env = {**os.environ, "PYTHONPATH": str(FAKE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=out.parent)
    sealed = Sealed.model_validate_json((out / "results.json").read_text())
    assert results_digest(sealed.results) == sealed.sha256
    return done.returncode, sealed.results, done.stdout + done.stderr


def test_a_bundle_runs_where_only_torch_and_the_driver_are(tmp_path: Path) -> None:
    pack([situ(), attn()], tmp_path / "bundle")
    status, results, text = run_bundle(tmp_path / "bundle", tmp_path / "out", "--no-time", "--keep-outputs")
    assert status == 0, text
    assert [e.code for e in results.executed] == ["accepted"] * 3
