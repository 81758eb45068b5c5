"""One client connection: when the server reads from it, when it times out, and how it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from appliance.background import Timer
from appliance.http.client_checks import HalfClosedCheck, Linger, WriteLimit
from appliance.http.errors import RequestError
from appliance.http.exchange import Exchange, whole_response
from appliance.http.heads import RequestHead
from appliance.http.peers import Peer, peer_of
from appliance.http.pools import Pool
from appliance.http.request_parser import PIECE_BYTES, RequestParser
from appliance.http.turns import Source, source_of_request

if TYPE_CHECKING:
    from appliance.http.server import HttpServer

REFUSAL_DELAY_S = 1.0
"""Delay before refusing a request whose head uses too much memory. Without the delay, the client could
immediately reconnect and fill the memory again."""
UNAUTHENTICATED_LINGER_BYTES = 1 << 20
"""Maximum number of bytes to read and discard before closing a connection without a valid key."""
_SENT_CHECK_S = 0.01
LARGE_READ_BYTES = 16 << 10
"""A client that sends at least this many bytes in one read is probably sending a large head or body, so its
connection must wait for a turn before reading again."""


class Connection(asyncio.BufferedProtocol):
    """One client connection. Applications get it as `state["connection"]` in the ASGI scope, and its peer as
    `state["peer"]`. At most one request is parsed at a time. While that request is being answered, or while
    the application is not reading its body, at most one additional read buffer is held. All other data stays
    in the kernel's buffer, which throttles the sender. While a response is streamed, `write_chunk` passes
    bytes straight to the transport and never waits. The writer must therefore check `writable` first and, if
    it is false, keep its data until `on_writable` is called.
    """

    transport: asyncio.Transport
    _half_closed: HalfClosedCheck
    _write_limit: WriteLimit
    _linger: Linger

    def __init__(self, server: HttpServer, address: str, request: bytes = b"") -> None:
        self.server = server
        self.authenticated = False
        """Whether the connection is in the pool for known clients."""
        self.on_writable: Callable[[], None] | None = None
        """Called when the transport can accept bytes again."""
        self.on_disconnect: Callable[[], None] | None = None
        """Called once, after the connection has closed. `on_writable` and `on_disconnect` are set for the
        response in progress."""
        self.refusal: RequestError | None = None
        """The error with which `refuse` has answered an unfinished request."""
        self._address = address
        self._tenant = ""
        self._peer: Peer | None = None
        self._source: Source
        """The source (tenant, address or user) to which this connection's turns are charged."""
        self.pool: Pool | None = None
        """The pool that this connection is in. Set by the server."""
        self._parser = RequestParser(request)
        self._exchange: Exchange | None = None
        self._advancing = False
        self._read_paused = False
        self._waits_to_read = False
        """Whether the connection is waiting for its turn to read again after a large read."""
        self._given_up = False
        """Whether the connection's request will be refused because unfinished heads use too much memory."""
        self._begun: tuple[int, int] = 0, 0
        """The second in which the latest request began, and how many requests have begun in that second."""
        self._ended = False
        """Whether the client has closed its sending side."""
        self.writable = True
        """Whether the transport's buffer is below its high-water mark. Streams check this for each token."""
        self._may_write = asyncio.Event()
        """An event that is set while `writable` is true."""
        self._may_write.set()
        self._timer = Timer()

    # ── methods for a response in progress ──

    @property
    def disconnected(self) -> bool:
        """Whether the client has disconnected, or the connection is about to close."""
        return self.transport.is_closing()

    @property
    def owner(self) -> tuple[bool, str]:
        """Whether the client is authenticated, and the tenant of its latest request."""
        return self.authenticated, self._tenant

    @property
    def date_line(self) -> bytes:
        """The Date header line for a response that begins now."""
        return self.server.date_line

    async def drain(self) -> None:
        """Wait until the transport can accept bytes again."""
        await self._may_write.wait()

    def write_chunk(self, data: bytes) -> None:
        """Write part of a response that was started without a content length. `data` must not be empty."""
        if self._exchange is not None and self._exchange.chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self.transport.write(data)

    def release(self) -> None:
        """Remove the callbacks of a response that has ended."""
        self.on_writable = self.on_disconnect = None

    def abort(self) -> None:
        """Close the connection immediately, dropping unsent bytes."""
        self.transport.abort()

    def cut_off(self) -> None:
        """Close the connection immediately, because the client is not reading its response."""
        self.server.cut_off.note(self._peer)
        self.transport.abort()

    def authenticate(self, tenant: str = "") -> bool:
        """Move the connection to the pool for known clients and assign it to `tenant`, because its request
        has a valid identity. Return False if the pool is full and all other connections have requests in
        progress."""
        if self.disconnected:
            # A closed connection has left its pool. Nothing would free a place that it took now.
            return True
        if not self.authenticated or self._tenant != tenant:
            if not self.server.promote(self, tenant):
                return False
            self.authenticated, self._tenant = True, tenant
            if self.pool is not None and self._exchange is not None and self._exchange.request_complete:
                self.pool.mark_busy(self)
        return self.authenticated

    # ── handing a request to another process ──

    async def leave(self) -> tuple[int, bytes]:
        """Stop reading and wait until earlier responses have been sent. Return the connection's descriptor,
        and any bytes of later requests that have already been read."""
        self._waits_to_read = False
        self._pause_reading(True)
        while self.transport.get_write_buffer_size() and not self.disconnected:
            await asyncio.sleep(_SENT_CHECK_S)
        descriptor: int = self.transport.get_extra_info("socket").fileno()
        return descriptor, bytes(self._parser.received)

    # ── opening and closing the connection ──

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Identify the peer and add the connection to a pool."""
        self.transport = transport
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer = peer_of(sock, self._address)
        note = partial(self.server.cut_off.note, self._peer)
        self._write_limit = WriteLimit(transport, self.server.write_timeout_s, note)
        self._half_closed = HalfClosedCheck(transport)
        self._linger = Linger(transport, self._write_limit)
        self._source = source_of_request("", self._peer)
        if not self.server.admit(self, self._peer):
            transport.abort()
            return
        self._timer.start(self._limit_s(self.server.limits.header_timeout_s), self._request_late)
        # First process the bytes that another process has already read from this connection.
        self.advance()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from its pool and notify the response in progress."""
        self.server.forget(self)
        for timer in (self._timer, self._half_closed, self._write_limit, self._linger):
            timer.stop()
        self.writable = True
        self._may_write.set()
        self._parser.drop()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.disconnect()
        on_disconnect = self.on_disconnect
        self.release()
        if on_disconnect is not None:
            on_disconnect()

    def stop(self) -> None:
        """Close the connection as soon as the response in progress has been written."""
        if self._exchange is None:
            self.close()
        else:
            self._exchange.keep_alive = False

    # ── reading ──

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the part of the server's shared read buffer that the transport may fill. `buffer_updated`
        empties it in the same event loop step. One loop iteration reads from every connection with data. To
        keep iterations short, the whole buffer is returned only while the application is waiting for the
        body.
        """
        buffer = self.server.read_buffer
        exchange = self._exchange
        return buffer if exchange is not None and exchange.wants_body else buffer[:LARGE_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes read into the buffer."""
        if self._linger.begun:
            self._linger.drop(nbytes)
        else:
            self._parser.received += self.server.read_buffer[:nbytes]
            self.advance()
        if nbytes >= LARGE_READ_BYTES and not self._waits_to_read and not self.transport.is_closing():
            self._waits_to_read = True
            self.server.turns.add(self._source, 0, self._read_on)
            if self._waits_to_read:
                self._pause_reading(True)

    def _read_on(self) -> None:
        """Resume reading after a large read, because it is the connection's turn."""
        if self._waits_to_read and not self.transport.is_closing():
            self._waits_to_read = False
            self._pause_reading(not self._linger.begun and not self._wants_bytes())

    def eof_received(self) -> bool:
        """Keep the connection open after the client has closed its sending side, if the client may still
        expect a response."""
        self._ended = True
        exchange = self._exchange
        if exchange is None or not exchange.request_complete or self._linger.begun:
            # The transport closes once everything has been sent. The write time limit still applies.
            self.close()
            return False
        self._half_closed.start(self._may_probe)
        return True

    def advance(self) -> None:
        """Parse as many of the received bytes as can be used now: at most the next request head, or the body
        that the application is waiting for."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while not self._linger.begun and not self.transport.is_closing() and self._step():
                pass
        except RequestError as error:
            self.refuse(error)
        finally:
            self._advancing = False
        if not self._linger.begun and not self.transport.is_closing():
            self._pause_reading(not self._wants_bytes())
            self._count_memory()

    def _count_memory(self) -> None:
        """Report to the server how much memory this connection's requests use, excluding body bytes already
        read by the application."""
        size = len(self._parser.received) + self._parser.head.collected_bytes
        if self._exchange is not None:
            size += self._exchange.head.memory_bytes
        self.server.request_memory.hold(self, size)

    def give_up_request(self) -> None:
        """Refuse the request after a delay, because unfinished request heads use too much memory in total. If
        the request is already complete, close the connection instead, because the application may be
        answering it."""
        if self._exchange is not None and self._exchange.request_complete:
            self.transport.abort()
            return
        self._given_up = True
        self._parser.drop()
        self._pause_reading(True)
        message = "the headers of unfinished requests use too much memory: retry later"
        refusal = RequestError(503, message, "too_many_header_bytes")
        self._timer.start(REFUSAL_DELAY_S, partial(self.refuse, refusal))

    def _step(self) -> bool:
        """Parse one piece of the received bytes. Return False if no complete piece remains."""
        parser = self._parser
        if not parser.received:
            return False
        exchange = self._exchange
        if exchange is None:
            begun = parser.head.begun
            head = parser.read_head()
            if head is not None:
                self._begin(head)
            elif parser.head.begun and not begun:
                self._timer.start(self._limit_s(self.server.limits.header_timeout_s), self._request_late)
            return head is not None
        if not exchange.wants_body:
            return False
        content = parser.read_body()
        if parser.body is None:
            self._request_complete(exchange)
        exchange.receive_body(content, parser.body is None)
        return True

    def _begin(self, head: RequestHead) -> None:
        state = {"peer": self._peer, "connection": self}
        exchange = self._exchange = Exchange(self, head, state)
        if self._parser.body is None:
            self._request_complete(exchange)
        else:
            self._timer.start(self.server.limits.body_timeout_s, self._body_late)
        assert self._peer is not None
        self._source = source_of_request(self.server.tenant_of(head.headers, state), self._peer)
        second, count = self._begun
        self._begun = self.server.second, (count + 1 if second == self.server.second else 1)
        self.server.turns.add(self._source, self._begun[1], lambda: self._run(exchange))
        if self._ended:
            self._half_closed.start(self._may_probe)

    def _run(self, exchange: Exchange) -> None:
        if self._exchange is exchange:
            self.server.run(exchange)

    def _request_complete(self, exchange: Exchange) -> None:
        exchange.request_complete = True
        self._timer.stop()
        if self.pool is not None:
            self.pool.mark_busy(self)
        if self._parser.received and not self.authenticated:
            # Only known clients may send more requests before the first one is answered.
            exchange.keep_alive = False

    def skip_body(self) -> bool:
        """Return whether the whole body has arrived. If so, drop its unread part."""
        parser = self._parser
        if parser.body is None or self._exchange is None:
            return True
        try:
            while parser.received and parser.body is not None:
                parser.read_body()
        except RequestError:
            return False
        if parser.body is not None:
            return False
        self._request_complete(self._exchange)
        return True

    def _wants_bytes(self) -> bool:
        """Return whether to read more bytes. During a response, up to one buffer of the next request is read,
        because only a read can detect a client disconnect."""
        exchange = self._exchange
        if self._given_up:
            return False
        if exchange is None or exchange.wants_body:
            return True
        return exchange.request_complete and not self._parser.received

    def _pause_reading(self, paused: bool) -> None:
        paused = paused or self._waits_to_read
        if paused == self._read_paused or self._ended:
            return
        self._read_paused = paused
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # ── the end of a response, and of the connection ──

    def finish(self, exchange: Exchange) -> None:
        """After a complete response, continue with the next request or close the connection."""
        self._exchange = None
        parser = self._parser
        if self.pool is not None:
            self.pool.mark_waiting(self)
        self._half_closed.stop()
        if self.transport.is_closing():
            return
        if parser.body is not None:
            self._begin_linger(2 * self.server.limits.max_body_bytes + PIECE_BYTES)
        elif not exchange.keep_alive or (self._ended and not parser.received):
            if self.authenticated and not parser.received:
                self.close()
            else:
                self._begin_linger(PIECE_BYTES)
        else:
            self._timer.start(self._limit_s(self.server.limits.idle_timeout_s), self._request_late)
            self.advance()

    def close(self) -> None:
        """Close the connection once all bytes already written have been sent."""
        if not self.transport.is_closing():
            self._timer.stop()
            self._write_limit.start()
            self.transport.close()

    def refuse(self, error: RequestError) -> None:
        """Send an error response and close the connection. If a response has already begun, close
        immediately."""
        exchange = self._exchange
        if exchange is not None and exchange.started:
            self.transport.abort()
            return
        self.refusal = error
        if exchange is not None:
            self._exchange = None
            exchange.disconnect()
        self.transport.write(whole_response(error))
        self._begin_linger(2 * self.server.limits.max_body_bytes + PIECE_BYTES)

    def _begin_linger(self, max_bytes: int) -> None:
        """Close after reading and discarding bytes for a short time, so that the client can read the
        response."""
        self._parser.drop()
        self._count_memory()
        if self._ended:
            self.close()
            return
        if not self.authenticated:
            max_bytes = min(max_bytes, UNAUTHENTICATED_LINGER_BYTES)
        if self.pool is not None:
            self.pool.mark_waiting(self)
        self._timer.stop()
        self._linger.begin(max_bytes)
        self._pause_reading(False)

    def _may_probe(self) -> bool:
        """Return whether `100 Continue` may be sent now to probe a half-closed connection."""
        exchange = self._exchange
        return (
            exchange is not None
            and not exchange.started
            and exchange.head.version == "1.1"
            and self._peer is not None
            and self._peer.kind == "tcp"
        )

    # ── time limits ──

    def _limit_s(self, seconds: float) -> float:
        """Return the time limit for an idle client, which is shorter for unknown clients."""
        if self.authenticated:
            return seconds
        return min(seconds, self.server.limits.unauthenticated_timeout_s)

    def _request_late(self) -> None:
        if self._parser.head.begun:
            self.refuse(RequestError(408, "the request headers did not arrive in time", "header_timeout"))
        elif self._write_limit.start():
            # The last response has not been fully sent. The write timer checks that the client reads it.
            self._timer.start(self._limit_s(self.server.limits.idle_timeout_s), self._request_late)
        else:
            self.close()

    def _body_late(self) -> None:
        exchange = self._exchange
        if exchange is None or self._linger.begun:
            return
        if not exchange.wants_body and self._parser.received:
            # The application has not yet read the bytes that have arrived.
            self._timer.start(self.server.limits.body_timeout_s, self._body_late)
        elif exchange.started:
            self.transport.abort()
        else:
            self.refuse(RequestError(408, "the request body did not arrive in time", "body_timeout"))

    # ── writing, within a time limit ──

    def pause_writing(self) -> None:
        """Start the write timer, because the transport's buffer is full."""
        self.writable = False
        self._may_write.clear()
        self._write_limit.start()
        self.server.congested(self)

    def resume_writing(self) -> None:
        """Resume writing, because the transport accepts bytes again."""
        self.writable = True
        self._may_write.set()
        self.server.relieved(self)
        self._write_limit.restart()
        if self.on_writable is not None:
            self.on_writable()
