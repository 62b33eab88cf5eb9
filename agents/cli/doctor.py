"""``kernelmill doctor``: what this machine can do, before work starts."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Callable
from typing import NamedTuple

import click
from rich.table import Table

from kernelmill.agents.cli.console import wide_console
from kernelmill.agents.cli.errors import MACHINE
from kernelmill.agents.paths import project_root
from kernelmill.verify import sandbox
from kernelmill.verify.build.assemble import ptxas_version
from kernelmill.verify.verdict import MachineFailure

PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cuda-nvcc", "torch", "llvmlite", "gitpython", "anthropic")
DISK_NEEDED_GB = 2


class Check(NamedTuple):
    """``needed`` False: its absence limits what can be done but fails nothing."""

    name: str
    ok: bool
    found: str
    needed: bool = True


def _python() -> Check:
    return Check("python", sys.version_info >= (3, 11), f"{platform.python_version()}, {platform.machine()}")


def _packages() -> Check:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return Check("packages", not missing, f"missing: {', '.join(missing)}" if missing else ", ".join(found))


def _assembler() -> Check:
    try:
        return Check("ptxas", True, ptxas_version())
    except MachineFailure as error:
        return Check("ptxas", False, str(error))


def _sandbox() -> Check:
    found = sandbox.probe()
    return Check("sandbox", all(found.values()), ", ".join(f"{k} {'yes' if v else 'NO'}" for k, v in found.items()))


def _git() -> Check:
    inside = (project_root() / ".git").exists()
    where = "inside a repository" if inside else "not inside a repository: pull requests need one"
    return Check("git", bool(shutil.which("git")) and inside, where if shutil.which("git") else "git is not installed")


def _disk() -> Check:
    free = shutil.disk_usage(project_root()).free / 1e9
    return Check("disk", free >= DISK_NEEDED_GB, f"{free:.0f} GB free, {DISK_NEEDED_GB} needed")


def _gpu() -> Check:
    found = shutil.which("nvidia-smi") is not None
    return Check(
        "gpu",
        found,
        "nvidia-smi found"
        if found
        else "none: kernels are emulated; `kernelmill bundle` packs them for a machine that has one",
        False,
    )


CHECKS: tuple[Callable[[], Check], ...] = (_python, _packages, _assembler, _sandbox, _git, _disk, _gpu)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def doctor(as_json: bool) -> None:
    """Check this machine: Python, packages, assembler, sandbox, git, disk, GPU. Exit 3 when something needed fails."""
    checks = [check() for check in CHECKS]
    if as_json:
        click.echo(json.dumps([c._asdict() for c in checks], indent=1))
    else:
        table = Table("check", "", "found", box=None)
        for c in checks:
            mark = "[green]ok[/]" if c.ok else "[red]FAIL[/]" if c.needed else "[yellow]none[/]"
            table.add_row(c.name, mark, c.found)
        wide_console().print(table)
    raise SystemExit(MACHINE if any(c.needed and not c.ok for c in checks) else 0)
