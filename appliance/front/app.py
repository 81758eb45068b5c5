"""Builds the API's ASGI application: routes, error responses, the OpenAPI document, and the middleware that
authenticates callers."""

from __future__ import annotations

import functools
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from appliance.front.app_state import AppState
from appliance.front.body import ClientDisconnected
from appliance.front.cors import Cors
from appliance.front.errors import ApiError, ErrorCode, forbidden, internal_error
from appliance.front.gate import Gate
from appliance.front.generation import CLIENT_DISCONNECTED
from appliance.front.health import health_routes
from appliance.front.request_context import RequestContext, context_of
from appliance.front.routes import api_routes
from appliance.front.schemas import ChatMessage, ChatRequest, CompletionRequest
from appliance.front.validation import ParsedType
from appliance.http import drop_frames
from appliance.http.openapi import openapi_document
from appliance.scopes import OPEN, InsufficientScopeError, check_routes

_DESCRIPTION = """\
OpenAI-compatible API for the models of one server. On TCP, every request needs a key. On the Unix socket,
the peer's uid identifies the user, and a valid key takes precedence. `x-appliance-class` (P0 to P3) or
`service_tier` selects the service class. With `x-appliance-deadline-ms`, a request is refused immediately if
its answer cannot be completed in time. Every response contains an `x-request-id` header."""
_MAX_CHARS_SHOWN = 100
"""Error messages quote at most this many characters of a path or method."""


def build_app(state: AppState) -> tuple[Starlette, ASGIApp]:
    """Return the router and the application to serve. The application authenticates each caller before it
    calls the router; tests read the router's route table."""

    async def refuse(request: Request, error: Exception) -> Response:
        return _refuse(state, request, error)

    @functools.cache
    def describe() -> dict[str, Any]:
        return _document(app)

    errors = (ApiError, HTTPException, InsufficientScopeError, ClientDisconnected, Exception)
    app = Starlette(
        routes=[*api_routes(state, describe), *health_routes(state)],
        exception_handlers=dict.fromkeys(errors, refuse),
    )
    app.router.redirect_slashes = False
    open_paths = frozenset(route.path for route in check_routes(app) if route.wanted == OPEN)
    return app, Cors(Gate(app, state, open_paths), state)


def _refuse(state: AppState, request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        refusal = error
    elif isinstance(error, HTTPException):
        refusal = _refused_by_router(request, error)
    elif isinstance(error, InsufficientScopeError):
        refusal = forbidden(str(error), "insufficient_scope")
    elif isinstance(error, ClientDisconnected):
        sent = request.scope["state"]["connection"].refusal
        if sent is None:
            refusal = ApiError(
                CLIENT_DISCONNECTED, "the client disconnected before its request was processed"
            )
        else:
            refusal = ApiError(sent.status, sent.message)  # the server has already sent this error
    else:
        # The HTTP server logs the traceback and then drops the stack frames.
        refusal = internal_error()
    if isinstance(error, ApiError | ClientDisconnected):
        drop_frames(error)
    context: RequestContext | None = request.scope["state"].get("context")
    if context is not None and not context.admitted:
        state.reject(context_of(request), refusal)
    return refusal.response()


def _refused_by_router(request: Request, error: HTTPException) -> ApiError:
    path = request.scope["path"][:_MAX_CHARS_SHOWN]
    message = str(error.detail)
    code: ErrorCode | None = None
    if error.status_code == 404:
        message = f"the path {path!r} does not exist; GET /openapi.json lists all paths"
        code = "not_found"
    elif error.status_code == 405:
        taken = (error.headers or {}).get("Allow", "other methods")
        message = f"{path!r} does not support {request.method[:_MAX_CHARS_SHOWN]}; use {taken}"
        code = "method_not_allowed"
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _document(app: Starlette) -> dict[str, Any]:
    document = openapi_document(
        "Appliance", check_routes(app), description=_DESCRIPTION, schema_hook=_field_schema
    )
    components = document["components"]
    for struct in (ChatRequest, CompletionRequest, ChatMessage):
        components["schemas"][struct.__name__]["properties"] |= {
            name: refused.json_schema for name, refused in struct.refused.items()
        }
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "An API key issued by this server."}
    }
    return document


def _field_schema(kind: type) -> dict[str, Any]:
    parsed: type[ParsedType] = kind
    return parsed.json_schema
