from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.hub.pull import Pulled, pull_model
from appliance.hub.repository import Hub, parse_reference
from tests.hub.server import HubServer


class Quiet:
    """Shows no progress, and calls a function with the number of received bytes."""

    def __init__(self, shown: Callable[[int], None] = lambda done: None) -> None:
        self._shown = shown

    def show(self, done: int, total: int) -> None:
        self._shown(done)


Pull = Callable[..., Pulled]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    # scripts/test prevents all other tests from reaching a hub.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server = HubServer()
    yield server
    server.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder of an empty hub cache."""
    folder = tmp_path / "hub"
    folder.mkdir()
    return folder


@pytest.fixture
def pull(hub: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch) -> Pull:
    """Return a function that pulls a repository from the hub into the cache."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def run(
        reference: str = "org/demo",
        *,
        token: str | None = None,
        into: Path = root,
        shown: Callable[[int], None] = lambda done: None,
    ) -> Pulled:
        return pull_model(
            Hub(hub.url, token), parse_reference(reference), into, Quiet(shown), lambda folder: None
        )

    return run
