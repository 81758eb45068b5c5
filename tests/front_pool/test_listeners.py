"""Tests of the API's listening sockets: how many connections are accepted at once, and how many wait."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from appliance.front_pool.front import Untaken
from appliance.front_pool.listeners import _MAX_PER_PASS, Listener
from appliance.http.sockets import _BACKLOG, bind_unix

pytestmark = pytest.mark.system


class Balancer:
    """A stand-in for the connection balancer. It counts the connections that it gets in each iteration of the
    event loop."""

    open = True

    def __init__(self) -> None:
        self.given = [0]

    def assign(self, connection: Untaken) -> None:
        connection.close()
        if not self.given[-1]:
            asyncio.get_running_loop().call_soon(self.given.append, 0)
        self.given[-1] += 1


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with bind_unix(tmp_path / "s", "0600") as sock:
        yield sock


def connected(listening: socket.socket) -> socket.socket:
    """Return a connection to the socket. Raises BlockingIOError if the backlog is full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(listening.getsockname())
    except OSError:
        sock.close()
        raise
    return sock


def test_a_burst_of_connections_is_accepted_in_several_passes_of_the_loop(listening: socket.socket) -> None:
    async def scenario() -> list[int]:
        balancer = Balancer()
        listener = Listener("api", listening, balancer, lambda where, description: None)  # type: ignore[arg-type]
        with ExitStack() as stack:
            for _ in range(3 * _MAX_PER_PASS):
                stack.enter_context(connected(listening))
            listener.update()
            async with asyncio.timeout(60):
                while sum(balancer.given) < 3 * _MAX_PER_PASS:
                    await asyncio.sleep(0)
        listener.close()
        return balancer.given

    given = asyncio.run(scenario())
    assert [count for count in given if count] == [_MAX_PER_PASS] * 3


def test_a_full_backlog_lets_clients_wait_until_a_connection_is_accepted(listening: socket.socket) -> None:
    backlog = min(_BACKLOG, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < backlog + 200:
        pytest.skip(f"needs {backlog + 200} descriptors, and the limit of this process is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, backlog + 200), hard))
    try:
        with ExitStack() as stack:
            # The kernel accepts one connection more than the length of the backlog.
            for _ in range(backlog + 1):
                stack.enter_context(connected(listening))
            with pytest.raises(BlockingIOError):
                connected(listening)
            with closing(listening.accept()[0]):
                connected(listening).close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
