"""Failures that are told to a person in a line or two, instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Failure(Exception):
    """The command cannot do what it was asked; the message says what is wrong, with the value, and the
    remedy."""


@contextmanager
def told(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds, whose messages are written for people, into a Failure."""
    try:
        yield
    except kinds as error:
        raise Failure(str(error)) from error
