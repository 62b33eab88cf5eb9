"""Inside the sandbox: a candidate's source to PTX and to an object file with its host code.

Everything here runs beside the candidate, in one process with it, and everything that comes out of this process is
treated as the candidate's word. ``request.json`` says what to build; ``result.json`` has one entry per finished build.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import random
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

DTYPES = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f32": cutlass.Float32,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
    "u8": cutlass.Uint8,
}

MODULE = "candidate"
PREFIX = "km"


def _load_runtime() -> None:
    """The runtime library must be there before a native export (see DESIGN, traps)."""
    for name in ("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13"):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "libcute_dsl_runtime.so" and "stubs" not in file.parts:
                ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
                return
    raise ImportError("libcute_dsl_runtime.so: no nvidia-cutlass-dsl-libs wheel has it")


_load_runtime()


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    # The exporter makes a temporary folder, which the sandbox does not allow: it gets one that is there.
    tempfile.TemporaryDirectory = lambda: contextlib.nullcontext(str(folder / "tmp"))  # type: ignore[misc,assignment]
    # Children of one server share its generator's state: a candidate that draws from it must not look deterministic.
    random.seed()
    built: list[dict[str, Any]] = []
    reply: dict[str, Any] = {"built": built}
    try:
        candidate = load_candidate(folder / "candidate.py", Path(request["lib"]))
        for n, unit in enumerate(request["units"]):
            built.append(_build(folder, n, unit, candidate.launch, candidate.Schedule))
    except BaseException as error:
        reply["error"] = {"kind": kind(error), "message": f"{type(error).__name__}: {error}"[:20000]}
    (folder / "result.json").write_text(json.dumps(reply))


def kind(error: BaseException) -> str:
    """What went wrong, looking through the DSL's own exceptions at what caused them."""
    kinds: tuple[tuple[str, type[BaseException]], ...] = (
        ("exit", SystemExit),
        ("sandbox", PermissionError),
        ("memory", MemoryError),
    )
    causes: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and len(causes) < 32:
        causes.append(at)
        at = at.__cause__ or at.__context__
    return next((name for name, exception in kinds if any(isinstance(c, exception) for c in causes)), "error")


def load_candidate(path: Path, lib: Path) -> Any:
    """The candidate as a module."""
    # The shared device functions come from the folder that the request names, whatever checkout runs this.
    for name, places in (("kernelmill.kernels", []), ("kernelmill.kernels.lib", [str(lib)])):
        package = types.ModuleType(name)
        package.__path__ = places
        sys.modules[name] = package
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    return module


def _build(folder: Path, n: int, unit: dict[str, Any], launch: Any, schedule_class: Any) -> dict[str, Any]:
    dump = folder / f"dump{n}"
    sizes: dict[str, Any] = {}
    arguments = [_fake(t, sizes) for t in unit["tensors"]]
    options = f"--gpu-arch {unit['target']} --keep-ptx --dump-dir {dump}"
    compiled = cute.compile(
        launch, *arguments, *unit["params"], schedule_class(**unit["schedule"]), make_fake_stream(), options=options
    )
    found = sorted(dump.glob("*.ptx"))
    if len(found) != 1:
        raise RuntimeError(f"the compiler left {len(found)} PTX files, 1 expected")
    # Copied: the sandbox lets no file move between folders.
    (folder / f"{n}.ptx").write_bytes(found[0].read_bytes())
    compiled.export_to_c(str(folder), f"host{n}", PREFIX)
    header = (folder / f"host{n}.h").read_text()
    entry = re.search(rf"void (_mlir_{PREFIX}__mlir_ciface_\w+)\(", header)
    if entry is None:
        raise RuntimeError("the exported header has no entry")
    return {"entry": entry.group(1)}


def _fake(tensor: dict[str, Any] | None, sizes: dict[str, Any]) -> Any:
    """A tensor without data: integers are static, names are run-time sizes shared by name, a null stride is a run-time
    stride. Strides are 64-bit: a 32-bit one silently reads as 0 through the C ABI."""
    if tensor is None:
        return None
    for d in tensor["shape"]:
        if isinstance(d, str) and d not in sizes:
            factor, _, _ = d.rpartition("*")
            sizes[d] = cute.sym_int32(divisibility=int(factor or 1))
    shape = tuple(sizes[d] if isinstance(d, str) else d for d in tensor["shape"])
    strides = tuple(cute.sym_int64(divisibility=tensor["divisibility"]) if s is None else s for s in tensor["strides"])
    return make_fake_tensor(DTYPES[tensor["dtype"]], shape, stride=strides, assumed_align=tensor["alignment"])
