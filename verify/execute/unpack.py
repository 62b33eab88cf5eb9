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
    for artifact, cubin in manifest.artifacts.items():
        entry: PackedArtifact = PackedArtifact.model_validate_json(
            (folder / "artifacts" / f"{artifact}.json").read_text()
        )
        if entry.id != artifact or entry.cubin_sha256 != cubin:
            raise NotWhole(f"artifacts/{artifact}.json is of another artifact")
        packed.append(entry)
    return hashlib.sha256(text).hexdigest(), manifest, packed
