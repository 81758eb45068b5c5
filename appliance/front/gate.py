"""The first thing a request meets: it gets an id, and goes no further without an identity.

Every path is closed but the two of health; whether it exists is nobody's business without a key. Nothing of
the body is read here.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.front.box import Box
from appliance.front.call import Call, make_request_id
from appliance.front.errors import ApiError

OPEN_PATHS = frozenset(["/health/live", "/health/ready"])

_CLASSES = frozenset(["P0", "P1", "P2", "P3"])
_MOST_PATH_SHOWN = 100


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, box: Box) -> None:
        self._app = app
        self._box = box

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = make_request_id(scope["headers"])
        id_header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), id_header]
            await send(message)

        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send_with_id)
            return
        box = self._box
        box.requests += 1
        state = scope["state"]
        try:
            identity = box.directory.identify(scope["headers"], state["peer"])
        except ApiError as error:
            box.unauthenticated += 1
            await error.response()(scope, receive, send_with_id)
            return
        call = Call(
            request_id=request_id,
            identity=identity,
            peer=str(state["peer"]),
            endpoint=scope["path"][:_MOST_PATH_SHOWN],
            connection=state["connection"],
        )
        state["call"] = call
        try:
            if box.draining:
                raise ApiError(503, "the service is stopping", code="draining", retry_after_s=5.0)
            call.asked_class = _asked_class(scope)
        except ApiError as error:
            box.reject(call, error)
            await error.response()(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)


def _asked_class(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-appliance-class":
            asked: str = value.decode("latin-1").strip().upper()
            if asked not in _CLASSES:
                raise ApiError(
                    400,
                    "x-appliance-class: must be P0, P1, P2 or P3",
                    param="x-appliance-class",
                    code="invalid_value",
                )
            return asked
    return ""
