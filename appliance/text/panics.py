"""Converts panics of the tokenizers library, which is written in Rust, to ordinary exceptions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def panics_as_errors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function so that it raises RuntimeError instead of a panic. A panic is not an `Exception`,
    so a handler of unexpected errors would not catch it."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:
            raise RuntimeError(f"the tokenizers library failed: {panic}") from panic

    return call
