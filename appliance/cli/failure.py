"""Failures reported in one or two lines instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Failure(Exception):
    """Raised if a command fails. The message contains the cause, the value and the remedy."""

    code = 1
    """Exit code of the command."""


class CommandLineError(Failure):
    """Raised if the command line is invalid: a value is unusable, or an option is missing."""

    code = 2


@contextmanager
def as_failure(*kinds: type[Exception]) -> Iterator[None]:
    """Convert exceptions of these types, whose messages are meant for users, to a Failure."""
    try:
        yield
    except kinds as error:
        raise Failure(str(error)) from error
