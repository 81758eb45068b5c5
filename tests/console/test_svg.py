"""Compares every screen at two sizes with the pictures in `docs/console/`, which also appear in the
documentation. After an intended change, regenerate the pictures with UPDATE_SNAPSHOTS=1 and check each of
them."""

from __future__ import annotations

import asyncio
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path

import pytest
from rich.color import Color
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

import console.action_dialog
import console.dialogs
import console.past_dialogs
from console.action_dialog import ActionDialog
from console.app import ConsoleApp
from console.dialogs import ChoiceDialog, Dialog, TextDialog
from console.fake import FIXED_TIME
from console.lines import Line
from console.past_dialogs import SliceDialog, TimeDialog
from console.replay import ReplaySource
from console.screens.registry import all_views, alternate_views
from console.session import ConsoleSession
from console.stored_recording import file_recording
from console.themes import BACKGROUNDS, style
from console.widget import merged
from tests.console.frames import SIZES, session
from tests.console.pilots import press, until
from tests.console.pilots import shown as shown_text
from tests.console.recorded import fake_seconds, record

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "console"
_WITH_HELP = ("overview", "requests")
NAMES = [view.name for view in all_views()] + [f"{name}-help" for name in _WITH_HELP]
_CELL_WIDTH = 12.2
"""Width of a character in the pictures, in units of the picture."""
_TEXT = re.compile(
    r'(<text [^>]*? x=")([\d.]+)("[^>]* textLength=")([\d.]+)("[^>]*>)((?:&#160;)*)(.*?)((?:&#160;)*)</text>'
)
"""Matches a piece of text in a picture, and separates the spaces at its beginning and end."""


@pytest.fixture(scope="module", autouse=True)
def utc() -> Iterator[None]:
    """Show times of day in UTC, so that the pictures do not depend on the machine's time zone."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.fixture(scope="module")
def shown(utc: None) -> ConsoleSession:
    return pictured()


def pictured() -> ConsoleSession:
    """Return a session that shows a fixed time, four minutes after the simulation begins. Its charts use
    block characters, because browsers often lack monospaced Braille characters."""
    made = session(240, interval_s=1.0)
    made._received = None
    made.run("glyphs block")
    return made


def picture(lines: list[Line], theme: str, width: int) -> str:
    """Return lines as an SVG picture."""
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
        for part in merged(row):
            text.append(part.text, style(theme, part.role, selected=part.selected))
        console.print(text, no_wrap=True, crop=False, soft_wrap=True)
    colours = copy(SVG_EXPORT_THEME)
    colours.background_color = Color.parse(BACKGROUNDS[theme]).get_truecolor()
    return console.export_svg(title="appliance console", theme=colours, unique_id="console")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_a_screen_looks_like_its_picture(shown: ConsoleSession, name: str, size: tuple[int, int]) -> None:
    width, height = size
    screen, _, helped = name.partition("-")
    shown.run(f"screen {screen}")
    shown.state.help = bool(helped)
    compare(f"{name}-{width}x{height}.svg", picture(shown.lines(width, height), "dark", width))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize(
    "name",
    [
        *(
            "overview-zoom",
            "audit-verified",
            "requests-detail",
            "finished",
            "finished-detail",
            "finished-help",
            "usage",
            "keys",
            "silences",
        ),
        *(f"{view.name}-{variant}" for view in all_views() for variant in view.variants[1:]),
    ],
)
def test_details_and_alternate_screens_look_like_their_pictures(
    utc: None, name: str, size: tuple[int, int]
) -> None:
    made = pictured()
    screen, _, part = name.partition("-")
    made.run(f"screen {screen}")
    made.lines(*size)
    if part == "verified":
        made.context.chain = asyncio.run(made.source.verify())
    elif part in made.view.variants:
        while made.view.variant != part:
            made.run("variant")
    else:
        made.run({"detail": "open", "help": "help", "zoom": "zoom", "": "move first"}[part])
    compare(f"{name}-{size[0]}x{size[1]}.svg", picture(made.lines(*size), "dark", size[0]))


def test_every_screen_and_dialog_has_pictures_of_both_sizes() -> None:
    drawn = {path.stem for path in PICTURES.glob("*.svg")}
    screens = {view.name for view in [*all_views(), *alternate_views()]}
    variants = {f"{view.name}-{variant}" for view in all_views() for variant in view.variants[1:]}
    for width, height in SIZES:
        assert {f"{name}-{width}x{height}" for name in screens | variants} <= drawn
    # Each kind of dialog has at least one picture.
    pictured_dialogs = {ActionDialog, ChoiceDialog, TextDialog, TimeDialog, SliceDialog}
    found = {
        value
        for module in (console.action_dialog, console.dialogs, console.past_dialogs)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Dialog)
        if value is not Dialog and not value.__name__.startswith("_")
    }
    assert found == pictured_dialogs, "draw a picture of the new dialog"


def without_outer_spaces(drawn: str) -> str:
    """Remove the spaces at the beginning and end of each piece of text. Some viewers, such as those that use
    librsvg, ignore these spaces and would shift the text."""

    def trimmed(found: re.Match[str]) -> str:
        before, x, between, length, after, leading, text, trailing = found.groups()
        if not text:
            return ""
        left, right = (_CELL_WIDTH * (len(spaces) // len("&#160;")) for spaces in (leading, trailing))
        moved, shortened = float(x) + left, float(length) - left - right
        return f"{before}{moved:.1f}{between}{shortened:.1f}{after}{text}</text>"

    return _TEXT.sub(trimmed, drawn)


async def settled(name: str, draw: Callable[[], str]) -> str:
    """Draw a picture until it equals its file, for at most 30 s, and return it. On a busy machine, a console
    may still be laying out its widgets when the first picture is drawn."""
    for _ in range(300):
        drawn = draw()
        if os.environ.get("UPDATE_SNAPSHOTS") or (PICTURES / name).read_text() == without_outer_spaces(drawn):
            break
        await asyncio.sleep(0.1)
    return drawn


def compare(name: str, drawn: str) -> None:
    """Compare a picture with its file, or write the file if UPDATE_SNAPSHOTS is set."""
    path, drawn = PICTURES / name, without_outer_spaces(drawn)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(drawn)
    assert path.read_text() == drawn, f"{name} differs: look at it, then set UPDATE_SNAPSHOTS=1"


@pytest.fixture(scope="module")
def history(utc: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("past") / "history.db", fake_seconds(60))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", ["history", "history-compare", "history-time", "history-export"])
def test_history_looks_like_its_picture(history: Path, name: str, size: tuple[int, int]) -> None:
    app = ConsoleApp(ReplaySource(file_recording(history), FIXED_TIME + 30))
    dialogs = {"history-time": ("T", TimeDialog), "history-export": ("E", SliceDialog)}
    file = f"{name}-{size[0]}x{size[1]}.svg"

    async def drawn() -> str:
        async with app.run_test(size=size) as pilot:
            app.travel.open(FIXED_TIME + 30)
            await until(pilot, lambda: "operator actions" in shown_text(app))
            if name == "history-compare":
                app.action_run("compare")
                app.travel.open(FIXED_TIME + 45)
                await until(pilot, lambda: app.session.past.instant.at == FIXED_TIME + 45)  # type: ignore[union-attr]
                app.action_run("compare")
                await until(pilot, lambda: "totals.ended" in shown_text(app))
            if name in dialogs:
                key, kind = dialogs[name]
                await press(pilot, key)
                await until(pilot, lambda: isinstance(app.screen, kind) and app.screen.focused is not None)
                await pilot.pause()
                return await settled(file, lambda: app.export_screenshot(title="appliance console"))
            width, height = size
            app.session.run("glyphs block")
            app.session.say("")
            return await settled(file, lambda: picture(app.session.lines(width, height), "dark", width))

    compare(file, asyncio.run(drawn()))
