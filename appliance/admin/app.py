"""The admin API's routes. One way in: the peer's uid decides before anything is read; actions come from the
registry (`appliance.actions`)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from appliance.actions import ACTIONS, Action
from appliance.protocol import ErrorBody, InFlight, Key, Status

log = logging.getLogger(__name__)

_MOST_BODY_BYTES = 64 << 10

App = Callable[[Scope, Receive, Send], Awaitable[None]]
PeerUid = Callable[[Scope], int | None]


class ActionError(Exception):
    """An action that cannot be done; `status` is the HTTP status code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Backend(Protocol):
    """What the routes show and do."""

    def status(self) -> Status: ...
    def in_flight(self) -> list[InFlight]: ...
    def keys(self) -> list[Key]: ...
    async def act(self, actor: str, action: Action, parameters: msgspec.Struct) -> msgspec.Struct: ...


def admin_app(backend: Backend, uids: frozenset[int], peer_uid: PeerUid) -> App:
    """The ASGI application: answers the peers with these uids, and nobody else."""
    app = FastAPI(
        title="Appliance admin API",
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
    )

    document = _Document(app)

    def shows(path: str, what: Callable[[], Any], result: Any, summary: str) -> None:
        async def show() -> Response:
            return _json(what())

        app.add_api_route(path, show, methods=["GET"], summary=summary, responses=document.answers(result))

    shows("/status", backend.status, Status, "What the service is and does")
    shows("/requests", backend.in_flight, list[InFlight], "Requests that have not ended, oldest first")
    shows("/keys", backend.keys, list[Key], "All keys, without their secrets")
    for action in ACTIONS:
        _add_action(app, document, backend, action, peer_uid)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
            return
        uid = peer_uid(scope)
        if uid not in uids:
            log.warning("uid %s was turned away from %s %s", uid, scope["method"], scope["path"])
            await _error(403, f"uid {uid} may not: use the service's user, or root")(scope, receive, send)
            return
        await app(scope, receive, send)

    return guarded


def _add_action(
    app: FastAPI, document: _Document, backend: Backend, action: Action, peer_uid: PeerUid
) -> None:
    async def act(request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MOST_BODY_BYTES:
                return _error(413, f"the body is longer than {_MOST_BODY_BYTES} bytes")
        try:
            parameters = msgspec.json.decode(body or b"{}", type=action.parameters)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _error(400, f"{action.name}: {error}")
        try:
            return _json(await backend.act(f"uid:{peer_uid(request.scope)}", action, parameters))
        except ActionError as error:
            return _error(error.status, str(error))

    app.add_api_route(
        f"/actions/{action.name}",
        act,
        methods=["POST"],
        summary=action.title,
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
            403: {"description": "Not for this user", "content": self.content(ErrorBody)},
        }


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    return _json(ErrorBody(message=message), status)
