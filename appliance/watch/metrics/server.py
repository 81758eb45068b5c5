"""Serves the metrics on a TCP address of their own to whoever can connect: those who scrape bring no key."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from fastapi import APIRouter, FastAPI, Response

from appliance.background import Background
from appliance.http import HttpServer
from appliance.listeners import address_of, bind_tcp, listens_on
from appliance.messages import Limits
from appliance.protocol import SocketStatus
from appliance.scopes import OPEN, check_routes, routes_for
from appliance.settings import Settings
from appliance.watch.metrics.exposition import CONTENT_TYPE

log = logging.getLogger(__name__)

_LIMITS = Limits(max_body_bytes=1024, max_connections=16)
_STOP_S = 1.0


def metrics_app(scrape: Callable[[], bytes]) -> FastAPI:
    """The application: one route."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    router = APIRouter(route_class=routes_for(OPEN))

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(scrape(), headers={"content-type": CONTENT_TYPE})

    app.include_router(router)
    check_routes(app)
    return app


class MetricsServer:
    """Listens where `metrics.listen` says, if it says anything."""

    def __init__(self, scrape: Callable[[], bytes]) -> None:
        self._app = metrics_app(scrape)
        self._server: HttpServer | None = None
        self._address = ""
        self._background = Background()

    def prepare(self, settings: Settings) -> socket.socket | None:
        """Open the address that `settings` name, if it is another than the present one: `change` takes it.
        Raises ListenError; nothing has changed then."""
        wanted = settings.metrics.address()
        if wanted is None or (self._server is not None and listens_on(self._address, wanted)):
            return None
        return bind_tcp(*wanted, setting="metrics.listen")

    def change(self, settings: Settings, opened: socket.socket | None) -> None:
        """Listen where `settings` say."""
        if self._server is not None and (opened is not None or settings.metrics.listen is None):
            self._background.run(self._server.stop(_STOP_S))
            self._server = None
            log.info("metrics do not listen on %s any more", self._address)
        if opened is not None:
            self._address = address_of(opened)
            self._server = HttpServer(self._app, _LIMITS)
            self._background.run(self._server.listen(opened))
            log.info("metrics listen on %s", self._address)

    async def stop(self) -> None:
        """Listen no more."""
        if self._server is not None:
            await self._server.stop(_STOP_S)
            self._server = None

    def status(self) -> list[SocketStatus]:
        """As operators see it."""
        if self._server is None:
            return []
        return [SocketStatus(name="metrics", address=self._address, state="accepting")]
