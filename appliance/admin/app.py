"""The admin API's routes. Callers are authenticated before anything is read. Each route declares its scope
(`appliance.scopes`), and the actions come from the registry (`appliance.actions`)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from appliance.actions import ACTIONS, Action
from appliance.admin.auditing import ActionError
from appliance.admin.callers import Authenticator, Caller, DeniedError
from appliance.http import Connection
from appliance.monitoring.metrics.exposition import CONTENT_TYPE
from appliance.protocol import Configuration, ErrorBody, InFlight, Key, PeerMapping, Status, Tenant
from appliance.scopes import InsufficientScopeError, check_routes, routes_for
from store.audit import Actor

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 << 10

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Backend(NamedTuple):
    """What the routes show and do."""

    status: Callable[[], Status]
    in_flight: Callable[[], list[InFlight]]
    keys: Callable[[], list[Key]]
    tenants: Callable[[], list[Tenant]]
    peers: Callable[[], list[PeerMapping]]
    configuration: Callable[[], Configuration]
    metrics: Callable[[], bytes]
    act: Callable[[Actor, msgspec.Struct], Awaitable[msgspec.Struct]]
    """Performs the action that the parameters belong to. Raises ActionError."""
    record_denied: Callable[[Actor, Action, str], None]
    """Audits that a caller lacked the scope for an action, and why."""


def admin_app(backend: Backend, authenticator: Authenticator) -> tuple[FastAPI, App]:
    """Return the FastAPI application, whose route table tests walk, and the application to serve, which
    authenticates callers first."""
    app = FastAPI(
        title="Appliance admin API",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    reading = APIRouter(route_class=routes_for("read"))
    acting = APIRouter(route_class=routes_for("admin"))
    document = _Document(app)

    def show(path: str, read: Callable[[], Any], result: Any, summary: str) -> None:
        async def answer() -> Response:
            return _json(read())

        reading.add_api_route(
            path, answer, methods=["GET"], summary=summary, responses=document.answers(result)
        )

    show("/status", backend.status, Status, "The state of the service")
    show("/requests", backend.in_flight, list[InFlight], "Requests that have not ended, oldest first")
    show("/keys", backend.keys, list[Key], "All keys, without their secrets")
    show("/tenants", backend.tenants, list[Tenant], "All tenants")
    show("/peers", backend.peers, list[PeerMapping], "Local users and groups that need no key")
    show("/config", backend.configuration, Configuration, "The settings in effect, and the source of each")
    for action in ACTIONS:
        _add_action(acting, document, backend, action)

    @reading.get("/metrics", summary="Metrics, in Prometheus' text format", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(backend.metrics(), headers={"content-type": CONTENT_TYPE})

    @reading.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return _json(app.openapi())

    @app.exception_handler(InsufficientScopeError)
    async def refuse(request: Request, error: Exception) -> Response:
        caller: Caller = request.scope["state"]["caller"]
        log.warning("%s denied %s: %s", caller.actor.name, _asked(request.scope), error)
        action = next((one for one in ACTIONS if request.scope["path"] == f"/actions/{one.name}"), None)
        if action is not None and request.method == "POST":
            backend.record_denied(caller.actor, action, str(error))
        return _error(403, str(error))

    app.include_router(reading)
    app.include_router(acting)
    check_routes(app)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        try:
            caller = authenticator.identify(scope["headers"], state.get("peer"))
        except DeniedError as error:
            log.warning("denied %s: %s", _asked(scope), error)
            response = _error(error.status, str(error))
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        connection: Connection | None = state.get("connection")
        if connection is not None and not connection.authenticate():
            response = _error(503, "too many connections are in use: try again in a moment")
            response.headers.update({"connection": "close", "retry-after": "1"})
            await response(scope, receive, send)
            return
        state["caller"], state["scopes"] = caller, caller.scopes
        await app(scope, receive, send)

    return app, guarded


def _asked(scope: Scope) -> str:
    """Return method and path for the log, escaped so that a client cannot forge a line of it."""
    return f"{scope['method']} {scope['path'][:100]!r}"


def _add_action(router: APIRouter, document: _Document, backend: Backend, action: Action) -> None:
    async def act(request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MAX_BODY_BYTES:
                return _error(413, f"the body is longer than {_MAX_BODY_BYTES} bytes")
        try:
            parameters = msgspec.json.decode(body or b"{}", type=action.parameters)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _error(400, f"{action.name}: {error}")
        try:
            caller: Caller = request.scope["state"]["caller"]
            return _json(await backend.act(caller.actor, parameters))
        except ActionError as error:
            return _error(error.status, str(error))

    router.add_api_route(
        f"/actions/{action.name}",
        act,
        methods=["POST"],
        summary=action.title,
        description=action.description,
        responses=document.answers(action.result),
        openapi_extra={"requestBody": {"required": True, "content": document.content(action.parameters)}},
    )


class _Document:
    """Adds the structs' schemas to the application's OpenAPI document, which knows pydantic's only."""

    def __init__(self, app: FastAPI) -> None:
        self._parts: dict[str, Any] = {}
        base = app.openapi

        def openapi() -> dict[str, Any]:
            whole = base()
            whole.setdefault("components", {}).setdefault("schemas", {}).update(self._parts)
            return whole

        app.openapi = openapi  # type: ignore[method-assign]

    def content(self, shape: Any) -> dict[str, Any]:
        (schema,), parts = msgspec.json.schema_components([shape], ref_template="#/components/schemas/{name}")
        self._parts.update(parts)
        return {"application/json": {"schema": schema}}

    def answers(self, result: Any) -> dict[int | str, dict[str, Any]]:
        return {
            200: {"description": "Done", "content": self.content(result)},
            400: {"description": "Bad parameters", "content": self.content(ErrorBody)},
            401: {"description": "The key is not valid", "content": self.content(ErrorBody)},
            403: {"description": "Permission denied", "content": self.content(ErrorBody)},
        }


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    return _json(ErrorBody(message=message), status)
