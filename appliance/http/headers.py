"""Helper functions for reading header fields."""

from __future__ import annotations

from collections.abc import Iterable

Headers = Iterable[tuple[bytes, bytes]]
"""Header names and values. Names are in lower case, as in ASGI."""


def header(headers: Headers, wanted: bytes) -> bytes | None:
    """Return the value of the first header with this name."""
    return next((value for name, value in headers if name == wanted), None)


def bearer(headers: Headers) -> tuple[bytes, bytes]:
    """Return the first Authorization header's scheme, in lower case, and its credentials. Both are empty if
    there is no such header."""
    value = header(headers, b"authorization")
    if value is None:
        return b"", b""
    scheme, _, credentials = value.strip().partition(b" ")
    return scheme.lower(), credentials.strip()
