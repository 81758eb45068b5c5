"""Failures that a command reports in a line or two, instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Failure(Exception):
    """The command failed; the message names the cause, the value and the remedy."""

    code = 1
    """The exit code of the command."""


class CommandLineError(Failure):
    """The command line is wrong: a value that cannot be used, or an option that is missing."""

    code = 2


@contextmanager
def as_failure(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds, whose messages are written for people, into a Failure."""
    try:
        yield
    except kinds as error:
        raise Failure(str(error)) from error
