"""Which scope each route wants. A router declares it for the routes that it holds (`routes_for`), each route
checks it where it is called, and `check_routes` lets no application be built with a route that has none: a
new route is closed until somebody says to whom it is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from store.policies import SCOPES

OPEN = "open"
"""For everybody, without an identity."""

_IMPLIED = {"admin": frozenset({"read"})}


class InsufficientScopeError(Exception):
    """The caller is known, and may not call this route."""

    def __init__(self, wanted: str, scopes: Iterable[str]) -> None:
        self.wanted = wanted
        has = ", ".join(sorted(scopes)) or "none"
        super().__init__(f"this needs a key of scope '{wanted}'; of yours it is {has}")


class ScopedRoute(APIRoute):
    """A route that is called only for those whose scopes, in the request's state, include its own."""

    wanted: ClassVar[str]

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.wanted != OPEN:
            scopes = scope["state"].get("scopes", ())
            if self.wanted not in scopes:
                raise InsufficientScopeError(self.wanted, scopes)
        await super().handle(scope, receive, send)


def routes_for(wanted: str) -> type[APIRoute]:
    """The class of routes that want this scope, for `APIRouter(route_class=…)`."""
    if wanted not in (OPEN, *SCOPES):
        raise ValueError(f"{wanted!r} is no scope: there are {', '.join((OPEN, *SCOPES))}")
    return type(f"{wanted.title()}Route", (ScopedRoute,), {"wanted": wanted})


def granted(scopes: Iterable[str]) -> frozenset[str]:
    """The scopes with those that they include: who may act may look."""
    whole = frozenset(scopes)
    return whole.union(*(_IMPLIED.get(scope, frozenset()) for scope in whole))


def check_routes(app: FastAPI) -> list[ScopedRoute]:
    """Every route of the application. Raises TypeError for one that wants no scope."""
    scoped = []
    for route in _routes(app.routes):
        if not isinstance(route, ScopedRoute):
            path = getattr(route, "path", repr(route))
            raise TypeError(f"the route {path} wants no scope: add it to a router made with routes_for(…)")
        scoped.append(route)
    return scoped


def _routes(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    for route in routes:
        # How FastAPI keeps a router that was included.
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from _routes(inner.routes)
        else:
            yield route
