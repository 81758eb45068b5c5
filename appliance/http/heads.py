"""Reads one request head: the request line and the headers. The head is collected up to the empty line at its
end and then parsed as a whole. The parser never sees bytes after the head, so pipelined requests are parsed
one at a time. This module also determines where the body ends and refuses any request with an ambiguous body
length.
"""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

import httptools

from appliance.http.errors import RequestError

MAX_HEAD_BYTES = 64 << 10

_HEADER_OBJECTS_BYTES = 128
"""Memory, in bytes, used by the three Python objects that represent one header, excluding its text."""

_END = b"\r\n\r\n"


@dataclass(slots=True)
class RequestHead:
    """The head of a request."""

    method: str
    path: str
    """The path, percent-decoded."""
    raw_path: bytes
    query: bytes
    version: str
    """The HTTP version: "1.0" or "1.1"."""
    headers: list[tuple[bytes, bytes]]
    """The header fields, with names in lower case."""
    content_length: int
    chunked: bool
    keep_alive: bool
    """Whether the connection may stay open for the next request."""
    expects_continue: bool
    memory_bytes: int
    """Approximate memory, in bytes, occupied by the head while the request is being answered."""


class HeadReader:
    """Collects the bytes of a request head."""

    def __init__(self) -> None:
        self._collected = bytearray()

    @property
    def begun(self) -> bool:
        """Whether part of a request head has arrived."""
        return bool(self._collected)

    @property
    def collected_bytes(self) -> int:
        """Size, in bytes, of the incomplete request head."""
        return len(self._collected)

    def feed(self, data: bytearray) -> RequestHead | None:
        """Move the head's bytes from `data` to the reader and return the head once it is complete. Raises
        RequestError as soon as the head is known to be too long or malformed."""
        collected = self._collected
        before = len(collected)
        if not collected:
            if data[:1] in (b"\r", b"\n"):
                # Empty lines before a request are allowed (RFC 9112, 2.2).
                del data[: len(data) - len(data.lstrip(b"\r\n"))]
            if data and not 65 <= data[0] <= 90:
                raise RequestError(400, "this is not an HTTP/1.1 request: use HTTP/1.1 without TLS")
            end = data.find(_END)
            collected += data if end < 0 else data[: end + len(_END)]
        else:
            collected += data
            end = collected.find(_END, max(before - 3, 0))
        length = len(collected) if end < 0 else end + len(_END)
        if length > MAX_HEAD_BYTES:
            raise RequestError(
                431,
                f"the request headers are larger than the limit of {MAX_HEAD_BYTES} bytes",
                "header_too_large",
            )
        line_feeds = collected.count(b"\n", before, length)
        if line_feeds != collected.count(b"\r\n", max(before - 1, 0), length):
            raise RequestError(400, "this is not a valid HTTP/1.1 request: end lines with CR LF")
        del data[: length - before]
        return None if end < 0 else _parse(bytes(collected[:length]))


class _Callbacks:
    """Collects the results of the HTTP parser."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True


def _parse(data: bytes) -> RequestHead:
    found = _Callbacks()
    parser = httptools.HttpRequestParser(found)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # Ignore the client's offer to upgrade to another protocol (RFC 9110, 7.8).
    except httptools.HttpParserError:
        raise RequestError(400, "this is not a valid HTTP/1.1 request") from None
    if not found.complete:
        raise RequestError(400, "this is not a valid HTTP/1.1 request")
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise RequestError(505, f"HTTP/{version} is not supported: use HTTP/1.1", "unsupported_version")
    method = parser.get_method().decode("ascii")
    if method == "CONNECT":
        raise RequestError(
            400, "CONNECT is not supported, because this server is not a proxy", "method_not_allowed"
        )
    path, query = _split(found.url)
    content_length, chunked = _framing(found.headers, version)
    _check_host(found.headers, version)
    return RequestHead(
        method=method,
        path=urllib.parse.unquote(path.decode("ascii")),
        raw_path=path,
        query=query,
        version=version,
        headers=found.headers,
        content_length=content_length,
        chunked=chunked,
        keep_alive=version == "1.1" and b"close" not in _connection_options(found.headers),
        expects_continue=version == "1.1"
        and any(name == b"expect" and value.lower() == b"100-continue" for name, value in found.headers),
        memory_bytes=2 * len(data) + _HEADER_OBJECTS_BYTES * len(found.headers),
    )


def _split(target: bytes) -> tuple[bytes, bytes]:
    """Split the request target into a path and a query."""
    try:
        url = httptools.parse_url(target)
        path: bytes = url.path or b"/"
        path.decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        raise RequestError(400, "the request's target is not a valid path", "invalid_path") from None
    return path, url.query or b""


def _framing(headers: list[tuple[bytes, bytes]], version: str) -> tuple[int, bool]:
    """Return the length of the body, and whether it is chunked. The parser has already refused folded
    headers. It has also refused a Content-Length that is repeated, is not a number, or accompanies a
    Transfer-Encoding, and a Transfer-Encoding in which another coding follows `chunked`.
    """
    lengths = [value for name, value in headers if name == b"content-length"]
    encodings = [value for name, value in headers if name == b"transfer-encoding"]
    if encodings and (version == "1.0" or any(value.strip().lower() != b"chunked" for value in encodings)):
        raise RequestError(
            400,
            "this Transfer-Encoding is not supported: send a Content-Length, or 'chunked' in HTTP/1.1",
        )
    return (int(lengths[0]) if lengths else 0), bool(encodings)


def _check_host(headers: list[tuple[bytes, bytes]], version: str) -> None:
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1:
        raise RequestError(400, "the Host header was sent more than once: send it once", "invalid_host")
    if not hosts and version == "1.1":
        raise RequestError(400, "the Host header is missing: HTTP/1.1 requires it", "invalid_host")


def _connection_options(headers: list[tuple[bytes, bytes]]) -> set[bytes]:
    return {
        option.strip().lower()
        for name, value in headers
        if name == b"connection"
        for option in value.split(b",")
    }
