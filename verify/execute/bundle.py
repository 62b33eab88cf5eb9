"""Packing artifacts, and all that running them needs, into one folder.

``run.py``, ``manifest.json``, ``artifacts/`` (a cubin and its description each), ``kernelmill/`` (the modules that the
runner imports and the families' specs) and ``standin/`` (for a machine without pydantic).
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelmill.specs.schema import Role
from kernelmill.specs.sources import closure, source
from kernelmill.verify.artifact import Artifact
from kernelmill.verify.build.bench import Unit
from kernelmill.verify.execute.records import MANIFEST, Manifest, PackedArtifact, PackedCandidate

MAX_BYTES = 40 << 20
"""A bundle's size at most, so that it can be sent anywhere."""

ENTRIES = ("kernelmill.verify.execute.runner", "kernelmill.verify.execute.child", "kernelmill.verify.execute.bench")
"""Modules that ``run.py`` and the children start from."""

RUN = '''\
"""Execute and time this bundle's kernels on the GPU of this machine: python run.py --help."""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
if importlib.util.find_spec("pydantic") is None:
    sys.path.append(str(HERE / "standin"))

from kernelmill.verify.execute.runner import main

if __name__ == "__main__":
    sys.exit(main(HERE))
'''


class BundleError(Exception):
    """A bundle cannot be made or is not whole. One line."""


@dataclass(frozen=True)
class Built:
    """One artifact to pack, with the unit that it was built for and the candidate that it came from."""

    candidate: PackedCandidate
    unit: Unit
    artifact: Artifact

    @property
    def key(self) -> tuple[str, str]:
        """Artifact and spec; see ``records.PackedArtifact``."""
        return self.artifact.id, self.unit.spec.name


def check_place(to: Path) -> None:
    """Raises BundleError when ``to`` cannot become a bundle: it exists and is not an empty folder."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise BundleError(f"{to} exists and is not an empty folder; name another with -o, or remove it")


def pack(built: Sequence[Built], to: Path) -> Manifest:
    """Write a bundle to ``to``. Raises BundleError as ``check_place`` does, and when the bundle is too large."""
    check_place(to)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".bundle-") as name:
        folder = Path(name) / "bundle"
        (folder / "artifacts").mkdir(parents=True)
        for b in built:
            _pack_artifact(b, folder / "artifacts")
        _pack_code(sorted({b.candidate.family for b in built}), folder)
        files = {str(p.relative_to(folder)): _sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}
        candidates = tuple({b.candidate.sha256: b.candidate for b in built}.values())
        artifacts = {b.artifact.id: hashlib.sha256(b.artifact.cubin).hexdigest() for b in built}
        manifest = Manifest(candidates=candidates, artifacts=artifacts, files=files)
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1))
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        if size > MAX_BYTES:
            raise BundleError(
                f"the bundle would have {size / 2**20:.1f} MiB, at most {MAX_BYTES >> 20} are allowed; "
                "pack fewer schedules or workloads"
            )
        if to.exists():
            to.rmdir()
        shutil.move(folder, to)
    return manifest


def _pack_artifact(built: Built, folder: Path) -> None:
    unit, artifact = built.unit, built.artifact
    workspaces = tuple(t for t in unit.spec.tensors if t.role is Role.workspace)
    packed = PackedArtifact(
        id=artifact.id,
        candidate=built.candidate.sha256,
        family=unit.spec.family,
        spec=unit.spec.name,
        spec_id=unit.spec.id,
        target=unit.target,
        binding=unit.binding,
        schedule=unit.schedule,
        cubin_sha256=hashlib.sha256(artifact.cubin).hexdigest(),
        workloads=unit.workloads,
        workspaces=workspaces,
        plans=artifact.plans,
    )
    (folder / f"{packed.name}.json").write_text(packed.model_dump_json())
    (folder / f"{artifact.id}.cubin").write_bytes(artifact.cubin)


def _pack_code(families: Sequence[str], folder: Path) -> None:
    for name, path in closure((*ENTRIES, *(f"kernelmill.specs.ops.{f}" for f in families))).items():
        to = folder.joinpath(*name.split("."))
        to = to / "__init__.py" if path.name == "__init__.py" else to.with_suffix(".py")
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(path.read_bytes())
    standin = folder / "standin" / "pydantic.py"
    standin.parent.mkdir()
    standin.write_bytes(source("kernelmill.verify.execute.standin").read_bytes())
    (folder / "run.py").write_text(RUN)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
