"""The dialog that confirms an action: its impact, its parameters, and the equivalent CLI command. The dialog
is derived from the action's entry in the registry. Its default is Cancel."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
from textual import events, on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.scrollbar import ScrollDown, ScrollTo, ScrollUp
from textual.widgets import Button, Checkbox, Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from appliance.actions import Action
from appliance.quantities import span_text
from console.commands import CommandError, build, equivalent, flag_of, is_hidden, is_switch
from console.impact import Impact
from console.lines import span

Values = dict[str, Any]
R = TypeVar("R")
_MIN_FORM, _MAX_FORM = 2, 20
"""Minimum and maximum height of an action's form, in lines."""


def text(value: str) -> Content:
    """Return `value` as content that has no markup and no control characters."""
    return Content(span(value).text)


class Switch(Checkbox):
    """A checkbox drawn with ASCII characters, which shows its state with a letter, not only with colour."""

    def render(self) -> Content:
        """Return the checkbox."""
        return Content("[X]" if self.value else "[ ]")


class _Form(VerticalScroll):
    """The fields of an action. It scrolls if they do not fit."""

    def __init__(self, resized: Callable[[], None], **options: Any) -> None:
        """`resized` is called when the form has its new size. Before that, Textual computes scroll positions
        from the old size."""
        super().__init__(**options)
        self._resized = resized
        self.is_scrolled = False
        """Whether the operator has scrolled with the mouse."""

    def on_resize(self) -> None:
        """Report the new size."""
        self._resized()

    @on(events.MouseScrollDown)
    @on(events.MouseScrollUp)
    @on(ScrollDown)
    @on(ScrollUp)
    @on(ScrollTo)
    def _scrolled(self) -> None:
        self.is_scrolled = True


class Dialog(ModalScreen[R]):
    """A dialog that closes only once. An operator who presses `enter` twice would otherwise close the screen
    below it as well."""

    def dismiss(self, result: R | None = None) -> AwaitComplete:
        """Close the dialog with this result, unless it has been closed already."""
        return super().dismiss(result) if self.is_current else AwaitComplete.nothing()


class ActionDialog(Dialog[msgspec.Struct | None]):
    """Asks for the parameters of an action and for confirmation. Its result is None if the operator
    cancels."""

    BINDINGS: ClassVar = [("escape", "cancel", "Cancel")]
    AUTO_FOCUS = ""
    """Prevents Textual from focusing the first field before the dialog sets the focus."""
    DEFAULT_CSS = """
    ActionDialog { align: center middle; background: transparent; }
    ActionDialog #dialog { width: 76; max-width: 96%; height: auto; max-height: 94%; border: round $primary;
        padding: 0 1; background: $surface; }
    ActionDialog #title { text-style: bold; color: $primary; width: 1fr; }
    ActionDialog #form { height: auto; }
    ActionDialog #impact { color: $warning; height: auto; }
    ActionDialog #description { height: auto; color: $text-muted; }
    ActionDialog .field { height: auto; }
    ActionDialog .field Label { width: 24; }
    ActionDialog .field .help { width: 1fr; height: auto; margin-left: 1; color: $text-muted; }
    ActionDialog Input { width: 1fr; background: $panel; }
    ActionDialog Checkbox { background: transparent; width: 3; }
    ActionDialog Checkbox:focus { text-style: bold reverse; }
    ActionDialog #hint { height: auto; color: $text-muted; }
    ActionDialog #command { height: auto; text-style: italic; }
    ActionDialog #error { color: $error; height: auto; }
    ActionDialog #forecast { height: auto; margin-top: 1; color: $secondary; }
    ActionDialog #buttons { height: 1; align-horizontal: right; margin-top: 1; }
    ActionDialog Button { min-width: 12; margin-left: 2; }
    ActionDialog Button:focus { text-style: bold reverse; }
    """

    def __init__(
        self,
        action: Action,
        values: Values,
        *,
        impact: Impact,
        what_if: Callable[[msgspec.Struct], Awaitable[list[str]]] | None = None,
    ) -> None:
        """`impact` states what the action affects, and detects whether that has changed. `what_if` forecasts
        the effect of the parameters; it is None if the action has no forecast."""
        super().__init__()
        self._action = action
        self._values = values
        self._impact = impact
        self._impact_lines: list[str] = []
        self._what_if = what_if

    def compose(self) -> ComposeResult:
        """Build the dialog."""
        action = self._action
        with Vertical(id="dialog"):
            yield Static(text(f"{action.title} {self._target()}".rstrip() + "?"), id="title")
            yield Static(text(action.description), id="description")
            yield _hidden("impact")
            with _Form(self._show_given, id="form", can_focus=False):
                for field in msgspec.structs.fields(action.parameters):
                    chosen = field.name == action.named_by and field.name in self._values
                    if not chosen and not is_hidden(action, field.name):
                        yield from self._field(field)
            if action.danger == "typed":
                with Horizontal(classes="field"):
                    yield Label("type the name")
                    yield Input(id="typed", placeholder=span(self._target()).text, compact=True)
            yield Static("", id="hint")
            yield Static("", id="command")
            yield _hidden("error")
            if self._what_if is not None:
                yield _hidden("forecast")
            with Horizontal(id="buttons"):
                # Next to a button such as "Cancel request", "Cancel" would be ambiguous.
                ends_something = action.title.startswith("Cancel")
                yield Button("Back" if ends_something else "Cancel", id="cancel", compact=True)
                if self._what_if is not None:
                    yield Button("What if", id="what-if", compact=True)
                yield Button(
                    action.title,
                    id="confirm",
                    variant="error" if action.danger != "none" else "primary",
                    compact=True,
                )

    def on_mount(self) -> None:
        """Focus the button that changes nothing, or the first field that must be filled in."""
        for one in self.query(Input):
            one.cursor_blink = False
        required = [one.name for one in msgspec.structs.fields(self._action.parameters) if one.required]
        empty = [name for name in required if name not in self._values]
        if empty:
            self.query_one(f"#field-{empty[0]}").focus()
        else:
            self.query_one("#cancel").focus()
        self._refresh()

    def on_resize(self) -> None:
        """Fit the dialog into the new size."""
        self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        """Limit the height of the form, which scrolls, so that everything else stays visible, especially the
        buttons."""
        if not self.display:
            return  # The dialog has been closed since this call was scheduled.
        dialog, form = self.query_one("#dialog"), self.query_one("#form")
        others = sum(
            one.outer_size.height + one.styles.margin.height
            for one in dialog.children
            if one is not form and one.display
        )
        form.styles.max_height = max(_MIN_FORM, min(_MAX_FORM, int(self.size.height * 0.94) - others - 2))

    def _show_given(self) -> None:
        """Scroll the form to the first field that has a value from the command line, unless the operator has
        scrolled the form or is in another field."""
        if not self.display or any(form.is_scrolled for form in self.query(_Form)):
            return
        if self.focused is not None and not isinstance(self.focused, Button):
            return
        for name in self._values:
            for field in self.query(f"#field-{name}"):
                field.scroll_visible(animate=False)
                return

    def _field(self, field: Any) -> ComposeResult:
        value = self._values.get(field.name)
        with Horizontal(classes="field"):
            yield Label(flag_of(field.name).removeprefix("--").replace("-", " "))
            if is_switch(self._action, field.name):
                yield Switch(
                    value=bool(value or field.default is True), id=f"field-{field.name}", compact=True
                )
                yield Static(text(_description(self._action, field.name)), classes="help")
            else:
                shown = _default_text(field) if value is None else str(value)
                absent = "none" if field.default is None else "unchanged"
                if field.name == self._action.named_by:
                    absent = self._target() or absent
                yield Input(value=shown, id=f"field-{field.name}", placeholder=absent, compact=True)

    def _target(self) -> str:
        name = self._named(self._values)
        if self._action.target == "model" and not self._action.is_target_required:
            return "the service" if not name else f"model {name}"
        return "" if name is None else str(name)

    def _collected(self) -> Values:
        """Return the given values that have no field, and the values of the fields that differ from their
        defaults."""
        values = dict(self._values)
        for field in msgspec.structs.fields(self._action.parameters):
            for widget in self.query(f"#field-{field.name}"):
                if isinstance(widget, Checkbox):
                    value: Any = widget.value
                    changed = value != (field.default is True)
                else:
                    assert isinstance(widget, Input)
                    value = widget.value.strip()
                    changed = value != _default_text(field)
                if changed:
                    values[field.name] = value
                else:
                    values.pop(field.name, None)
        return values

    @on(Input.Changed)
    @on(Checkbox.Changed)
    def _refresh(self) -> None:
        """Show the CLI command and the impact of the current values."""
        self.query_one("#command", Static).update(text("$ " + equivalent(self._action, self._collected())))
        self._show_error("")
        self.show_impact()

    def show_impact(self) -> None:
        """Show what the action would affect now."""
        if not self.query("#impact"):
            return  # The dialog has not been built yet, or it has been closed.
        lines = self._impact.lines(self._named(self._collected()))
        if lines == self._impact_lines:
            return
        self._impact_lines = lines
        impact = self.query_one("#impact", Static)
        impact.update(_lines(lines))
        impact.display = bool(lines)
        self.call_after_refresh(self._fit)

    def _named(self, values: Values) -> str | None:
        """Return the target that an action's values name."""
        return values.get(self._action.named_by) if self._action.named_by else None

    def _show_error(self, message: str) -> None:
        error = self.query_one("#error", Static)
        error.update(text(message))
        error.display = bool(message)
        self.call_after_refresh(self._fit)

    @on(events.DescendantFocus)
    def _explain(self, event: events.DescendantFocus) -> None:
        """Explain the field that has the focus. The explanation of a checkbox is always shown beside it."""
        name = "" if isinstance(event.widget, Checkbox) else (event.widget.id or "").removeprefix("field-")
        self.query_one("#hint", Static).update(text(_description(self._action, name)))
        self.call_after_refresh(self._fit)

    @on(Button.Pressed, "#confirm")
    def _confirm(self) -> None:
        problem = self._impact.changes(self._named(self._collected()))
        self.show_impact()
        if not problem and self._action.danger == "typed":
            typed = self.query_one("#typed", Input).value.strip()
            if typed != self._values.get(self._action.named_by):
                problem = f"type {self._values.get(self._action.named_by)} to confirm"
        try:
            parameters = build(self._action, self._collected())
        except CommandError as error:
            problem = problem or str(error)
        if problem:
            self._show_error(problem)
            return
        self.dismiss(parameters)

    @on(Button.Pressed, "#what-if")
    def _ask_what_if(self) -> None:
        """Show the forecast for the current values."""
        try:
            parameters = build(self._action, self._collected())
        except CommandError as error:
            self._show_error(str(error))
            return
        forecast = self.query_one("#forecast", Static)
        forecast.update(text("replaying recent requests…"))
        forecast.display = True
        self.call_after_refresh(self._fit)
        self.run_worker(self._forecast(parameters), exclusive=True, group="forecast")

    async def _forecast(self, parameters: msgspec.Struct) -> None:
        assert self._what_if is not None
        self.query_one("#forecast", Static).update(_lines(await self._what_if(parameters)))
        self.call_after_refresh(self._fit)

    @on(Input.Submitted)
    def _next_field(self) -> None:
        self.focus_next()

    @on(Button.Pressed, "#cancel")
    def action_cancel(self) -> None:
        """Close the dialog without changing anything."""
        self.dismiss(None)


class ChoiceDialog(Dialog[str | None]):
    """Offers a list to choose from."""

    BINDINGS: ClassVar = [("escape", "cancel", "Cancel")]
    DEFAULT_CSS = """
    ChoiceDialog { align: center middle; background: transparent; }
    ChoiceDialog #dialog { width: 60; max-width: 96%; height: auto; max-height: 90%; border: round $primary;
        padding: 0 1; background: $surface; }
    ChoiceDialog #title { text-style: bold; color: $primary; }
    ChoiceDialog OptionList { height: auto; max-height: 16; background: $surface; }
    """

    def __init__(self, title: str, choices: Sequence[tuple[str, str]]) -> None:
        """`choices` are pairs of an id and the text to show for it."""
        super().__init__()
        self._title = title
        self._choices = choices

    def compose(self) -> ComposeResult:
        """Build the list."""
        with Vertical(id="dialog"):
            yield Static(text(self._title), id="title")
            yield OptionList(*(Option(text(label), id=name) for name, label in self._choices), compact=True)

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_cancel(self) -> None:
        """Close the list."""
        self.dismiss(None)


class TextDialog(Dialog[None]):
    """Shows a result that must not be missed, such as a new key, until the operator closes it. The key
    `enter` does not close it, because the operator may press it twice to confirm the action."""

    BINDINGS: ClassVar = [("escape", "close", "Close"), ("q", "close", "Close")]
    DEFAULT_CSS = """
    TextDialog { align: center middle; background: transparent; }
    TextDialog #dialog { width: 90; max-width: 96%; height: auto; max-height: 90%; border: round $primary;
        padding: 0 1; background: $surface; }
    TextDialog #title { text-style: bold; color: $primary; }
    TextDialog #close { color: $text-muted; margin-top: 1; }
    """

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title = title
        self._lines = lines

    def compose(self) -> ComposeResult:
        """Build the dialog."""
        with VerticalScroll(id="dialog"):
            yield Static(text(self._title), id="title")
            yield Static(_lines(self._lines))
            yield Static(text("esc to close"), id="close")

    def action_close(self) -> None:
        """Close the dialog."""
        self.dismiss(None)


def _hidden(name: str) -> Static:
    """Return a text that takes no space until it is shown."""
    hidden = Static("", id=name)
    hidden.display = False
    return hidden


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    """Return the default of a parameter as text, with its unit, or an empty string if it has no default."""
    default = field.default
    if default in (None, msgspec.UNSET, msgspec.NODEFAULT):
        return ""
    return span_text(default) if isinstance(default, float) and field.name.endswith("_s") else str(default)


def _description(action: Action, name: str) -> str:
    """Return the description of a parameter, or an empty string."""
    for field in msgspec.structs.fields(action.parameters):
        kind = msgspec.inspect.type_info(field.type)
        if field.name == name and isinstance(kind, msgspec.inspect.Metadata):
            return (kind.extra_json_schema or {}).get("description", "")
    return ""


def _lines(texts: Sequence[str]) -> Content:
    return Content("\n").join([text(one) for one in texts])
