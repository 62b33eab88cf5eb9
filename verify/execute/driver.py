"""The CUDA driver, as much of it as launching a plan needs. The lowest layer: tests fake ``cuda.bindings.driver``.

Addresses are plain integers, sizes are bytes. Every call that fails raises :class:`DriverError` with CUDA's own name
for it. Device memory is taken with plain allocations.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class NoDriver(Exception):
    """There is no driver, no binding or no GPU here. One line."""


class DriverError(Exception):
    """A driver call failed. ``name``: CUDA's, such as CUDA_ERROR_ILLEGAL_ADDRESS; ``call``: the function."""

    def __init__(self, name: str, call: str) -> None:
        super().__init__(f"{name} from {call}")
        self.name = name
        self.call = call


def bindings() -> Any:
    """The module of the driver bindings, whichever name it has here. Raises NoDriver."""
    for name in ("cuda.bindings.driver", "cuda.cuda"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise NoDriver("the CUDA driver bindings are missing: install cuda-bindings")


Launches = Sequence[Mapping[str, Any]]
"""The launches of a plan as JSON data (``plan.Launch``)."""


class Driver:
    """The first GPU's primary context (the one that torch uses too), current in the calling thread."""

    def __init__(self) -> None:
        self.cu = bindings()
        try:
            self.call("cuInit", 0)
            self.device = self.call("cuDeviceGet", 0)
            self.context = self.call("cuDevicePrimaryCtxRetain", self.device)
            self.call("cuCtxSetCurrent", self.context)
        except DriverError as error:
            raise NoDriver(f"no usable GPU here: {error}") from None
        except Exception as error:  # The bindings raise what they like when libcuda cannot be loaded.
            why = " ".join(str(error).split()).partition(". ")[0][:200]
            raise NoDriver(f"no CUDA driver here: {why}") from None

    def call(self, function: str, *arguments: Any) -> Any:
        """Call and check; returns the results after the status: none, one, or a tuple."""
        status, *values = getattr(self.cu, function)(*arguments)
        if int(status) != 0:
            raise DriverError(getattr(status, "name", str(int(status))), function)
        return values[0] if len(values) == 1 else tuple(values) or None

    def attribute(self, name: str) -> int:
        """A device attribute, named without its prefix."""
        which = getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", which, self.device))

    def describe(self) -> dict[str, Any]:
        """What device this is."""
        name = self.call("cuDeviceGetName", 96, self.device)
        major, minor = self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")
        return {
            "name": name.split(b"\0")[0].decode(errors="replace"),
            "capability": f"{major}.{minor}",
            "driver": int(self.call("cuDriverGetVersion")),
            "sms": self.attribute("MULTIPROCESSOR_COUNT"),
            "l2_bytes": self.attribute("L2_CACHE_SIZE"),
            "memory_bytes": int(self.call("cuMemGetInfo")[1]),
        }

    def load(self, image: bytes) -> Any:
        """A module from a cubin or from PTX text, which must end with a zero byte."""
        return self.call("cuModuleLoadData", image)

    def unload(self, module: Any) -> None:
        self.call("cuModuleUnload", module)

    def function(self, module: Any, name: str) -> Any:
        return self.call("cuModuleGetFunction", module, name.encode())

    def alloc(self, size: int) -> int:
        return int(self.call("cuMemAlloc", max(1, size)))

    def free(self, address: int) -> None:
        self.call("cuMemFree", address)

    def upload(self, address: int, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        if data.nbytes:
            self.call("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)

    def download(self, address: int, size: int) -> np.ndarray:
        data = np.empty(size, dtype=np.uint8)
        if size:
            self.call("cuMemcpyDtoH", data.ctypes.data, address, size)
        return data

    def copy(self, to: int, source: int, size: int, stream: Any) -> None:
        if size:
            self.call("cuMemcpyDtoDAsync", to, source, size, stream)

    def stream(self) -> Any:
        """A new stream that does not wait for the default one."""
        return self.call("cuStreamCreate", int(self.cu.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def synchronize(self, stream: Any) -> None:
        self.call("cuStreamSynchronize", stream)

    def synchronize_all(self) -> None:
        """Wait for everything in the context, whatever stream it is on."""
        self.call("cuCtxSynchronize")

    def event(self) -> Any:
        return self.call("cuEventCreate", 0)

    def record(self, event: Any, stream: Any) -> None:
        self.call("cuEventRecord", event, stream)

    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two recorded events."""
        return float(self.call("cuEventElapsedTime", start, end)) * 1e-3

    def prepare(self, module: Any, launches: Launches) -> list[Any]:
        """The functions of a plan's launches, allowed as much shared memory and as large clusters as those ask for."""
        functions = []
        attributes = self.cu.CUfunction_attribute
        for launch in launches:
            function = self.function(module, launch["kernel"])
            if launch["shared"]:
                which = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                # One function may be launched with several sizes: the largest must stay allowed.
                most = max(n["shared"] for n in launches if n["kernel"] == launch["kernel"])
                self.call("cuFuncSetAttribute", function, which, most)
            if _volume(launch["cluster"]) > 8:
                which = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                self.call("cuFuncSetAttribute", function, which, 1)
            functions.append(function)
        return functions

    def run_plan(self, functions: Sequence[Any], launches: Launches, at: Mapping[str, int], stream: Any) -> None:
        """Enqueue a plan's launches on ``stream``, with tensors at the addresses ``at``."""
        for function, launch in zip(functions, launches, strict=True):
            self.launch(function, launch, [_filled(p, at) for p in launch["params"]], stream)

    def launch(self, function: Any, launch: Mapping[str, Any], params: Sequence[bytes], stream: Any) -> None:
        """Enqueue one launch. ``params``: the bytes of each kernel parameter."""
        buffers = [ctypes.create_string_buffer(p, len(p)) for p in params]
        pointers = (ctypes.c_void_p * max(1, len(buffers)))(*(ctypes.addressof(b) for b in buffers))
        where = ctypes.addressof(pointers)
        attributes = self._attributes(launch)
        grid, block = launch["grid"], launch["block"]
        if not attributes:
            self.call("cuLaunchKernel", function, *grid, *block, launch["shared"], stream, where, 0)
            return
        config = self.cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = launch["shared"]
        config.hStream = stream
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self.call("cuLaunchKernelEx", config, function, where, 0)

    def _attributes(self, launch: Mapping[str, Any]) -> list[Any]:
        ids = self.cu.CUlaunchAttributeID
        made = []
        if _volume(launch["cluster"]) > 1:
            attribute = self.cu.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dim = attribute.value.clusterDim
            dim.x, dim.y, dim.z = launch["cluster"]
            made.append(attribute)
        if launch["cooperative"]:
            attribute = self.cu.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            made.append(attribute)
        if launch["pdl"]:
            attribute = self.cu.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            made.append(attribute)
        return made

    def begin_capture(self, stream: Any) -> None:
        """In global mode: until the end, anything that strays to another stream of the context fails."""
        mode = self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.call("cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: Any) -> tuple[Any, int]:
        """The instantiated graph and how many nodes it has."""
        graph = self.call("cuStreamEndCapture", stream)
        counted = self.call("cuGraphGetNodes", graph)
        nodes = int(counted[-1] if isinstance(counted, tuple) else counted)
        return self.call("cuGraphInstantiate", graph, 0), nodes

    def replay(self, graph: Any, stream: Any) -> None:
        self.call("cuGraphLaunch", graph, stream)

    def drop_graph(self, graph: Any) -> None:
        self.call("cuGraphExecDestroy", graph)


def _volume(dim: Sequence[int]) -> int:
    return dim[0] * dim[1] * dim[2]


def _filled(param: Mapping[str, Any], at: Mapping[str, int]) -> bytes:
    """A parameter's bytes with its pointers filled in."""
    data = bytearray.fromhex(param["bytes"])
    for pointer in param["pointers"]:
        where = pointer["at"]
        data[where : where + 8] = (at[pointer["tensor"]] + pointer["offset"]).to_bytes(8, "little")
    return bytes(data)
