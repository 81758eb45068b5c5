"""Converts panics of the tokenizers library, which is written in Rust, to ordinary exceptions."""

from __future__ import annotations


def raise_panic(error: BaseException) -> None:
    """Raise RuntimeError if `error` is a panic. A panic is not an `Exception`, so a handler of unexpected
    errors would not catch it."""
    if not isinstance(error, Exception | KeyboardInterrupt | SystemExit):
        raise RuntimeError(f"the tokenizers library failed: {error}") from error
