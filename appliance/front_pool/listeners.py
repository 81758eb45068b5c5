"""The listening sockets. The core accepts connections on the API's sockets and gives each one to a front.

While no front takes connections a listener is not read: clients wait in its backlog, and none is refused.
Sockets that the service manager opened outlive the service: a client that connects while the service is down
waits for its next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from appliance.front_pool.front import Dealer
from appliance.messages import Connection
from appliance.protocol import SocketName, SocketState, SocketStatus
from appliance.rundir import remove_socket
from appliance.settings import Settings

log = logging.getLogger(__name__)

_BACKLOG = 4096
_MAX_PER_PASS = 4
"""Connections accepted per pass of the event loop: a burst of them must not delay requests in progress."""
_AFTER_SHORTAGE_S = 0.1
_SHORTAGE_IS_OVER_S = 60.0
"""A shortage that begins again within this time is the same one: it is reported once."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


Note = Callable[[str, str], None]
"""Reports a problem: where, and what."""


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
        set_access(path, mode, gid)
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


def bind_tcp(
    host: str, port: int, *, setting: str = "listen", beside: Iterable[Listener] = ()
) -> socket.socket:
    """A listening TCP socket, whose address may overlap those of `beside`. Raises ListenError, which names
    the setting."""
    sharing = [listener.socket for listener in beside]
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # For this moment only: nobody else shall share an address with the service by mistake.
            with _shared(sock, *sharing):
                sock.bind(address)
                sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ListenError(
            f"{setting} = {host}:{port} cannot be listened on ({error.strerror or error}): "
            f"name another address"
        ) from error
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def _shared(*sockets: socket.socket) -> Iterator[None]:
    """Let these have addresses that overlap."""
    if len(sockets) < 2:
        yield
        return
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        yield
    finally:
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)


def change_access(path: Path, mode: str, gid: int | None = None) -> None:
    """As `set_access`, of a socket in use: what cannot be done is logged."""
    try:
        set_access(path, mode, gid)
    except OSError as error:
        log.error("%s cannot have mode %s (%s)", path, mode, error.strerror)


def set_access(path: Path, mode: str, gid: int | None) -> None:
    """Give the socket to a group, if this process may do that, and set its file mode (octal)."""
    if gid is not None:
        try:
            os.chown(path, -1, gid)
        except PermissionError:
            log.warning("%s cannot be given to group %d: the service's user is not in it", path, gid)
    os.chmod(path, int(mode, 8))


class Listener:
    """One listening socket whose connections go to the dealer. Takes the socket over."""

    def __init__(
        self, name: SocketName, sock: socket.socket, dealer: Dealer, note: Note, *, lasting: bool = False
    ) -> None:
        """`note` reports a problem to the operator. `lasting`: the service manager made the socket, and
        keeps it when the service ends."""
        self.name = name
        self.lasting = lasting
        self.accepted = 0
        self.socket = sock
        self._kind = "unix" if sock.family == socket.AF_UNIX else "tcp"
        self._path = Path(sock.getsockname()) if self._kind == "unix" else None
        self.address = address_of(sock)
        self._dealer = dealer
        self._note = note
        self._short_at: float | None = None
        """When this process last had no descriptor or memory for a connection."""
        self._reading = False
        self._pause: asyncio.TimerHandle | None = None
        self._stopping = False
        self.closed = False

    def update(self) -> None:
        """Read the socket if a front takes connections, else leave them in the backlog."""
        wanted = not (self.closed or self._stopping) and self._pause is None and self._dealer.open
        if wanted != self._reading:
            self._reading = wanted
            loop = asyncio.get_running_loop()
            if wanted:
                loop.add_reader(self.socket.fileno(), self._accept)
            else:
                loop.remove_reader(self.socket.fileno())

    def begin_stop(self) -> None:
        """A socket that outlives the service is read no more: who connects waits for the next one. On its own
        sockets the service goes on answering."""
        if self.lasting:
            self._stopping = True
            self.update()

    def close(self) -> None:
        """Stop listening, and remove the socket's file if it is the service's own."""
        if self.closed:
            return
        self.closed = True
        if self._pause is not None:
            self._pause.cancel()
        self.update()
        if self._path is not None and not self.lasting:
            remove_socket(self._path)
        self.socket.close()

    def status(self) -> SocketStatus:
        """Return the socket's status for operators."""
        state: SocketState = "closed" if self.closed else "accepting" if self._reading else "waiting"
        return SocketStatus(name=self.name, address=self.address, state=state, accepted=self.accepted)

    def _accept(self) -> None:
        for _ in range(_MAX_PER_PASS):
            if not self._dealer.open:
                self.update()
                return
            try:
                connection, peer = self.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                self._wait_out(error)
                return
            self.accepted += 1
            with connection:
                peer_address = "" if self._kind == "unix" else _address(peer)
                self._dealer.deal(Connection(self._kind, peer_address), connection.fileno())

    def _wait_out(self, shortage: OSError) -> None:
        """Accept nothing for a moment; clients wait in the backlog."""
        loop = asyncio.get_running_loop()
        if self._short_at is None or loop.time() - self._short_at > _SHORTAGE_IS_OVER_S:
            self._note(
                self.name,
                f"no connections can be accepted for now ({shortage.strerror}): raise the limit of open "
                f"files (ulimit -n)",
            )
        self._short_at = loop.time()
        self._pause = loop.call_later(_AFTER_SHORTAGE_S, self._resume)
        self.update()

    def _resume(self) -> None:
        self._pause = None
        self.update()


def address_of(sock: socket.socket) -> str:
    """Where a socket listens, in words."""
    return _address(sock.getsockname())


def _address(name: str | tuple[object, ...]) -> str:
    if isinstance(name, tuple):
        host, port = name[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return name


class Doors:
    """The service's sockets: those that the service manager opened for it, and its own."""

    def __init__(self, given: list[socket.socket], settings: Settings, dealer: Dealer, note: Note) -> None:
        """Sort the `given` sockets by their addresses and open those that are missing. `note` reports a
        problem to the operator. Raises ListenError."""
        self.listeners: list[Listener] = []
        """Of the API."""
        self.admin: socket.socket | None = None
        """The operators' socket, if it was given."""
        self._dealer = dealer
        self._note = note
        try:
            for sock in given:
                self._sort(sock, settings)
            if not any(listener.name == "api" for listener in self.listeners):
                self._add("api", bind_unix(settings.api_socket, settings.unix.api_mode))
            if (opened := self._bind(settings)) is not None:
                self._add("tcp", opened)
        except ListenError:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening. The operators' socket is the admin server's to close."""
        for listener in self.listeners:
            listener.close()

    def prepare(self, settings: Settings) -> socket.socket | None:
        """Open the address that `settings` name and the present ones do not, if there is one: `change` takes
        it. Raises ListenError; nothing has changed then."""
        return self._bind(settings, beside=self._own_tcp())

    def change(self, settings: Settings, opened: socket.socket | None) -> None:
        """Listen where `settings` say, in their modes. Connections that exist go on."""
        wanted = settings.address()
        for listener in self._own_tcp():
            if wanted is None or not listens_on(listener.address, wanted):
                listener.close()
                self.listeners.remove(listener)
                log.info("tcp does not listen on %s any more", listener.address)
        if opened is not None:
            self._add("tcp", opened).update()
        for listener in self.listeners:
            if listener.name == "api" and not listener.lasting:
                change_access(Path(listener.address), settings.unix.api_mode)

    def _own_tcp(self) -> list[Listener]:
        return [listener for listener in self.listeners if listener.name == "tcp" and not listener.lasting]

    def _add(self, name: SocketName, sock: socket.socket, *, lasting: bool = False) -> Listener:
        listener = Listener(name, sock, self._dealer, self._note, lasting=lasting)
        self.listeners.append(listener)
        by = " (opened by the service manager)" if lasting else ""
        log.info("%s listens on %s%s", name, listener.address, by)
        return listener

    def _bind(self, settings: Settings, beside: Iterable[Listener] = ()) -> socket.socket | None:
        wanted = settings.address()
        if wanted is None or any(
            listener.name == "tcp" and listens_on(listener.address, wanted) for listener in self.listeners
        ):
            return None
        return bind_tcp(*wanted, beside=beside)

    def _sort(self, sock: socket.socket, settings: Settings) -> None:
        name = sock.getsockname()
        if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ListenError(
                f"the service manager gave {name!r}, which does not listen for connections: use ListenStream="
            )
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            self._add("tcp", sock, lasting=True)
            return
        known = {str(settings.api_socket): "api", str(settings.admin_socket): "admin"}
        if name not in known:
            raise ListenError(
                f"the service manager gave {name}, and the service's sockets are {' and '.join(known)}: make "
                f"ListenStream= and run_dir agree"
            )
        if known[name] == "api":
            self._add("api", sock, lasting=True)
        else:
            self.admin = sock


def listens_on(address: str, wanted: tuple[str, int]) -> bool:
    """Whether a listener on `address` is the one that is wanted; a port of 0 is any."""
    host, port = wanted
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except OSError:
        return False
    return address == _address(found) or (port == 0 and address.rpartition(":")[0] == _address(found)[:-2])
