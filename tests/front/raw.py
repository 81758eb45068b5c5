"""A minimal HTTP client on a socket, for requests that an HTTP library would refuse to send."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.front.harness import Harness


def connect(front: Harness, tcp: bool = False) -> socket.socket:
    """Return a connection to the API. The socket has a timeout."""
    if tcp:
        return socket.create_connection(("127.0.0.1", front.port), 60)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(60)
    sock.connect(front.api_sock)
    return sock


def listening(path: Path) -> socket.socket:
    """Return a socket that listens at this path."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen(1000)
    return sock


@dataclass
class Answer:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes
    ms: float = 0.0

    @property
    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error object in OpenAI's format, after checking its fields."""
        document = self.json
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
        return document["error"]


def head(method: str, path: str, headers: dict[str, str] | None = None) -> bytes:
    """Return the head of a request."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: whatever.example",
        *(f"{k}: {v}" for k, v in (headers or {}).items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def request(body: Any, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None) -> bytes:
    """Return a POST request with a JSON body."""
    data = json.dumps(body).encode()
    return head("POST", path, {"Content-Length": str(len(data)), **(headers or {})}) + data


def read_answer(sock: socket.socket, buffer: bytearray | None = None, has_body: bool = True) -> Answer:
    """Read one response. Bytes after it stay in `buffer`. The returned status is 0 if the connection is
    closed before a response arrives."""
    buffer = bytearray() if buffer is None else buffer

    def more() -> bool:
        try:
            data = sock.recv(1 << 16)
        except ConnectionResetError:
            return False
        buffer.extend(data)
        return bool(data)

    while b"\r\n\r\n" not in buffer:
        if not more():
            return Answer(0, {}, bytes(buffer))
    top, _, _ = bytes(buffer).partition(b"\r\n\r\n")
    del buffer[: len(top) + 4]
    first, *lines = top.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(first.split()[1])
    body = bytearray()
    if not has_body:
        return Answer(status, headers, b"")
    if "content-length" in headers:
        length = int(headers["content-length"])
        while len(buffer) < length and more():
            pass
        body += buffer[:length]
        del buffer[:length]
        return Answer(status, headers, bytes(body))
    while True:
        while b"\r\n" not in buffer:
            if not more():
                return Answer(status, headers, bytes(body))
        size, _, _ = bytes(buffer[:20]).partition(b"\r\n")
        length = int(size, 16)
        while len(buffer) < len(size) + 4 + length:
            if not more():
                return Answer(status, headers, bytes(body))
        body += buffer[len(size) + 2 : len(size) + 2 + length]
        del buffer[: len(size) + 4 + length]
        if not length:
            return Answer(status, headers, bytes(body))


def ask(
    front: Harness,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    tcp: bool = False,
) -> Answer:
    """Send one request on a new connection. Return the response and its duration."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = dict(headers or {})
    if data is not None:
        headers.setdefault("Content-Length", str(len(data)))
        headers.setdefault("Content-Type", "application/json")
    with connect(front, tcp) as sock:
        started = time.perf_counter()
        # The server may respond and close the connection before all of the request has been sent.
        with contextlib.suppress(OSError):
            sock.sendall(head(method, path, headers) + (data or b""))
        answer = read_answer(sock, has_body=method != "HEAD")
        answer.ms = (time.perf_counter() - started) * 1000
    return answer


def post(front: Harness, path: str, body: dict[str, Any], **headers: str) -> Answer:
    """Send one POST request with a JSON body on a new connection."""
    return ask(front, "POST", path, body, headers)


def chat(**fields: Any) -> dict[str, Any]:
    """Return the body of a chat request."""
    return {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}


def events(answer: Answer) -> list[Any]:
    """Return the data of a stream's events as parsed JSON, except "[DONE]", which stays a string."""
    data = [event.removeprefix("data: ") for event in answer.body.decode().split("\n\n") if event]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
