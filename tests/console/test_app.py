"""Tests of the console as an application. They press keys as an operator would."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from textual import events
from textual.keys import _character_to_key
from textual.pilot import Pilot
from textual.widgets import Button, OptionList, Static

from appliance.cli.console_commands import Theme
from appliance.protocol import Key, NewKey
from appliance.snapshot import Snapshot
from console.app import ConsoleApp
from console.dialogs import ChoiceDialog, TextDialog
from console.fake import FakeSource
from console.keys import offered
from console.palette import ConsoleCommands
from console.screens.registry import alternate_views
from console.screens.table import TableView
from console.source import ListName, ListRow, Row, SourceError
from console.themes import THEMES
from tests.console.frames import SIZES
from tests.console.pilots import console, opened, press, run, shown, until


def test_the_command_line_offers_every_theme() -> None:
    assert set(get_args(Theme)) == set(THEMES)


def test_every_screen_opens_with_its_key_in_every_theme_and_glyph_set() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        for view in app.session.views:
            await press(pilot, view.key)
            assert app.session.view is view
        for _ in range(5):
            await press(pilot, "t", "b")
        assert app.session.theme == "dark"

    run(steps, console())


@pytest.mark.parametrize("size", SIZES)
def test_help_explains_the_screen_and_escape_closes_it(size: tuple[int, int]) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "4", "question_mark")
        await until(pilot, lambda: "Help: Requests" in shown(app))
        await press(pilot, "escape")
        await until(pilot, lambda: "Help:" not in shown(app))

    run(steps, console(), size)


def test_a_filter_applies_while_it_is_typed_and_escape_restores_it() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "7", "slash", *"mobile")
        await until(pilot, lambda: "Tenants 1 of 8" in shown(app))
        await press(pilot, "escape")
        await until(pilot, lambda: "Tenants 8 " in shown(app))
        await press(pilot, "slash", *"mobile", "enter")
        await until(pilot, lambda: "Tenants 1 of 8" in shown(app))

    run(steps, console())


def test_tab_lists_the_possible_completions_with_their_names() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        rows = app.source.rows

        async def with_own_rule(name: ListName) -> Sequence[Row]:
            return [ListRow(id="quiet", subject="quiet")] * (name == "rules") + [*await rows(name)]

        app.source.rows = with_own_rule  # type: ignore[method-assign]
        await press(pilot, "colon", *"keys revoke ")
        await until(pilot, lambda: "callers" in app.session.context.rows)
        [key, *_] = [one for one in app.session.context.rows["callers"] if isinstance(one, Key)]
        await press(pilot, "tab")
        await until(pilot, lambda: f"{key.id} ({key.name})" in shown(app))
        await press(pilot, *key.id.removeprefix(app.prompt.value.rpartition(" ")[2]), "tab")
        await until(pilot, lambda: app.prompt.value == f"keys revoke {key.id} ")
        await until(pilot, lambda: f"({key.name})" not in shown(app))
        app.prompt.value = "k"
        await press(pilot, "tab")
        await until(pilot, lambda: " kv  keys  keys create  keys rotate" in shown(app))
        app.prompt.value = "alerts unsilence "
        await press(pilot, "tab")
        await until(pilot, lambda: app.prompt.value == "alerts unsilence 5f0c21aa ")
        await until(pilot, lambda: "rules" in app.session.context.rows)
        app.prompt.value = "alerts silence q"
        await press(pilot, "tab")
        await until(pilot, lambda: "quiet  queue-full" in shown(app))
        app.prompt.value = "alerts silence kv-"
        await press(pilot, "tab")
        await until(pilot, lambda: app.prompt.value.startswith("alerts silence kv-cache"))

    run(steps, console(write=True))


def press_at_once(app: ConsoleApp, keys: str) -> None:
    """Press keys without waiting for their effects. A line feed stands for `enter`, a delete character for
    `backspace`, and an escape character for `escape`."""
    names = {"\n": "enter", "\x7f": "backspace", "\x1b": "escape"}
    for one in keys:
        name = names.get(one)
        app.post_message(events.Key(name, None) if name else events.Key(_character_to_key(one), one))


@pytest.mark.parametrize(
    ("keys", "screen", "typed"),
    [
        (":keys revoke ", "overview", "keys revoke "),
        ("7/search", "tenants", "search"),
        (":tenants\n/mobile", "tenants", "mobile"),
        (":tenx\x7fants\n/mobile", "tenants", "mobile"),
        (":tenants\x1b6/llama", "models", "llama"),
        ("7/x\n:keys revoke ", "tenants", "keys revoke "),
    ],
    ids=["command", "filter", "submitted", "corrected", "cancelled", "filtered"],
)
def test_characters_that_arrive_at_once_go_to_the_command_line(keys: str, screen: str, typed: str) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        press_at_once(app, keys)
        await until(pilot, lambda: app.prompt.display and app.prompt.value == typed)
        assert app.session.view.name == screen

    run(steps, console(write=True))


def test_keys_that_arrive_at_once_after_enter_do_not_go_to_the_command_line() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        press_at_once(app, ":tenants\n/mobile\n:pause\n\n")
        await until(pilot, lambda: "Tenants ▸ mobile" in shown(app))
        assert app.session.state.paused
        assert not app.prompt.display

    run(steps, console())


def test_a_late_report_that_the_command_line_was_hidden_does_not_take_its_focus() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "colon")
        app.prompt.post_message(events.Hide())
        await press(pilot, *"pause")
        await until(pilot, lambda: app.prompt.value == "pause")
        assert not app.session.state.paused

    run(steps, console())


def test_a_choice_made_twice_closes_only_its_dialog() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "7", "a")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog) and app.screen.focused)
        dialog = app.screen
        dialog.dismiss("tenants.set")
        dialog.dismiss("tenants.set")
        await until(pilot, lambda: opened(app))
        await press(pilot, "escape")
        await until(pilot, lambda: "nothing was changed" in shown(app))

    run(steps, console(write=True))


def test_the_command_line_shows_screens_and_refuses_unknown_commands() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "colon", *"models", "enter")
        await until(pilot, lambda: app.session.view.name == "models")
        await press(pilot, "colon", *"nonsense", "enter")
        await until(pilot, lambda: "unknown command 'nonsense'" in shown(app))

    run(steps, console())


@pytest.mark.parametrize("size", SIZES)
def test_the_audit_chain_is_verified_by_key_and_by_command(size: tuple[int, int]) -> None:
    app = console()
    rows = app.source._rows  # type: ignore[attr-defined]

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "V")
        await until(pilot, lambda: "chain ok at 09-21 14:1" in shown(app))
        assert app.session.view.name == "audit" and f": {len(rows.audit)} rows," in shown(app)
        rows.audit[3] = msgspec.structs.replace(rows.audit[3], target="another")
        await press(pilot, "1", "colon", *"audit verify", "enter")
        await until(pilot, lambda: "chain BROKEN at row 4, found at" in shown(app))
        assert app.session.view.name == "audit"

    run(steps, app, size)


def test_a_confirmed_action_is_performed_on_each_marked_row() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "4", "space", "space", "X")
        for _ in range(2):
            await until(pilot, lambda: opened(app))
            dialog = app.screen
            await press(pilot, "tab", "enter")
            await until(pilot, lambda dialog=dialog: app.screen is not dialog)  # type: ignore[misc]
        await until(pilot, lambda: len(getattr(app.source, "performed", [])) == 2)

    run(steps, console(write=True))


def test_the_silence_under_the_cursor_is_ended() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "8", "v")
        await until(pilot, lambda: "disk-*" in shown(app))
        app.action_run("act alerts.unsilence")
        await until(pilot, lambda: opened(app))
        assert "$ appliance alerts unsilence 5f0c21aa" in str(
            app.screen.query_one("#command", Static).render()
        )
        app.screen.query_one("#confirm", Button).press()
        await until(pilot, lambda: "ended the silence of disk-* on *" in shown(app))
        await until(pilot, lambda: "no silences are active" in shown(app))

    run(steps, console(write=True))


def test_a_new_key_is_shown_before_the_lists_have_been_read_again() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        key = NewKey(id="key_new", key="sk-app-secret", name="new", tenant="mobile")
        performed, answered = asyncio.Event(), asyncio.Event()
        rows = app.source.rows

        async def create(parameters: msgspec.Struct) -> msgspec.Struct:
            performed.set()
            return key

        async def slow(name: ListName) -> Sequence[Row]:
            if performed.is_set():
                await answered.wait()
                return []
            return await rows(name)

        app.source.act, app.source.rows = create, slow  # type: ignore[method-assign]
        await press(pilot, "7", "v", "v")
        await until(pilot, lambda: "callers" in app.session.context.rows)
        app.call_later(app.run_line, "keys create --name new --tenant mobile")
        await until(pilot, lambda: opened(app))
        app.screen.query_one("#confirm", Button).press()
        await until(pilot, lambda: isinstance(app.screen, TextDialog))
        await until(
            pilot, lambda: key.key in "\n".join(str(one.render()) for one in app.screen.query(Static))
        )
        assert app.session.context.rows["callers"]
        # The operator may have pressed `enter` once too often to confirm the action.
        await press(pilot, "enter")
        assert isinstance(app.screen, TextDialog)
        answered.set()
        await until(pilot, lambda: not app.session.context.rows["callers"])

    run(steps, console(write=True))


def test_the_console_stays_and_reconnects_when_the_service_is_away() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        read, failed = app.source.next, list[SourceError]()

        async def counted() -> Snapshot:
            try:
                return await read()
            except SourceError as error:
                failed.append(error)
                raise

        app.source.next = counted  # type: ignore[method-assign]
        app.source.away = "no service is running at /run/appliance"  # type: ignore[attr-defined]
        await until(pilot, lambda: "no service is running" in shown(app))
        await until(pilot, lambda: "STALE" in shown(app))
        # The delay between reads does not grow, so the console reconnects quickly.
        await until(pilot, lambda: len(failed) >= 8)
        app.source.away = ""  # type: ignore[attr-defined]
        await until(pilot, lambda: "STALE" not in shown(app) and "no service" not in shown(app))

    run(steps, console())


def test_a_table_is_exported_to_a_private_file(tmp_path: Path) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        path = tmp_path / "tenants.csv"
        await press(pilot, "7")
        app.run_line(f"export csv {path}")
        assert path.read_text().startswith("name,")
        assert path.stat().st_mode & 0o777 == 0o600
        app.run_line(f"export csv {tmp_path}/missing/x.csv")
        await until(pilot, lambda: "cannot write" in shown(app))
        app.run_line("export csv ~no-such-user/x.csv")
        await until(pilot, lambda: "no such user" in shown(app))

    run(steps, console())


def test_an_export_keeps_files_that_the_console_did_not_write(tmp_path: Path) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        own, foreign, link = tmp_path / "own.csv", tmp_path / "foreign.csv", tmp_path / "link.csv"
        foreign.write_text("precious")
        link.symlink_to(foreign)
        await press(pilot, "7")
        for path in (foreign, link, tmp_path):
            app.run_line(f"export csv {path}")
            await until(pilot, lambda path=path: f"{path} already exists" in _message(app))
            assert "choose another name" in _message(app) and "remove the file" in _message(app)
        assert foreign.read_text() == "precious" and link.is_symlink()
        for form in ("csv", "json"):
            app.run_line(f"export {form} {own}")
            await until(pilot, lambda: f"wrote {own}" in _message(app))
        assert own.read_text().startswith("[")
        own.write_text("edited")
        app.run_line(f"export csv {own}")
        await until(pilot, lambda: f"{own} already exists" in _message(app))
        assert own.read_text() == "edited"

    run(steps, console())


def _message(app: ConsoleApp) -> str:
    return app.session.state.message


@pytest.mark.parametrize("write", [False, True])
def test_the_palette_offers_actions_only_with_write(write: bool) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        commands = {command for _, _, command in ConsoleCommands(app.screen)._entries()}
        acting = {command for command in commands if command.startswith("act ")}
        assert acting == ({f"act {action.name}" for action in offered()} if write else set())
        assert "actions" in commands

    run(steps, console(write=write))


def test_the_palette_leads_to_the_screens_without_a_tab() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        for search, name in (("silences", "silences"), ("local users", "keys"), ("finished", "finished")):
            await press(pilot, "ctrl+p", *search)
            await until(pilot, lambda: app.screen.query_one(OptionList).option_count)
            await press(pilot, "enter")
            await until(pilot, lambda name=name: app.session.view.name == name)  # type: ignore[misc]
        commands = {command for _, _, command in ConsoleCommands(app.screen)._entries()}
        assert commands >= {f"screen {view.name}" for view in alternate_views()}

    run(steps, console())


def test_jump_mode_goes_to_the_row_or_panel_with_the_typed_letter() -> None:
    app = console()

    async def jump() -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: app.session.context.snapshot is not None)
            await press(pilot, "4", "f")
            await until(pilot, lambda: "\nd" in shown(app) and "type the letter" in shown(app))
            await press(pilot, "d")
            await until(pilot, lambda: not app.session.context.jumping)
            view = app.session.view
            assert isinstance(view, TableView)
            assert view.cursor == view.id_of(view.ordered(app.session.context)[2])
            await press(pilot, "1", "f", "s", "enter")
            await until(pilot, lambda: "Tokens per second" not in shown(app) and "Latency" in shown(app))

    asyncio.run(jump())


def test_in_jump_mode_any_other_key_only_ends_the_mode() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "7", "slash", *"s", "enter", "down")
        view = app.session.view
        assert isinstance(view, TableView)
        app.redraw()
        cursor = view.cursor
        assert cursor != view.id_of(view.ordered(app.session.context)[0])
        for key in ("up", "down", "home", "f1", "q", "escape", "1", "space", "N"):
            await press(pilot, "f")
            assert app.session.context.jumping
            await press(pilot, key)
            assert not app.session.context.jumping, key
            assert (view.cursor, view.filter, view.marks) == (cursor, "s", set()), key
            assert app.session.view is view and not app.session.state.help, key
            assert app.is_running and app.return_code is None, key

    run(steps, console())


def test_enter_on_a_block_opens_the_request_that_uses_it() -> None:
    app = console()

    async def follow() -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: app.session.context.snapshot is not None)
            await press(pilot, "3")
            await until(pilot, lambda: "1 cell = " in shown(app))
            context = app.session.context
            while not app.session.view.request(context):
                await press(pilot, "right")
            request = app.session.view.request(context)
            await press(pilot, "enter")
            await until(pilot, lambda: f"Requests ▸ {request}" in shown(app))
            await press(pilot, "backspace")
            await until(pilot, lambda: app.session.view.name == "kv")

    asyncio.run(follow())


def test_the_charts_begin_with_the_recorded_minutes_before_the_start() -> None:
    app = console()
    app.source.next = FakeSource.next.__get__(app.source)  # type: ignore[method-assign]
    app.source._real_time = True  # type: ignore[attr-defined]

    async def watch() -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: len(app.session.context.history.points) > 100)
            times = [point.at for point in app.session.context.history.points]
            assert times == sorted(set(times))
            assert all(len(slices) > 100 for slices in app.session.context.history.batches.values())

    asyncio.run(watch())
