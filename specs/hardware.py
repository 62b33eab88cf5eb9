"""Figures of the hardware that specs are bounded by. Peak figures are datasheet values; achievable ones are either
measured (said so) or an explicit planning fraction of the peak. Nothing is a measurement unless its source says so.
"""

from __future__ import annotations

from kernelmill.specs.data import Frozen
from kernelmill.specs.schema import Cost

PLANNED_FRACTION = 0.85
"""Share of the peak bandwidth that target times plan with where nobody measured: an assumption, not a measurement."""


class Figure(Frozen):
    """``value`` in the unit of its field; ``source`` says where it is from."""

    value: float
    source: str


class Hardware(Frozen):
    """One GPU. Bandwidths in bytes/s (link: what one rank receives), dense rates in FLOP/s, times in seconds."""

    name: str
    target: str
    sms: int
    clock_hz: float
    peak_bandwidth: Figure
    achievable_bandwidth: Figure
    peak_bf16: Figure
    peak_link: Figure
    launch_gap: Figure
    shared_bytes_per_sm: int
    shared_bytes_per_cta: int
    l2_bytes: int
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
    """What a good kernel should reach: achievable bandwidth, half the peak rate, plus the launch chain."""
    return (
        max(
            cost.cold_bytes / hardware.achievable_bandwidth.value,
            cost.flops / (0.5 * hardware.peak_bf16.value),
            cost.link_bytes / hardware.peak_link.value,
        )
        + launches * hardware.launch_gap.value
    )


def _planned(peak: float) -> Figure:
    return Figure(value=PLANNED_FRACTION * peak, source=f"{PLANNED_FRACTION:.0%} of the peak, planned, not measured")


_BLACKWELL_GAP = Figure(
    value=1.1e-6, source="kernel in a CUDA graph as seen on an H200; not measured on Blackwell, an assumption here"
)

GB300 = Hardware(
    name="GB300",
    target="sm_103a",
    sms=148,
    clock_hz=1.92e9,
    peak_bandwidth=Figure(value=8.0e12, source="NVIDIA GB300 datasheet: 8 TB/s HBM3e per GPU"),
    achievable_bandwidth=_planned(8.0e12),
    peak_bf16=Figure(value=2.5e15, source="NVIDIA GB300 datasheet: 2.5 PFLOP/s dense BF16 per GPU"),
    peak_link=Figure(value=0.9e12, source="NVLink 5: 1.8 TB/s in both directions, 0.9 TB/s received"),
    launch_gap=_BLACKWELL_GAP,
    shared_bytes_per_sm=228 * 1024,
    shared_bytes_per_cta=227 * 1024,
    l2_bytes=126 * 1024 * 1024,
)

B200 = GB300.model_copy(
    update={
        "name": "B200",
        "target": "sm_100a",
        "clock_hz": 1.85e9,
        "peak_bandwidth": Figure(value=8.0e12, source="NVIDIA B200 datasheet: 8 TB/s HBM3e"),
        "peak_bf16": Figure(value=2.25e15, source="NVIDIA B200 datasheet: 2.25 PFLOP/s dense BF16"),
    }
)

H200 = Hardware(
    name="H200",
    target="sm_90a",
    sms=132,
    clock_hz=1.83e9,
    peak_bandwidth=Figure(value=4.8e12, source="NVIDIA H200 datasheet: 4.8 TB/s HBM3e"),
    achievable_bandwidth=Figure(
        value=4.3e12, source="measured: device-to-device copy through PyTorch, bytes read and written, one H200"
    ),
    peak_bf16=Figure(value=0.99e15, source="NVIDIA H200 datasheet: 0.99 PFLOP/s dense BF16"),
    peak_link=Figure(value=0.45e12, source="NVLink 4: 900 GB/s in both directions, 450 GB/s received"),
    launch_gap=Figure(value=1.1e-6, source="measured: kernel in a CUDA graph on an H200"),
    shared_bytes_per_sm=228 * 1024,
    shared_bytes_per_cta=227 * 1024,
    l2_bytes=60 * 1000 * 1000,
)

HARDWARE: dict[str, Hardware] = {h.name: h for h in (GB300, B200, H200)}
