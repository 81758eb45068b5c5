"""The first thing a request meets: it gets an id, and goes no further without an identity.

Every path is closed but those whose route is open to everybody (`appliance.scopes`); whether it exists is
nobody's business without a key. What the caller may do is checked by the route. Nothing of the body is read
here.
"""

from __future__ import annotations

import math

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.classes import CLASS_NAMES
from appliance.front.box import Box
from appliance.front.call import Call, make_request_id
from appliance.front.errors import ApiError, forbidden, invalid
from appliance.scopes import granted

_MOST_PATH_SHOWN = 100
_LONGEST_DEADLINE_MS = 86_400_000


class Gate:
    """ASGI middleware around the whole application. `open_paths` need no identity."""

    def __init__(self, app: ASGIApp, box: Box, open_paths: frozenset[str]) -> None:
        self._app = app
        self._box = box
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = make_request_id(scope["headers"])
        headers = [(b"x-request-id", request_id.encode())]
        call: Call | None = None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if call is not None and call.request_class is not None:
                    headers.append((b"x-appliance-class", CLASS_NAMES[call.request_class].encode()))
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        if scope["raw_path"].endswith(b"/") and scope["path"] != "/":
            # A path with a slash at its end is the path without; not with an encoded one.
            scope["path"] = scope["path"].removesuffix("/")
        if scope["path"] in self._open_paths:
            await self._app(scope, receive, send_with_headers)
            return
        box = self._box
        box.requests += 1
        state = scope["state"]
        try:
            identity = box.directory.identify(scope["headers"], state["peer"])
        except ApiError as error:
            box.unauthenticated += 1
            await error.response()(scope, receive, send_with_headers)
            return
        call = Call(
            request_id=request_id,
            identity=identity,
            peer=str(state["peer"]),
            endpoint=scope["path"][:_MOST_PATH_SHOWN],
            connection=state["connection"],
        )
        state["call"] = call
        state["scopes"] = granted(identity.scopes)
        try:
            if identity.suspended:
                raise forbidden(
                    f"tenant {identity.tenant!r} is suspended: ask the operator of this box",
                    "tenant_suspended",
                )
            call.asked_class = _asked_class(scope)
            call.deadline_ms = _deadline_ms(scope)
        except ApiError as error:
            box.reject(call, error)
            await error.response()(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def _asked_class(scope: Scope) -> str:
    asked = _header(scope, "x-appliance-class").upper()
    if asked and asked not in CLASS_NAMES:
        raise invalid("x-appliance-class", "must be P0, P1, P2 or P3")
    return asked


def _deadline_ms(scope: Scope) -> float | None:
    text = _header(scope, "x-appliance-deadline-ms")
    if not text:
        return None
    try:
        deadline_ms = float(text)
    except ValueError:
        deadline_ms = math.nan
    if not 0 < deadline_ms <= _LONGEST_DEADLINE_MS:
        raise invalid(
            "x-appliance-deadline-ms",
            f"must be milliseconds from now until the whole answer is there, at most {_LONGEST_DEADLINE_MS}",
        )
    return deadline_ms


def _header(scope: Scope, wanted: str) -> str:
    for name, value in scope["headers"]:
        if name == wanted.encode():
            text: str = value.decode("latin-1").strip()
            return text
    return ""
