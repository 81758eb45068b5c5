"""Tests of viewing history in the console. They press keys as an operator would."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Button, Input

from appliance.actions.parameters import DrainService
from appliance.snapshot import Snapshot
from console.action_dialog import ActionDialog
from console.app import ConsoleApp
from console.dialogs import ChoiceDialog
from console.fake import FIXED_TIME, FakeSource
from console.keys import KEYS, offered
from console.palette import ConsoleCommands
from console.past_dialogs import SliceDialog, TimeDialog
from console.replay import ReplaySource
from console.stored_recording import file_recording
from tests.console.pilots import press, run, shown, until
from tests.console.recorded import fake_seconds, record


class SecondsSource(FakeSource):
    """A simulated service that delivers the snapshot of the next simulated second every 50 ms."""

    async def next(self) -> Snapshot:
        await asyncio.sleep(0.05)
        return self.step()


def console(*, write: bool = False) -> ConsoleApp:
    source = SecondsSource(requests=60, blocks=2048, gpus=4, tenants=8, interval_s=1.0, now=FIXED_TIME)
    for _ in range(30):
        source.step()
    return ConsoleApp(source, write=write)


def past_at(app: ConsoleApp) -> float:
    """Return the displayed time, in seconds since the simulated clock started."""
    assert app.session.past is not None
    return app.session.past.instant.at - FIXED_TIME


async def enter_past(pilot: Pilot[int], app: ConsoleApp, seconds: float = 20.0) -> None:
    app.travel.open(FIXED_TIME + seconds)
    await until(pilot, lambda: app.session.past is not None and past_at(app) == seconds)
    await until(pilot, lambda: "HISTORY" in shown(app) and "operator actions" in shown(app))


def test_a_step_back_shows_history_and_n_returns_to_the_live_data_without_a_gap() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "left_square_bracket")
        await until(pilot, lambda: "HISTORY 2026-" in shown(app))
        entered = past_at(app)
        await press(pilot, "left_square_bracket")
        await until(pilot, lambda: past_at(app) < entered)
        await press(pilot, "right_square_bracket")
        await until(pilot, lambda: past_at(app) == entered)
        await press(pilot, "N")
        await until(pilot, lambda: "HISTORY" not in shown(app))
        assert app.session.context.snapshot is not None
        assert app.session.context.snapshot.at > FIXED_TIME + entered
        times = [point.at for point in app.session.context.history.points]
        assert times == [times[0] + number for number in range(len(times))]

    run(steps, console())


def test_t_goes_to_a_time_and_reports_an_invalid_one() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "T")
        await until(pilot, lambda: isinstance(app.screen, TimeDialog) and app.screen.focused is not None)
        dialog = app.screen
        assert "Recorded from 2026-" in str(dialog.query(".note").last().render())
        await press(pilot, *"soon", "enter")
        await until(pilot, lambda: "'soon' is not valid" in str(dialog.query_one("#error").render()))
        dialog.query_one(Input).value = _local(FIXED_TIME + 15)
        await press(pilot, "enter")
        await until(pilot, lambda: app.session.past is not None)
        assert past_at(app) == 15
        await press(pilot, "colon", *f"time {_local(FIXED_TIME + 12)}", "enter")
        await until(pilot, lambda: past_at(app) == 12)
        await press(pilot, "colon", *"time 1999-01-01", "enter")
        await until(pilot, lambda: "nothing was recorded" in shown(app))
        assert past_at(app) == 12

    run(steps, console())


def _local(at: float) -> str:
    from console import units

    return units.date(at).replace(" ", "T")


def test_space_plays_and_pauses() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await enter_past(pilot, app, 15.0)
        await press(pilot, "greater_than_sign", "space")
        await until(pilot, lambda: "PLAY x2" in shown(app))
        await until(pilot, lambda: past_at(app) >= 17)
        await press(pilot, "space")
        await until(pilot, lambda: "PLAY" not in shown(app))
        stopped = past_at(app)
        await asyncio.sleep(1.5)
        assert past_at(app) == stopped

    run(steps, console())


def test_history_accepts_no_action_through_any_key_command_or_palette_entry() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        acted: list[object] = []

        async def act(parameters: object) -> object:
            acted.append(parameters)
            raise AssertionError("history was changed")

        app.source.act = act  # type: ignore[method-assign,assignment]
        await enter_past(pilot, app)
        for key in "467":
            await press(pilot, key)
            for one in KEYS:
                if one.group == "Actions":
                    await press(pilot, one.keys[0])
                    await pilot.pause()
                    assert not isinstance(app.screen, ActionDialog | ChoiceDialog), one
        for action in offered():
            app.run_line(f"{action.name.replace('.', ' ')} {'x' if action.named_by else ''}")
            app.action_run(f"act {action.name}")
            await pilot.pause()
            assert not isinstance(app.screen, ActionDialog), action.name
        entries = ConsoleCommands(app.screen)._entries()
        assert not [command for _, _, command in entries if command.startswith("act ")]
        await press(pilot, "X")
        await until(pilot, lambda: "history is read-only" in shown(app))
        assert not acted

    run(steps, console(write=True))


def test_braces_jump_to_operator_actions_which_are_marks_on_the_timeline() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await app.source.act(DrainService(model="qwen3-8b"))
        assert app.session.context.snapshot is not None
        acted_at = app.source.simulation.now - FIXED_TIME  # type: ignore[attr-defined]
        await until(pilot, lambda: app.session.context.snapshot.at > FIXED_TIME + acted_at + 5)  # type: ignore[union-attr]
        await press(pilot, "left_square_bracket")
        await until(pilot, lambda: "HISTORY" in shown(app))
        await press(pilot, "left_curly_bracket")
        await until(pilot, lambda: "uid:1000: drain qwen3-8b: ok" in shown(app))
        assert past_at(app) == pytest.approx(acted_at, abs=1.0)
        assert "▲" in shown(app)
        await enter_past(pilot, app, acted_at - 5)
        await press(pilot, "right_curly_bracket")
        await until(pilot, lambda: past_at(app) == pytest.approx(acted_at, abs=1.0))

    run(steps, console(write=True))


def test_two_times_are_compared_metric_by_metric() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await enter_past(pilot, app, 14.0)
        await press(pilot, "c")
        await until(pilot, lambda: "first time set to" in shown(app))
        first = app.session.context.snapshot
        await enter_past(pilot, app, 25.0)
        second = app.session.context.snapshot
        await press(pilot, "c")
        await until(pilot, lambda: "Compare" in shown(app) and "totals.ended" in shown(app))
        assert first is not None and second is not None
        rows = {row.name: row for row in app.session.comparison.ordered(app.session.context)}
        ended = rows["totals.ended"]
        assert (ended.first, ended.second) == (first.totals.ended, second.totals.ended)
        assert ended.difference == (second.totals.ended or 0) - (first.totals.ended or 0) != 0
        assert not any(row.first == row.second for row in rows.values())
        await press(pilot, "v")
        await until(
            pilot, lambda: "queue.limit" in shown(app) or len(app.session.comparison._rows) > len(rows)
        )
        await press(pilot, "c")
        await until(pilot, lambda: app.session.view.name == "overview")
        await press(pilot, "N")
        await until(pilot, lambda: "HISTORY" not in shown(app))
        # The live service can also be compared with the pinned time.
        await press(pilot, "c")
        await until(pilot, lambda: "Compare" in shown(app))

    run(steps, console())


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (40, 10)])
def test_the_badge_is_visible_at_every_size(size: tuple[int, int]) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.travel.open(FIXED_TIME + 20)
        await until(pilot, lambda: "HISTORY 2026-" in shown(app))
        for key in "1234567890":
            await press(pilot, key)
            await until(pilot, lambda: "HISTORY 2026-" in shown(app).splitlines()[0])

    run(steps, console(), size)


def test_a_recording_opens_without_a_service_and_cannot_return_to_live(tmp_path: Path) -> None:
    path = record(tmp_path / "history.db", fake_seconds(20))
    app = ConsoleApp(ReplaySource(file_recording(path)))

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await until(pilot, lambda: "HISTORY 2026-" in shown(app))
        assert past_at(app) == 20
        await press(pilot, "left_square_bracket")
        await until(pilot, lambda: past_at(app) == 19)
        await press(pilot, "N")
        await until(pilot, lambda: "there is no live service" in shown(app))
        await press(pilot, "a")
        await until(pilot, lambda: "a file, which cannot be changed" in shown(app))
        await press(pilot, "9")
        await until(pilot, lambda: "control.db" in shown(app))

    run(steps, app)


def test_a_relative_time_refers_to_the_clock_of_the_service() -> None:
    """The simulated clock of the service differs from this machine's clock."""

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await until(pilot, lambda: app._fed > 20)
        app.run_line("time -10s")
        await until(pilot, lambda: app.session.past is not None)
        newest = app.session.newest().snapshot
        assert newest is not None and 0 < past_at(app) < newest.at - FIXED_TIME

    run(steps, console())


def test_a_relative_time_refers_to_the_end_of_a_file(tmp_path: Path) -> None:
    app = ConsoleApp(ReplaySource(file_recording(record(tmp_path / "history.db", fake_seconds(30)))))

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await until(pilot, lambda: app.session.past is not None)
        newest = past_at(app)
        app.run_line("time -10s")
        await until(pilot, lambda: past_at(app) == newest - 10)

    run(steps, app)


def test_a_slice_is_exported_from_the_console(tmp_path: Path) -> None:
    path = record(tmp_path / "history.db", fake_seconds(30))
    app = ConsoleApp(ReplaySource(file_recording(path)))
    target = tmp_path / "incident.db"

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await until(pilot, lambda: "HISTORY 2026-" in shown(app))
        await press(pilot, "E")
        await until(pilot, lambda: isinstance(app.screen, SliceDialog) and app.screen.focused is not None)
        dialog = app.screen
        dialog.query_one("#from", Input).value = _local(FIXED_TIME + 10)
        dialog.query_one("#to", Input).value = "never"
        dialog.query_one("#file", Input).value = str(target)
        dialog.query_one("#export", Button).press()
        await until(pilot, lambda: "'never' is not valid" in str(dialog.query_one("#error").render()))
        dialog.query_one("#to", Input).value = _local(FIXED_TIME + 20)
        dialog.query_one("#file", Input).value = "~no-such-user/incident.db"
        dialog.query_one("#export", Button).press()
        await until(pilot, lambda: "no such user" in str(dialog.query_one("#error").render()))
        target.write_text("precious")
        dialog.query_one("#file", Input).value = str(target)
        dialog.query_one("#export", Button).press()
        await until(pilot, lambda: "already exists" in str(dialog.query_one("#error").render()))
        assert target.read_text() == "precious"
        target.unlink()
        dialog.query_one("#export", Button).press()
        await until(pilot, lambda: "wrote" in shown(app))
        assert target.exists()

    run(steps, app)
    replay = ReplaySource(file_recording(target))
    assert asyncio.run(replay.next()).at == FIXED_TIME + 10
