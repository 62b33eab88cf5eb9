"""Reading a bundle, on the machine that runs it: whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kernelmill.verify.execute.records import MANIFEST, SCHEMA, Manifest, PackedArtifact


class NotWhole(Exception):
    """The bundle is damaged or of another version. One line."""


def read_bundle(folder: Path) -> tuple[str, Manifest, list[PackedArtifact]]:
    """The manifest's sha256, the manifest, and every artifact. Raises NotWhole."""
    try:
        text = (folder / MANIFEST).read_bytes()
        manifest = Manifest.model_validate_json(text)
    except (OSError, ValueError) as error:
        raise NotWhole(f"{MANIFEST}: {str(error).splitlines()[0]}") from None
    if manifest.schema_version != SCHEMA:
        raise NotWhole(f"{MANIFEST} has schema {manifest.schema_version}, this runner reads {SCHEMA}")
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            raise NotWhole(f"{name} is missing or not the file that was packed")
    packed = []
    for path in (folder / name for name in manifest.files if name.startswith("artifacts/") and name.endswith(".json")):
        entry: PackedArtifact = PackedArtifact.model_validate_json(path.read_text())
        if path.stem != entry.name or manifest.artifacts.get(entry.id) != entry.cubin_sha256:
            raise NotWhole(f"{path.name} is of another artifact")
        packed.append(entry)
    if {p.id for p in packed} != set(manifest.artifacts):
        raise NotWhole(f"{MANIFEST} names artifacts that are not described")
    order = list(manifest.artifacts)
    packed.sort(key=lambda p: (order.index(p.id), p.spec))
    return hashlib.sha256(text).hexdigest(), manifest, packed
