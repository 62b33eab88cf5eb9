"""Exit statuses and one-line errors of the command line.

0 done or accepted, 1 rejected or nothing gained, 2 usage, 3 the machine or we could not do it, 4 paused by budget,
130 interrupted and resumable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

OK, REJECTED, USAGE, MACHINE, PAUSED, INTERRUPTED = 0, 1, 2, 3, 4, 130


class UsageFailure(click.ClickException):
    """Bad input: one line naming it and the nearest valid ones."""

    exit_code = USAGE


class MachineTrouble(click.ClickException):
    """We or the machine could not do it: one line what, and what to do."""

    exit_code = MACHINE


class OneLineGroup(click.Group):
    """A group whose usage errors are one line, for it and its subcommands."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        help_of = f" See: {error.ctx.command_path} --help" if error.ctx else ""
        raise UsageFailure(" ".join(error.format_message().split()) + help_of) from None
