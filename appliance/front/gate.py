"""Assigns each request an id and authenticates its caller before any other code handles it. Every path
requires an identity, except the paths of open routes (`appliance.scopes`). A caller without an identity gets
the same response whether or not a path exists. The gate does not read the body. Each route checks the scopes
it requires.
"""

from __future__ import annotations

import math

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.channel.identity import Identity
from appliance.front.app_state import AppState
from appliance.front.body_budget import BodyReservation
from appliance.front.errors import ApiError, forbidden, invalid
from appliance.front.request_context import RequestContext, make_request_id, response_ids
from appliance.http.headers import header
from appliance.scopes import granted
from store.fields import CLASS_NAMES

_MAX_PATH_CHARS = 100
_MAX_DEADLINE_MS = 86_400_000


class Gate:
    """ASGI middleware that wraps the whole application and rejects callers without an identity, except on
    `open_paths`. `IdentityTable.tenant_of` has already identified the caller."""

    def __init__(self, app: ASGIApp, state: AppState, open_paths: frozenset[str]) -> None:
        self._app = app
        self._state = state
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = make_request_id(scope["headers"])
        headers = response_ids(scope["headers"], request_id)
        context: RequestContext | None = None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if context is not None and context.request_class is not None:
                    headers.append((b"x-appliance-class", CLASS_NAMES[context.request_class].encode()))
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        if scope["raw_path"].endswith(b"/") and scope["path"] != "/":
            # Ignore a trailing slash in the path, unless it is percent-encoded.
            scope["path"] = scope["path"].removesuffix("/")
        is_open = scope["path"] in self._open_paths
        state = self._state
        state.requests += not is_open
        request_state = scope["state"]
        identity: Identity | ApiError = request_state["caller"]
        if isinstance(identity, Identity):
            request_state["identity"] = identity
        if is_open:
            await self._app(scope, receive, send_with_headers)
            return
        if isinstance(identity, ApiError):
            state.denials.note(request_state["peer"])
            identity.headers["connection"] = "close"
            await identity.response()(scope, receive, send_with_headers)
            return
        context = RequestContext(
            request_id=request_id,
            identity=identity,
            peer=str(request_state["peer"]),
            endpoint=scope["path"][:_MAX_PATH_CHARS],
            connection=request_state["connection"],
            body=BodyReservation(state.bodies, identity.tenant),
        )
        request_state["context"] = context
        request_state["scopes"] = granted(identity.scopes)
        try:
            if not request_state["connection"].authenticate(identity.tenant):
                raise _no_place()
            if identity.suspended:
                raise forbidden(
                    f"tenant {identity.tenant!r} is suspended: contact the operator of this server",
                    "tenant_suspended",
                )
            context.asked_class = _asked_class(scope)
            context.deadline_ms = _deadline_ms(scope)
        except ApiError as error:
            state.reject(context, error)
            await error.response()(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            context.prepared()
            context.body.release()


def _no_place() -> ApiError:
    return ApiError(
        503,
        "this server or your tenant has reached its connection limit: retry later, or ask the operator to "
        "raise limits.max_connections",
        code="too_many_connections",
        retry_after_s=1.0,
        headers={"connection": "close"},
    )


def _asked_class(scope: Scope) -> str:
    asked = _header(scope, b"x-appliance-class").upper()
    if asked and asked not in CLASS_NAMES:
        raise invalid("x-appliance-class", "must be P0, P1, P2 or P3")
    return asked


def _deadline_ms(scope: Scope) -> float | None:
    text = _header(scope, b"x-appliance-deadline-ms")
    if not text:
        return None
    try:
        deadline_ms = float(text)
    except ValueError:
        deadline_ms = math.nan
    if not 0 < deadline_ms <= _MAX_DEADLINE_MS:
        raise invalid(
            "x-appliance-deadline-ms",
            "must be the time limit for the answer in milliseconds, greater than 0 "
            f"and at most {_MAX_DEADLINE_MS}",
        )
    return deadline_ms


def _header(scope: Scope, wanted: bytes) -> str:
    return (header(scope["headers"], wanted) or b"").decode("latin-1").strip()
