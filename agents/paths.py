"""Where things are: the store of a checkout and the folders that the verifier is told about."""

from __future__ import annotations

from pathlib import Path

import kernelmill.agents.seeds
import kernelmill.kernels.lib


def project_root(start: Path | None = None) -> Path:
    """The nearest folder at or above ``start`` (default: the current one) that holds a ``.git``; else ``start``."""
    here = (start or Path.cwd()).resolve()
    return next((p for p in (here, *here.parents) if (p / ".git").exists()), here)


def store_folder() -> Path:
    """``.kernelmill`` of the project: jobs, caches, evidence. Made when missing; ignored by git."""
    folder = project_root() / ".kernelmill"
    folder.mkdir(exist_ok=True)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    return folder


def lib_folder() -> Path:
    """The shared device functions, ``kernels/lib``."""
    return Path(kernelmill.kernels.lib.__path__[0])


def seed_file(family: str) -> Path:
    """The seed candidate of a family, ``agents/seeds/<family>.py``."""
    return Path(kernelmill.agents.seeds.__path__[0]) / f"{family}.py"
