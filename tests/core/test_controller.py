"""Tests of the controller's periodic check, without processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from appliance.core.controller import Controller


def test_of_two_late_ticks_in_a_row_the_second_one_checks_the_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A core that is always late must still notice hung processes."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("appliance.core.controller.time", SimpleNamespace(monotonic=lambda: clock.now))
    parts: dict[str, Any] = {
        name: MagicMock() for name in ("policies", "requests", "models", "fronts", "listeners", "drains")
    }
    controller = Controller(**parts)

    def checks_after(seconds: float) -> bool:
        clock.now += seconds
        before = parts["models"].check.call_count, parts["fronts"].check.call_count
        controller._tick()
        after = parts["models"].check.call_count, parts["fronts"].check.call_count
        assert after in (before, (before[0] + 1, before[1] + 1))
        return after != before

    async def ticks() -> list[bool]:
        clock.now += 30.0  # The time before the start is no pause.
        controller.start()
        started = parts["models"].check.call_count == 1
        return [started, *map(checks_after, (0.25, 30.0, 30.0, 30.0, 0.25))]

    assert asyncio.run(ticks()) == [True, True, False, True, False, True]
