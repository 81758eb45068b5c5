"""One request and its response: calls the ASGI application and writes the response."""

from __future__ import annotations

import asyncio
import http
import logging
import re
from typing import TYPE_CHECKING, Any

from appliance.http.errors import RequestError, drop_frames, error_document
from appliance.http.heads import RequestHead

if TYPE_CHECKING:
    from appliance.http.connection import Connection

log = logging.getLogger(__name__)

_CONTROL_CHARACTER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def status_line(status: int) -> bytes:
    """Return the status line of a response."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def whole_response(error: RequestError) -> bytes:
    """Return a complete response to a request that never reaches the application."""
    body = error_document(error.message, "invalid_request_error", None, error.code)
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return status_line(error.status) + head + body


class Exchange:
    """Handles one request: receives body bytes from the connection, calls the application and writes the
    response."""

    def __init__(self, connection: Connection, head: RequestHead, state: dict[str, Any]) -> None:
        self.head = head
        self.keep_alive = head.keep_alive
        self.started = False
        """Whether the response head has been written."""
        self.complete = False
        """Whether the whole response has been written."""
        self.chunked = False
        """Whether the response is chunked. If it has neither chunks nor a length, closing the connection
        marks its end."""
        self.request_complete = False
        self.wants_body = False
        """Whether the application is waiting for body data."""
        self._connection = connection
        self._state = state
        self._content: list[bytes] = []
        self._arrived = asyncio.Event()
        self._end_delivered = False
        self._disconnected = False
        self._expects_continue = head.expects_continue
        self._length_left: int | None = None

    # ── called by `Connection` ──

    def receive_body(self, content: bytes, last: bool) -> None:
        """Append a part of the request body."""
        if content:
            self._content.append(content)
        self.request_complete = last
        if content or last:
            self.wants_body = False
            self._arrived.set()

    def disconnect(self) -> None:
        """Tell the application that the client has disconnected."""
        self._disconnected = True
        self._arrived.set()

    async def run(self, app: Any) -> None:
        """Call the application. If it raises an error or sends no response, send a 500 response."""
        head = self.head
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            # Handle HEAD like GET, but without a response body.
            "method": "GET" if head.method == "HEAD" else head.method,
            "scheme": "http",
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "root_path": "",
            "headers": head.headers,
            "server": None,
            "client": None,
            "state": self._state,
        }
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:
            log.exception("the application failed to process %s %r", head.method, head.path[:100])
            drop_frames(error)
        if self._disconnected or self.complete:
            return
        if self.started:
            self._connection.close()
            return
        log.error("the application sent no response to %s %r", head.method, head.path[:100])
        self._connection.refuse(
            RequestError(
                500, "the service failed to process the request; see its log for the cause", "internal"
            )
        )

    # ── called by the ASGI application ──

    async def receive(self) -> dict[str, Any]:
        """Return the next ASGI event: part of the body, or a client disconnect."""
        while not (self._disconnected or self.complete):
            if self._content or (self.request_complete and not self._end_delivered):
                content = b"".join(self._content)
                self._content.clear()
                self._end_delivered = self.request_complete
                return {"type": "http.request", "body": content, "more_body": not self.request_complete}
            self._arrived.clear()
            if not self.request_complete:
                if self._expects_continue:
                    self._expects_continue = False
                    self._connection.transport.write(CONTINUE)
                self.wants_body = True
                self._connection.advance()
            await self._arrived.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Write the part of the response contained in this ASGI event."""
        connection = self._connection
        if not connection.writable and not self._disconnected:
            await connection.drain()
        if self._disconnected:
            return
        if self.complete:
            raise RuntimeError(f"{message['type']} was sent after the end of the response")
        if not self.started:
            self._start(message)
            return
        body = message.get("body", b"")
        more = message.get("more_body", False)
        self._write(body, more)
        if not more:
            self.complete = True
            self._arrived.set()
            connection.finish(self)

    def _start(self, message: Any) -> None:
        self.started = True
        self._expects_continue = False
        status = message["status"]
        connection = self._connection
        if not connection.skip_body():
            self.keep_alive = False
        parts = [status_line(status), connection.date_line]
        says_close = False
        for name, value in message.get("headers", ()):
            if _CONTROL_CHARACTER.search(value):
                raise RuntimeError(f"the value of the header {name!r} contains a control character")
            lowered = name.lower()
            if lowered == b"content-length":
                self._length_left = int(value)
            elif lowered == b"connection":
                says_close = b"close" in value.lower()
                self.keep_alive = self.keep_alive and not says_close
            parts += (lowered, b": ", value, b"\r\n")
        has_body = self.head.method != "HEAD" and status not in (204, 304)
        if has_body and self._length_left is None:
            if self.head.version == "1.1":
                self.chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False
        if not has_body:
            self._length_left = None
        if not self.keep_alive and not says_close:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        connection.transport.write(b"".join(parts))

    def _write(self, body: bytes, more: bool) -> None:
        transport = self._connection.transport
        if self.head.method == "HEAD":
            return
        if self.chunked:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                data += b"0\r\n\r\n"
            if data:
                transport.write(data)
            return
        if self._length_left is not None:
            self._length_left -= len(body)
            if self._length_left < 0 or (self._length_left and not more):
                self._connection.abort()
                raise RuntimeError("the length of the response body differs from its Content-Length")
        if body:
            transport.write(body)
