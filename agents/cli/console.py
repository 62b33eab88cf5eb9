"""Where the commands print to."""

from __future__ import annotations

from rich.console import Console

PIPED_WIDTH = 160
"""Columns where nobody's terminal sets them, so that no table cuts a name in a file or a pipe."""


def wide_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or :data:`PIPED_WIDTH` where there is none."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PIPED_WIDTH)
