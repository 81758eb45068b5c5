"""Runs the console as an application without a terminal, for tests that press keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec
from textual import events
from textual.app import App
from textual.keys import _character_to_key
from textual.pilot import Pilot, WaitForScreenTimeout
from textual.screen import Screen

from appliance.snapshot import Snapshot
from console.action_dialog import ActionDialog
from console.app import ConsoleApp
from console.fake import FakeSource
from console.keys import CHARACTERS
from console.lines import plain
from console.source import SourceError
from tests.console.frames import source


class StillSource(FakeSource):
    """A simulated service whose clock stops after the first few snapshots."""

    steps = 6
    away = ""
    """The reason why the service does not answer, or an empty string if it answers."""
    performed: list[msgspec.Struct]

    async def next(self) -> Snapshot:
        if self.away:
            raise SourceError(self.away)
        if self.steps == 0:
            await asyncio.sleep(0.5)
            return self._snapshot()
        self.steps -= 1
        return self.step()

    async def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        self.performed = [*getattr(self, "performed", []), parameters]
        return await super().act(parameters)


def console(*, write: bool = False, theme: str = "dark") -> ConsoleApp:
    fake = source()
    fake.__class__ = StillSource
    return ConsoleApp(fake, write=write, theme=theme)


def shown(app: ConsoleApp) -> str:
    """Return the frame as text."""
    return "\n".join(plain(row) for row in app.frame_widget._lines)


def text_of(screen: Screen[object], selector: str) -> str:
    """Return the text of a widget, or an empty string if the screen does not have it yet."""
    found = screen.query(selector)
    return str(found.first().render()) if found else ""


def opened(app: ConsoleApp) -> bool:
    """Return whether an action's dialog is fully displayed and has the focus."""
    if not isinstance(app.screen, ActionDialog) or app.screen.focused is None:
        return False
    # The dialog displays the command only after it has set the focus.
    return any(str(one.render()) for one in app.screen.query("#command"))


async def until(pilot: Pilot[int], condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    for _ in range(1200):
        await asyncio.sleep(0.05)
        if condition():
            return
    raise AssertionError("timed out after 60 s:\n" + shown(pilot.app))  # type: ignore[arg-type]


async def processed(pilot: Pilot[int]) -> None:
    """Wait until the console has processed its messages and any further messages that they caused."""
    for _ in range(3):
        # A widget that is removed during the wait drops its message, for which `pause` then waits in vain.
        with suppress(WaitForScreenTimeout):
            await pilot.pause(0)


def send_key(app: App[int], key: str) -> None:
    """Send a key press to the console without waiting for its effect."""
    name = _character_to_key(key) if len(key) == 1 and not key.isalnum() else key
    character = key if len(key) == 1 else {**CHARACTERS, "space": " "}.get(key)
    app.post_message(events.Key(name, character))


async def press(pilot: Pilot[int], *keys: str) -> None:
    """Press keys, and wait until the console has processed each of them. `Pilot.press` also waits until the
    process is idle, which takes up to 2 s per key on a busy machine. For a key that ends the console, use
    `send_key`: a console that is closing does not process all messages."""
    for key in keys:
        send_key(pilot.app, key)
        await processed(pilot)


def run(
    test: Callable[[Pilot[int], ConsoleApp], object], app: ConsoleApp, size: tuple[int, int] = (120, 40)
) -> None:
    """Run a test in a console that already shows measured values."""

    async def steps() -> None:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: "peak" in shown(app) or "output" in shown(app))
            await test(pilot, app)  # type: ignore[misc]

    asyncio.run(steps())
