"""Tests that all connections together use limited memory for request heads. When the limit is reached, the
tenant that uses the most memory is the first to lose a request."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import appliance.http.request_memory
from appliance.http import HttpServer
from tests.front.raw import listening
from tests.waiting import until

LIMIT = 2 << 20
HEAD_BYTES = 60_000
UNFINISHED = b"GET /tenant HTTP/1.1\r\nHost: x\r\nX-Filling: " + b"x" * HEAD_BYTES


async def tenant(request: Request) -> PlainTextResponse:
    """Assign the connection to the tenant named in the request."""
    assert request.scope["state"]["connection"].authenticate(request.headers["x-tenant"])
    return PlainTextResponse("known")


async def wait(request: Request) -> PlainTextResponse:
    await asyncio.sleep(600)
    return PlainTextResponse("late")


APP = Starlette(routes=[Route("/tenant", tenant), Route("/wait", wait)])


class Client:
    """A client's connection."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(path))
        self.sock.setblocking(False)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def belong_to(self, name: str) -> None:
        await self.send(f"GET /tenant HTTP/1.1\r\nHost: x\r\nX-Tenant: {name}\r\n\r\n".encode())
        assert b"known" in await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)

    def received(self) -> bytes | None:
        """Return the bytes that have arrived, or None if nothing has arrived. Return b"" if the connection
        has been closed."""
        try:
            return self.sock.recv(1 << 16)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""


def serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[HttpServer, Path], Awaitable[None]]
) -> None:
    """Run a server on which request heads may use at most 2 MiB."""
    monkeypatch.setattr(appliance.http.request_memory, "MAX_REQUEST_MEMORY_BYTES", LIMIT)

    async def run() -> None:
        server = HttpServer(APP)
        await server.listen(listening(tmp_path / "s"))
        async with asyncio.timeout(60):
            await use(server, tmp_path / "s")
        await server.stop(0.1)

    asyncio.run(run())


def test_the_total_memory_of_unfinished_heads_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(server: HttpServer, path: Path) -> None:
        clients = [Client(path) for _ in range(60)]
        for one in clients:
            await one.send(UNFINISHED)
        kept = LIMIT // len(UNFINISHED)
        answers: list[bytes] = []

        def refused() -> bool:
            answers.extend(filter(None, (one.received() for one in clients)))
            return len(answers) >= len(clients) - kept

        await until(refused)
        assert len(answers) == len(clients) - kept
        assert all(b"503" in one and b"too_many_header_bytes" in one for one in answers)
        assert server.request_memory.refused == len(answers)
        await Client(path).belong_to("small")

    serve(tmp_path, monkeypatch, use)


def test_a_refusal_is_delayed_so_that_the_client_cannot_fill_the_memory_again_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.http.connection.REFUSAL_DELAY_S", 3.0)

    async def use(server: HttpServer, path: Path) -> None:
        clients = [Client(path) for _ in range(LIMIT // len(UNFINISHED) + 1)]
        began = time.monotonic()
        for one in clients:
            await one.send(UNFINISHED)
        await until(lambda: any(b"503" in (one.received() or b"") for one in clients))
        assert time.monotonic() - began >= 3.0
        assert server.request_memory.refused == 1

    serve(tmp_path, monkeypatch, use)


def test_a_request_of_the_tenant_with_the_most_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(server: HttpServer, path: Path) -> None:
        modest = Client(path)
        await modest.belong_to("modest")
        await modest.send(UNFINISHED)
        greedy = [Client(path) for _ in range(60)]
        for one in greedy:
            await one.belong_to("greedy")
            await one.send(UNFINISHED)
        await until(lambda: server.request_memory.refused >= 61 - LIMIT // len(UNFINISHED))
        assert modest.received() is None
        await modest.send(b"\r\nX-Tenant: modest\r\n\r\n")
        await until(lambda: b"known" in (modest.received() or b""))

    serve(tmp_path, monkeypatch, use)


def test_headers_count_with_their_python_objects_until_the_request_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(server: HttpServer, path: Path) -> None:
        request = b"GET /wait HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 5000 + b"\r\n"
        clients = [Client(path) for _ in range(20)]
        for one in clients:
            await one.send(request)
        # Each request takes 0.7 MB of memory.
        await until(lambda: server.connections == 2 and server.request_memory.refused == 18)
        assert sum(one.received() is None for one in clients) == 2

    serve(tmp_path, monkeypatch, use)


def test_bytes_that_are_read_ahead_count_towards_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(server: HttpServer, path: Path) -> None:
        clients = []
        while len(clients) < 180:
            clients.append(Client(path))
            await asyncio.sleep(0)  # let the server accept the connection
        for one in clients:
            await one.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        for one in clients:
            await one.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
        await until(lambda: server.request_memory.refused > 0 and server.connections < 180)
        assert any(one.received() is None for one in clients)

    serve(tmp_path, monkeypatch, use)
