"""Services that tests share."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.system.service import Service, service


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def demo() -> Iterator[Service]:
    """The shipped model on both kinds of socket; shared by tests that leave it as it was."""
    with service("--listen", f"127.0.0.1:{free_port()}", "--fronts", "2") as running:
        yield running
