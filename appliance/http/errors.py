"""HTTP errors detected before the application is called."""

from __future__ import annotations

import json
from typing import Literal

RequestErrorCode = Literal[
    "body_timeout",
    "header_timeout",
    "header_too_large",
    "internal",
    "invalid_host",
    "invalid_http",
    "invalid_path",
    "method_not_allowed",
    "too_many_header_bytes",
    "unsupported_version",
]
"""The `code` field of an error in OpenAI's format, for requests refused without calling the application."""


class RequestError(Exception):
    """Raised for a request that is refused without calling the application. The connection is then closed."""

    def __init__(self, status: int, message: str, code: RequestErrorCode = "invalid_http") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


def error_document(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    """Return an error as JSON in OpenAI's format."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}, ensure_ascii=False).encode()


def drop_frames(error: BaseException) -> None:
    """Drop the stack frames of `error` and its causes. The frames refer to the request's body and texts. If a
    future in a frame also refers to the error, the reference cycle would keep several megabytes alive until
    the garbage collector runs.
    """
    known: BaseException | None = error
    while known is not None:
        known.__traceback__ = None
        known = known.__context__
