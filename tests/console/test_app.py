"""Tests of the console as an application. They press keys as an operator would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from textual import events
from textual.keys import _character_to_key
from textual.pilot import Pilot
from textual.widgets import Button, Input, OptionList, Static

from appliance.actions import action_named
from appliance.actions.parameters import DeleteTenant
from appliance.protocol import Key, NewKey
from appliance.snapshot import Snapshot
from console.app import ConsoleApp
from console.dialogs import ActionDialog, TextDialog
from console.fake import FakeSource
from console.keys import KEYS, offered
from console.lines import plain
from console.palette import ConsoleCommands
from console.screens.registry import alternate_views
from console.screens.table import TableView
from console.source import ListName, ListRow, Row, SourceError
from tests.console.frames import SIZES, source


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


def opened(app: ConsoleApp) -> bool:
    """Return whether an action's dialog is fully displayed and has the focus."""
    if not isinstance(app.screen, ActionDialog) or app.screen.focused is None:
        return False
    # The command is displayed after the focus has been set.
    return any(str(one.render()) for one in app.screen.query("#command"))


async def until(pilot: Pilot[int], condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    for _ in range(1200):
        await asyncio.sleep(0.05)
        if condition():
            return
    raise AssertionError("timed out after 60 s:\n" + shown(pilot.app))  # type: ignore[arg-type]


def run(
    test: Callable[[Pilot[int], ConsoleApp], object], app: ConsoleApp, size: tuple[int, int] = (120, 40)
) -> None:
    """Run a test in a console that already shows measured values."""

    async def steps() -> None:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: "peak" in shown(app) or "output" in shown(app))
            await test(pilot, app)  # type: ignore[misc]

    asyncio.run(steps())


def test_every_screen_opens_with_its_key_in_every_theme_and_glyph_set() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        for view in app.session.views:
            await pilot.press(view.key)
            assert app.session.view is view
        for _ in range(5):
            await pilot.press("t", "b")
        assert app.session.theme == "dark"

    run(steps, console())


@pytest.mark.parametrize("size", SIZES)
def test_help_explains_the_screen_and_escape_closes_it(size: tuple[int, int]) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("4", "question_mark")
        await until(pilot, lambda: "Help: Requests" in shown(app))
        await pilot.press("escape")
        await until(pilot, lambda: "Help:" not in shown(app))

    run(steps, console(), size)


def test_a_filter_applies_while_it_is_typed_and_escape_restores_it() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("7", "slash", *"mobile")
        await until(pilot, lambda: "Tenants 1 of 8" in shown(app))
        await pilot.press("escape")
        await until(pilot, lambda: "Tenants 8 " in shown(app))
        await pilot.press("slash", *"mobile", "enter")
        await until(pilot, lambda: "Tenants 1 of 8" in shown(app))

    run(steps, console())


def test_tab_lists_the_possible_completions_with_their_names() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        rows = app.source.rows

        async def with_own_rule(name: ListName) -> Sequence[Row]:
            return [ListRow(id="quiet", subject="quiet")] * (name == "rules") + [*await rows(name)]

        app.source.rows = with_own_rule  # type: ignore[method-assign]
        await pilot.press("colon", *"keys revoke ")
        await until(pilot, lambda: "callers" in app.session.context.rows)
        [key, *_] = [one for one in app.session.context.rows["callers"] if isinstance(one, Key)]
        await pilot.press("tab")
        await until(pilot, lambda: f"{key.id} ({key.name})" in shown(app))
        await pilot.press(*key.id.removeprefix(app.prompt.value.rpartition(" ")[2]), "tab")
        await until(pilot, lambda: app.prompt.value == f"keys revoke {key.id} ")
        await until(pilot, lambda: f"({key.name})" not in shown(app))
        app.prompt.value = "k"
        await pilot.press("tab")
        await until(pilot, lambda: " kv  keys  keys create  keys rotate" in shown(app))
        app.prompt.value = "alerts unsilence "
        await pilot.press("tab")
        await until(pilot, lambda: app.prompt.value == "alerts unsilence 5f0c21aa ")
        await until(pilot, lambda: "rules" in app.session.context.rows)
        app.prompt.value = "alerts silence q"
        await pilot.press("tab")
        await until(pilot, lambda: "quiet  queue-full" in shown(app))
        app.prompt.value = "alerts silence kv-"
        await pilot.press("tab")
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


def test_the_command_line_shows_screens_and_refuses_unknown_commands() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("colon", *"models", "enter")
        await until(pilot, lambda: app.session.view.name == "models")
        await pilot.press("colon", *"nonsense", "enter")
        await until(pilot, lambda: "unknown command 'nonsense'" in shown(app))

    run(steps, console())


@pytest.mark.parametrize("size", SIZES)
def test_the_audit_chain_is_verified_by_key_and_by_command(size: tuple[int, int]) -> None:
    app = console()
    rows = app.source._rows  # type: ignore[attr-defined]

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("V")
        await until(pilot, lambda: "chain ok at 09-21 14:1" in shown(app))
        assert app.session.view.name == "audit" and f": {len(rows.audit)} rows," in shown(app)
        rows.audit[3] = msgspec.structs.replace(rows.audit[3], target="another")
        await pilot.press("1", "colon", *"audit verify", "enter")
        await until(pilot, lambda: "chain BROKEN at row 4, found at" in shown(app))
        assert app.session.view.name == "audit"

    run(steps, app, size)


def test_a_read_only_console_performs_no_action_through_any_key_or_command() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        for key in "4678":
            await pilot.press(key)
            for one in KEYS:
                if one.group == "Actions":
                    await pilot.press(one.keys[0])
                    await pilot.pause()
                    if one.command == "actions":
                        await pilot.press("enter")
                    assert not isinstance(app.screen, ActionDialog), one
        for action in offered():
            app.run_line(f"{action.name.replace('.', ' ')} {'x' if action.named_by else ''}")
            app.action_run(f"act {action.name}")
            await pilot.pause()
            assert not isinstance(app.screen, ActionDialog), action.name
        assert not hasattr(app.source, "performed")

    run(steps, console())


def test_a_dialog_shows_impact_and_cli_command_and_its_default_is_cancel() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("4", "X")
        await until(pilot, lambda: opened(app))
        text = "\n".join(str(one.render()) for one in app.screen.query("Static"))
        assert "$ appliance requests cancel req-" in text
        assert "output tokens" in text
        assert app.screen.focused is app.screen.query_one("#cancel", Button)
        await pilot.press("enter")
        await until(pilot, lambda: not isinstance(app.screen, ActionDialog))
        assert not hasattr(app.source, "performed")
        await until(pilot, lambda: "nothing was changed" in shown(app))

    run(steps, console(write=True))


def test_a_confirmed_action_is_performed_on_each_marked_row() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("4", "space", "space", "X")
        for _ in range(2):
            await until(pilot, lambda: opened(app))
            dialog = app.screen
            await pilot.press("tab", "enter")
            await until(pilot, lambda dialog=dialog: app.screen is not dialog)  # type: ignore[misc]
        await until(pilot, lambda: len(getattr(app.source, "performed", [])) == 2)

    run(steps, console(write=True))


def test_a_command_line_without_a_target_concerns_the_row_under_the_cursor() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("4")
        await until(pilot, lambda: app._fed > StillSource.steps)
        [name] = app.session.view.selected(app.session.context)
        app.call_later(app.run_line, "requests cancel")
        await until(pilot, lambda: opened(app))
        assert name in str(app.screen.query_one("#title", Static).render())
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, ActionDialog))
        # Without a model, the line stands for the whole service, also if a model is under the cursor.
        await pilot.press("6")
        app.call_later(app.run_line, "drain")
        await until(pilot, lambda: opened(app))
        assert "Drain the service?" in str(app.screen.query_one("#title", Static).render())

    run(steps, console(write=True))


def test_a_drain_is_a_form_with_a_banner() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("colon", *"drain --grace 45s", "enter")
        await until(pilot, lambda: opened(app))
        await pilot.press("tab", "enter")
        await until(pilot, lambda: "SERVICE DRAINING" in shown(app))
        assert app.source.performed[0].grace_s == 45.0  # type: ignore[attr-defined]

    run(steps, console(write=True))


def test_the_silence_under_the_cursor_is_ended() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("8", "v")
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


def test_the_key_and_the_mapping_under_the_cursor_are_filled_in() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("7", "v", "v")
        await until(pilot, lambda: "key_" in shown(app))
        [name] = app.session.view.selected(app.session.context)
        for action, target in (("keys.revoke", name), ("peers.unmap", "uid:1004")):
            view = app.session.view
            assert isinstance(view, TableView)
            view.cursor = target
            app.redraw()
            app.action_run(f"act {action}")
            await until(pilot, lambda: opened(app))
            command = str(app.screen.query_one("#command", Static).render())
            assert command.startswith(f"$ appliance {action.replace('.', ' ')} {target}")
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(app.screen, ActionDialog))
        view.cursor = name
        app.redraw()
        app.action_run("act peers.unmap")
        await until(pilot, lambda: "select a peer first" in shown(app))

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
        await pilot.press("7", "v", "v")
        await until(pilot, lambda: "callers" in app.session.context.rows)
        app.call_later(app.run_line, "keys create --name new --tenant mobile")
        await until(pilot, lambda: opened(app))
        app.screen.query_one("#confirm", Button).press()
        await until(pilot, lambda: isinstance(app.screen, TextDialog))
        await until(
            pilot, lambda: key.key in "\n".join(str(one.render()) for one in app.screen.query(Static))
        )
        assert app.session.context.rows["callers"]
        answered.set()
        await until(pilot, lambda: not app.session.context.rows["callers"])

    run(steps, console(write=True))


def test_a_typed_action_needs_the_name_of_its_target() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("7")
        app.call_later(app.begin, action_named("tenants.delete"), {"name": "mobile"}, given=True)
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: "type mobile to confirm" in str(dialog.query_one("#error").render()))
        dialog.query_one("#typed", Input).value = "mobile"
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: getattr(app.source, "performed", []) == [DeleteTenant(name="mobile")])

    run(steps, console(write=True))


def test_a_dialog_says_that_a_tenant_with_keys_cannot_be_deleted() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("7")
        app.call_later(app.begin, action_named("tenants.delete"), {"name": "mobile"}, given=True)
        await until(pilot, lambda: opened(app))
        assert "3 valid keys" in str(app.screen.query_one("#impact").render())

    run(steps, console(write=True))


def test_the_button_that_keeps_a_request_is_not_called_cancel() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("4", "X")
        await until(pilot, lambda: opened(app))
        labels = [str(button.label) for button in app.screen.query(Button)]
        assert labels == ["Back", "Cancel request"]

    run(steps, console(write=True))


def test_a_form_that_scrolls_shows_the_field_given_on_the_command_line() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.resize_terminal(80, 24)
        app.call_later(app.run_line, "tenants set mobile --concurrent-requests 7")
        await until(pilot, lambda: opened(app))
        field, form = app.screen.query_one("#field-concurrent_requests"), app.screen.query_one("#form")
        await until(pilot, lambda: form.max_scroll_y and form.region.contains_region(field.region))
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: not form.max_scroll_y)
        # Textual lays out the smaller form after the dialog has limited its height.
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: form.max_scroll_y and form.region.contains_region(field.region))

    run(steps, console(write=True))


def test_a_form_stays_where_the_operator_has_scrolled_it() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.resize_terminal(80, 24)
        app.call_later(app.run_line, "tenants set mobile --concurrent-requests 7")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        assert isinstance(dialog, ActionDialog)
        field, form = dialog.query_one("#field-concurrent_requests"), dialog.query_one("#form")
        await until(pilot, lambda: form.max_scroll_y and form.region.contains_region(field.region))
        while form.scroll_y:
            form.post_message(events.MouseScrollUp(form, 1, 1, 0, -1, 0, False, False, False))
            await pilot.pause()
        height = form.size.height
        dialog._show_error("a message that takes a line")
        await until(pilot, lambda: form.size.height < height)
        await pilot.pause()
        assert form.scroll_y == 0 and not form.region.contains_region(field.region)

    run(steps, console(write=True))


def test_a_dialog_refuses_if_the_state_has_changed() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("4", "X")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        snapshot = app.session.context.snapshot
        assert snapshot is not None
        app.source.simulation.cancel(snapshot.requests[0].request_id)  # type: ignore[attr-defined]
        before = app.session.context.snapshot
        await until(pilot, lambda: app.session.context.snapshot is not before)
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: "state changed" in str(dialog.query_one("#error").render()))
        assert not hasattr(app.source, "performed")

    run(steps, console(write=True))


def impact_of(app: ConsoleApp) -> str:
    """Return the impact shown in the open dialog."""
    return str(app.screen.query_one("#impact").render())


@pytest.mark.parametrize(
    ("action", "target"),
    [("models.unload", "qwen3-8b"), ("tenants.suspend", "search")],
    ids=["model", "tenant"],
)
def test_the_impact_in_an_open_dialog_follows_the_service_also_while_updates_are_paused(
    action: str, target: str
) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("p")
        await until(pilot, lambda: "PAUSED" in shown(app))
        chosen = action_named(action)
        app.call_later(app.begin, chosen, {chosen.named_by: target}, given=True)
        await until(pilot, lambda: opened(app))
        await until(pilot, lambda: "running and" in impact_of(app))
        dialog, before = app.screen, impact_of(app)
        sim = app.source.simulation  # type: ignore[attr-defined]
        running = (request for one in sim.replicas for request in one.running)
        sim.cancel(next(one.id for one in running if target in (one.model, one.tenant)))
        await until(pilot, lambda: impact_of(app) != before)
        # The number of requests is not part of the decision, so the action is still confirmed.
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: getattr(app.source, "performed", []))

    run(steps, console(write=True))


def test_the_dialog_of_a_request_reads_its_blocks_from_every_screen() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await until(pilot, lambda: not app.source.reads_blocks)
        snapshot = app.session.context.snapshot
        assert snapshot is not None
        app.call_later(app.run_line, f"requests cancel {snapshot.requests[0].request_id}")
        await until(pilot, lambda: opened(app) and app.source.reads_blocks)
        await until(pilot, lambda: "KV blocks" in impact_of(app))
        await pilot.press("escape")
        await until(pilot, lambda: not app.source.reads_blocks)

    run(steps, console(write=True))


def test_the_impact_follows_the_target_in_the_form() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.begin, action_named("drain"), {}, given=True)
        await until(pilot, lambda: opened(app) and bool(impact_of(app)))
        before = impact_of(app)
        app.screen.query_one("#field-model", Input).value = "qwen3-8b"
        await until(pilot, lambda: impact_of(app) != before)

    run(steps, console(write=True))


def test_a_dialog_notices_another_operators_change_of_a_limit() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.run_line, "tenants set mobile --weight 3")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        app.source.simulation.tenants["mobile"].limits[0].capacity = 123_456.0  # type: ignore[attr-defined]
        before = app.session.context.snapshot
        await until(pilot, lambda: app.session.context.snapshot is not before)
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: "to 123,456: review" in str(dialog.query_one("#error").render()))
        assert not hasattr(app.source, "performed")
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: getattr(app.source, "performed", []))

    run(steps, console(write=True))


def test_a_dialog_reads_the_keys_again_while_it_is_open() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        rows, removed = app.source.rows, list[str]()

        async def fewer(name: ListName) -> Sequence[Row]:
            return [one for one in await rows(name) if getattr(one, "id", "") not in removed]

        app.source.rows = fewer  # type: ignore[method-assign]
        key = next(one.id for one in await rows("callers") if isinstance(one, Key))
        app.call_later(app.run_line, f"keys revoke {key}")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        removed.append(key)
        left = len(await fewer("callers"))
        await until(pilot, lambda: len(app.session.context.rows["callers"]) == left)
        dialog.query_one("#confirm", Button).press()
        await until(
            pilot, lambda: "key changed from valid to absent" in str(dialog.query_one("#error").render())
        )
        assert not hasattr(app.source, "performed")

    run(steps, console(write=True))


def test_a_wrong_value_in_a_form_is_named_and_nothing_is_performed() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.begin, action_named("drain"), {"grace_s": "soon"}, given=True)
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: "grace_s" in str(dialog.query_one("#error").render()))
        assert not hasattr(app.source, "performed")

    run(steps, console(write=True))


def test_the_console_stays_and_reconnects_when_the_service_is_away() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.source.away = "no service is running at /run/appliance"  # type: ignore[attr-defined]
        await until(pilot, lambda: "no service is running" in shown(app))
        await until(pilot, lambda: "STALE" in shown(app))
        app.source.away = ""  # type: ignore[attr-defined]
        await until(pilot, lambda: "STALE" not in shown(app) and "no service" not in shown(app))

    run(steps, console())


def test_a_table_is_exported_to_a_private_file(tmp_path: Path) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        path = tmp_path / "tenants.csv"
        await pilot.press("7")
        app.run_line(f"export csv {path}")
        assert path.read_text().startswith("name,")
        assert path.stat().st_mode & 0o777 == 0o600
        app.run_line(f"export csv {tmp_path}/missing/x.csv")
        await until(pilot, lambda: "cannot write" in shown(app))

    run(steps, console())


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
            await pilot.press("ctrl+p", *search)
            await until(pilot, lambda: app.screen.query_one(OptionList).option_count)
            await pilot.press("enter")
            await until(pilot, lambda name=name: app.session.view.name == name)  # type: ignore[misc]
        commands = {command for _, _, command in ConsoleCommands(app.screen)._entries()}
        assert commands >= {f"screen {view.name}" for view in alternate_views()}

    run(steps, console())


def test_jump_mode_goes_to_the_row_or_panel_with_the_typed_letter() -> None:
    app = console()

    async def jump() -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: app.session.context.snapshot is not None)
            await pilot.press("4", "f")
            await until(pilot, lambda: "\nd" in shown(app) and "type the letter" in shown(app))
            await pilot.press("d")
            await until(pilot, lambda: not app.session.context.jumping)
            view = app.session.view
            assert isinstance(view, TableView)
            assert view.cursor == view.id_of(view.ordered(app.session.context)[2])
            await pilot.press("1", "f", "s", "enter")
            await until(pilot, lambda: "Tokens per second" not in shown(app) and "Latency" in shown(app))

    asyncio.run(jump())


def test_a_key_that_is_no_letter_of_a_row_only_leaves_jump_mode() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("7", "slash", *"s", "enter", "down")
        view = app.session.view
        assert isinstance(view, TableView)
        app.redraw()
        cursor = view.cursor
        assert cursor != view.id_of(view.ordered(app.session.context)[0])
        for key in ("up", "down", "home", "f1", "q", "escape", "1", "space", "N"):
            await pilot.press("f")
            assert app.session.context.jumping
            await pilot.press(key)
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
            await pilot.press("3")
            await until(pilot, lambda: "1 cell = " in shown(app))
            context = app.session.context
            while not app.session.view.request(context):
                await pilot.press("right")
            request = app.session.view.request(context)
            await pilot.press("enter")
            await until(pilot, lambda: f"Requests ▸ {request}" in shown(app))
            await pilot.press("backspace")
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


def test_a_layout_that_was_scheduled_before_a_dialog_closed_does_nothing() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.press("D")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        assert isinstance(dialog, ActionDialog)
        dialog._fit()
        dialog.dismiss(None)
        # The widgets of the dialog are removed before the dialog stops processing its callbacks.
        await until(pilot, lambda: not dialog.query("#form"))
        dialog._fit()

    run(steps, console(write=True))
