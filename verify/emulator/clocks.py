"""The clocks behind the race check (:mod:`.races`): who knows of whose accesses, kept where barriers are.

Python's half. The arrays are shared with native code, which stamps every access and compares.
"""

from __future__ import annotations

import numpy as np

from kernelmill.verify.emulator.races import NEVER, WARP_BITS
from kernelmill.verify.emulator.state import LANES


class Clocks:
    """Of one resident CTA. ``clock[w, x]``: the last epoch of warp x that warp w knows to be over; :data:`NEVER` where
    no race is possible. Epochs are drawn from one growing count, which the next CTA here continues, so that stamps of
    an earlier CTA are always old."""

    def __init__(self, warps: int, shared: int, cell: int) -> None:
        self.warps = warps
        self.cells = -(-shared // cell)
        self.writes = np.zeros(self.cells, np.uint32)
        self.reads = np.zeros(self.cells, np.uint32)
        self.warp_reads = np.zeros((warps, self.cells), np.uint32)
        self.clock = np.full((warps, LANES), NEVER, np.uint32)
        self.shared_clock = np.zeros(LANES, np.uint32)
        self.time = np.zeros(1, np.uint32)

    @staticmethod
    def bytes(warps: int, shared: int, cell: int) -> int:
        """Memory of one CTA's arrays."""
        return 4 * (2 + warps) * -(-shared // cell)

    def describe(self, head: np.ndarray) -> None:
        """Tell native code where the arrays are."""
        head["race_cells"] = self.cells
        head["race_writes"] = self.writes.ctypes.data
        head["race_reads"] = self.reads.ctypes.data
        head["race_warp_reads"] = self.warp_reads.ctypes.data
        head["race_clock"] = self.clock.ctypes.data + 4 * LANES * np.arange(self.warps, dtype=np.uint64)
        head["race_shared_clock"] = self.shared_clock.ctypes.data
        head["race_time"] = self.time.ctypes.data

    def restart(self, head: np.ndarray) -> None:
        """A new CTA: all that was stamped so far is over."""
        past = int(self.time[0])
        self.time[0] = past + 1
        self.clock[:, : self.warps] = past
        np.fill_diagonal(self.clock, NEVER)
        self.shared_clock[:] = 0
        self.gone: np.ndarray | None = None
        head["race_epoch"] = past + 1
        self._limit(head, list(range(self.warps)))

    def _limit(self, head: np.ndarray, warps: list[int]) -> None:
        least = self.clock[warps].min(axis=1)
        head["race_limit"][warps] = least << np.uint32(WARP_BITS) | np.uint32((1 << WARP_BITS) - 1)

    def publish(self, head: np.ndarray, warp: int, known: np.ndarray | None) -> np.ndarray:
        """``warp`` arrives: what it did and knows, joined with what is ``known``. Its next accesses are a new epoch."""
        row = self.clock[warp].copy()
        row[warp] = head["race_epoch"][warp]
        row[self.warps :] = 0
        self.time[0] += 1
        head["race_epoch"][warp] = self.time[0]
        return row if known is None else np.maximum(row, known)

    def learn(self, head: np.ndarray, warps: list[int], published: np.ndarray | None, whole: bool) -> None:
        """A barrier completes: ``warps`` learn what was ``published``, and if it is of the ``whole`` CTA also what the
        exited warps did."""
        if published is None or not warps:
            return
        if whole and self.gone is not None:
            published = np.maximum(published, self.gone)
        self.clock[warps] = np.maximum(self.clock[warps], published)
        self._limit(head, warps)

    def leave(self, head: np.ndarray, warp: int) -> None:
        """``warp`` exits: barriers of the whole CTA no longer wait for it."""
        self.gone = self.publish(head, warp, self.gone)
