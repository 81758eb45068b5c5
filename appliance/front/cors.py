"""Allows web pages from the configured origins to call the API, according to CORS (part of the Fetch
standard)."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from appliance.front.app_state import AppState

_METHODS = ("GET", "POST")
_EXPOSED = (
    "idempotent-replayed",
    "retry-after",
    "retry-after-ms",
    "x-appliance-class",
    "x-appliance-request-id",
    "x-appliance-retry-of",
    "x-request-id",
    *(
        f"x-ratelimit-{value}-{kind}"
        for value in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens")
    ),
)
"""Response headers that scripts on allowed web pages can read."""
_MAX_AGE_S = 600


class Cors:
    """ASGI middleware around the whole application. For allowed origins, the middleware answers preflight
    requests, which carry no key, and adds CORS headers to all other responses. Requests with no origin or any
    other origin are passed on unchanged."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state
        self._origins: tuple[str, ...] = ()
        self._middleware: CORSMiddleware | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = self._state.limits.cors_origins
        if origins != self._origins:
            self._origins, self._middleware = origins, self._make(origins)
        if self._middleware is not None and self._is_allowed(self._middleware, scope):
            await self._middleware(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _make(self, origins: tuple[str, ...]) -> CORSMiddleware | None:
        if not origins:
            return None
        return CORSMiddleware(
            self._app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=["*"],
            expose_headers=_EXPOSED,
            max_age=_MAX_AGE_S,
        )

    def _is_allowed(self, middleware: CORSMiddleware, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        return origin is not None and middleware.is_allowed_origin(origin.decode("latin-1"))
