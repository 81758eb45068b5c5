"""The HTTP client: connections that are used again, and one request's way over one of them.

A stream costs no task switch per chunk: what a chunk means is noted where it is read, and only the end of a
request wakes anybody.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from typing import Any

import msgspec

from appliance.bench.http import EventSplitter, ProtocolError, ResponseParser
from appliance.bench.messages import Record, Target
from appliance.ownership import UntrustedError, check_peer

_MOST_ERROR_BYTES = 64 << 10
_MOST_PLAIN_BYTES = 16 << 20
_CONNECT_AGAIN_S = 0.002


class _Choice(msgspec.Struct):
    text: str | None = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Exchange:
    """A request on its way. `done` is set once: at the response's end, or with a failure."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.failure = ""
        self.message = ""

    def on_body(self, piece: bytes, response: ResponseParser) -> None:
        """Some of the body came."""
        raise NotImplementedError

    def on_end(self, response: ResponseParser) -> None:
        """The response is complete."""
        raise NotImplementedError

    def fail(self, kind: str, message: str) -> None:
        """It ends here."""
        if not self.done.done():
            self.failure, self.message = kind, message
            self.done.set_result(None)

    def finish(self) -> None:
        """It ended well, or was refused."""
        if not self.done.done():
            self.done.set_result(None)


class Plain(Exchange):
    """A request whose whole answer is wanted at once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bytearray()

    def on_body(self, piece: bytes, response: ResponseParser) -> None:
        self.body += piece
        if len(self.body) > _MOST_PLAIN_BYTES:
            raise ProtocolError(f"the answer is larger than {_MOST_PLAIN_BYTES} bytes")

    def on_end(self, response: ResponseParser) -> None:
        self.status = response.status
        self.finish()


class Streamed(Exchange):
    """A streamed completion: times of the chunks that carry tokens, and the server's own counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first_at: float | None = None
        self.last_at = 0.0
        self.ended_at = 0.0
        self.gaps_s: list[float] = []
        self.chunks = 0
        self.usage: _Usage | None = None
        self._splitter = EventSplitter()
        self._refusal = bytearray()
        self._is_over = False

    def on_body(self, piece: bytes, response: ResponseParser) -> None:
        if response.status != 200:
            if len(self._refusal) < _MOST_ERROR_BYTES:
                self._refusal += piece
            return
        now = time.monotonic()
        for data in self._splitter.feed(piece):
            if data == b"[DONE]":
                self._is_over = True
                self.ended_at = now
            else:
                self._take(data, now)

    def _take(self, data: bytes, now: float) -> None:
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"an event is not a completion's chunk ({error}): {data[:60]!r}") from None
        if event.error is not None:
            self.fail("error event", error_text(event.error))
            return
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            if choice.finish_reason is not None:
                self._is_over = True
                self.ended_at = now
                if not choice.text:
                    continue  # the end, no token
            # An empty text without an end is a token whose characters are not complete yet.
            self.chunks += 1
            if self.first_at is None:
                self.first_at = now
            else:
                self.gaps_s.append(now - self.last_at)
            self.last_at = now

    def on_end(self, response: ResponseParser) -> None:
        self.status = response.status
        if response.status != 200:
            self.fail(f"http {response.status}", refusal_text(bytes(self._refusal)))
        elif not self._is_over:
            kind = response.headers.get("content-type", "none")
            self.fail(
                "protocol" if self.first_at is None else "closed",
                f"no completion was streamed (content-type {kind})"
                if self.first_at is None
                else "the stream ended without a finish_reason",
            )
        else:
            self.finish()


class Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self._response = ResponseParser(self._on_body, self._on_end)
        self._exchange: Exchange | None = None
        self.transport: asyncio.Transport
        self.is_open = False

    @property
    def begun(self) -> bool:
        """Whether any of the last request's response came."""
        return self._response.begun

    def start(self, request: bytes, exchange: Exchange) -> None:
        """Send a request."""
        self._response.expect()
        self._exchange = exchange
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._response.feed(data)
        except ProtocolError as error:
            self._fail("protocol", str(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._exchange is not None and not self._response.closed():
            self._fail("closed", str(exc) if exc else "the server closed the connection before the end")

    def close(self) -> None:
        """Drop it, whatever is under way."""
        self.is_open = False
        self._exchange = None
        self.transport.abort()

    def _on_body(self, piece: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_body(piece, self._response)

    def _on_end(self) -> None:
        exchange, self._exchange = self._exchange, None
        self.is_open = self.is_open and self._response.keeps_alive
        if exchange is not None:
            exchange.on_end(self._response)

    def _fail(self, kind: str, message: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.fail(kind, message)


class Client:
    """Sends requests to one target; a connection that is free is used again."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._free: list[Connection] = []
        self._tls = ssl.create_default_context() if target.tls_name else None

    async def complete(self, number: int, request: bytes, streamed: Streamed, due_at: float) -> Record:
        """Send a streamed completion and note how it went. `due_at` in the past counts as waiting time."""
        sent_at = time.monotonic()
        await self.send(request, streamed)
        usage = streamed.usage
        return Record(
            number=number,
            began_at=due_at,
            late_s=max(0.0, sent_at - due_at),
            ended_at=time.monotonic() if streamed.failure else streamed.ended_at,
            first_at=streamed.first_at,
            gaps_s=streamed.gaps_s,
            tokens=None if usage is None else usage.completion_tokens,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            failure=streamed.failure,
            message=streamed.message,
        )

    async def send(self, request: bytes, exchange: Exchange) -> None:
        """Send a request and wait until `exchange` is done. Failures are the exchange's, none is raised."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while not exchange.done.done():
            connection = self._take_free()
            used_before = connection is not None
            if connection is None:
                try:
                    connection = await self._connect(deadline)
                except (OSError, ssl.SSLError) as error:
                    late = isinstance(error, TimeoutError)
                    exchange.fail("timeout" if late else "connect", error.strerror or str(error))
                    return
            timer = loop.call_at(deadline, exchange.fail, "timeout", f"no end within {self._timeout_s:g} s")
            try:
                connection.start(request, exchange)
                await exchange.done
            finally:
                timer.cancel()
                # Cancelled: the server is to learn that nobody waits for the answer any more.
                if exchange.failure or exchange.done.cancelled():
                    connection.close()
            if not exchange.failure and connection.is_open:
                self._free.append(connection)
            elif exchange.failure == "closed" and used_before and not connection.begun:
                # The server had hung up on an idle connection while the request was on its way: everybody
                # asks again then (RFC 9112, 9.3.1), on the next one.
                exchange.failure = exchange.message = ""
                exchange.done = loop.create_future()

    def close(self) -> None:
        """Drop all free connections."""
        for connection in self._free:
            connection.close()
        self._free.clear()

    def _take_free(self) -> Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, deadline: float) -> Connection:
        loop = asyncio.get_running_loop()
        target = self.target
        async with asyncio.timeout_at(deadline):
            while True:
                try:
                    if target.socket:
                        _, connection = await loop.create_unix_connection(Connection, target.socket)
                        if target.trusted_uids:
                            _check_peer(connection, frozenset(target.trusted_uids))
                    else:
                        _, connection = await loop.create_connection(
                            Connection,
                            target.host,
                            target.port,
                            ssl=self._tls,
                            server_hostname=target.tls_name or None,
                        )
                    return connection
                except BlockingIOError:
                    # A Unix socket whose backlog is full: a blocking connect would wait as well.
                    await asyncio.sleep(_CONNECT_AGAIN_S)


def _check_peer(connection: Connection, uids: frozenset[int]) -> None:
    """Raise PermissionError, before anything is sent, if another user's process is behind the socket."""
    try:
        check_peer(connection.transport.get_extra_info("socket"), uids)
    except UntrustedError as error:
        connection.close()
        raise PermissionError(errno.EPERM, str(error)) from error


def error_text(error: Any) -> str:
    """The message of an error in OpenAI's shape, or what there is of it."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error["message"]
    return str(error)


def refusal_text(body: bytes) -> str:
    """What a refusal's body says."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode("utf-8", "replace").strip() or "no reason was given"
    if isinstance(document, dict):
        return error_text(document.get("error") or document.get("detail") or document)
    return str(document)[:200]
