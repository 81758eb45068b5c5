"""HTTP/1.1 responses and server-sent events, as little of them as a load generator needs.

Written by hand because each chunk of each stream passes here: a general client costs more per token than the
fastest servers do.
"""

from __future__ import annotations

from collections.abc import Callable

_MOST_HEADER_BYTES = 64 << 10
_HEAD, _LENGTH, _CHUNK_SIZE, _CHUNK, _CHUNK_END, _TRAILER, _UNTIL_CLOSE, _ENDED = range(8)


class ProtocolError(Exception):
    """The peer does not speak HTTP/1.1; the message says what came instead."""


class ResponseParser:
    """One connection's responses, one after another. Bytes go in; `on_body` and `on_end` are called from
    within `feed`, so all they learn came with the same read."""

    def __init__(self, on_body: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_body = on_body
        self._on_end = on_end
        self._buffer = b""
        self._state = _ENDED
        self._left = 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keeps_alive = False
        """Whether another request may follow on this connection, once the response has ended."""

    def expect(self) -> None:
        """A request was sent: the next bytes are its response's."""
        self._buffer, self._state, self.status = b"", _HEAD, 0

    @property
    def begun(self) -> bool:
        """Whether any byte of the response came."""
        return self._state != _HEAD or bool(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take what was read. Raises ProtocolError."""
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        position, size = 0, len(data)
        while position < size:
            state = self._state
            if state == _CHUNK_SIZE:
                end = data.find(b"\r\n", position)
                if end < 0:
                    break
                self._left = _chunk_size(data[position:end])
                position = end + 2
                self._state = _CHUNK if self._left else _TRAILER
            elif state in (_CHUNK, _LENGTH):
                piece = data[position : position + self._left]
                position += len(piece)
                self._left -= len(piece)
                if not self._left and state == _CHUNK:
                    self._state = _CHUNK_END
                self._on_body(piece)
                if not self._left and state == _LENGTH:
                    self._end()
            elif state == _CHUNK_END:
                if size - position < 2:
                    break
                if data[position : position + 2] != b"\r\n":
                    raise ProtocolError("a chunk of the response is longer than it says")
                position += 2
                self._state = _CHUNK_SIZE
            elif state == _HEAD:
                end = data.find(b"\r\n\r\n", position)
                if end < 0:
                    break
                self._head(data[position:end])
                position = end + 4
            elif state == _TRAILER:
                end = data.find(b"\r\n", position)
                if end < 0:
                    break
                if end == position:
                    self._end()
                position = end + 2
            elif state == _UNTIL_CLOSE:
                self._on_body(data[position:])
                position = size
            else:
                raise ProtocolError("the server sent more than it announced")
        if position < size:
            self._buffer = data[position:]
            if len(self._buffer) > _MOST_HEADER_BYTES:
                raise ProtocolError(f"a line of the response is longer than {_MOST_HEADER_BYTES} bytes")

    def closed(self) -> bool:
        """The peer closed; whether that was the response's proper end."""
        if self._state == _UNTIL_CLOSE:
            self._end()
            return True
        return False

    def _head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ProtocolError(f"this is no HTTP/1.1 response: {first[:60]!r}")
        status = int(rest[:3])
        if 100 <= status < 200:
            return  # the real one follows
        self.status = status
        self.headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        connection = self.headers.get("connection", "").lower()
        self.keeps_alive = connection != "close" if version == "HTTP/1.1" else connection == "keep-alive"
        if self.headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._state = _CHUNK_SIZE
        elif status in (204, 304):
            self._end()
        elif (length := self.headers.get("content-length")) is not None:
            if not length.isdigit():
                raise ProtocolError(f"the response's content-length is {length[:30]!r}")
            self._left = int(length)
            self._state = _LENGTH
            if not self._left:
                self._end()
        else:
            self.keeps_alive = False
            self._state = _UNTIL_CLOSE

    def _end(self) -> None:
        self._state = _ENDED
        self._on_end()


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise ProtocolError(f"this is no chunk's size: {line[:30]!r}") from None


class EventSplitter:
    """The data of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) out of
    pieces of a body that may be cut anywhere. Comments and fields other than data are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that ended with this piece."""
        if self._rest:
            piece = self._rest + piece
        lines = piece.split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        data = self._data
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if data:
                    events.append(data[0] if len(data) == 1 else b"\n".join(data))
                    data.clear()
            elif line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
        return events
