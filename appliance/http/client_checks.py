"""Detects clients that have disconnected after closing their sending side, and clients that do not read their
response. Also gives clients time to read a refusal before their connection is closed."""

from __future__ import annotations

import asyncio
import select
import sys
from collections.abc import Callable
from functools import partial

from appliance.background import Timer
from appliance.http.exchange import CONTINUE

FIRST_PROBE_S = 0.5
"""Delay before the first probe of a half-closed TCP connection, whose client may be waiting for the response
or may have disconnected. A probe sends `100 Continue`; if the client has closed the connection, its host
replies with a reset. The delay doubles after each probe."""
_POLL_S = 0.5
LINGER_S = 2.0
"""Time limit for reading and discarding the rest of a refused request before closing the connection. If the
connection were closed immediately, the client would get a reset before reading the response."""


class HalfClosedCheck:
    """Aborts a half-closed connection when its client has disconnected."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._probe_s = FIRST_PROBE_S
        self._timer = Timer()

    def start(self, may_probe: Callable[[], bool], waited_s: float = 0.0) -> None:
        """Check whether the client has disconnected, now and at regular intervals, until `stop` is called or
        the connection closes. `may_probe` returns whether `100 Continue` may be sent."""
        if self._transport.is_closing():
            return
        if self._peer_has_closed():
            self._transport.abort()
            return
        if waited_s >= self._probe_s and may_probe():
            self._probe_s *= 2
            waited_s = 0.0
            self._transport.write(CONTINUE)
        self._timer.start(_POLL_S, partial(self.start, may_probe, waited_s + _POLL_S))

    def stop(self) -> None:
        """Stop checking whether the client has disconnected."""
        self._timer.stop()

    def _peer_has_closed(self) -> bool:
        """Return whether the client has closed both directions of the connection. For TCP, the kernel reports
        this only after a reset."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), 0)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


class WriteLimit:
    """Aborts a connection if its client reads none of the response for `limit_s` seconds."""

    def __init__(self, transport: asyncio.Transport, limit_s: float, note: Callable[[], None]) -> None:
        """`note` is called before a connection is aborted."""
        self._transport = transport
        self._limit_s = limit_s
        self._note = note
        self._timer = Timer()
        self._is_running = False
        self._unsent_bytes = 0
        """Number of unsent bytes when the timer was started."""

    def start(self) -> bool:
        """Start the timer if any bytes are unsent and the timer is not running. Return whether any bytes are
        unsent."""
        unsent = self._transport.get_write_buffer_size()
        if unsent and not self._is_running:
            self._is_running, self._unsent_bytes = True, unsent
            self._timer.start(self._limit_s, self._late)
        return unsent > 0

    def restart(self) -> None:
        """Restart the timer, because the client has read some bytes."""
        self._unsent_bytes = sys.maxsize

    def stop(self) -> None:
        """Cancel the write timer."""
        self._timer.stop()

    def _late(self) -> None:
        self._is_running = False
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent >= self._unsent_bytes:
            self._note()
            self._transport.abort()
        else:
            self.start()


class Linger:
    """Ends a connection, but first discards incoming bytes for a short time, so that the client can read the
    response."""

    def __init__(self, transport: asyncio.Transport, write_limit: WriteLimit) -> None:
        self.begun = False
        self._transport = transport
        self._write_limit = write_limit
        self._bytes_left = 0
        self._timer = Timer()

    def begin(self, max_bytes: int) -> None:
        """Send the rest of the response and then close the sending side. Discard at most `max_bytes` incoming
        bytes."""
        self.begun = True
        self._bytes_left = max_bytes
        self._timer.start(LINGER_S, self._over)
        self._transport.write_eof()

    def drop(self, nbytes: int) -> None:
        """Count discarded bytes and abort the connection if there are too many."""
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            self._transport.abort()

    def stop(self) -> None:
        """Cancel the timer that closes the connection."""
        self._timer.stop()

    def _over(self) -> None:
        if self._write_limit.start():
            self._timer.start(LINGER_S, self._over)
        else:
            self._transport.abort()
