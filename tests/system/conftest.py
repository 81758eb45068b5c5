"""Services shared by tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ports import free_port
from tests.system.service import Service, service


@pytest.fixture(scope="session")
def demo() -> Iterator[Service]:
    """Start the shipped model with a Unix and a TCP socket. Tests that do not change the service share it."""
    with service("--listen", f"127.0.0.1:{free_port()}", "--fronts", "2", kind=Service) as running:
        yield running
