"""An HTTP client for streamed completions, based on httptools. No task is woken when a chunk arrives: a
protocol callback records the time, and the task that sent the request resumes only when the response ends. A
general-purpose HTTP client would use more CPU time per token than a fast server does."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from typing import Any

import httptools
import msgspec

from appliance.bench.load import FailureKind, Record, Target, http_failure
from appliance.ownership import UntrustedError, check_peer

_MAX_BODY_BYTES = 16 << 20
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


class TargetExchange:
    """A request and its response. The `done` future resolves when the response ends or the request fails."""

    def __init__(self, *, streamed: bool) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.failure: FailureKind = ""
        self.message = ""
        self.body = bytearray()
        """Body of the response, if the response is not streamed."""
        self.first_at: float | None = None
        self.ended_at = 0.0
        self.gaps_s: list[float] = []
        self.chunks = 0
        self.usage = _Usage()
        self._streamed = streamed
        self._last_at = 0.0
        self._rest = b""

    def fail(self, kind: FailureKind, message: str) -> None:
        """Record a failure and finish the exchange."""
        if not self.done.done():
            self.failure, self.message = kind, message
            self.done.set_result(None)

    def retry(self) -> None:
        """Clear a recorded failure, because the request is about to be sent again."""
        self.failure, self.message = "", ""
        self.done = asyncio.get_running_loop().create_future()

    def on_body(self, status: int, data: bytes) -> None:
        """Called with each chunk of the response body."""
        if not self._streamed or status != 200:
            self.body += data
            if len(self.body) > _MAX_BODY_BYTES:
                self.fail("protocol", f"the response is larger than {_MAX_BODY_BYTES:,} bytes")
            return
        now = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            # Each completion event is one line: "data:" followed by JSON.
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), now)

    def on_end(self, status: int) -> None:
        """Called when the response has ended."""
        self.status = status
        if not self._streamed:
            if not self.done.done():
                self.done.set_result(None)
        elif status != 200:
            self.fail(http_failure(status), refusal_text(bytes(self.body)))
        elif self.ended_at:
            if not self.done.done():
                self.done.set_result(None)
        elif self.first_at is None:
            self.fail("protocol", "the server streamed no completion")
        else:
            self.fail("closed", "the stream ended without a finish_reason")

    def _on_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.ended_at = now
            return
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.fail(
                "protocol",
                f"the server sent an event that is not a completion chunk ({error}): {data[:60]!r}",
            )
            return
        if event.error is not None:
            self.fail("error event", _error_text(event.error))
            return
        self.usage = event.usage or self.usage
        for choice in event.choices:
            if choice.finish_reason is not None:
                self.ended_at = now
                # A chunk with a finish_reason but no text contains no token.
                if not choice.text:
                    continue
            # A chunk with neither text nor finish_reason contains a token that ends in the middle of a
            # character.
            self.chunks += 1
            if self.first_at is None:
                self.first_at = now
            else:
                self.gaps_s.append(now - self._last_at)
            self._last_at = now


class TargetConnection(asyncio.Protocol):
    """A connection used for one exchange at a time. httptools calls the `on_` methods."""

    transport: asyncio.Transport
    _parser: Any

    def __init__(self) -> None:
        self.is_open = False
        self.has_response = False
        """Whether any part of the response to the latest request has arrived."""
        self._exchange: TargetExchange | None = None
        self._has_length = self._ends_at_close = False

    def start(self, request: bytes, exchange: TargetExchange) -> None:
        """Send a request."""
        self._parser = httptools.HttpResponseParser(self)
        self._exchange = exchange
        self.has_response = self._has_length = self._ends_at_close = False
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.close()  # the server sent data without a request
            return
        self.has_response = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail("protocol", f"the response is not valid HTTP/1.1: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._exchange is not None and self._ends_at_close:
            self._end()
        self._fail(
            "closed", str(exc) if exc else "the server closed the connection before the response was complete"
        )

    def close(self) -> None:
        """Close the connection immediately."""
        self.is_open = False
        self._exchange = None
        self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._ends_at_close = not self._has_length

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_body(self._parser.get_status_code(), data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:  # a final response follows each interim response (1xx)
            self.is_open = self.is_open and self._parser.should_keep_alive()
            self._end()

    def _end(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.on_end(self._parser.get_status_code())

    def _fail(self, kind: FailureKind, message: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.fail(kind, message)


class Client:
    """Sends requests to one server, reusing connections."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._free: list[TargetConnection] = []
        self._tls = ssl.create_default_context() if target.tls_name else None

    async def complete(self, request: bytes, exchange: TargetExchange, due_at: float) -> Record:
        """Send a request for a streamed completion and return the request's record. `due_at` is the time at
        which the request should have been sent."""
        sent_at = time.monotonic()
        await self.send(request, exchange)
        return Record(
            began_at=due_at,
            late_s=max(0.0, sent_at - due_at),
            ended_at=time.monotonic() if exchange.failure else exchange.ended_at,
            first_at=exchange.first_at,
            gaps_s=exchange.gaps_s,
            tokens=exchange.usage.completion_tokens,
            prompt_tokens=exchange.usage.prompt_tokens,
            failure=exchange.failure,
            message=exchange.message,
        )

    async def send(self, request: bytes, exchange: TargetExchange) -> None:
        """Send a request and wait until `exchange` is done. Failures are recorded in the exchange, not
        raised."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while not exchange.done.done():
            while self._free and not self._free[-1].is_open:
                self._free.pop()
            is_reused = bool(self._free)
            try:
                connection = self._free.pop() if is_reused else await self._connect(deadline)
            except OSError as error:
                exchange.fail(
                    "timeout" if isinstance(error, TimeoutError) else "connect",
                    error.strerror or str(error) or "the server did not accept the connection in time",
                )
                return
            timer = loop.call_at(
                deadline,
                exchange.fail,
                "timeout",
                f"the response was not complete within {self._timeout_s:g} s",
            )
            try:
                connection.start(request, exchange)
                await exchange.done
            finally:
                timer.cancel()
                if exchange.failure or exchange.done.cancelled():
                    connection.close()  # so that the server notices the disconnection
            if not exchange.failure and connection.is_open:
                self._free.append(connection)
            elif exchange.failure == "closed" and is_reused and not connection.has_response:
                # The server closed an idle connection just as the request was sent. HTTP clients resend such
                # requests (RFC 9112, section 9.3.1).
                exchange.retry()

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._free:
            connection.close()
        self._free.clear()

    async def _connect(self, deadline: float) -> TargetConnection:
        loop = asyncio.get_running_loop()
        target = self.target
        async with asyncio.timeout_at(deadline):
            while True:
                try:
                    if target.socket:
                        _, connection = await loop.create_unix_connection(TargetConnection, target.socket)
                        _check_peer(connection, target.trusted_uids)
                    else:
                        _, connection = await loop.create_connection(
                            TargetConnection,
                            target.host,
                            target.port,
                            ssl=self._tls,
                            server_hostname=target.tls_name or None,
                        )
                    return connection
                except BlockingIOError:
                    # The backlog of the Unix socket is full, so try again soon.
                    await asyncio.sleep(_CONNECT_AGAIN_S)


def _check_peer(connection: TargetConnection, uids: frozenset[int]) -> None:
    """Before any data is sent, raise PermissionError if an untrusted user's process owns the socket."""
    if not uids:
        return
    try:
        check_peer(connection.transport.get_extra_info("socket"), uids)
    except UntrustedError as error:
        connection.close()
        raise PermissionError(errno.EPERM, str(error)) from error


def refusal_text(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode("utf-8", "replace").strip() or "the server gave no reason"
    if isinstance(document, dict):
        return _error_text(document.get("error") or document.get("detail") or document)
    return str(document)[:200]


def _error_text(error: Any) -> str:
    """Return the message of an error in OpenAI's format, or any other error as text."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error["message"]
    return str(error)
