"""Artifacts on disk, by the hash of everything that went into them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from kernelmill.specs.data import canonical_json
from kernelmill.verify.artifact import Artifact

FORMAT = 1
"""Raised when the build path changes what it makes of the same inputs."""

VERSIONED = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cuda-nvcc", "llvmlite")
MAX_BYTES = 2 << 30


@cache
def versions() -> dict[str, str]:
    """Installed versions of what shapes an artifact."""
    return {name: importlib.metadata.version(name) for name in VERSIONED}


def lib_hash(lib: Path) -> str:
    """sha256 over the names and contents of the shared device functions' sources."""
    digest = hashlib.sha256()
    for path in sorted(lib.rglob("*.py")):
        digest.update(str(path.relative_to(lib)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def key(source: str, lib: str, unit: object) -> str:
    """The cache key. ``unit``: spec id, target, binding, schedule and workloads, as plain data."""
    return hashlib.sha256(canonical_json([FORMAT, versions(), source, lib, unit]).encode()).hexdigest()


def load(folder: Path, name: str) -> Artifact | None:
    """The artifact of a key; a missing or damaged entry is None."""
    path = folder / name[:2] / f"{name}.json"
    try:
        text = path.read_text()
        os.utime(path)
        digest, _, body = text.partition("\n")
        if hashlib.sha256(body.encode()).hexdigest() != digest:
            return None
        return Artifact.model_validate_json(body)
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


def store(folder: Path, name: str, artifact: Artifact) -> None:
    """Write an entry, whole or not at all."""
    place = folder / name[:2]
    place.mkdir(parents=True, exist_ok=True)
    body = artifact.model_dump_json()
    with tempfile.NamedTemporaryFile("w", dir=place, delete=False, suffix=".tmp") as file:
        file.write(hashlib.sha256(body.encode()).hexdigest() + "\n" + body)
    Path(file.name).replace(place / f"{name}.json")


def trim(folder: Path, limit: int = MAX_BYTES) -> None:
    """Drop the least recently used entries beyond ``limit`` bytes."""
    entries = []
    for path in folder.glob("*/*"):
        with suppress(OSError):
            status = path.stat()
            entries.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= size
