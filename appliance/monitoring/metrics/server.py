"""Serves the metrics on a separate TCP address, without a key, to every client that can connect. The listener
runs inside the core, and its clients must not slow the core down. The listener therefore accepts only a few
connections, with short time limits, and closes the oldest one to accept a new one. Each connection handles
one request at a time, and requests that arrive at about the same time share one scrape (`SHARED_S`).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from appliance.background import Background
from appliance.channel.front_settings import Limits
from appliance.http import HttpServer
from appliance.http.sockets import address_of, bind_tcp, listens_on
from appliance.monitoring.metrics.exposition import CONTENT_TYPE
from appliance.protocol.status import SocketStatus
from appliance.scopes import OPEN, ScopedRoute, check_routes
from appliance.settings import Settings

log = logging.getLogger(__name__)

_LIMITS = Limits(max_body_bytes=1024, max_unauthenticated_connections=16)
_STOP_S = 1.0


def metrics_app(scrape: Callable[[], bytes]) -> Starlette:
    """Return the ASGI application, which has a single route."""

    async def metrics(request: Request) -> Response:
        return Response(scrape(), headers={"content-type": CONTENT_TYPE})

    app = Starlette(routes=[ScopedRoute("GET", "/metrics", metrics, wanted=OPEN)])
    app.router.redirect_slashes = False
    check_routes(app)
    return app


class MetricsServer:
    """Listens on the address in `metrics.listen`, if one is set."""

    def __init__(self, scrape: Callable[[], bytes]) -> None:
        self._app = metrics_app(scrape)
        self._server: HttpServer | None = None
        self._address = ""
        self._background = Background()

    def prepare(self, settings: Settings) -> socket.socket | None:
        """If the address in `settings` has changed, open a socket on the new address and return it, to be
        passed to `change`. Raises ListenError without changing anything."""
        wanted = settings.metrics.address()
        if wanted is None or (self._server is not None and listens_on(self._address, wanted)):
            return None
        return bind_tcp(*wanted, setting="metrics.listen")

    def change(self, settings: Settings, opened: socket.socket | None) -> None:
        """Serve the metrics on the address in `settings`. `opened` is the result of `prepare`."""
        if self._server is not None and (opened is not None or settings.metrics.listen is None):
            self._background.run(self._server.stop(_STOP_S))
            self._server = None
            log.info("metrics are no longer served on %s", self._address)
        if opened is not None:
            self._address = address_of(opened)
            self._server = HttpServer(self._app, _LIMITS, known=lambda peer: False)
            self._background.run(self._server.listen(opened))
            log.info("metrics are served on %s", self._address)

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.stop(_STOP_S)
            self._server = None

    def status(self) -> list[SocketStatus]:
        """Return the listener's status for operators."""
        if self._server is None:
            return []
        return [SocketStatus(name="metrics", address=self._address, state="accepting")]
