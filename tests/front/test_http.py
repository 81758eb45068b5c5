"""Tests of the HTTP server on a listening socket, as used by the admin API."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import weakref
from pathlib import Path

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from appliance.channel.front_settings import Limits
from appliance.http import HttpServer
from appliance.http.server import MAX_UNSENT_BYTES
from tests.front.raw import listening


async def show_peer(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(request.scope["state"]["peer"]))


async def big(request: Request) -> PlainTextResponse:
    assert request.scope["state"]["connection"].authenticate(request.headers.get("x-tenant", ""))
    return PlainTextResponse("x" * (8 << 20))


APP = Starlette(routes=[Route("/who", show_peer), Route("/big", big)])


async def exchange(path: Path, request: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


def test_an_application_can_read_the_peer_of_a_unix_socket(tmp_path: Path) -> None:
    async def run() -> None:
        server = HttpServer(APP)
        await server.listen(listening(tmp_path / "s"))
        answer = await exchange(tmp_path / "s", b"GET /who HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.endswith(f"uid {os.getuid()}".encode())
        assert b"date: " in answer
        await server.stop(1.0)
        assert server.connections == 0

    uvloop.run(run())


def shorten_write_limits(server: HttpServer) -> None:
    """End the current time limits of writes, and let each later one be short."""
    for connection in list(server._connections):
        limit = connection._write_limit
        limit._limit_s = 0.2
        if limit._is_running:
            limit._late()


def test_a_client_that_never_reads_its_answer_is_cut_off(tmp_path: Path) -> None:
    async def run() -> None:
        server = HttpServer(APP, Limits(), write_timeout_s=0.2)
        await server.listen(listening(tmp_path / "s"))
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"), limit=1024)
        writer.write(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(60):
            while not server.connections:
                await asyncio.sleep(0)
            while server.connections:
                await asyncio.sleep(0.02)
        assert server.cut_off.total == 1
        writer.close()
        await server.stop(0.1)

    uvloop.run(run())


def test_clients_that_read_their_answers_slowly_are_not_cut_off(tmp_path: Path) -> None:
    """The time limit of a write ends after every piece that the client reads."""

    async def read_slowly(server: HttpServer, ending: str) -> None:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"), limit=1024)
        writer.write(f"GET /big HTTP/1.1\r\nHost: x\r\n{ending}\r\n".encode())
        await reader.readexactly(1000)
        [connection] = server._connections
        received = 1000

        async def read() -> int:
            piece = await reader.read(64 << 10)
            assert piece, "the connection was cut off"
            return len(piece)

        for _ in range(5):
            before = connection.transport.get_write_buffer_size()
            while before == connection.transport.get_write_buffer_size():
                received += await read()
            connection._write_limit._late()
        assert received < 8 << 20
        while received < 8 << 20:
            received += await read()
        writer.close()

    async def run() -> None:
        server = HttpServer(APP, Limits(), write_timeout_s=600.0)
        await server.listen(listening(tmp_path / "s"))
        async with asyncio.timeout(60):
            for ending in ("", "Connection: close\r\n"):
                await read_slowly(server, ending)
                while server.connections:
                    await asyncio.sleep(0.01)
        assert server.cut_off.total == 0
        await server.stop(0.1)

    uvloop.run(run())


@pytest.mark.parametrize("taken", [0, 2 << 20])
def test_a_client_that_stops_reading_its_last_answer_is_cut_off(tmp_path: Path, taken: int) -> None:
    async def run() -> None:
        server = HttpServer(APP, Limits(), write_timeout_s=600.0)
        await server.listen(listening(tmp_path / "s"))
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"), limit=1024)
        writer.write(b"GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.readexactly(1000 + taken)
        shorten_write_limits(server)
        async with asyncio.timeout(60):
            while not server.cut_off.total:
                await asyncio.sleep(0.02)
            while server.connections:
                await asyncio.sleep(0.02)
        writer.close()
        await server.stop(0.1)

    uvloop.run(run())


def test_a_client_that_half_closes_within_a_head_and_reads_no_answer_is_cut_off(tmp_path: Path) -> None:
    """The server holds too few unsent bytes for the transport to pause writing."""
    unsent: list[int] = []

    async def held(request: Request) -> PlainTextResponse:
        transport = request.scope["state"]["connection"].transport
        unsent.append(transport.get_write_buffer_size())
        return PlainTextResponse("x" * 20_000)

    async def run() -> None:
        server = HttpServer(Starlette(routes=[Route("/", held)]), Limits(), write_timeout_s=600.0)
        await server.listen(listening(tmp_path / "s"))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(tmp_path / "s"))
            sock.setblocking(False)
            async with asyncio.timeout(60):
                while not unsent or not unsent[-1]:
                    asked = len(unsent)
                    await asyncio.get_running_loop().sock_sendall(sock, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                    while len(unsent) == asked:
                        await asyncio.sleep(0.001)
                assert server.cut_off.total == 0
                await asyncio.get_running_loop().sock_sendall(sock, b"GET / HT")
                sock.shutdown(socket.SHUT_WR)
                shorten_write_limits(server)
                while server.connections:
                    await asyncio.sleep(0.02)
        assert server.cut_off.total == 1
        await server.stop(0.1)

    uvloop.run(run())


def test_the_total_memory_of_unread_answers_is_bounded(tmp_path: Path) -> None:
    count = 3 * MAX_UNSENT_BYTES // (8 << 20)

    async def run() -> None:
        server = HttpServer(APP)
        await server.listen(listening(tmp_path / "s"))
        path = str(tmp_path / "s")
        first = socket.socket(socket.AF_UNIX)
        first.connect(path)
        first.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        others = []
        async with asyncio.timeout(120):
            while not server.connections:
                await asyncio.sleep(0.01)
            for _ in range(count):
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(path)
                sock.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
                others.append(sock)
                await asyncio.sleep(0.01)
            while server.connections > MAX_UNSENT_BYTES // (7 << 20) + 1:
                await asyncio.sleep(0.01)
            # The server still serves new clients, and also a client that reads its response.
            answer = await exchange(
                tmp_path / "s", b"GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
        assert len(answer) > 8 << 20
        assert server.connections > 0
        for sock in (first, *others):
            sock.close()
        await server.stop(1.0)

    uvloop.run(run())


def test_unread_answers_of_one_tenant_do_not_cut_off_clients_of_another(tmp_path: Path) -> None:
    """Each time the other tenant's unread responses exceed the limit, the slow client is the one that has
    waited longest."""
    count = 3 * MAX_UNSENT_BYTES // (8 << 20)

    def ask(tenant: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(tmp_path / "s"))
        sock.sendall(f"GET /big HTTP/1.1\r\nHost: x\r\nX-Tenant: {tenant}\r\n\r\n".encode())
        return sock

    async def run() -> None:
        server = HttpServer(APP)
        await server.listen(listening(tmp_path / "s"))
        slow = ask("slow")
        async with asyncio.timeout(60):
            while not server.connections:
                await asyncio.sleep(0.01)
            greedy = []
            for number in range(count):
                greedy.append(ask("greedy"))
                while server.connections + server.cut_off.total < number + 2:
                    await asyncio.sleep(0.01)
            while server.cut_off.total < count // 2:
                await asyncio.sleep(0.01)
            slow.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=slow)
            await reader.readuntil(b"\r\n\r\n")
            assert len(await reader.readexactly(8 << 20)) == 8 << 20
        writer.close()
        for sock in greedy:
            sock.close()
        await server.stop(1.0)

    uvloop.run(run())


@pytest.mark.parametrize("is_known", [False, True])
def test_a_closed_connection_gets_no_place_in_a_pool(tmp_path: Path, is_known: bool) -> None:
    answers: list[bool] = []

    async def authenticate_late(request: Request) -> PlainTextResponse:
        connection = request.scope["state"]["connection"]
        connection.abort()
        while server.connections:
            await asyncio.sleep(0)
        answers.append(connection.authenticate("acme"))
        return PlainTextResponse("")

    server: HttpServer

    async def run() -> None:
        nonlocal server
        app = Starlette(routes=[Route("/", authenticate_late)])
        server = HttpServer(app, known=lambda peer: is_known)
        await server.listen(listening(tmp_path / "s"))
        assert await exchange(tmp_path / "s", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == b""
        await server.stop(1.0)
        assert answers == [True]
        assert not len(server.known_pool) and not len(server.unknown_pool)

    uvloop.run(run())


def test_an_error_of_the_application_releases_the_requests_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stack frames of an error refer to the request's body. In this test, they also refer to the error
    itself."""
    # pytest would keep the stack frames of a logged error alive, so do not log the error.
    monkeypatch.setattr("appliance.http.exchange.log.exception", lambda *arguments: None)
    bodies: list[weakref.ref[set[int]]] = []

    async def fail(request: Request) -> PlainTextResponse:
        body = set(range(1000))
        bodies.append(weakref.ref(body))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_exception(RuntimeError("a mistake"))
        await future
        return PlainTextResponse(str(body))

    async def run() -> None:
        server = HttpServer(Starlette(routes=[Route("/", fail)]))
        await server.listen(listening(tmp_path / "s"))
        request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        gc.disable()
        try:
            assert b"500 Internal Server Error" in await exchange(tmp_path / "s", request)
            async with asyncio.timeout(60):
                while bodies[0]() is not None:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()
        await server.stop(0.1)

    uvloop.run(run())


def test_a_stop_closes_connections_after_its_grace_period(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def forever(request: Request) -> PlainTextResponse:
        begun.set()
        await asyncio.sleep(60)
        return PlainTextResponse("late")

    async def run() -> None:
        server = HttpServer(Starlette(routes=[Route("/", forever)]))
        await server.listen(listening(tmp_path / "s"))
        asking = asyncio.create_task(exchange(tmp_path / "s", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
        await begun.wait()
        await server.stop(0.1)
        assert server.connections == 0
        assert b"late" not in await asking

    uvloop.run(run())
