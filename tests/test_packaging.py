"""The package list equals the tree, and nothing imports a top-level folder under its bare name."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = ("agents", "kernels", "specs", "verify")
# Who may import whom (DESIGN: imports go one way).
ALLOWED = {
    "specs": {"specs"},
    "verify": {"specs", "verify"},
    "kernels": {"specs", "kernels"},
    "agents": {"agents", "kernels", "specs", "verify"},
}
KERNELS_MAY_USE = {"kernelmill.verify.artifact", "kernelmill.verify.plan"}


def sources() -> list[Path]:
    return sorted(p for top in TOP for p in (ROOT / top).rglob("*.py"))


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which package is meant"
            names.append(node.module or "")
            names += [f"{node.module}.{a.name}" for a in node.names]
    return names


def test_package_list_equals_the_tree() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    in_tree = {
        "kernelmill." + ".".join(p.parent.relative_to(ROOT).parts)
        for top in TOP
        for p in (ROOT / top).rglob("__init__.py")
    }
    # Merged kernels are data of the checkout, found by path; they are not packages.
    assert declared == in_tree
    for path in sources():
        folder = path.parent.relative_to(ROOT).parts
        if folder[:2] != ("kernels", "ops"):
            assert (path.parent / "__init__.py").exists(), f"{path} lies in a folder that is no package"


def test_kernelmill_is_a_namespace_package() -> None:
    import kernelmill

    assert kernelmill.__file__ is None


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    top = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] not in TOP, f"{path}: import kernelmill.{parts[0]}, not {parts[0]}"
        if parts[0] == "kernelmill" and len(parts) > 1:
            kernel_exception = top == "kernels" and any(name.startswith(k) for k in KERNELS_MAY_USE)
            assert parts[1] in ALLOWED[top] or kernel_exception, f"{path}: {top} must not import {name}"


def test_bare_folder_names_are_not_importable(tmp_path: Path) -> None:
    code = f"import importlib.util as u, sys; sys.exit(any(u.find_spec(n) for n in {TOP!r}))"
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=False).returncode == 0


def test_a_wheel_installs_and_imports(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet"]
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT], check=True)
    (wheel,) = wheels.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = (p.relative_to(ROOT) for p in sources())
    assert {f"kernelmill/{m}" for m in modules if m.parts[:2] != ("kernels", "ops")} <= names
    assert "kernelmill/__init__.py" not in names
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    code = "import kernelmill.specs.data as d; print(d.__file__)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(site)}, check=True, capture_output=True
    )
    assert Path(found.stdout.decode().strip()).is_relative_to(site)
