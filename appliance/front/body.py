"""Reads a request's JSON body into a struct and enforces limits on the body's size and contents. Error
messages contain the name of the invalid field."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.requests import Request

from appliance.front.body_budget import BodyReservation
from appliance.front.errors import ApiError, invalid
from appliance.front.request_context import RequestContext, context_of
from appliance.front.validation import Body, FieldError, parse_struct

_BYTES_PER_VALUE = 8
_BYTES_PER_NAME = 32
_BYTES_PER_CONTAINER = 128
_BYTES_PER_FLOAT = 128
"""Limits on a body's contents. A body may have up to one JSON value per 8 bytes of the maximum body size, one
object name per 32 bytes, one list or object per 128 bytes, and one number with a fraction or exponent per 128
bytes. A maximum of 2 MiB allows 262,144 values, 65,536 names, 16,384 lists or objects, and 16,384 such
numbers. Parsing runs on the event loop and takes about 0.1 µs per value, 0.2 µs per name, 0.3 µs per number
with a fraction or exponent, and 1 µs per list or object. A list of 131,072 token ids is well within the limit
of 262,144 values. Commas, colons and brackets inside strings count too. A string with enough of them to reach
a limit would exceed most models' context length anyway: text with one comma per 8 bytes or one colon per 32
bytes has more than 250,000 tokens in 2 MiB.
"""

_FREE_BYTES = 64 << 10
"""Refused bodies of up to this many bytes do not count against the caller's token limits."""
_BYTES_PER_TOKEN = 8
"""A refused body larger than `_FREE_BYTES` counts against the caller's token limits, as one token per
`_BYTES_PER_TOKEN` bytes."""


class ClientDisconnected(Exception):
    """Raised if the client disconnects before its request is complete or sent to the core."""


async def read_body(request: Request, model: type[Body], max_bytes: int) -> Body:
    """Receive, parse and validate a request's body. Raises `ApiError` if the body is invalid or too large, or
    `ClientDisconnected` if the client disconnects first."""
    return parse_body(await receive_body(request, max_bytes), model, max_bytes, context_of(request))


async def receive_body(request: Request, max_bytes: int) -> bytearray:
    """Receive a body with a JSON Content-Type and return its bytes. Raises `ApiError` if the body has another
    type (415), is too large (413) or would exceed a memory limit (503), or `ClientDisconnected` if the client
    disconnects first."""
    _check_content_type(request)
    return await _read_bytes(request, max_bytes, context_of(request).body)


def parse_body(data: bytearray, model: type[Body], max_bytes: int, context: RequestContext) -> Body:
    """Parse and validate a request's body. Raises `ApiError` if the body is invalid (400) or has too many
    values (413)."""
    context.work_tokens = max(0, len(data) - _FREE_BYTES) // _BYTES_PER_TOKEN
    max_values, max_names = max_bytes // _BYTES_PER_VALUE, max_bytes // _BYTES_PER_NAME
    max_containers = max_bytes // _BYTES_PER_CONTAINER
    if (
        data.count(b",") > max_values
        or data.count(b":") > max_names
        or data.count(b"{") + data.count(b"[") > max_containers
    ):
        raise ApiError(
            413,
            f"the body has more than {max_values} values, more than {max_names} names in objects or more "
            f"than {max_containers} lists and objects; split the request",
            code="body_too_large",
        )
    try:
        return parse_struct(model, _decode(data, max_bytes // _BYTES_PER_FLOAT))
    except FieldError as error:
        raise invalid(error.param or None, error.message, error.code) from None


def _check_content_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, "send the body without a content encoding", code="unsupported_content_encoding")
    content_type = request.headers.get("content-type")
    if content_type is None:
        return
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415, "send the header 'Content-Type: application/json'", code="unsupported_content_type"
        )
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip(' "') not in ("utf-8", "utf8"):
            raise ApiError(415, "send the body in UTF-8", code="unsupported_charset")


async def _read_bytes(request: Request, max_bytes: int, reservation: BodyReservation) -> bytearray:
    too_large = ApiError(
        413, f"the body is larger than the limit of {max_bytes} bytes", code="body_too_large"
    )
    # The HTTP parser has already refused requests whose Content-Length is not a number.
    length = int(request.headers.get("content-length", 0))
    if length > max_bytes:
        raise too_large
    # Reserve memory for the declared length before reading any bytes, so that a request over the memory limit
    # is refused immediately.
    reservation.grow_to(length)
    received = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        received += message.get("body", b"")
        if len(received) > max_bytes:
            raise too_large
        reservation.grow_to(len(received))
        if not message.get("more_body", False):
            # Do not copy the body to a bytes object: that would double the memory used for large bodies.
            return received


class _FloatLimit:
    """Parses numbers with a fraction or exponent, up to a maximum count. Replaces msgspec's own parser, which
    takes 10 µs for a very small or very large number such as 1e-308."""

    def __init__(self, most: int) -> None:
        self._left = self._most = most

    def __call__(self, text: str) -> float:
        self._left -= 1
        if self._left < 0:
            raise ApiError(
                413,
                f"the body has more than {self._most} numbers with a fraction or an exponent; "
                "split the request",
                code="body_too_large",
            )
        value = float(text)
        if math.isinf(value):
            raise ValueError("Number out of range")
        return value


def _decode(data: bytearray, max_floats: int) -> Any:
    try:
        return msgspec.json.Decoder(float_hook=_FloatLimit(max_floats)).decode(data)
    except RecursionError:
        reason = "its lists or objects are nested too deeply"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
    raise invalid(None, f"the body is not valid JSON: {reason}", "invalid_json")
