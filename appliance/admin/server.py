"""Serves the admin API on `admin.sock`."""

from __future__ import annotations

import socket
from pathlib import Path

from appliance.admin.app import Backend, admin_app
from appliance.admin.callers import Authenticator
from appliance.channel.front_settings import Limits
from appliance.http import HttpServer
from appliance.http.sockets import bind_unix, change_access
from appliance.protocol.status import SocketStatus
from appliance.rundir import remove_socket

_LIMITS = Limits(max_body_bytes=64 << 10, max_connections=64, max_unauthenticated_connections=16)


class AdminServer:
    """Serves the admin API on its socket between `start` and `stop`."""

    def __init__(self, path: Path, mode: str, given: socket.socket | None = None) -> None:
        """`given` is the admin socket if the service manager created it, otherwise None. A socket created by
        the service manager outlives the service."""
        self._path = path
        self._mode = mode
        self._given = given
        self._server: HttpServer | None = None

    async def start(self, backend: Backend, authenticator: Authenticator) -> None:
        """Start serving the admin API. Raises ListenError if the socket cannot be created."""
        _, app = admin_app(backend, authenticator)
        sock = self._given or bind_unix(self._path, self._mode, authenticator.gid)
        self._server = HttpServer(app, _LIMITS, known=authenticator.knows)
        await self._server.listen(sock)

    def change(self, mode: str, gid: int | None) -> None:
        """Change the socket's file mode and group."""
        self._mode = mode
        if self._given is None and self._server is not None:
            change_access(self._path, mode, gid)

    async def stop(self) -> None:
        """Finish the requests in progress, then remove the socket if the service created it."""
        if self._given is None:
            remove_socket(self._path)
        if self._server is not None:
            await self._server.stop(1.0)

    def status(self) -> SocketStatus:
        """Return the socket's status for operators."""
        return SocketStatus(
            name="admin", address=str(self._path), state="accepting" if self._server else "closed"
        )
