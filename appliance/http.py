"""HTTP/1.1 over sockets that somebody else bound or accepted; fronts and the admin API serve through it.

uvicorn's protocol over httptools, with what it lacks: who the peer is (`SO_PEERCRED`, `SO_PEERGROUPS`), time
limits for headers, bodies and writes, a bound on bytes, and a door past ASGI for streams
(`Connection.write_chunk`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import Any, NamedTuple

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from appliance.messages import Limits

MOST_HEADER_BYTES = 64 << 10
WRITE_TIMEOUT_S = 60.0
"""A peer that takes nothing for this long, while more than the transport's high-water mark waits, is gone."""
LINGER_S = 2.0
"""How long a refused body may go on arriving (and is dropped) before the connection closes. Closing at once
would reset the connection under the answer."""

_UCRED = struct.Struct("3i")
_SO_PEERGROUPS = 59
"""Of asm-generic/socket.h, Linux 4.13 or newer; Python's socket module does not name it."""
_MOST_GROUPS_BYTES = 1024
"""What Python reads of a socket option: 256 groups."""


class Peer(NamedTuple):
    """Who is at the other end, as it was when it connected. `uid` and `pid` are -1 for TCP; `address` is
    empty for a Unix socket."""

    kind: str
    """"unix" or "tcp"."""
    uid: int
    pid: int
    address: str
    gids: tuple[int, ...] = ()
    """Its groups: the primary one, then the others in ascending order."""

    def __str__(self) -> str:
        return f"uid {self.uid}" if self.kind == "unix" else self.address


def unix_peer(sock: socket.socket) -> Peer:
    """Who connected to a Unix socket, by the kernel's word. Of a process in more than 256 groups only the
    primary one is known."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    others = b""
    with contextlib.suppress(OSError):  # more groups than fit, or an older kernel
        others = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS_BYTES)
    gids = sorted({number for (number,) in struct.iter_unpack("I", others)} - {gid})
    return Peer("unix", uid, pid, "", (gid, *gids))


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Scheme (lower case) and credentials of the first Authorization header; both empty without one."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, credentials = value.strip().partition(b" ")
            return scheme.lower(), credentials.strip()
    return b"", b""


def error_document(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    """An error in OpenAI's shape, as JSON."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}, ensure_ascii=False).encode()


class Connection(HttpToolsProtocol):
    """One client's connection. Applications find it, and its peer, in the scope: `state["connection"]`,
    `state["peer"]`.

    While a response streams, `write_chunk` hands bytes straight to the transport. It never waits: who writes
    looks at `writable` first and keeps what it has until `on_writable`.
    """

    def __init__(self, server: HttpServer, address: str, request: bytes = b"") -> None:
        super().__init__(server.config, server.state, {}, asyncio.get_running_loop())
        self._server = server
        self._address = address
        self._request = request
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._received = 0
        self._begins_with = 0
        self._in_headers = False
        self._in_body = False
        self.on_writable: Callable[[], None] | None = None
        """Called when the transport takes bytes again."""
        self.on_lost: Callable[[], None] | None = None
        """Called once when the connection is gone. Both belong to the response under way."""

    # ── for a response under way ──

    @property
    def writable(self) -> bool:
        """Whether the transport's buffer is below its high-water mark."""
        return not self.flow.write_paused

    @property
    def lost(self) -> bool:
        """The client is gone, or about to be."""
        return self.transport.is_closing()

    def write_chunk(self, data: bytes) -> None:
        """Write a chunk of a response that was started without a content length. `data` is not empty."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def release(self) -> None:
        """Forget the callbacks: the response is over."""
        self.on_writable = self.on_lost = None

    def abort(self) -> None:
        """Close now, dropping what was not sent."""
        self.transport.abort()

    # ── for a request that another process is to answer ──

    def leave(self) -> int | None:
        """Read no more, so that another process can go on with this connection: its descriptor. None if bytes
        of a further request were read already, or some of an earlier answer are not sent yet."""
        if self._in_headers or self._in_body or self.pipeline or self.transport.get_write_buffer_size():
            return None
        self.transport.pause_reading()
        descriptor: int = self.transport.get_extra_info("socket").fileno()
        return descriptor

    async def abandon(self) -> None:
        """Close this process's descriptor; whoever has another one keeps the connection."""
        gone = asyncio.Event()
        self.on_lost = gone.set
        self.transport.abort()
        await gone.wait()

    # ── the connection's life ──

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._server.limits.max_connections:
            transport.abort()
            return
        self.app_state = {"peer": self._identify(transport), "connection": self}
        self._arm(self._server.limits.header_timeout_s, self._headers_late)
        if self._request:
            # What another process has read, before anything is read here.
            request, self._request = self._request, b""
            self.data_received(request)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disarm()
        self._stop_write_timer()
        self._unset_keepalive_if_required()
        on_lost = self.on_lost
        self.release()
        # The state refers back to this object: without it the connection is freed at once.
        self.app_state = {}
        if on_lost is not None:
            on_lost()

    def _identify(self, transport: asyncio.Transport) -> Peer:
        sock = transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            return unix_peer(sock)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = self._address
        if not address and self.client:
            host, port = self.client
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return Peer("tcp", -1, -1, address)

    # ── reading, within bounds ──

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self._begins_with = 0 if self._in_headers or self._in_body else len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_headers:
            if self._received > MOST_HEADER_BYTES:
                self._refuse(
                    431, f"the request's header is larger than {MOST_HEADER_BYTES} bytes", "header_too_large"
                )
        elif self._in_body and not self.cycle.response_complete:
            # Bodies are counted by whoever reads them; this bounds chunk framing and trailers as well.
            most = 2 * self._server.limits.max_body_bytes + MOST_HEADER_BYTES
            if self._received > most:
                self._refuse(413, f"the request is larger than {most} bytes", "body_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # Bytes that came along with another message's end are not counted.
        self._received, self._begins_with = self._begins_with, 0
        self._in_headers = True
        self._arm(self._server.limits.header_timeout_s, self._headers_late)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._in_body = True
        super().on_headers_complete()
        self._arm(self._server.limits.body_timeout_s, self._body_late)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._arm(LINGER_S, self._body_late)

    def _headers_late(self) -> None:
        if self._busy():
            self._arm(self._server.limits.header_timeout_s, self._headers_late)
        elif self._in_headers:
            self._refuse(408, "the request's header did not arrive in time", "header_timeout")
        else:
            self.transport.close()

    def _body_late(self) -> None:
        if self.flow.read_paused:
            self._arm(self._server.limits.body_timeout_s, self._body_late)
        elif self.cycle.response_started:
            self._hang_up()
        else:
            self._refuse(408, "the request's body did not arrive in time", "body_timeout")

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer for the application, which reads the end of the connection, and close."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = error_document(message, "invalid_request_error", None, code)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP/1.1 request", "invalid_http")

    # ── writing, within bounds ──

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._server.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()
        if self.on_writable is not None:
            self.on_writable()

    def timeout_keep_alive_handler(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        # A close waits until everything was taken; this peer had its time.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.close()

    # ── timers ──

    def _arm(self, seconds: float, late: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class HttpServer:
    """Serves one ASGI application on the running event loop, over any number of sockets.

    `limits` may be replaced at any time; connections that exist take the new ones at their next request.
    """

    def __init__(
        self, app: Any, limits: Limits | None = None, write_timeout_s: float = WRITE_TIMEOUT_S
    ) -> None:
        self.limits = limits or Limits()
        self.write_timeout_s = write_timeout_s
        self.config = Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        # One line for each malformed request would let anybody fill the journal.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self.config.load()
        self.state = ServerState()
        self._loop = asyncio.get_running_loop()
        self._listening: list[asyncio.Server] = []
        self._clock: asyncio.TimerHandle | None = None
        self._stopping = False
        self._tick()

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self.state.connections)

    async def adopt(self, sock: socket.socket, address: str = "", request: bytes = b"") -> None:
        """Serve an accepted connection. `address` is the TCP peer's, for the log; found out when empty.
        `request` is what was read from it before.

        The socket is the server's from here on; over the limit of connections, or while stopping, it closes.
        """
        if self._stopping or self.connections >= self.limits.max_connections:
            sock.close()
            return
        self.config.timeout_keep_alive = self.limits.idle_timeout_s  # type: ignore[assignment]
        sock.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: Connection(self, address, request), sock)
        except OSError:
            # The client left between being accepted and now.
            sock.close()

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket (Unix or TCP) until `stop`."""
        self.config.timeout_keep_alive = self.limits.idle_timeout_s  # type: ignore[assignment]
        sock.setblocking(False)

        def connection() -> Connection:
            return Connection(self, "")

        if sock.family == socket.AF_UNIX:
            server = await self._loop.create_unix_server(connection, sock=sock)
        else:
            server = await self._loop.create_server(connection, sock=sock)
        self._listening.append(server)

    async def stop(self, grace_s: float) -> None:
        """Accept no more, close idle connections, let responses under way end within `grace_s` seconds, then
        cut the rest off."""
        self._stopping = True
        for server in self._listening:
            server.close()
        for connection in list(self.state.connections):
            connection.shutdown()
        deadline = self._loop.time() + grace_s
        while self.state.connections and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self.state.connections):
            connection.transport.abort()
        if self._clock is not None:
            self._clock.cancel()
        # Applications whose client was cut off learn of it and end.
        while self.state.tasks and self._loop.time() < deadline + 1.0:
            await asyncio.sleep(0.01)

    def _tick(self) -> None:
        self.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._clock = self._loop.call_later(1.0, self._tick)
