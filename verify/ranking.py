"""A small model that orders accepted candidates by the emulator's counters.

It is a **model, in model cycles, never a time**: nothing here was measured on a GPU. Per launch, on the busiest SM:

    issue   = warp instructions / issue ports in use
    shared  = shared-memory wavefronts (bank conflicts included)
    memory  = max(bytes / SM's share of achievable bandwidth,  load rounds x latency)
    cost    = launch gap + max(issue, shared, memory) + barriers x barrier cost

``load rounds x latency`` is the in-flight limit: a warp that waits for its loads ``r`` times moves its bytes no faster
than ``r`` latencies allow (Little's law); CTAs that do not fit on the SM together wait for each other. The busiest SM
runs ``ceil(CTAs / SMs)`` CTAs, of which as many are resident at once as threads and shared memory allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kernelmill.specs.hardware import Hardware
from kernelmill.verify.emulator.interface import KernelCounters

ISSUE_PORTS = 4
"""Warp schedulers of an SM, one warp instruction a cycle each (CUDA C++ Programming Guide, compute capability 9.x)."""

LATENCY = 800.0
"""Cycles from a load that misses L2 to its data: order of magnitude, an assumption of the model."""

BARRIER = 30.0
"""Cycles that a CTA-wide barrier costs: order of magnitude, an assumption of the model."""

LAUNCH_GAP = 1500.0
"""Cycles between two dependent launches: order of magnitude (about 1 us), an assumption of the model."""

RANKED = 0.6
"""Rank correlation with measured times under which the model's order of schedules is worth nothing: `unranked`."""

MAX_THREADS_PER_SM = 2048
MAX_CTAS_PER_SM = 32
"""CUDA C++ Programming Guide, technical specifications for compute capability 9.0 and 10.x."""


def model_cost(counters: Sequence[KernelCounters], hardware: Hardware) -> float:
    """Model cycles of one call: the sum over its launches. Never to be shown as a time."""
    return sum(_launch(kernel, hardware) for kernel in counters)


def rank_correlation(costs: Sequence[float], times: Sequence[float]) -> float | None:
    """Spearman's: of the ranks of model costs and of measured times, ties sharing their mean rank. None where there are
    fewer than three or one side has no order."""
    if len(costs) < 3:
        return None
    a, b = _ranks(costs), _ranks(times)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    data = np.asarray(values, dtype=np.float64)
    below, same = data[:, None] > data[None, :], data[:, None] == data[None, :]
    return below.sum(1) + (same.sum(1) - 1) / 2


def _launch(kernel: KernelCounters, hardware: Hardware) -> float:
    on_busiest = math.ceil(kernel.ctas / hardware.sms)
    resident = max(1, min(on_busiest, _resident(kernel, hardware)))
    waves = math.ceil(on_busiest / resident)
    warps = math.ceil(kernel.threads / 32) * resident
    issue = kernel.issue_slots_busiest * on_busiest / min(ISSUE_PORTS, warps)
    shared = float(kernel.shared_cycles_busiest * on_busiest)
    share = hardware.achievable_bytes_per_cycle / min(hardware.sms, kernel.ctas)
    per_sm = min(share, hardware.sm_bytes_per_cycle)
    memory = max(
        kernel.global_bytes_busiest * on_busiest / per_sm,
        kernel.load_rounds_busiest / math.ceil(kernel.threads / 32) * LATENCY * waves,
    )
    return LAUNCH_GAP + max(issue, shared, memory) + kernel.barriers * BARRIER * waves


def _resident(kernel: KernelCounters, hardware: Hardware) -> int:
    threads = MAX_THREADS_PER_SM // max(32, kernel.threads)
    shared = hardware.shared_bytes_per_sm // kernel.shared_bytes if kernel.shared_bytes else MAX_CTAS_PER_SM
    return min(MAX_CTAS_PER_SM, threads, shared)
