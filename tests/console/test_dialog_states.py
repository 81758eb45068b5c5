"""Tests of dialogs in special states: a service that stops, targets that do not exist, a read-only console,
and keys that end the console."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widgets import Button, Input, Static

from appliance.actions import action_named
from appliance.actions.parameters import CreateTenant
from appliance.protocol import Done, Key
from console.action_dialog import ActionDialog
from console.app import ConsoleApp
from console.context import Context
from console.dialogs import ChoiceDialog, TextDialog
from console.past_dialogs import SliceDialog, TimeDialog
from console.source import ListName, NoAnswerError, Row, SourceError
from console.target_state import state_lines
from tests.console.frames import session
from tests.console.pilots import console, opened, press, run, send_key, shown, text_of, until

OPENERS: dict[str, Callable[[ConsoleApp], object]] = {
    "action": lambda app: app.run_line("tenants set mobile"),
    "list": lambda app: app.action_runner.choose(),
    "text": lambda app: app.push_screen(TextDialog("Result", ["text"])),
    "time": lambda app: app.push_screen(TimeDialog(now=0.0, note="Recorded")),
    "palette": lambda app: app.action_run("palette"),
}


@pytest.mark.parametrize(("name", "key"), [*((name, "ctrl+c") for name in OPENERS), ("action", "ctrl+q")])
def test_the_keys_that_end_the_console_also_work_in_dialogs(name: str, key: str) -> None:
    app = console(write=True)

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(OPENERS[name], app)
        await until(pilot, lambda: len(app.screen_stack) == 2 and app.screen.is_current)
        kinds = (ActionDialog, ChoiceDialog, TextDialog, TimeDialog, CommandPalette)
        assert isinstance(app.screen, kinds)
        if fields := list(app.screen.query(Input)):
            fields[0].focus()
        send_key(app, key)
        await until(pilot, lambda: app.return_value == 0)

    run(steps, app)


def test_a_dialog_says_that_the_service_does_not_answer_and_stays_open() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.run_line, "tenants suspend mobile")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        before = text_of(dialog, "#impact")
        app.source.away = "the service on /run/appliance/admin.sock has stopped"  # type: ignore[attr-defined]
        message = "not up to date: the service on /run/appliance/admin.sock has stopped"
        await until(pilot, lambda: text_of(dialog, "#impact").startswith(f"{message}\n{before.split()[0]}"))
        app.source.away = ""  # type: ignore[attr-defined]
        await until(pilot, lambda: "not up to date" not in text_of(dialog, "#impact"))
        assert app.screen is dialog

    run(steps, console(write=True))


def test_an_action_that_the_stopped_service_does_not_perform_fails_with_the_reason() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.run_line, "models load qwen3-8b")
        await until(pilot, lambda: opened(app))
        app.screen.query_one("#confirm", Button).press()
        await until(pilot, lambda: isinstance(app.screen, TextDialog))
        await until(pilot, lambda: text_of(app.screen, "#title") == "Load model failed")
        await press(pilot, "escape")
        await until(pilot, lambda: "Load model qwen3-8b: failed: the demo does not simulate" in shown(app))

    run(steps, console(write=True))


def test_the_menu_of_a_read_only_console_says_so() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "4", "a")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        await until(pilot, lambda: "start the console with --write" in text_of(app.screen, "#title"))

    run(steps, console())


def made() -> Context:
    return session(steps=3, write=True).context


def lines(name: str, target: str, context: Context) -> list[str]:
    return state_lines(action_named(name), target, context)


@pytest.mark.parametrize(
    ("action", "kind", "known"),
    [
        ("models.load", "model", "qwen3-8b"),
        ("models.remove", "model", "qwen3-8b@1"),
        ("models.split", "model", "default"),
        ("peers.unmap", "mapping", "uid:1004"),
        ("alerts.ack", "alert", ""),
        ("alerts.unsilence", "silence", ""),
    ],
)
def test_a_dialog_says_that_its_target_does_not_exist(action: str, kind: str, known: str) -> None:
    context = made()
    assert lines(action, "nosuch", context) == [f"no {kind} nosuch is listed: check the name"]
    assert lines(action, known, context) == []
    assert lines("models.add", "nosuch", context) == lines("models.alias", "nosuch", context) == []


def test_a_dialog_says_that_its_target_already_has_the_state() -> None:
    context = made()
    snapshot = context.snapshot
    assert snapshot is not None
    name = snapshot.tenants[0].name
    assert lines("tenants.resume", name, context) == ["not suspended"]
    assert lines("tenants.suspend", name, context) == []
    context.snapshot = msgspec.structs.replace(
        snapshot, tenants=[msgspec.structs.replace(one, suspended_at=0.0) for one in snapshot.tenants]
    )
    assert lines("tenants.suspend", name, context)[0].startswith("already suspended since ")
    assert lines("tenants.resume", name, context)[0].startswith("suspended since ")
    key = context.rows_of("callers", Key)[0]
    assert lines("keys.revoke", key.id, context) == []
    for field, text in (("revoked_at", "already revoked at "), ("expires_at", "expired at ")):
        context.rows["callers"] = [msgspec.structs.replace(key, **{field: 1.0})]
        assert lines("keys.revoke", key.id, context)[0].startswith(text)


def test_a_dialog_says_that_the_service_is_already_draining() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await app.source.act(action_named("drain").parameters(grace_s=60.0))
        before = app.session.newest().snapshot
        await until(pilot, lambda: app.session.newest().snapshot is not before)
        app.call_later(app.run_line, "drain")
        await until(pilot, lambda: opened(app))
        await until(pilot, lambda: "already draining, grace left" in text_of(app.screen, "#impact"))

    run(steps, console(write=True))


def test_a_dialog_whose_action_fails_opens_again_with_the_values_and_the_error() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        refused = "log_days = 400 is out of range: use 1 to 365"
        performed: list[msgspec.Struct] = []

        async def act(parameters: msgspec.Struct) -> msgspec.Struct:
            performed.append(parameters)
            if len(performed) == 1:
                raise SourceError(refused)
            return Done(message="created")

        app.source.act = act  # type: ignore[method-assign]
        app.call_later(app.action_runner.begin, action_named("tenants.create"), {}, given=True)
        await until(pilot, lambda: opened(app))
        first = app.screen
        first.query_one("#field-name", Input).value = "new"
        first.query_one("#field-log_days", Input).value = "400"
        first.query_one("#confirm", Button).press()
        await until(pilot, lambda: app.screen is not first and opened(app))
        dialog = app.screen
        assert str(dialog.query_one("#earlier").render()) == f"failed: {refused}"
        assert dialog.query_one("#field-name", Input).value == "new"
        field = dialog.query_one("#field-log_days", Input)
        assert field.value == "400"
        # A second press of `enter`, meant for the first dialog, does not close the second one.
        assert isinstance(dialog.focused, Input)
        field.value = "30"
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: performed[1:] == [CreateTenant(name="new", log_days=30)])
        await until(pilot, lambda: "created" in shown(app) and len(app.screen_stack) == 1)

    run(steps, console(write=True))


def test_a_dialog_opens_even_if_the_service_does_not_send_the_list_of_its_targets() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        async def rows(name: ListName) -> list[Row]:
            await asyncio.Event().wait()
            return []

        app.source.rows = rows  # type: ignore[method-assign]
        app.call_later(app.run_line, "tenants suspend mobile")
        await until(pilot, lambda: opened(app))
        assert "mobile" in text_of(app.screen, "#title")

    run(steps, console(write=True))


def test_an_action_without_an_answer_is_not_offered_again() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        async def act(parameters: msgspec.Struct) -> msgspec.Struct:
            raise NoAnswerError("the service did not answer within 30 s")

        app.source.act = act  # type: ignore[method-assign]
        app.call_later(app.run_line, "tenants set mobile --weight 3")
        await until(pilot, lambda: opened(app))
        app.screen.query_one("#confirm", Button).press()
        await until(pilot, lambda: text_of(app.screen, "#title") == "Change tenant failed")
        expected = "did not answer within 30 s. The service may have performed the action"
        await until(pilot, lambda: any(expected in str(one.render()) for one in app.screen.query(Static)))

    run(steps, console(write=True))


def test_an_operator_who_gives_up_after_a_failure_still_sees_the_failure() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.run_line, "tenants set mobile --weight 3")
        await until(pilot, lambda: opened(app))
        first = app.screen
        first.query_one("#confirm", Button).press()
        await until(pilot, lambda: app.screen is not first and opened(app))
        assert app.screen.query_one("#field-weight", Input).value == "3"
        await press(pilot, "escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert "Change tenant mobile: failed: the demo does not simulate" in shown(app)
        assert "nothing was changed" not in shown(app)

    run(steps, console(write=True))


def test_a_dialog_that_changes_nothing_says_so_and_stays_open() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.run_line, "tenants set mobile")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        # The empty fields show the values that they keep.
        weight = dialog.query_one("#field-weight", Input)
        await until(pilot, lambda: weight.placeholder == "now: 0.5")
        dialog.query_one("#confirm", Button).press()
        await until(
            pilot, lambda: text_of(dialog, "#error").startswith("nothing to change: enter a new value")
        )
        assert app.screen is dialog and not hasattr(app.source, "performed")

    run(steps, console(write=True))


@pytest.mark.parametrize(("field", "value"), [("from", ""), ("to", " "), ("from", "soon")])
def test_an_error_in_the_dialog_of_an_export_names_the_field(field: str, value: str) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        dialog = SliceDialog(1e9, 1e9 + 60.0, now=2e9)
        app.call_later(app.push_screen, dialog)
        await until(
            pilot, lambda: dialog.is_current and dialog.query("#export") and dialog.query(f"#{field}")
        )
        dialog.query_one(f"#{field}", Input).value = value
        dialog.query_one("#export", Button).press()
        start = (
            f"{field} 'soon' is not valid: use a time" if value.strip() else f"{field} is empty: enter a time"
        )
        await until(pilot, lambda: text_of(dialog, "#error").startswith(start))

    run(steps, console())
