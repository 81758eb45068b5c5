"""Tests of actions on several marked rows: each target is confirmed, performed and reported separately."""

from __future__ import annotations

import asyncio

import msgspec
from textual.pilot import Pilot
from textual.widgets import Static

from appliance.actions import action_named
from appliance.actions.parameters import CancelRequest, SuspendTenant
from console.app import ConsoleApp
from console.dialogs import TextDialog
from console.source import SourceError
from tests.console.pilots import console, opened, press, run, shown, until


async def mark_requests(pilot: Pilot[int], app: ConsoleApp, count: int) -> list[str]:
    """Mark requests, begin to cancel them, and return their ids."""
    await press(pilot, "4", *["space"] * count)
    names = app.session.view.selected(app.session.context)
    assert len(names) == count
    await press(pilot, "X")
    return names


async def asked(pilot: Pilot[int], app: ConsoleApp, title: str) -> None:
    """Wait for the dialog with this title."""
    await until(pilot, lambda: opened(app) and str(app.screen.query_one("#title", Static).render()) == title)


def texts(app: ConsoleApp) -> list[str]:
    return "\n".join(str(one.render()) for one in app.screen.query(Static)).split("\n")


def test_each_target_is_reported_if_one_fails_and_the_next_is_cancelled() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        act = app.source.act

        async def failing(parameters: msgspec.Struct) -> msgspec.Struct:
            if parameters == CancelRequest(request_id=names[1]):
                raise SourceError("the service did not respond")
            return await act(parameters)

        app.source.act = failing  # type: ignore[method-assign]
        names = await mark_requests(pilot, app, 4)
        for place, name in enumerate(names[:2], 1):
            await asked(pilot, app, f"{place} of 4: Cancel request {name}?")
            await press(pilot, "tab", "enter")
        await asked(pilot, app, f"3 of 4: Cancel request {names[2]}?")
        # The dialog of the next target says that the previous one failed.
        assert str(app.screen.query_one("#earlier", Static).render()) == (
            f"{names[1]}: failed: the service did not respond"
        )
        await press(pilot, "enter")
        await until(pilot, lambda: isinstance(app.screen, TextDialog))
        summary = "Cancel request: 1 of 4 done, 1 failed, 1 cancelled, 1 not tried"
        await until(pilot, lambda: summary in texts(app))
        expected = [
            f"{names[0]}: done",
            f"{names[1]}: failed: the service did not respond",
            f"{names[2]}: cancelled",
            f"{names[3]}: not tried",
        ]
        await until(pilot, lambda: [line for line in texts(app) if line.startswith("req-")] == expected)
        await press(pilot, "escape")
        await until(pilot, lambda: summary in shown(app))
        assert "nothing was changed" not in shown(app)

    run(steps, console(write=True))


def test_nothing_was_changed_only_if_the_first_dialog_is_cancelled() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        names = await mark_requests(pilot, app, 2)
        await asked(pilot, app, f"1 of 2: Cancel request {names[0]}?")
        await press(pilot, "escape")
        await until(pilot, lambda: "Cancel request: cancelled; nothing was changed" in shown(app))
        assert len(app.screen_stack) == 1

    run(steps, console(write=True))


def test_several_completed_targets_are_counted() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        names = await mark_requests(pilot, app, 2)
        for place, name in enumerate(names, 1):
            await asked(pilot, app, f"{place} of 2: Cancel request {name}?")
            await press(pilot, "tab", "enter")
        await until(pilot, lambda: "Cancel request: 2 of 2 done" in shown(app))
        assert len(app.screen_stack) == 1

    run(steps, console(write=True))


def test_the_footer_shows_which_target_is_in_progress() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        answer = asyncio.Event()
        act = app.source.act

        async def slow(parameters: msgspec.Struct) -> msgspec.Struct:
            await answer.wait()
            return await act(parameters)

        app.source.act = slow  # type: ignore[method-assign]
        names = await mark_requests(pilot, app, 2)
        await asked(pilot, app, f"1 of 2: Cancel request {names[0]}?")
        await press(pilot, "tab", "enter")
        await until(pilot, lambda: f"Cancel request {names[0]} (1 of 2): in progress…" in shown(app))
        # The dialog of the next target does not cover a dialog that the operator has opened in the meantime.
        app.call_later(
            app.action_runner.begin, action_named("tenants.suspend"), {"name": "mobile"}, given=True
        )
        await asked(pilot, app, "Suspend tenant mobile?")
        answer.set()
        await until(pilot, lambda: CancelRequest(request_id=names[0]) in getattr(app.source, "performed", []))
        assert str(app.screen.query_one("#title", Static).render()) == "Suspend tenant mobile?"
        await press(pilot, "tab", "enter")
        await asked(pilot, app, f"2 of 2: Cancel request {names[1]}?")
        await until(pilot, lambda: SuspendTenant(name="mobile") in app.source.performed)  # type: ignore[attr-defined]

    run(steps, console(write=True))
