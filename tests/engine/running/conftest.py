"""Fixtures for tests of the runner: the folder of a tiny random model, and an engine that runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.generate import LocalEngine
from tests.engine.running.tiny_model import CONFIG, spec_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(spec_of(folder))
    yield engine
    engine.close()
