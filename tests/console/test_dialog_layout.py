"""Tests that every kind of dialog shows its buttons, keys and explanations at every size."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Button, Checkbox, Input, OptionList

from appliance.actions import Action, action_named
from console.action_dialog import ActionDialog, fields_of
from console.app import ConsoleApp
from console.dialogs import Choice, ChoiceDialog, TextDialog
from console.keys import offered
from console.past_dialogs import SliceDialog, TimeDialog
from tests.console.pilots import console, opened, press, run, text_of, until

SMALLEST = ((60, 18), (40, 12))
"""The smallest terminal with panels, and a smaller one. The pictures in `docs/console/` show larger ones."""
LONG = "a-very-long-name-of-" + "x" * 44


def visible(screen: Screen[object], *selectors: str) -> bool:
    """Return whether all widgets of a dialog that match the selectors are completely visible."""
    if not screen.query("#dialog"):
        return False
    inside = screen.region.intersection(screen.query_one("#dialog").content_region)
    found = [one for selector in selectors for one in screen.query(selector)]
    return all(one.region.area and inside.contains_region(one.region) for one in found)


async def begin(pilot: Pilot[int], app: ConsoleApp, name: str, values: dict[str, str]) -> ActionDialog:
    """Open the dialog of an action."""
    app.call_later(app.action_runner.begin, action_named(name), values, given=True)
    await until(pilot, lambda: opened(app))
    assert isinstance(app.screen, ActionDialog)
    return app.screen


async def close(pilot: Pilot[int], app: ConsoleApp) -> None:
    """Close the dialog that is open, and wait until no action is being confirmed."""
    await press(pilot, "escape")
    await until(pilot, lambda: len(app.screen_stack) == 1 and not app.action_runner.confirming)


def target_of(action: Action, name: str) -> dict[str, str]:
    return {action.named_by: name} if action.named_by else {}


def longest_texts() -> list[Action]:
    """Return the actions with the longest title and the longest description among the actions with the same
    danger and the same number of fields."""
    kinds: dict[tuple[str, int], list[Action]] = {}
    for action in offered():
        fields = fields_of(action, target_of(action, LONG))
        kinds.setdefault((action.danger, len(fields)), []).append(action)
    longest = [
        max(actions, key=lambda one: len(getattr(one, text)))
        for actions in kinds.values()
        for text in ("title", "description")
    ]
    return [action for action in offered() if action in longest]


@pytest.mark.parametrize("size", SMALLEST, ids=lambda size: f"{size[0]}x{size[1]}")
def test_buttons_and_keys_of_actions_are_visible(size: tuple[int, int]) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        for action in longest_texts():
            dialog = await begin(pilot, app, action.name, target_of(action, LONG))
            await until(pilot, lambda dialog=dialog: visible(dialog, "Button", "#keys", "#title"))
            await until(pilot, lambda dialog=dialog: "esc cancel" in text_of(dialog, "#keys"))
            dialog.show_error("a message that is long enough to need more than one line in a small dialog")
            await until(pilot, lambda dialog=dialog: visible(dialog, "Button", "#keys", "#error"))
            await close(pilot, app)

    run(steps, console(write=True), size)


@pytest.mark.parametrize("size", SMALLEST, ids=lambda size: f"{size[0]}x{size[1]}")
def test_keys_of_the_other_dialogs_are_visible(size: tuple[int, int]) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        choices = [Choice(str(number), f"Choice {number} {LONG}") for number in range(50)]
        for dialog, hint in (
            (ChoiceDialog(f"Actions (selected: {LONG})", choices), "type"),
            (TextDialog(f"Failed {LONG}", [f"line {number} {LONG}" for number in range(50)]), "esc to close"),
            (
                TimeDialog(now=0.0, note="Recorded from 2026-11-20 10:00:00 to 2026-11-20 14:00:00"),
                "enter open",
            ),
            (SliceDialog(0.0, 60.0, now=60.0), "enter export"),
        ):
            app.push_screen(dialog)  # type: ignore[arg-type]
            await until(pilot, lambda dialog=dialog: visible(dialog, "Button", "#keys", "#title"))
            await until(pilot, lambda dialog=dialog, hint=hint: hint in text_of(dialog, "#keys"))
            await close(pilot, app)

    run(steps, console(), size)


@pytest.mark.parametrize("size", [(80, 24), *SMALLEST], ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_field_that_has_the_focus_is_visible(size: tuple[int, int]) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        dialog = await begin(pilot, app, "tenants.set", {"name": "mobile"})
        fields = list(dialog.query(Input))
        assert len(fields) > 10
        for _ in range(len(fields) + len(dialog.query(Button))):
            await press(pilot, "tab")
            focused = dialog.focused
            assert focused is not None
            if isinstance(focused, Input):
                await until(pilot, lambda: visible(dialog, f"#{focused.id}", "Button", "#keys", "#hint"))  # noqa: B023

    run(steps, console(write=True), size)


@pytest.mark.parametrize("name", ["tenants.suspend", "keys.revoke"])
def test_a_button_does_not_show_the_explanation_of_a_parameter(name: str) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        action = action_named(name)
        dialog = await begin(pilot, app, name, target_of(action, "mobile"))
        assert dialog.focused is dialog.query_one("#cancel", Button)
        assert not dialog.query_one("#hint").display
        # The parameter "cancel" has the same name as the button. The parameter's explanation is beside its
        # field.
        dialog.query_one("#field-cancel", Checkbox).focus()
        await until(pilot, lambda: "space switch" in text_of(dialog, "#keys"))
        await close(pilot, app)
        dialog = await begin(pilot, app, "tenants.set", {"name": "mobile"})
        dialog.query_one("#field-weight").focus()
        await until(pilot, lambda: "Weight in fair sharing" in text_of(dialog, "#hint"))
        dialog.query_one("#what-if").focus()
        await until(pilot, lambda: "Nothing is changed" in text_of(dialog, "#hint"))

    run(steps, console(write=True))


def test_the_arrow_keys_move_between_fields_and_buttons() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        dialog = await begin(pilot, app, "drain", {})
        assert dialog.focused is dialog.query_one("#cancel")
        for key, name in (
            ("right", "confirm"),
            ("left", "cancel"),
            ("up", "field-queue"),
            ("up", "field-grace_s"),
        ):
            await press(pilot, key)
            await until(pilot, lambda name=name: dialog.focused is not None and dialog.focused.id == name)
        # Inside a text, these keys move the cursor.
        await press(pilot, "left")
        assert dialog.focused is dialog.query_one("#field-grace_s")

    run(steps, console(write=True))


@pytest.mark.parametrize(
    ("size", "keys"),
    [
        ((120, 40), "enter press the button  esc cancel  tab move and explain"),
        ((80, 24), "enter press the button  esc cancel  tab move and explain  pgdn scroll"),
        ((60, 18), "enter press  esc cancel  tab move  pgdn scroll"),
        ((40, 12), "enter press  esc cancel  tab move"),
    ],
    ids=lambda value: f"{value[0]}x{value[1]}" if isinstance(value, tuple) else "",
)
def test_the_last_line_shows_the_keys_that_fit(size: tuple[int, int], keys: str) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        dialog = await begin(pilot, app, "tenants.set", {"name": "mobile"})
        await until(pilot, lambda: text_of(dialog, "#keys") == keys)

    run(steps, console(write=True), size)


def test_a_page_key_scrolls_the_texts_of_a_small_dialog() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        dialog = await begin(pilot, app, "models.unload", {"model": "qwen3-8b"})
        body = dialog.query_one("#body")
        await until(pilot, lambda: body.max_scroll_y)
        await press(pilot, "pagedown")
        await until(pilot, lambda: body.scroll_y)
        await press(pilot, "pageup", "pageup")
        await until(pilot, lambda: not body.scroll_y)

    run(steps, console(write=True), (40, 12))


def test_typed_text_narrows_the_list_of_actions() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "6", "a")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog) and app.screen.focused)
        choices = app.screen.query_one(OptionList)
        count = choices.option_count
        assert count > 10
        await press(pilot, *"model wa")
        await until(pilot, lambda: [one.id for one in choices.options] == ["models.wake"])
        await press(pilot, "x")
        await until(pilot, lambda: "no choice contains this text" in str(choices.options[0].prompt))
        await press(pilot, "enter")
        assert isinstance(app.screen, ChoiceDialog)
        await press(pilot, "ctrl+u")
        await until(pilot, lambda: choices.option_count == count)
        await press(pilot, "down", "up", *"unpin", "enter")
        await until(pilot, lambda: opened(app))
        assert "Unpin model" in text_of(app.screen, "#title")

    run(steps, console(write=True))
