"""Errors in the format of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from starlette.responses import Response

from appliance.channel.core_messages import RefusalCode, Refused
from appliance.front.validation import INVALID, FieldErrorCode
from appliance.http import error_document
from engine.messages import Output

ErrorCode = Literal[
    RefusalCode,
    FieldErrorCode,
    "aborted",
    "body_too_large",
    "chat_template_bound",
    "context_length_exceeded",
    "engine_error",
    "idempotency_key_reused",
    "insufficient_scope",
    "internal",
    "invalid_api_key",
    "invalid_json",
    "method_not_allowed",
    "missing_api_key",
    "model_broken",
    "model_loading",
    "model_not_allowed",
    "not_found",
    "rejected_by_engine",
    "replica_failed",
    "too_many_body_bytes",
    "too_many_connections",
    "too_many_prompts",
    "unknown_uid",
    "unsupported_authorization",
    "unsupported_charset",
    "unsupported_content_encoding",
    "unsupported_content_type",
]
"""The `code` field of an error in OpenAI's format."""
INVALID_REQUEST = "invalid_request_error"

_KINDS = {429: "rate_limit_error", 503: "service_unavailable"}


class ApiError(Exception):
    """An error response. `param` is the name of the invalid field in OpenAI's notation:
    `messages[0].content`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: ErrorCode | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        kind: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        self._kind = kind

    @property
    def kind(self) -> str:
        """The `type` field of the error in OpenAI's format."""
        return self._kind or _KINDS.get(self.status, INVALID_REQUEST if self.status < 500 else "server_error")

    def document(self) -> bytes:
        """Return the error as a JSON object, for a response body or a stream's error event."""
        return error_document(self.message, self.kind, self.param, self.code)

    def response(self) -> Response:
        """Return the error as an HTTP response."""
        headers = self.headers
        if self.retry_after_s is not None:
            # Send Retry-After, which HTTP requires to be in whole seconds, and also the millisecond header
            # that OpenAI's client prefers.
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, round(self.retry_after_s * 1000)))
        return Response(self.document(), self.status, headers, "application/json")


def invalid(param: str | None, message: str, code: ErrorCode = INVALID) -> ApiError:
    """Return a 400 error about one field."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def internal_error() -> ApiError:
    """Return the 500 error for a request that failed because of an error in this process."""
    return ApiError(
        500,
        "the server failed to process the request; see the log of this front process for the cause",
        code="internal",
    )


def unauthorized(message: str, code: ErrorCode) -> ApiError:
    """Return a 401 error."""
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})


def forbidden(message: str, code: ErrorCode, param: str | None = None) -> ApiError:
    """Return a 403 error for an authenticated caller without permission."""
    return ApiError(403, message, param=param, code=code)


def model_not_allowed(name: str) -> ApiError:
    """Return the 403 error for a model that the caller's key does not permit."""
    return forbidden(
        f"this key does not permit the use of model {_shown(name)!r}; GET /v1/models lists the "
        "permitted models",
        "model_not_allowed",
        "model",
    )


def model_not_found(name: str) -> ApiError:
    """Return the 404 error for a model that is not served."""
    return ApiError(
        404,
        f"model {_shown(name)!r} is not served by this server; GET /v1/models lists the available models",
        param="model",
        code="model_not_found",
    )


def refusal_error(message: Refused) -> ApiError:
    """Return the error for a request refused by the core."""
    return ApiError(
        message.status,
        message.message,
        param="model" if message.status == 404 else None,
        code=message.code,
        retry_after_s=message.retry_after_s,
        headers={"x-should-retry": "false"} if message.useless else None,
        kind=message.kind,
    )


def engine_error(output: Output) -> ApiError:
    """Return the error for a sample that the engine ended without an answer."""
    message = output.error or "the engine ended this request without giving a reason"
    if output.finish_reason == "cancelled":
        return ApiError(503, output.error or "this request was cancelled", code="aborted", retry_after_s=1.0)
    if output.refused:
        return ApiError(400, message, code="rejected_by_engine")
    return ApiError(503, message, code="engine_error", retry_after_s=1.0)


def _shown(name: str) -> str:
    return name if len(name) <= 80 else name[:80] + "…"
