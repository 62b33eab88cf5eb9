"""Exit statuses and one-line errors of the command line.

0 done or accepted, 1 rejected or nothing gained, 2 usage, 3 the machine or we could not do it, 4 paused by budget,
130 interrupted and resumable.
"""

from __future__ import annotations

import click

OK, REJECTED, USAGE, MACHINE, PAUSED, INTERRUPTED = 0, 1, 2, 3, 4, 130


class UsageFailure(click.ClickException):
    """Bad input: one line naming it and the nearest valid ones."""

    exit_code = USAGE


class MachineTrouble(click.ClickException):
    """We or the machine could not do it: one line what, and what to do."""

    exit_code = MACHINE
