from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.fake_server import FakeServer
from tests.cli.conftest import _own_environment, cli, run_dir  # noqa: F401


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """Yield an OpenAI-compatible server on a TCP port. The test sets its response times."""
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
