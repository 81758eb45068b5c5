"""Routes that declare their required scope. Every route of this service is a `ScopedRoute`, which checks the
caller's scopes before it calls the endpoint. `check_routes` rejects applications with any other kind of
route, so no route can be added without a scope.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from appliance.http.openapi import Operation
from store.policies import SCOPES

OPEN = "open"
"""Scope of routes that require no authentication."""

_IMPLIED = {"admin": frozenset({"read"})}


class InsufficientScopeError(Exception):
    """Raised if the caller is authenticated but lacks the scope that the route requires."""

    def __init__(self, wanted: str, scopes: Iterable[str]) -> None:
        self.wanted = wanted
        has = ", ".join(sorted(scopes)) or "none"
        super().__init__(f"this request needs a key with scope '{wanted}'; your key's scopes: {has}")


class ScopedRoute(Route):
    """A route whose endpoint is called only if `wanted` is one of the scopes in the request's state."""

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        wanted: str,
        operation: Operation | None = None,
    ) -> None:
        """`operation` describes the route in the OpenAPI document; None omits the route from it."""
        if wanted not in (OPEN, *SCOPES):
            raise ValueError(f"{wanted!r} is not a scope; available scopes: {', '.join((OPEN, *SCOPES))}")
        super().__init__(path, endpoint, methods=[method])
        # Remove the HEAD method that Starlette adds to GET, because the HTTP server already converts HEAD to
        # GET.
        self.methods = {method}
        self.wanted = wanted
        self.operation = operation

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint. Raises InsufficientScopeError if the caller lacks the required scope."""
        if self.wanted != OPEN:
            scopes = scope["state"].get("scopes", ())
            if self.wanted not in scopes:
                raise InsufficientScopeError(self.wanted, scopes)
        await super().handle(scope, receive, send)


def granted(scopes: Iterable[str]) -> frozenset[str]:
    """Return these scopes and all scopes that they imply: `admin` implies `read`."""
    whole = frozenset(scopes)
    return whole.union(*(_IMPLIED.get(scope, frozenset()) for scope in whole))


def check_routes(app: Starlette) -> list[ScopedRoute]:
    """Return all of the application's routes. Raises TypeError if a route does not declare a scope."""
    scoped = []
    for route in app.routes:
        if not isinstance(route, ScopedRoute):
            path = getattr(route, "path", repr(route))
            raise TypeError(f"the route {path} does not declare a scope: use ScopedRoute for it")
        scoped.append(route)
    return scoped
