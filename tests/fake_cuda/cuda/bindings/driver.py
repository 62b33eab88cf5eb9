"""The CUDA driver on the host, for tests: memory is the host's, time is counted, and a cubin is a description in JSON.

A fake cubin is ``FAKE`` and then ``{"spec": name, "axes": {kernel: axes}, "bad": what is wrong, "us": time}``. Its
kernels take one pointer per tensor of the spec, and compute the family's plain implementation on the layouts of
``layout.py``. Our own PTX kernels are known by name. ``bad`` makes a kernel misbehave as the tests of each check need.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from enum import IntEnum
from typing import Any

import numpy as np
import torch


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_MISALIGNED_ADDRESS = 716
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906


class CUstream_flags(IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class CUfunction_attribute(IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


class CUlaunchAttributeID(IntEnum):
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Bag:
    """Holds whatever attributes are set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = _Bag()
        return self.__dict__[name]


class CUlaunchConfig(_Bag):
    pass


class CUlaunchAttribute(_Bag):
    pass


class _Stream:
    def __init__(self) -> None:
        self.capturing: list[Any] | None = None


WORLD = os.environ.get("FAKE_CUDA", "")
"""What is wrong with the machine: ``no device``, ``wrong copies``."""

_OK = CUresult.CUDA_SUCCESS
_ATTRIBUTES = {16: 132, 38: 50 << 20, 75: 9, 76: 0}
_memory: dict[int, np.ndarray] = {}
_streams: dict[int, _Stream] = {}
_sticky: CUresult | None = None
_clock = 0.0  # microseconds


def CUstream(handle: Any) -> _Stream:
    return _streams.setdefault(int(handle), _Stream()) if not isinstance(handle, _Stream) else handle


def _advance(us: float) -> None:
    global _clock
    _clock += us


def _do(stream: _Stream, work: Any) -> None:
    if stream.capturing is not None:
        stream.capturing.append(work)
    else:
        work()


def cuInit(flags: int) -> tuple[Any, ...]:
    if WORLD == "no device":
        return (CUresult.CUDA_ERROR_NO_DEVICE,)
    _pretend()
    return (_OK,)


def cuDeviceGet(ordinal: int) -> tuple[Any, ...]:
    return _OK, 0


def cuDevicePrimaryCtxRetain(device: int) -> tuple[Any, ...]:
    return _OK, 1


def cuCtxSetCurrent(context: int) -> tuple[Any, ...]:
    return (_OK,)


def cuDeviceGetAttribute(which: int, device: int) -> tuple[Any, ...]:
    return _OK, _ATTRIBUTES[int(which)]


def cuDeviceGetName(length: int, device: int) -> tuple[Any, ...]:
    return _OK, b"FAKE GPU\0\0"


def cuDriverGetVersion() -> tuple[Any, ...]:
    return _OK, 13000


def cuMemGetInfo() -> tuple[Any, ...]:
    return _OK, 1 << 37, 1 << 37


def cuModuleLoadData(image: bytes) -> tuple[Any, ...]:
    if image.startswith(b"FAKE"):
        return _OK, json.loads(image[4:])
    assert image.endswith(b"\0") and b".visible .entry" in image
    return _OK, {"ptx": True}


def cuModuleGetFunction(module: Any, name: bytes) -> tuple[Any, ...]:
    return _OK, (module, name.decode())


def cuFuncSetAttribute(function: Any, which: int, value: int) -> tuple[Any, ...]:
    return (_OK,)


def cuMemAlloc(size: int) -> tuple[Any, ...]:
    data = np.zeros(size + 256, dtype=np.uint8)
    address = -(-data.ctypes.data // 256) * 256
    _memory[address] = data
    return _OK, address


def cuMemFree(address: int) -> tuple[Any, ...]:
    del _memory[address]
    return (_OK,)


def cuMemcpyHtoD(to: int, source: int, size: int) -> tuple[Any, ...]:
    ctypes.memmove(to, source, size)
    return (_OK,)


def cuMemcpyDtoH(to: int, source: int, size: int) -> tuple[Any, ...]:
    ctypes.memmove(to, source, size)
    return (_sticky or _OK,)


def cuMemcpyDtoDAsync(to: int, source: int, size: int, stream: _Stream) -> tuple[Any, ...]:
    def work() -> None:
        ctypes.memmove(to, source, size)
        _advance(2 * size / 4.3e6)

    _do(stream, work)
    return (_OK,)


def cuStreamCreate(flags: int) -> tuple[Any, ...]:
    return _OK, _Stream()


def cuStreamSynchronize(stream: _Stream) -> tuple[Any, ...]:
    return (_sticky or _OK,)


def cuCtxSynchronize() -> tuple[Any, ...]:
    return (_sticky or _OK,)


def cuEventCreate(flags: int) -> tuple[Any, ...]:
    return _OK, _Bag()


def cuEventRecord(event: Any, stream: _Stream) -> tuple[Any, ...]:
    event.at = _clock
    return (_OK,)


def cuEventElapsedTime(start: Any, end: Any) -> tuple[Any, ...]:
    return _OK, (end.at - start.at) / 1e3


def cuStreamBeginCapture(stream: _Stream, mode: Any) -> tuple[Any, ...]:
    assert mode is CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    stream.capturing = []
    return (_OK,)


def cuStreamEndCapture(stream: _Stream) -> tuple[Any, ...]:
    work, stream.capturing = stream.capturing, None
    return _OK, work


def cuGraphGetNodes(graph: Any, count: int = 0) -> tuple[Any, ...]:
    return _OK, [], len(graph)


def cuGraphInstantiate(graph: Any, flags: int) -> tuple[Any, ...]:
    return _OK, graph


def cuGraphLaunch(graph: Any, stream: _Stream) -> tuple[Any, ...]:
    for work in graph:
        work()
    return (_OK,)


def cuGraphExecDestroy(graph: Any) -> tuple[Any, ...]:
    return (_OK,)


def cuLaunchKernel(function: Any, *rest: Any) -> tuple[Any, ...]:
    *dims, _, stream, params, _ = rest
    module, name = function
    if name == "kernelmill_copy":
        to, source, chunks = _words(params, 3)
        assert dims[0] * dims[3] >= chunks
        size = 16 * chunks - 16 * (WORLD == "wrong copies")
        _do(stream, lambda: (ctypes.memmove(to, source, size), _advance(32 * chunks / 4.3e6)))
    elif name == "kernelmill_read":
        _, rounds, _ = _words(params, 3)
        _do(stream, lambda: _advance(rounds * 8 * dims[0] * dims[3] * 16 / 4.5e6))
    elif name == "kernelmill_empty":
        _do(stream, lambda: _advance(1.1))
    else:
        from kernelmill.specs.registry import find

        spec = find(module["spec"])[0]
        addresses = _words(params, len(spec.tensors))
        if module.get("bad") == "refused":
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        if module.get("bad") == "strays" and stream.capturing is not None:
            return (CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,)
        if module.get("bad") == "second node" and stream.capturing is not None:
            stream.capturing.append(lambda: None)
        _do(stream, lambda: _kernel(module, spec, name, addresses))
    return (_OK,)


def cuLaunchKernelEx(config: CUlaunchConfig, function: Any, params: int, extra: int) -> tuple[Any, ...]:
    assert config.numAttrs == len(config.attrs) > 0
    grid = config.gridDimX, config.gridDimY, config.gridDimZ
    block = config.blockDimX, config.blockDimY, config.blockDimZ
    return cuLaunchKernel(function, *grid, *block, config.sharedMemBytes, config.hStream, params, extra)


def _words(params: int, count: int) -> list[int]:
    pointers = (ctypes.c_void_p * count).from_address(params)
    return [ctypes.c_uint64.from_address(p).value for p in pointers]


def _view(address: int, tensor: Any, axes: Any) -> torch.Tensor:
    from kernelmill.verify.layout import layout

    at = layout(tensor, axes)
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * at.bytes).from_address(address))
    return torch.from_numpy(raw).view(tensor.dtype.torch).as_strided(at.shape, at.strides)


_before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
"""Kernel to its last first tensor and output, for the kernel that keeps them."""


def _kernel(module: Any, spec: Any, name: str, addresses: list[int]) -> None:
    from kernelmill.specs.registry import family
    from kernelmill.specs.schema import Role
    from kernelmill.verify.layout import layout

    global _sticky
    module["calls"] = module.get("calls", 0) + 1
    bad, axes = module.get("bad"), spec.point(module["axes"][name])
    tensors = {t.name: _view(a, t, axes) for t, a in zip(spec.tensors, addresses, strict=True)}
    faults = {"illegal": 700, "misaligned": 716, "trap": 719, "no memory": 2}
    if bad in faults:
        _sticky = CUresult(faults[bad])
        return
    if bad == "hang":
        time.sleep(3600)
    if bad == "dies":
        sys.exit(5)
    made = family(spec.family).functions.baseline(tensors, axes)
    out = next(t for t in spec.tensors if t.role is Role.output)
    where = dict(zip((t.name for t in spec.tensors), addresses, strict=True))
    if bad == "stale":
        x = tensors[spec.tensors[0].name].clone()
        old = _before.setdefault(name, (x, made[out.name]))
        if int((old[0] != x).sum()) == 1:
            made[out.name] = old[1]
        else:
            _before[name] = (x, made[out.name])
    if bad == "wrong":
        made[out.name][0, 0] += 1
    if bad == "late" and module["calls"] == 60:
        made[out.name][0, 0] += 1
    for tensor in spec.tensors:
        if tensor.name in made and tensor.role in (Role.state, Role.output):
            value = made[tensor.name]
            if bad == "poison left" and tensor is out:
                value[-1, -1] = tensors[tensor.name][-1, -1]
            tensors[tensor.name].copy_(value)
    if bad == "guard":
        ctypes.memset(where[out.name] + layout(out, axes).bytes + 8, 0, 2)
    if bad == "guard before":
        ctypes.memset(where[out.name] - 2, 0, 2)
    if bad == "gap":
        ctypes.memset(where[out.name] + 2 * axes["N"], 0, 2)
    if bad == "input":
        tensors[spec.tensors[0].name].view(torch.uint8)[0, 0] ^= 1
    _advance(module.get("us", 2.0))


class _FakeTorchStream:
    cuda_stream = 7


class _FakeGraph:
    def replay(self) -> None:
        _advance(32 * 3.0)


def _pretend() -> None:
    """The timing child's torch works on the host. Not on import: torch itself imports these bindings."""
    if "kernelmill.verify.execute.bench" in sys.modules:
        bench = sys.modules["kernelmill.verify.execute.bench"]
        bench.DEVICE, bench.CEILING_BYTES = "cpu", 1 << 20  # type: ignore[attr-defined]
        torch.cuda.Stream = _FakeTorchStream  # type: ignore[assignment,misc]
        torch.cuda.CUDAGraph = _FakeGraph  # type: ignore[assignment,misc]
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
        torch.cuda.graph = lambda *_, **__: contextlib.nullcontext()  # type: ignore[assignment,misc]
