"""Compares every screen at two sizes with pictures in `docs/console/`, which the documentation shows too.
After an intended change, write them again with UPDATE_SNAPSHOTS=1 and look at each."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from console.lines import Line
from console.screens.registry import all_views
from console.session import ConsoleSession
from console.themes import style
from console.widget import merged
from tests.console.frames import SIZES, session

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "console"
_WITH_HELP = ("overview", "requests")
NAMES = [view.name for view in all_views()] + [f"{name}-help" for name in _WITH_HELP]


@pytest.fixture(scope="module")
def shown() -> Iterator[ConsoleSession]:
    """Return a session whose times of day do not depend on the machine."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    made = session()
    made.accept = lambda snapshot: None  # type: ignore[method-assign]
    made._received = None
    yield made
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


def picture(lines: list[Line], theme: str, width: int) -> str:
    """Return lines as SVG."""
    console = Console(
        width=width,
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    for row in lines:
        text = Text(end="")
        for part, role, _ in merged(row):
            found = style(theme, role[1:], selected=True) if role.startswith("@") else style(theme, role)
            text.append(part, found)
        console.print(text, no_wrap=True, crop=False, soft_wrap=True)
    return console.export_svg(title="appliance console", unique_id="console")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_a_screen_looks_like_its_picture(shown: ConsoleSession, name: str, size: tuple[int, int]) -> None:
    width, height = size
    screen, _, helped = name.partition("-")
    shown.run(f"screen {screen}")
    shown.state.help = bool(helped)
    path = PICTURES / f"{name}-{width}x{height}.svg"
    drawn = picture(shown.lines(width, height), "dark", width)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(drawn)
    assert path.read_text() == drawn, f"{path.name} differs: look at it, then set UPDATE_SNAPSHOTS=1"
