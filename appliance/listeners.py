"""The API's listening sockets. The core accepts and deals each connection to a front.

While no front takes connections the listener is not read: clients wait in its backlog, nobody is turned away.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from pathlib import Path

from appliance.fronts import Dealer
from appliance.messages import Connection
from appliance.protocol import SocketStatus
from appliance.rundir import remove_socket

log = logging.getLogger(__name__)

_BACKLOG = 4096
_MOST_PER_PASS = 64
"""Accepted per pass of the event loop: a burst of connections must not hold up the requests in flight."""
_AFTER_SHORTAGE_S = 0.1
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ListenError(Exception):
    """An address that cannot be listened on; the message says why and what to do."""


def bind_unix(path: Path, mode: str, gid: int | None = None) -> socket.socket:
    """A listening Unix socket with this file mode (octal), replacing a stale one. Raises ListenError.

    It is given to the group `gid` where this process may do that; else it stays with the process's own.
    The run directory's lock must be held: it is what makes another socket here a stale one.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_socket(path)
        sock.bind(str(path))
        # Nobody can connect before listen(), so the mode is never wider than asked for.
        if gid is not None:
            _give(path, gid)
        os.chmod(path, int(mode, 8))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        hint = ""
        if "too long" in str(error):
            hint = ": name a shorter --run-dir"
        elif error.errno == errno.EADDRINUSE:
            hint = ": something that is not a socket has its name; move it away"
        raise ListenError(f"{path} cannot be listened on ({error.strerror or error}){hint}") from error
    sock.setblocking(False)
    return sock


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ListenError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ListenError(
            f"listen = {host}:{port} cannot be listened on ({error.strerror or error}): name another address"
        ) from error
    sock.setblocking(False)
    return sock


def _give(path: Path, gid: int) -> None:
    try:
        os.chown(path, -1, gid)
    except PermissionError:
        log.warning("%s cannot be given to group %d: the service's user is not in it", path, gid)


class Listener:
    """One listening socket whose connections go to the dealer. Takes the socket over."""

    def __init__(self, name: str, sock: socket.socket, dealer: Dealer) -> None:
        self.name = name
        self.accepted = 0
        self._sock = sock
        self._kind = "unix" if sock.family == socket.AF_UNIX else "tcp"
        self._path = Path(sock.getsockname()) if self._kind == "unix" else None
        self.address = _address(sock.getsockname())
        self._dealer = dealer
        self._reading = False
        self._pause: asyncio.TimerHandle | None = None
        self.closed = False

    def update(self) -> None:
        """Read the socket if a front takes connections, else leave them in the backlog."""
        wanted = not self.closed and self._pause is None and self._dealer.open
        if wanted != self._reading:
            self._reading = wanted
            loop = asyncio.get_running_loop()
            if wanted:
                loop.add_reader(self._sock.fileno(), self._accept)
            else:
                loop.remove_reader(self._sock.fileno())

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        if self.closed:
            return
        self.closed = True
        if self._pause is not None:
            self._pause.cancel()
        self.update()
        if self._path is not None:
            remove_socket(self._path)
        self._sock.close()

    def status(self) -> SocketStatus:
        """As operators see it."""
        state = "closed" if self.closed else "accepting" if self._reading else "waiting"
        return SocketStatus(name=self.name, address=self.address, state=state, accepted=self.accepted)

    def _accept(self) -> None:
        for _ in range(_MOST_PER_PASS):
            if not self._dealer.open:
                self.update()
                return
            try:
                connection, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                log.error("%s: no more connections can be taken for now: %s", self.name, error.strerror)
                self._pause = asyncio.get_running_loop().call_later(_AFTER_SHORTAGE_S, self._resume)
                self.update()
                return
            self.accepted += 1
            with connection:
                peer_address = "" if self._kind == "unix" else _address(peer)
                self._dealer.deal(Connection(self._kind, peer_address), connection.fileno())

    def _resume(self) -> None:
        self._pause = None
        self.update()


def _address(name: str | tuple[object, ...]) -> str:
    if isinstance(name, tuple):
        host, port = name[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return name
