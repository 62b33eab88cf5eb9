"""PTX text to :mod:`.ir`. The text is an attacker's: bounded size, linear time, nothing skipped silently."""

from __future__ import annotations

from kernelmill.verify.emulator.ir import Module


def parse(text: str) -> Module:
    """Parse one PTX module. Raises :class:`~.ir.PtxError` for bad text and :class:`~.interface.Unsupported` for legal
    PTX that this emulator does not know. ``Kernel.registers`` lists the registers that an instruction names."""
    raise NotImplementedError
