"""Raw sockets for attackers' connections, and measurements of the memory used by the service's processes."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from tests.system.service import Service

MEGABYTE = 1 << 20
Address = tuple[str, int] | str


def connect(address: Address, timeout_s: float = 60.0) -> socket.socket:
    """Connect to a TCP address or a Unix socket."""
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout_s)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    sock.connect(address)
    return sock


def tcp_address(running: Service, name: str = "tcp") -> tuple[str, int]:
    """Return the TCP address of the API (for "tcp") or of the metrics."""
    address = next(one["address"] for one in running.status()["sockets"] if one["name"] == name)
    host, _, port = address.rpartition(":")
    return host, int(port)


def read_all(sock: socket.socket) -> bytes:
    """Read until the connection is closed."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def exchange(address: Address, request: bytes) -> bytes:
    """Send `request` and nothing else. Returns the bytes received until the connection is closed."""
    with connect(address) as sock:
        sock.sendall(request)
        return read_all(sock)


def post(path: str, body: dict[str, Any] | bytes, *headers: str, version: str = "1.1") -> bytes:
    """Return a POST request with a JSON body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def chat(**fields: Any) -> dict[str, Any]:
    """Return a short chat request."""
    return {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}


def flood(address: Address, data: bytes, connections: int, seconds: float) -> list[bytes]:
    """Send `data` on many connections at the same time, as fast as the service accepts it. Return the data
    that each connection received before it was closed or the time ran out."""
    sockets = [connect(address) for _ in range(connections)]
    left = {sock: memoryview(data) for sock in sockets}
    answers = dict.fromkeys(sockets, b"")
    open_now = set(sockets)
    deadline = time.monotonic() + seconds
    for sock in sockets:
        sock.setblocking(False)
    while open_now and time.monotonic() < deadline:
        sending = [sock for sock in open_now if left[sock]]
        readable, writable, _ = select.select(list(open_now), sending, [], 0.1)
        for sock in writable:
            with contextlib.suppress(BlockingIOError):
                try:
                    left[sock] = left[sock][sock.send(left[sock][: 1 << 18]) :]
                except OSError:
                    left[sock] = memoryview(b"")
        for sock in readable:
            with contextlib.suppress(BlockingIOError):
                try:
                    piece = sock.recv(1 << 16)
                except OSError:
                    piece = b""
                answers[sock] += piece
                if not piece:
                    open_now.discard(sock)
    for sock in sockets:
        sock.close()
    return list(answers.values())


def cpu_s(*pids: int) -> float:
    """Return the CPU time that these processes have used, in seconds. Unlike a duration, it does not depend
    on other work of the machine."""
    return sum(times.user + times.system for times in (psutil.Process(pid).cpu_times() for pid in pids))


def serving_pids(running: Service) -> list[int]:
    """Return the process ids of the core and the fronts."""
    return [running.process.pid, *(front["pid"] for front in running.status()["fronts"])]


class Memory:
    """Tracks the resident memory of the core and the fronts."""

    def __init__(self, running: Service) -> None:
        self._processes = [psutil.Process(pid) for pid in serving_pids(running)]
        self.before = self._sizes()

    def _sizes(self) -> list[int]:
        return [process.memory_info().rss for process in self._processes]

    def growth(self) -> int:
        """Return the largest growth of any process's memory, in bytes."""
        return max(now - before for now, before in zip(self._sizes(), self.before, strict=True))


@contextmanager
def idle(address: Address, count: int) -> Iterator[list[socket.socket]]:
    """Yield connections that send nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(address)) for _ in range(count)]


def is_closed(sock: socket.socket) -> bool:
    """Return whether the service has closed the connection."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def wait_for(condition: Callable[[], bool], description: str, timeout_s: float = 60.0) -> None:
    """Poll until `condition` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {timeout_s} s waiting for {description}"
        time.sleep(0.05)
