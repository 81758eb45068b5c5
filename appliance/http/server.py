"""Serves one ASGI application over any number of sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any

from appliance.channel.front_settings import Limits
from appliance.http.connection import Connection
from appliance.http.counted_log import CountedLog
from appliance.http.exchange import Exchange
from appliance.http.peers import Peer
from appliance.http.pools import Pool
from appliance.http.request_memory import RequestMemory, of_largest_owner
from appliance.http.turns import Turns

WRITE_TIMEOUT_S = 60.0
"""A connection is closed if its client reads none of the response for this long."""
MAX_UNSENT_BYTES = 64 << 20
"""Maximum total number of unsent response bytes across all connections. If it is exceeded, the server picks
the tenant with the most unsent bytes and closes whichever of its connections has been congested longest."""
READ_BYTES = 64 << 10
"""Maximum number of body bytes per read from a connection."""


class HttpServer:
    """Serves one ASGI application on the running event loop. Each connection is in one of two pools: one for
    known clients and one for all others. A client is known if `known` returns True for its peer, or if one of
    the connection's requests had a valid key. The pool for unknown clients is small, has short time limits,
    and never takes room away from the pool for known clients. `tenant_of` returns a request's tenant, based
    on its headers and state, or an empty string if it has no valid identity. `tenant_of` may add entries to
    the request's state. Tenants take turns (`Turns`).
    """

    def __init__(
        self,
        app: Any,
        limits: Limits | None = None,
        *,
        known: Callable[[Peer], bool] = lambda peer: True,
        tenant_of: Callable[[Sequence[tuple[bytes, bytes]], dict[str, Any]], str] = lambda headers, state: "",
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        self.known_pool = Pool()
        self.unknown_pool = Pool()
        self.refused = 0
        """Connections closed or answered with 503 because the pool was full."""
        self.cut_off = CountedLog("connections closed because clients did not read their responses")
        self.request_memory = RequestMemory()
        self.turns = Turns()
        self.tenant_of = tenant_of
        self.second = 0
        """Seconds since the server started."""
        self.limits = limits or Limits()
        self.write_timeout_s = write_timeout_s
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        """The read buffer shared by all connections. Sharing is safe, because a transport fills the buffer
        and the connection empties it in the same event loop step."""
        self._app = app
        self._known = known
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._congested: dict[Connection, None] = {}
        """Connections whose transport accepts no more bytes. The one that has been congested longest comes
        first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[asyncio.Server] = []
        self._clock: asyncio.TimerHandle | None = None
        self._stopping = False
        self._tick()

    @property
    def limits(self) -> Limits:
        """The current limits on connections and requests. If the limits are replaced, existing connections
        adopt the new ones at their next request."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self.known_pool.limit = limits.max_connections
        self.unknown_pool.limit = limits.max_unauthenticated_connections

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def make_space(self) -> None:
        """Close waiting connections until both pools are within their limits, for example after a limit has
        been lowered."""
        self.known_pool.make_space()
        self.unknown_pool.make_space()

    async def adopt(
        self,
        sock: socket.socket,
        address: str = "",
        request: bytes = b"",
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve an accepted connection. The server becomes the owner of the socket. If the server is
        stopping, it answers only the request that another process had read, or closes the socket if there is
        none.

        - `address` is the TCP peer's address. If empty, the address is looked up.
        - `request` holds bytes already read from the connection by another process.
        - `begins` is called before anything is read.
        """
        if self._stopping and not request:
            sock.close()
            return
        begins()
        sock.setblocking(False)
        try:
            _, connection = await self._loop.connect_accepted_socket(
                lambda: Connection(self, address, request), sock
            )
        except OSError:
            # The client has disconnected since being accepted.
            sock.close()
            return
        if self._stopping:
            connection.stop()

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket (Unix or TCP) until `stop` is called."""
        sock.setblocking(False)

        def connection() -> Connection:
            return Connection(self, "")

        if sock.family == socket.AF_UNIX:
            server = await self._loop.create_unix_server(connection, sock=sock)
        else:
            server = await self._loop.create_server(connection, sock=sock)
        self._listening.append(server)

    async def stop(self, grace_s: float) -> None:
        """Stop the server: accept no more connections, close idle connections, wait up to `grace_s` seconds
        for responses in progress, and then close the remaining connections."""
        self._stopping = True
        for server in self._listening:
            server.close()
        for connection in list(self._connections):
            connection.stop()
        deadline = self._loop.time() + grace_s
        while self._connections and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self._connections):
            connection.abort()
        if self._clock is not None:
            self._clock.cancel()
        # The application has been told that the connections are closed. Wait for its tasks to end.
        while self._tasks and self._loop.time() < deadline + 1.0:
            await asyncio.sleep(0.01)

    # ── called by `Connection` ──

    def admit(self, connection: Connection, peer: Peer) -> bool:
        """Add a new connection to a pool. Return False if the pool is full."""
        known = self._known(peer)
        if known and self.known_pool.add(connection, source=peer.source):
            connection.pool, connection.authenticated = self.known_pool, True
        elif self.unknown_pool.add(connection, source=peer.source):
            # If the pool for known clients is full, place a known client in the other pool, so that it
            # receives a 503 response.
            connection.pool = self.unknown_pool
        else:
            self.refused += 1
            return False
        self._connections.add(connection)
        return True

    def promote(self, connection: Connection, tenant: str) -> bool:
        """Move a connection to the pool for known clients, because its request has a valid identity, and
        assign it to that identity's tenant. Return False if the pool is full."""
        former = connection.pool
        if former is self.known_pool:
            if self.known_pool.assign(connection, tenant):
                return True
        elif self.known_pool.add(connection, tenant, source=f"tenant {tenant}"):
            if former is not None:
                former.remove(connection)
            connection.pool = self.known_pool
            return True
        self.refused += 1
        return False

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection from its pool."""
        self._connections.discard(connection)
        self._congested.pop(connection, None)
        self.request_memory.hold(connection, 0)
        if connection.pool is not None:
            connection.pool.remove(connection)

    def congested(self, connection: Connection) -> None:
        """Record that this connection's client has stopped reading its response. If too many response bytes
        are unsent, close a connection."""
        self._congested[connection] = None
        unsent = {one: one.transport.get_write_buffer_size() for one in self._congested}
        total = sum(unsent.values())
        while total > MAX_UNSENT_BYTES:
            oldest = of_largest_owner(unsent)[0]
            if oldest is connection:
                return
            total -= unsent.pop(oldest)
            del self._congested[oldest]
            oldest.cut_off()

    def relieved(self, connection: Connection) -> None:
        """Record that this connection's client has resumed reading its response."""
        self._congested.pop(connection, None)

    def run(self, exchange: Exchange) -> None:
        """Start a task in which the application answers the request."""
        task = self._loop.create_task(exchange.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tick(self) -> None:
        self.second += 1
        self.date_line = b"date: %b\r\n" % formatdate(usegmt=True).encode()
        self._clock = self._loop.call_later(1.0, self._tick)
