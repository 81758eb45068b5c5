"""Tests of `appliance top`, which prints one frame of a screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest

from appliance.cli.console_commands import Screen
from console.fake import FakeSource
from console.replay import ReplaySource
from console.source import ListName, Row, SourceError
from console.top import top_lines
from tests.console.frames import source

SCREENS = get_args(Screen)
TITLES = {"audit": "Audit 7 ", "logs": "Logs ", "models": "─ Versions ", "tenants": "never expires"}
"""For each of these screens, a text that appears only after the screen's lists have been read."""


def printed(screen: str, made: FakeSource | ReplaySource | None = None) -> str:
    return "\n".join(top_lines(made or source(), screen, 120, 200))


@pytest.mark.parametrize("screen", SCREENS)
def test_a_printed_screen_contains_its_lists(screen: str) -> None:
    text = printed(screen)
    assert "loading" not in text
    assert TITLES.get(screen, "") in text
    if screen == "alerts":
        assert "1 active silence" in text


@pytest.mark.parametrize("screen", SCREENS)
def test_a_printed_screen_of_the_past_contains_its_lists(screen: str) -> None:
    fake = source()
    for _ in range(10):
        fake.step()
    text = printed(screen, ReplaySource(fake.recording()))
    assert "loading" not in text
    assert "HISTORY" in text
    if screen in ("audit", "logs"):
        assert TITLES[screen] in text


def test_a_list_that_cannot_be_read_is_an_error_only_if_the_screen_needs_it() -> None:
    class Refusing(FakeSource):
        async def rows(self, name: ListName) -> Sequence[Row]:
            raise SourceError(f"no {name} today")

    fake = source()
    fake.__class__ = Refusing
    with pytest.raises(SourceError, match="no audit today"):
        printed("audit", fake)
    assert "no models today" in printed("models", fake)
