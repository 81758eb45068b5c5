"""The API's listening sockets. The core accepts connections on them and gives each connection to a front.

The core accepts connections on a listener only while a front can take them. Otherwise, new connections wait
in the listener's backlog instead of being refused. Sockets opened by the service manager outlive the service:
a client that connects while the service is down is served after the next startup.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Iterable
from pathlib import Path

from appliance.channel.core_messages import ClientConnection
from appliance.front_pool.balancer import ConnectionBalancer
from appliance.front_pool.front import Untaken
from appliance.front_pool.shortage import NoteProblem, ShortageReport
from appliance.http.sockets import (
    ListenError,
    address_of,
    bind_tcp,
    bind_unix,
    change_access,
    format_address,
    listens_on,
)
from appliance.protocol.status import SocketName, SocketState, SocketStatus
from appliance.rundir import remove_socket
from appliance.settings import Settings

log = logging.getLogger(__name__)

_MAX_PER_PASS = 4
"""Maximum number of connections accepted per event loop iteration, to keep a burst of connections from
delaying requests in progress."""
_RETRY_S = 0.1
"""How long, in seconds, to stop accepting connections after running out of descriptors or memory."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """One listening socket whose connections are given to fronts. Owns the socket."""

    def __init__(
        self,
        name: SocketName,
        sock: socket.socket,
        balancer: ConnectionBalancer,
        note: NoteProblem,
        *,
        lasting: bool = False,
    ) -> None:
        """`lasting` is true if the service manager created the socket and keeps it open after the service
        stops."""
        self.name = name
        self.lasting = lasting
        self.accepted = 0
        self.socket = sock
        self._is_unix = sock.family == socket.AF_UNIX
        self.address = address_of(sock)
        self._balancer = balancer
        self._shortage = ShortageReport(name, note)
        self._reading = False
        self._pause: asyncio.TimerHandle | None = None
        self._stopping = False
        self._closed = False

    def update(self) -> None:
        """Accept connections if a front can take them; otherwise, leave new ones in the socket's backlog."""
        wanted = not (self._closed or self._stopping) and self._pause is None and self._balancer.open
        if wanted != self._reading:
            self._reading = wanted
            loop = asyncio.get_running_loop()
            if wanted:
                loop.add_reader(self.socket.fileno(), self._accept)
            else:
                loop.remove_reader(self.socket.fileno())

    def begin_stop(self) -> None:
        """If the socket outlives the service, stop accepting connections, so that new clients wait for the
        next startup. A socket created by the service accepts connections until it is closed."""
        if self.lasting:
            self._stopping = True
            self.update()

    def close(self) -> None:
        """Stop listening and remove the socket file if the service created it."""
        if self._closed:
            return
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        self.update()
        if self._is_unix and not self.lasting:
            remove_socket(Path(self.address))
        self.socket.close()

    def status(self) -> SocketStatus:
        """Return the socket's status for operators."""
        state: SocketState = "closed" if self._closed else "accepting" if self._reading else "waiting"
        return SocketStatus(name=self.name, address=self.address, state=state, accepted=self.accepted)

    def _accept(self) -> None:
        for _ in range(_MAX_PER_PASS):
            if not self._balancer.open:
                self.update()
                return
            try:
                connection, peer = self.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                self._pause_accepting(error)
                return
            self.accepted += 1
            message = ClientConnection("" if self._is_unix else format_address(peer))
            self._balancer.assign(Untaken(message, [connection.detach()]))

    def _pause_accepting(self, shortage: OSError) -> None:
        """Briefly stop accepting connections. New clients wait in the socket's backlog."""
        self._shortage.report("no connections can be accepted at the moment", shortage)
        self._pause = asyncio.get_running_loop().call_later(_RETRY_S, self._resume)
        self.update()

    def _resume(self) -> None:
        self._pause = None
        self.update()


class Listeners:
    """All API sockets, opened by the service manager or by the service itself."""

    def __init__(
        self,
        given: list[socket.socket],
        settings: Settings,
        balancer: ConnectionBalancer,
        note: NoteProblem,
    ) -> None:
        """Match the sockets in `given` to listeners by address and open sockets for the remaining listeners.
        Raises ListenError if a given socket is unsuitable or a socket cannot be opened."""
        self.admin: socket.socket | None = None
        """The admin API's socket if opened by the service manager, otherwise None."""
        self._listeners: list[Listener] = []
        self._balancer = balancer
        self._note = note
        try:
            for sock in given:
                self._take(sock, settings)
            if not any(listener.name == "api" for listener in self._listeners):
                self._add("api", bind_unix(settings.api_socket, settings.unix.api_mode))
            if (opened := self._bind_tcp(settings)) is not None:
                self._add("tcp", opened)
        except ListenError:
            self.close()
            raise

    def status(self) -> list[SocketStatus]:
        """Return each socket's status for operators."""
        return [listener.status() for listener in self._listeners]

    def accepted(self) -> dict[str, int]:
        """Return the number of accepted connections per listener, by name."""
        return {listener.name: listener.accepted for listener in self._listeners}

    def update(self) -> None:
        """Start or stop accepting connections, depending on whether a front can take them."""
        for listener in self._listeners:
            listener.update()

    def begin_stop(self) -> None:
        """Leave new connections in the backlogs of sockets that outlive the service, to be served after its
        next startup."""
        for listener in self._listeners:
            listener.begin_stop()

    def close(self) -> None:
        """Stop listening on all API sockets. The admin server closes its own socket."""
        for listener in self._listeners:
            listener.close()

    def prepare(self, settings: Settings) -> socket.socket | None:
        """If the TCP address in `settings` is new, open a socket on that address for a later call to
        `change`. If ListenError is raised, nothing has changed."""
        return self._bind_tcp(settings, beside=[listener.socket for listener in self._own_tcp()])

    def change(self, settings: Settings, opened: socket.socket | None) -> None:
        """Apply the address and the file modes in `settings`. Existing connections stay open."""
        wanted = settings.address()
        for listener in self._own_tcp():
            if wanted is None or not listens_on(listener.address, wanted):
                listener.close()
                self._listeners.remove(listener)
                log.info("no longer listening on %s (tcp)", listener.address)
        if opened is not None:
            self._add("tcp", opened).update()
        for listener in self._listeners:
            if listener.name == "api" and not listener.lasting:
                change_access(Path(listener.address), settings.unix.api_mode)

    def _own_tcp(self) -> list[Listener]:
        return [listener for listener in self._listeners if listener.name == "tcp" and not listener.lasting]

    def _add(self, name: SocketName, sock: socket.socket, *, lasting: bool = False) -> Listener:
        listener = Listener(name, sock, self._balancer, self._note, lasting=lasting)
        self._listeners.append(listener)
        by = " (opened by the service manager)" if lasting else ""
        log.info("listening on %s: %s%s", name, listener.address, by)
        return listener

    def _bind_tcp(self, settings: Settings, beside: Iterable[socket.socket] = ()) -> socket.socket | None:
        wanted = settings.address()
        if wanted is None or any(
            listener.name == "tcp" and listens_on(listener.address, wanted) for listener in self._listeners
        ):
            return None
        return bind_tcp(*wanted, beside=beside)

    def _take(self, sock: socket.socket, settings: Settings) -> None:
        """Take ownership of a socket opened by the service manager."""
        name = sock.getsockname()
        if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ListenError(
                f"the service manager passed {name!r}, which is not a listening stream socket: use "
                "ListenStream= in the socket unit"
            )
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            self._add("tcp", sock, lasting=True)
            return
        known = {str(settings.api_socket): "api", str(settings.admin_socket): "admin"}
        if name not in known:
            raise ListenError(
                f"the service manager passed {name}, but the service's sockets are "
                f"{' and '.join(known)}: change ListenStream= or the run_dir setting so that the paths "
                "match"
            )
        if known[name] == "api":
            self._add("api", sock, lasting=True)
        else:
            self.admin = sock
