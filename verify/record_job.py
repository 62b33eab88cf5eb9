"""Inside the sandbox: run a candidate's host code against a stand-in of the DSL's runtime and write down its launches.

The object file is native code that the candidate's process made: it runs here, in a second sandboxed child that has
neither the source nor a GPU, and what it launches is recorded, not done. Addresses are made up by the request. Each
workload is recorded with two sets of addresses, so that the trusted side can tell pointers from numbers.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

PREFIX = "km"
MAX_LAUNCHES = 64
ATTRIBUTE_BYTES = 72
"""sizeof(cudaLaunchAttribute): an id, padding, a union of 64 bytes (CUDA runtime API, driver_types.h)."""
CLUSTER, COOPERATIVE, PROGRAMMATIC = 4, 2, 6
"""cudaLaunchAttributeID values."""
KNOWN_ATTRIBUTES = (CLUSTER, COOPERATIVE, PROGRAMMATIC)

SCRUBBING = """
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
define internal void @scrub() noinline {
  %space = alloca [131072 x i8]
  call void @llvm.memset.p0.i64(ptr %space, i8 0, i64 131072, i1 true)
  ret void
}
define void @call(ptr %function, ptr %arguments, i32 %count) {
  call void @scrub()
  call void %function(ptr %arguments, i32 %count)
  ret void
}
"""
STAND_IN = """
declare i32 @recorded_{name}(i64, i64, i64, i64, i64, i64)
define i32 @{name}(i64 %a, i64 %b, i64 %c, i64 %d, i64 %e, i64 %f) {{
  %status = call i32 @recorded_{name}(i64 %a, i64 %b, i64 %c, i64 %d, i64 %e, i64 %f)
  call void @scrub()
  ret i32 %status
}}
"""
"""The host code always runs on a stack of zeros: the padding in its parameters, which it never sets, is then always the
same, and shows nothing of this process' addresses."""


class Refused(Exception):
    """The host code did something that a launch plan cannot say."""


class Recorder:
    """The stand-in: C functions under the runtime library's names, and what they were called with."""

    def __init__(self, param_bytes: dict[str, list[int]], result: Path) -> None:
        self._param_bytes = param_bytes
        self._kernels: list[str] = []
        self._callbacks: list[Any] = []
        self.code = SCRUBBING
        self._result = result
        self.launches: list[dict[str, Any]] = []
        self.problem: str | None = None
        for name, function in (
            ("_cudaLibraryLoadData", self._load),
            ("_cudaLibraryUnload", self._nothing),
            ("_cudaLibraryGetKernel", self._get_kernel),
            ("_cudaGetDevice", self._zero),
            ("_cudaDeviceGetAttribute", self._device_attribute),
            ("_cuKernelGetAttribute", self._kernel_attribute),
            ("_cudaFuncSetAttribute", self._nothing),
            ("_cudaKernelSetAttributeForDevice", self._nothing),
            ("_cudaLaunchKernelEx", self._launch),
            ("cuda_dialect_init_library_once", self._nothing),
        ):
            self._define(name, function)

    def _define(self, name: str, function: Any) -> None:
        def guarded(*arguments: int) -> int:
            try:
                return int(function(*arguments) or 0)
            except Exception as error:
                self.problem = self.problem or f"{name}: {error}"
                return 1

        callback = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 6)(guarded)
        self._callbacks.append(callback)
        self.code += STAND_IN.format(name=name)
        llvm.add_symbol(f"recorded_{name}", ctypes.cast(callback, ctypes.c_void_p).value)

    def give_up(self, problem: str) -> None:
        """End this process with one recording that says why: native code in a loop cannot be made to return."""
        self._result.write_text(json.dumps([{"status": 1, "launches": [], "problem": problem}]))
        os._exit(0)

    def _nothing(self, *_: int) -> int:
        return 0

    def _load(self, out: int, *_: int) -> None:
        ctypes.c_uint64.from_address(out).value = 0x5555

    def _zero(self, out: int, *_: int) -> None:
        ctypes.c_int32.from_address(out).value = 0

    def _device_attribute(self, out: int, *_: int) -> None:
        # Asked for the largest dynamic shared memory that may be opted into (227 KiB on every target).
        ctypes.c_int32.from_address(out).value = 227 * 1024

    def _kernel_attribute(self, out: int, *_: int) -> None:
        ctypes.c_int32.from_address(out).value = 0

    def _get_kernel(self, out: int, _library: int, name: int, *_: int) -> None:
        self._kernels.append(ctypes.string_at(name).decode("ascii"))
        ctypes.c_uint64.from_address(out).value = len(self._kernels)

    def _launch(self, config: int, kernel: int, arguments: int, *_: int) -> None:
        if len(self.launches) >= MAX_LAUNCHES:
            self.give_up(f"more than {MAX_LAUNCHES} launches")
        name = self._kernels[kernel - 1]
        sizes = self._param_bytes.get(name)
        if sizes is None:
            raise Refused(f"kernel {name[:200]} is not in the PTX")
        words = (ctypes.c_uint32 * 13).from_address(config)
        attributes = self._attributes(ctypes.c_uint64.from_address(config + 40).value, words[12])
        pointers = (ctypes.c_uint64 * len(sizes)).from_address(arguments)
        self.launches.append(
            {
                "kernel": name,
                "grid": list(words[0:3]),
                "block": list(words[3:6]),
                "shared": ctypes.c_uint64.from_address(config + 24).value,
                "stream": ctypes.c_uint64.from_address(config + 32).value,
                "params": [ctypes.string_at(p, n).hex() for p, n in zip(pointers, sizes, strict=True)],
                **attributes,
            }
        )

    def _attributes(self, at: int, count: int) -> dict[str, Any]:
        if count > 16:
            raise Refused(f"{count} launch attributes")
        found: dict[str, Any] = {}
        for n in range(count):
            base = at + n * ATTRIBUTE_BYTES
            kind = ctypes.c_uint32.from_address(base).value
            value = list((ctypes.c_uint32 * 3).from_address(base + 8))
            if kind == CLUSTER:
                found["cluster"] = value
            elif kind == COOPERATIVE:
                found["cooperative"] = bool(value[0])
            elif kind == PROGRAMMATIC:
                found["pdl"] = bool(value[0])
            else:
                raise Refused(f"launch attribute {kind}")
        return found


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    recorder = Recorder(request["param_bytes"], folder / "result.json")
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(recorder.code), llvm.Target.from_default_triple().create_target_machine()
    )
    engine.add_object_file(llvm.ObjectFileRef.from_path(str(folder / "host.o")))
    engine.finalize_object()
    _initialise(engine)
    recordings = []
    for call in request["calls"]:
        recorder.launches = []
        status = _call(engine, request["entry"], [_argument(a) for a in call])
        recordings.append({"status": status, "launches": recorder.launches, "problem": recorder.problem})
    (folder / "result.json").write_text(json.dumps(recordings))


def _initialise(engine: Any) -> None:
    library = ctypes.c_uint64(0)
    handle = ctypes.pointer(library)
    _call(engine, f"_mlir_{PREFIX}_cuda_init", [ctypes.pointer(handle)])
    _call(engine, f"_mlir_{PREFIX}_cuda_load_to_device", [ctypes.pointer(handle), ctypes.pointer(ctypes.c_int32(0))])


def _argument(words: list[list[Any]]) -> Any:
    """One ABI argument: a struct of (type, value) fields in order."""
    kinds = {"pointer": ctypes.c_uint64, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
    fields = [(f"f{n}", kinds[kind]) for n, (kind, _) in enumerate(words)]
    struct = type("Argument", (ctypes.Structure,), {"_fields_": fields})
    return ctypes.pointer(struct(*(value for _, value in words)))


def _call(engine: Any, name: str, arguments: list[Any]) -> int:
    """Call an entry of the C ABI: an array of pointers to the arguments, the last one to the status."""
    address = engine.get_function_address(name)
    if not address:
        raise Refused(f"the object has no entry {name[:200]}")
    status = ctypes.c_int32(0)
    pointers = [*arguments, ctypes.pointer(status)]
    array = (ctypes.c_void_p * len(pointers))(*[ctypes.cast(p, ctypes.c_void_p) for p in pointers])
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)(engine.get_function_address("call"))
    call(address, ctypes.cast(array, ctypes.c_void_p), len(pointers))
    return status.value
