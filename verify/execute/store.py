"""What this checkout packed, kept to check returning results against: one folder per bundle, named by its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from kernelmill.verify.artifact import Artifact
from kernelmill.verify.execute.bundle import Built
from kernelmill.verify.execute.records import MANIFEST, PackedArtifact


class NotHere(Exception):
    """The store does not hold what was asked for, or holds something else under its name. One line."""


def remember(store: Path, bundle: Path, built: Sequence[Built]) -> str:
    """Keep a bundle's manifest and artifacts; returns the manifest's sha256."""
    text = (bundle / MANIFEST).read_bytes()
    name = hashlib.sha256(text).hexdigest()
    folder = store / "bundles" / name
    folder.mkdir(parents=True, exist_ok=True)
    for b in built:
        (folder / f"{b.artifact.id}.json").write_text(b.artifact.model_dump_json())
        packed = f"{b.artifact.id}.{b.unit.spec.name}.json"
        (folder / f"packed-{packed}").write_bytes((bundle / "artifacts" / packed).read_bytes())
    (folder / MANIFEST).write_bytes(text)
    return name


def recall(store: Path, manifest: str, artifact: str) -> tuple[Artifact, list[PackedArtifact]]:
    """An artifact of a bundle and what it was packed for. Raises NotHere when it is missing or not what its id says."""
    folder = store / "bundles" / manifest
    try:
        kept = Artifact.model_validate_json((folder / f"{artifact}.json").read_text())
        texts = [p.read_text() for p in sorted(folder.glob(f"packed-{artifact}.*.json"))]
        packed = [PackedArtifact.model_validate_json(t) for t in texts]
    except (OSError, ValidationError):
        raise NotHere(f"artifact {artifact[:12]} is not in the bundle that this checkout packed") from None
    if kept.id != artifact or not packed or any(p.id != artifact for p in packed):
        raise NotHere(f"the store's artifact {artifact[:12]} is damaged: its content has id {kept.id[:12]}")
    return kept, packed


def packed_here(store: Path, manifest: str) -> Path:
    """The manifest of a bundle that this checkout packed. Raises NotHere."""
    path = store / "bundles" / manifest / MANIFEST
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != manifest:
        raise NotHere(f"no bundle with manifest {manifest[:12]} was packed in this checkout")
    return path
