"""Puts the API together: endpoints, error shape, OpenAPI document, and the gate around it all."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from appliance.front.body import ClientLeft
from appliance.front.box import Box
from appliance.front.call import Call, call_of
from appliance.front.cors import Cors
from appliance.front.errors import ApiError, forbidden
from appliance.front.gate import Gate
from appliance.front.generation import CLIENT_LEFT
from appliance.front.health import health_routes
from appliance.front.routes import api_routes
from appliance.front.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from appliance.http import drop_frames
from appliance.scopes import OPEN, InsufficientScopeError, check_routes

_BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

_DESCRIPTION = """\
OpenAI's API over the models of one box. On TCP every request needs a key; on the Unix socket the peer's uid
is enough, and a key, if it is valid, wins. `x-appliance-class` (P0 to P3) or `service_tier` ask for a class
of service; with `x-appliance-deadline-ms` an answer that cannot be complete by then is refused at once. Every
answer carries `x-request-id`."""
_MOST_SHOWN = 100
"""Characters of a path or method."""


def build_app(box: Box) -> tuple[FastAPI, ASGIApp]:
    """The FastAPI application (its route table is what tests walk), and what to serve: the gate around it."""
    app = FastAPI(
        title="Appliance",
        version="1",
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.include_router(api_routes(box, lambda: document()))
    app.include_router(health_routes(box))

    async def refuse(request: Request, error: Exception) -> Response:
        return _refuse(box, request, error)

    for kind in (ApiError, HTTPException, InsufficientScopeError, ClientLeft, Exception):
        app.add_exception_handler(kind, refuse)

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _openapi(app, open_paths)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    open_paths = frozenset(route.path for route in check_routes(app) if route.wanted == OPEN)
    return app, Cors(Gate(app, box, open_paths), box)


def _refuse(box: Box, request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        refusal = error
    elif isinstance(error, HTTPException):
        refusal = _refused_by_router(request, error)
    elif isinstance(error, InsufficientScopeError):
        refusal = forbidden(str(error), "insufficient_scope")
    elif isinstance(error, ClientLeft):
        refusal = ApiError(CLIENT_LEFT, "the client left before its request was whole")
    else:
        # The HTTP server logs the traceback, and then drops the frames.
        refusal = ApiError(500, "the front failed to answer; its journal says why", code="internal")
    if isinstance(error, ApiError | ClientLeft):
        drop_frames(error)
    call: Call | None = request.scope["state"].get("call")
    if call is not None and not call.admitted:
        box.reject(call_of(request), refusal)
    return refusal.response()


def _refused_by_router(request: Request, error: HTTPException) -> ApiError:
    path = request.scope["path"][:_MOST_SHOWN]
    message, code = str(error.detail), None
    if error.status_code == 404:
        message = f"there is no path {path!r} here; GET /openapi.json lists what there is"
        code = "not_found"
    elif error.status_code == 405:
        taken = (error.headers or {}).get("Allow", "other methods")
        message = f"{path!r} does not take {request.method[:_MOST_SHOWN]}; it takes {taken}"
        code = "method_not_allowed"
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _openapi(app: FastAPI, open_paths: frozenset[str]) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        openapi_version="3.1.0",
    )
    _, definitions = models_json_schema(
        [(model, "validation") for model in _BODIES], ref_template="#/components/schemas/{model}"
    )
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    components["securitySchemes"] = {
        "key": HTTPBearer(description="A key of this box.").model.model_dump(
            mode="json", by_alias=True, exclude_none=True
        )
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # FastAPI documents its own validation error, which cannot happen here.
            if operation["responses"].get("422", {}).get("description") == "Validation Error":
                del operation["responses"]["422"]
            operation["security"] = [] if path in open_paths else [{"key": []}]
    for leftover in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(leftover, None)
    return document
