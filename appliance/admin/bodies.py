"""Parses the admin API's JSON request bodies and creates its JSON responses."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from appliance.protocol import ErrorBody

Parameters = TypeVar("Parameters", bound=msgspec.Struct)

_MAX_BODY_BYTES = 64 << 10
ERRORS = dict.fromkeys((400, 401, 403), ErrorBody)
"""Error responses in the API document: invalid request, missing or unknown key, and missing permission."""


class AdminRequestError(Exception):
    """Raised if a request is refused or fails. `status` is the HTTP status code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_parameters(request: Request, action: str, kind: type[Parameters]) -> Parameters:
    """Parse an action's parameters from the request body. An empty body counts as an empty object. Raises
    AdminRequestError with a message that names the action."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise AdminRequestError(
                413, f"the request body is larger than the limit of {_MAX_BODY_BYTES} bytes"
            )
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdminRequestError(400, f"{action}: {error}") from error


def json_answer(value: Any, status: int = 200) -> Response:
    """Return a JSON response with this value as its body."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_answer(status: int, message: str) -> Response:
    """Return an error response with this message."""
    return json_answer(ErrorBody(message=message), status)
