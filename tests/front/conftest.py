"""Fixtures for the front process tests. Most tests share one real front. A test that breaks its front starts
a separate one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from appliance.channel.front_settings import Limits
from tests.front.harness import KEY, Harness, write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    harness = Harness(folder, tmp_path_factory.mktemp("run")).start()
    yield harness
    harness.close()


@pytest.fixture
def front(shared: Harness) -> Harness:
    """The shared front process, reset to its initial state."""
    shared.reset()
    return shared


@pytest.fixture
def restore_models(front: Harness) -> Iterator[None]:
    """Serve only the default model again after the test."""
    yield
    front.models = []
    front.reconfigure()


@pytest.fixture
def own_front(folder: Path, tmp_path: Path) -> Iterator[Callable[[Limits], Harness]]:
    """Return a function that starts a front process for this test alone."""
    started: list[Harness] = []

    def start(limits: Limits | None = None) -> Harness:
        started.append(Harness(folder, tmp_path, limits or Limits()).start())
        return started[-1]

    yield start
    for harness in started:
        harness.close()


@pytest.fixture
def client(front: Harness) -> Iterator[openai.OpenAI]:
    """OpenAI's client, connected to the Unix socket, with a placeholder key."""
    transport = httpx2.HTTPTransport(uds=front.api_sock, verify=False)
    with openai.OpenAI(
        api_key="unused",
        base_url="http://appliance/v1",
        max_retries=0,
        timeout=600,
        http_client=openai.DefaultHttpx2Client(transport=transport),
    ) as client:
        yield client


@pytest.fixture
def tcp_client(front: Harness) -> Iterator[openai.OpenAI]:
    """OpenAI's client, connected over TCP, with a valid key."""
    with openai.OpenAI(
        api_key=KEY, base_url=f"http://127.0.0.1:{front.port}/v1", max_retries=0, timeout=600
    ) as client:
        yield client
