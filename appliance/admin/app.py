"""The admin API's routes. Callers are authenticated before any route is called. Each route declares its scope
(`appliance.scopes`), and the actions come from the registry (`appliance.actions`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from appliance.actions import ACTIONS, Action
from appliance.admin.bodies import ERRORS, AdminRequestError, error_answer, json_answer, read_parameters
from appliance.admin.callers import Authenticator, Caller, DeniedError
from appliance.calls import READ_ONLY_HEADER
from appliance.http import Connection, CountedLog
from appliance.http.openapi import Operation, openapi_document
from appliance.monitoring.metrics.exposition import CONTENT_TYPE
from appliance.protocol import Configuration, Key, PeerMapping, Tenant
from appliance.protocol.registry import RegisteredModel
from appliance.protocol.status import Status
from appliance.scopes import InsufficientScopeError, ScopedRoute, check_routes
from appliance.snapshot import UnfinishedRequest
from store.audit import Actor

_READ_ONLY = (
    "this session is read-only: to act on the service, start the console with --write, or send the request "
    f"without the {READ_ONLY_HEADER} header"
)

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Backend(NamedTuple):
    """The functions that the admin API's routes call."""

    status: Callable[[], Status]
    in_flight: Callable[[], Awaitable[list[UnfinishedRequest]]]
    keys: Callable[[], list[Key]]
    tenants: Callable[[], list[Tenant]]
    peers: Callable[[], list[PeerMapping]]
    models: Callable[[], list[RegisteredModel]]
    configuration: Callable[[], Configuration]
    metrics: Callable[[], bytes]
    routes: Sequence[ScopedRoute]
    """Additional routes of the admin API. Their endpoints may also read databases."""
    act: Callable[[Actor, msgspec.Struct], Awaitable[msgspec.Struct]]
    """Performs the action with the given parameters. Raises ActionError if the action is refused or fails."""
    record_denied: Callable[[Actor, Action, str], None]
    """Audits an action that was denied because the caller lacked the required scope. The arguments are the
    caller, the action and the reason."""
    note: Callable[[str, str], None]
    """Reports a problem to operators. The arguments are the location and a description."""


def admin_app(backend: Backend, authenticator: Authenticator) -> tuple[Starlette, App]:
    """Return two applications. The first contains the routes, so that tests can inspect them. The second is
    the one to serve: it authenticates each caller and then calls the first."""
    denials = CountedLog("requests on admin.sock were denied", functools.partial(backend.note, "admin"))

    @functools.cache
    def description() -> bytes:
        # Building the OpenAPI document blocks the event loop for 15 to 40 ms, so the document is cached.
        return msgspec.json.encode(openapi_document("Appliance admin API", check_routes(app)))

    async def openapi(request: Request) -> Response:
        return Response(description(), media_type="application/json")

    routes = [
        *_read_routes(backend),
        *backend.routes,
        *(_action_route(backend, action) for action in ACTIONS),
        _metrics_route(backend),
        ScopedRoute("GET", "/openapi.json", openapi, wanted="read"),
    ]
    refuse = functools.partial(_refuse, backend, denials)
    app = Starlette(routes=routes, exception_handlers={InsufficientScopeError: refuse, HTTPException: _fail})
    app.router.redirect_slashes = False
    check_routes(app)
    return app, _guarded(app, authenticator, denials)


def _guarded(app: Starlette, authenticator: Authenticator, denials: CountedLog) -> App:
    """Wrap `app` in an application that authenticates each caller first."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        try:
            caller = authenticator.identify(scope["headers"], state.get("peer"))
        except DeniedError as error:
            denials.note(state.get("peer"), f"denied {_asked(scope)}: {error}")
            response = error_answer(error.status, str(error))
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        connection: Connection | None = state.get("connection")
        if connection is not None and not connection.authenticate():
            response = error_answer(503, "too many connections are open: retry in a moment")
            response.headers.update({"connection": "close", "retry-after": "1"})
            await response(scope, receive, send)
            return
        state["caller"], state["scopes"] = caller, caller.scopes
        await app(scope, receive, send)

    return guarded


async def _refuse(backend: Backend, denials: CountedLog, request: Request, error: Exception) -> Response:
    """Return the response for a caller who lacks the required scope. Denied actions are audited."""
    caller: Caller = request.scope["state"]["caller"]
    if caller.read_only:
        error = PermissionError(_READ_ONLY)
    denied = f"{caller.actor.name} was denied {_asked(request.scope)}: {error}"
    denials.note(request.scope["state"].get("peer"), denied)
    action = next((one for one in ACTIONS if request.scope["path"] == f"/actions/{one.name}"), None)
    if action is not None and request.method == "POST":
        backend.record_denied(caller.actor, action, str(error))
    return error_answer(403, str(error))


async def _fail(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_answer(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


def _read_routes(backend: Backend) -> list[ScopedRoute]:
    """Return the routes that read the service state."""
    return [
        _shown("/status", backend.status, Status, "Return the service's state"),
        _shown(
            "/requests",
            backend.in_flight,
            list[UnfinishedRequest],
            "List the unfinished requests, oldest first",
        ),
        _shown("/keys", backend.keys, list[Key], "List all keys, without their secrets"),
        _shown("/tenants", backend.tenants, list[Tenant], "List all tenants"),
        _shown(
            "/peers", backend.peers, list[PeerMapping], "List the local users and groups that need no key"
        ),
        _shown(
            "/models",
            backend.models,
            list[RegisteredModel],
            "List the models in the settings and in the registry, with their versions",
        ),
        _shown(
            "/config",
            backend.configuration,
            Configuration,
            "Return the settings in effect, each with its source",
        ),
    ]


def _metrics_route(backend: Backend) -> ScopedRoute:
    async def metrics(request: Request) -> Response:
        return Response(backend.metrics(), headers={"content-type": CONTENT_TYPE})

    operation = Operation("Return the metrics in Prometheus text format", answer=None)
    return ScopedRoute("GET", "/metrics", metrics, wanted="read", operation=operation)


def _asked(scope: Scope) -> str:
    """Return the request's method and path for the log, escaped so that a client cannot forge log lines."""
    return f"{scope['method']} {scope['path'][:100]!r}"


def _shown(path: str, read: Callable[[], Any], result: Any, summary: str) -> ScopedRoute:
    async def show(request: Request) -> Response:
        shown = read()
        return json_answer(await shown if inspect.isawaitable(shown) else shown)

    operation = Operation(summary, answer=result, errors=ERRORS)
    return ScopedRoute("GET", path, show, wanted="read", operation=operation)


def _action_route(backend: Backend, action: Action) -> ScopedRoute:
    async def act(request: Request) -> Response:
        try:
            parameters = await read_parameters(request, action.name, action.parameters)
            caller: Caller = request.scope["state"]["caller"]
            return json_answer(await backend.act(caller.actor, parameters))
        except AdminRequestError as error:
            return error_answer(error.status, str(error))

    operation = Operation(
        action.title,
        description=action.description,
        body=action.parameters,
        answer=action.result,
        errors=ERRORS,
    )
    return ScopedRoute("POST", f"/actions/{action.name}", act, wanted="admin", operation=operation)
