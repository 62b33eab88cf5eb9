"""From a stopped run to a finding: which tensor and index an address means, and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernelmill.verify.emulator.interface import Buffer, Finding, Unsupported
from kernelmill.verify.emulator.machine import Stop
from kernelmill.verify.emulator.state import (
    ACCESS_FAULTS,
    FAULTS,
    MAX_COPIES,
    RACES,
    REGION_SHIFT,
    SHARED_BASE,
    SPACES,
    Fault,
    Space,
    region_base,
)


@dataclass(frozen=True)
class Place:
    """What a region of global memory is."""

    name: str
    space: Literal["global", "param", "const"]
    buffer: Buffer | None


def index_of(buffer: Buffer, offset: int) -> tuple[int, ...]:
    """The index of the element at byte ``offset`` from a buffer's start, which may be negative or beyond its end: then
    the slowest dimension leaves its range."""
    element = offset // buffer.itemsize
    index = [0] * len(buffer.shape)
    by_stride = sorted(range(len(buffer.shape)), key=lambda d: (-buffer.strides[d], d))
    for d in by_stride:
        if buffer.strides[d] > 0 and buffer.shape[d] > 1:
            index[d], element = divmod(element, buffer.strides[d])
    return tuple(index)


_WHAT = {
    "out_of_bounds": "outside of any tensor",
    "misaligned": "not a multiple of the access width",
    "touched": "a store to memory that must not change",
    "uninitialised": "a read of bytes that nobody wrote",
    "trap": "the kernel executed a trap",
    "divergent_barrier": "not all lanes that must execute this together do, or a member mask does not name one",
    "missing_wait": "an access to bytes that a cp.async may still be writing",
}


def finding_of(stop: Stop, kernel: str, places: dict[int, Place]) -> Finding:
    """The finding of a stopped run. ``places``: by region number."""
    base = {"kernel": kernel, "cta": stop.cta.coordinates, "warp": stop.warp}
    if stop.code != "fault":
        where = stop.where
        return Finding.model_validate(
            base
            | {"code": stop.code, "lane": stop.lane, "message": stop.reason}
            | ({"line": where.line, "instruction": where.text} if where else {})
        )
    head = stop.cta.head[stop.warp]
    fault = int(head["fault_code"])
    if fault == Fault.COPIES_FULL:
        raise Unsupported(f"more than {MAX_COPIES} cp.async of one warp in flight")
    code = FAULTS[fault]
    what = _WHAT.get(code, "")
    if fault in RACES:
        now, before = RACES[fault]
        what = f"{now} bytes that warp {int(head['fault_other'])} has {before}, with no barrier between the two"
    instr = stop.cta.grid.generated.instructions[int(head["fault_instr"])]
    fields = base | {
        "code": code,
        "lane": int(head["fault_lane"]),
        "line": instr.line,
        "instruction": instr.text,
        "message": what,
    }
    if fault not in ACCESS_FAULTS:
        return Finding.model_validate(fields)
    address = int(head["fault_address"])
    space = int(head["fault_space"])
    fields |= {"address": address, "space": SPACES[space]}
    if space == Space.GLOBAL:
        number = address >> REGION_SHIFT
        place = places.get(number)
        if place is None:
            fields["message"] = f"{what}: the address is no tensor's"
        else:
            offset = address - region_base(number)
            fields["space"] = place.space
            message = f"{what}: byte {offset} of {place.name}"
            fields["message"] = message
            if place.buffer is not None:
                fields["message"] = f"{message}, which has {place.buffer.data.size} bytes"
                fields |= {"tensor": place.buffer.name, "index": index_of(place.buffer, offset)}
    elif space == Space.SHARED:
        size = stop.cta.grid.shared
        fields["message"] = f"{what}: byte {address - SHARED_BASE} of {size} bytes of shared memory"
    return Finding.model_validate(fields)
