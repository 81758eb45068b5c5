"""Tests of opening a service's databases together."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from appliance.core.state import opened
from appliance.core.systemd import Manager
from appliance.settings import Settings


def open_once(folder: Path) -> None:
    async def run() -> None:
        settings = Settings(run_dir=str(folder / "run"), state_dir=str(folder / "state"))
        async with opened(settings, Manager({})):
            pass

    asyncio.run(run())


@pytest.mark.parametrize("name", ["history.db", "contents.db"])
@pytest.mark.parametrize("emptied", [False, True])
def test_a_missing_database_is_created_and_logged(
    name: str, emptied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        open_once(tmp_path)
        open_once(tmp_path)
        assert caplog.messages == [], "a new installation and a complete one must log nothing"
        for path in (tmp_path / "state").glob(f"{name}*"):
            path.unlink()
        if emptied:
            (tmp_path / "state" / name).touch()
        open_once(tmp_path)
    (message,) = caplog.messages
    assert message.startswith(
        f"{tmp_path}/state/{name} is missing or empty although control.db already has data"
    )
