"""Figures of the hardware that specs are bounded by: each says whether it is a datasheet's, measured, or assumed."""

from __future__ import annotations

from typing import Literal

from kernelmill.specs.data import Frozen
from kernelmill.specs.schema import Cost

PLANNED_BANDWIDTH = 0.85
"""Share of the peak bandwidth that target times plan with where nobody measured: an assumption."""

PLANNED_RATE = 0.5
"""Share of the peak rate that target times plan with: an assumption; decode operations are seldom bound by it."""


class Figure(Frozen):
    """``value`` in the unit of its field; ``source`` says where it is from. ``datasheet`` figures are peaks."""

    value: float
    kind: Literal["datasheet", "measured", "assumed"]
    source: str


class Hardware(Frozen):
    """One GPU. Bandwidths in bytes/s (link: what one rank receives), dense rates in FLOP/s, times in seconds.

    ``chip_source`` tells where the counts, sizes and the clock are from; the clock serves only the ranking model.
    """

    name: str
    target: str
    peak_bandwidth: Figure
    achievable_bandwidth: Figure
    peak_bf16: Figure
    peak_link: Figure
    launch_gap: Figure
    sms: int
    clock_hz: float
    shared_bytes_per_sm: int
    shared_bytes_per_cta: int
    l2_bytes: int
    chip_source: str
    sm_bytes_per_cycle: float = 64.0
    """Bytes that L2 delivers to one SM per cycle: an assumption of the ranking model."""

    @property
    def achievable_bytes_per_cycle(self) -> float:
        """Of the whole GPU, per SM clock cycle."""
        return self.achievable_bandwidth.value / self.clock_hz


def bound_seconds(cost: Cost, hardware: Hardware) -> float:
    """The time nothing can beat on cold data: max(bytes / peak bandwidth, flops / peak rate, link bytes / peak link).

    Without launch cost. Only good for calling a result impossible."""
    return max(
        cost.cold_bytes / hardware.peak_bandwidth.value,
        cost.flops / hardware.peak_bf16.value,
        cost.link_bytes / hardware.peak_link.value,
    )


def target_seconds(cost: Cost, hardware: Hardware, launches: int = 1) -> float:
    """What a good kernel should reach: achievable bandwidth, the planned share of the rate, plus the launch chain."""
    return (
        max(
            cost.cold_bytes / hardware.achievable_bandwidth.value,
            cost.flops / (PLANNED_RATE * hardware.peak_bf16.value),
            cost.link_bytes / hardware.peak_link.value,
        )
        + launches * hardware.launch_gap.value
    )


def _datasheet(value: float, source: str) -> Figure:
    return Figure(value=value, kind="datasheet", source=source)


def _planned(peak: float) -> Figure:
    source = f"{PLANNED_BANDWIDTH:.0%} of the peak, not measured"
    return Figure(value=PLANNED_BANDWIDTH * peak, kind="assumed", source=source)


_HOPPER_GAP = 1.1e-6
_BLACKWELL_GAP = Figure(value=_HOPPER_GAP, kind="assumed", source="as measured on an H200; not measured on Blackwell")
_NVLINK5 = _datasheet(0.9e12, "NVLink 5: 1.8 TB/s per GPU both ways, 0.9 TB/s received")
_BLACKWELL_CHIP = (
    "SMs as the CUDA runtime reports them in published benchmark records ({}); clock assumed; shared memory: CUDA C++ "
    "Programming Guide, compute capability 10.x; L2: 126 MB, Blackwell Tuning Guide"
)

GB300 = Hardware(
    name="GB300",
    target="sm_103a",
    peak_bandwidth=_datasheet(8.0e12, "NVIDIA GB300 NVL72 datasheet: 8 TB/s HBM3e per GPU"),
    achievable_bandwidth=_planned(8.0e12),
    peak_bf16=_datasheet(2.5e15, "NVIDIA GB300 NVL72 datasheet: 2.5 PFLOP/s dense BF16 per GPU"),
    peak_link=_NVLINK5,
    launch_gap=_BLACKWELL_GAP,
    sms=152,
    clock_hz=1.92e9,
    shared_bytes_per_sm=228 * 1024,
    shared_bytes_per_cta=227 * 1024,
    l2_bytes=126 * 1000 * 1000,
    chip_source=_BLACKWELL_CHIP.format("152; the full die has 160"),
)

B200 = Hardware(
    name="B200",
    target="sm_100a",
    peak_bandwidth=_datasheet(8.0e12, "NVIDIA B200 datasheet: up to 8 TB/s HBM3e (7.7 in HGX boards)"),
    achievable_bandwidth=_planned(7.7e12),
    peak_bf16=_datasheet(2.25e15, "NVIDIA B200 datasheet: 2.25 PFLOP/s dense BF16"),
    peak_link=_NVLINK5,
    launch_gap=_BLACKWELL_GAP,
    sms=148,
    clock_hz=1.85e9,
    shared_bytes_per_sm=228 * 1024,
    shared_bytes_per_cta=227 * 1024,
    l2_bytes=126 * 1000 * 1000,
    chip_source=_BLACKWELL_CHIP.format("148"),
)

H200 = Hardware(
    name="H200",
    target="sm_90a",
    peak_bandwidth=_datasheet(4.8e12, "NVIDIA H200 datasheet: 4.8 TB/s HBM3e"),
    achievable_bandwidth=Figure(
        value=4.3e12,
        kind="measured",
        source="device-to-device copy of 8.6 GB through PyTorch, bytes read and written, one H200 SXM, driver 580",
    ),
    peak_bf16=_datasheet(0.99e15, "NVIDIA H200 datasheet: 0.99 PFLOP/s dense BF16 (SXM)"),
    peak_link=_datasheet(0.45e12, "NVLink 4: 900 GB/s per GPU both ways, 450 GB/s received"),
    launch_gap=Figure(
        value=_HOPPER_GAP, kind="measured", source="one launch of a small exported kernel in a CUDA graph, one H200"
    ),
    sms=132,
    clock_hz=1.98e9,
    shared_bytes_per_sm=228 * 1024,
    shared_bytes_per_cta=227 * 1024,
    l2_bytes=60 * 1000 * 1000,
    chip_source="SMs, clock under load and L2 as read on one H200; shared memory: CUDA C++ Programming Guide, 9.0",
)

HARDWARE: dict[str, Hardware] = {h.name: h for h in (GB300, B200, H200)}
