"""Tests of marked rows: the marks of rows that have ended, and the rows that actions apply to."""

from __future__ import annotations

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from appliance.actions.parameters import CancelRequest
from console.app import ConsoleApp
from console.lines import plain
from console.screens.requests import RequestsView
from console.session import ConsoleSession
from tests.console.frames import session
from tests.console.pilots import console, opened, press, run, shown, until


def marked(count: int) -> tuple[ConsoleSession, RequestsView]:
    """Return a session that shows the unfinished requests, with some of them marked."""
    made = session()
    made.run("screen requests")
    made.lines(120, 40)
    for _ in range(count):
        made.run("mark")
    view = made.view
    assert isinstance(view, RequestsView) and len(view.marks) == count
    return made, view


def end(made: ConsoleSession, *requests: str) -> None:
    """Deliver a snapshot in which these requests have ended."""
    snapshot = made.context.snapshot
    assert snapshot is not None
    left = [one for one in snapshot.requests if one.request_id not in requests]
    made.accept(msgspec.structs.replace(snapshot, at=snapshot.at + 1, requests=left))


@pytest.mark.parametrize(("size", "row"), [((120, 40), 2), ((80, 24), 2), ((59, 17), 2)])
def test_the_mark_of_an_ended_row_is_dropped_and_the_heading_says_so(size: tuple[int, int], row: int) -> None:
    made, view = marked(3)
    ended, *left = sorted(view.marks)
    end(made, ended)
    text = plain(made.lines(*size)[row])
    assert "2 marked · 1 marked row no longer listed" in text
    assert view.marks == set(left)
    assert sorted(view.selected(made.context)) == left
    # The note disappears when the operator changes the marks.
    made.run("back")
    assert "marked" not in plain(made.lines(*size)[row])


def test_when_all_marked_rows_have_ended_actions_concern_the_row_under_the_cursor() -> None:
    made, view = marked(2)
    end(made, *view.marks)
    assert "2 marked rows no longer listed" in plain(made.lines(120, 40)[2])
    assert view.selected(made.context) == [view.cursor]


def test_marks_of_rows_that_the_filter_hides_are_counted_and_kept() -> None:
    made, view = marked(2)
    view.filter = sorted(view.marks)[0]
    assert "2 marked (1 not shown)" in plain(made.lines(120, 40)[2])
    assert view.selected(made.context) == [view.filter]
    view.filter = ""
    made.lines(120, 40)
    assert len(view.selected(made.context)) == 2


def test_an_action_skips_marked_rows_that_end_before_it_and_goes_on_with_the_rest() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "4", "space", "space", "space")
        view = app.session.view
        first, second, third = view.selected(app.session.context)
        await press(pilot, "X")
        await until(pilot, lambda: opened(app))
        app.source.simulation.cancel(second)  # type: ignore[attr-defined]
        await until(pilot, lambda: not view.has_target(second, app.session.newest()))
        await press(pilot, "tab", "enter")
        await until(
            pilot, lambda: opened(app) and third in str(app.screen.query_one("#title", Static).render())
        )
        await press(pilot, "tab", "enter")
        await until(pilot, lambda: "Cancel request: 2 of 3 done, 1 no longer listed" in shown(app))
        performed = app.source.performed  # type: ignore[attr-defined]
        assert performed == [CancelRequest(request_id=first), CancelRequest(request_id=third)]
        await until(pilot, lambda: "3 marked rows no longer listed" in shown(app))

    run(steps, console(write=True))
