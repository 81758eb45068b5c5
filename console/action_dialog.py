"""The confirmation dialog for an action. It shows the action's impact, parameters and equivalent CLI command,
and is built from the action's registry entry. The default button cancels."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Button, Checkbox, Input, Label, Static

from appliance.actions import Action
from appliance.quantities import span_text
from console.dialogs import Dialog, KeyHint, ScrollArea, hidden, lines_of, show_text, text
from console.impact import Impact
from console.lines import span
from console.parameters import (
    CommandError,
    Parameter,
    Values,
    build,
    danger_of,
    entered,
    equivalent,
    parameters_of,
)
from console.present import absent_text

_MIN_FORM, _MAX_FORM = 4, 20
"""Minimum and maximum height of the form, in lines."""
_WHAT_IF = "Replay the requests from the last 15 minutes with these limits. Nothing is changed."
"""Help text of the button that forecasts the effect of new limits."""


class Switch(Checkbox):
    """An ASCII checkbox that shows its state with a letter as well as with colour."""

    def render(self) -> Content:
        """Render the checkbox as text."""
        return Content("[X]" if self.value else "[ ]")


class Confirmed(NamedTuple):
    """The result of a confirmed dialog."""

    parameters: msgspec.Struct
    values: Values
    """The parameters as entered."""


class ActionDialog(Dialog[Confirmed | None]):
    """Asks for an action's parameters and for confirmation. The result is None if the operator cancels."""

    DEFAULT_CSS = """
    ActionDialog #form { height: auto; }
    ActionDialog #earlier { color: $error; height: auto; }
    ActionDialog #impact { color: $warning; height: auto; }
    ActionDialog #description { height: auto; color: $text-muted; }
    ActionDialog .field { height: auto; }
    ActionDialog .field Label { width: 24; }
    ActionDialog.-small .field Label { width: 20; }
    ActionDialog .field .help { width: 1fr; height: auto; margin-left: 1; color: $text-muted; }
    ActionDialog .field .now { width: auto; max-width: 50%; height: 1; margin-left: 1; color: $text-muted; }
    ActionDialog.-small .field .now { display: none; }
    ActionDialog Checkbox { background: transparent; width: 3; }
    ActionDialog Checkbox:focus { text-style: bold reverse; }
    ActionDialog #hint { height: auto; max-height: 3; color: $text-muted; }
    ActionDialog.-small #hint { max-height: 2; }
    ActionDialog #command { height: auto; text-style: italic; }
    ActionDialog #forecast { height: auto; margin-top: 1; color: $secondary; }
    """

    def __init__(
        self,
        action: Action,
        values: Values,
        *,
        impact: Impact,
        what_if: Callable[[msgspec.Struct], Awaitable[list[str]]] | None = None,
        place: str = "",
        earlier: Sequence[str] = (),
        again: Values | None = None,
    ) -> None:
        """`impact` describes what the action affects and detects changes to the target. `what_if` forecasts
        the parameters' effect; it is None for actions without a forecast. If the action has several targets,
        `place` is this target's position, such as "2 of 3". `earlier` describes earlier failures of the
        action. If the action failed, `again` contains the values entered, so that the operator can correct
        them."""
        super().__init__()
        self._action = action
        self._values = values
        self._filled = values if again is None else again
        """The values with which the fields are filled when the dialog opens."""
        self._is_repeated = again is not None
        self._impact = impact
        self._impact_lines: list[str] = []
        self._present: Mapping[str, Any] = {}
        """The target's current values, which the dialog shows beside or inside the fields."""
        self._what_if = what_if
        self._place = place
        self._earlier = earlier
        self._fields: dict[str, Input | Switch] = {}
        """The fields of the form by the name of the parameter. They are kept because a query for each field
        would search the whole dialog whenever a snapshot arrives."""
        self._present_texts: dict[str, Static] = {}
        """The texts beside the fields, which show the current values."""

    def title_text(self) -> str:
        place = f"{self._place}: " if self._place else ""
        return f"{place}{self._action.title} {self._target()}".rstrip() + "?"

    def body(self) -> ComposeResult:
        action = self._action
        with ScrollArea(id="body"):
            if self._earlier:
                yield Static(lines_of(self._earlier), id="earlier")
            yield Static(text(action.description), id="description")
            yield hidden("impact")
            with ScrollArea(id="form"):
                for field in fields_of(action, self._values):
                    yield from self._field(field)
            if action.danger == "typed":
                with Horizontal(classes="field"):
                    yield Label("type to confirm")
                    yield Input(id="typed", placeholder=span(self._typed()).text, compact=True)
            yield Static("", id="command")
            if self._what_if is not None:
                yield hidden("forecast")
        yield hidden("hint")

    def buttons(self) -> Iterator[Button]:
        action = self._action
        # "Cancel" would be ambiguous next to a button such as "Cancel request".
        ends_something = action.title.startswith("Cancel")
        yield Button("Back" if ends_something else "Cancel", id="cancel", compact=True)
        if self._what_if is not None:
            yield Button("What if", id="what-if", compact=True)
        yield Button(
            action.title,
            id="confirm",
            variant="primary" if action.danger == "none" else "error",
            compact=True,
        )

    def key_hints(self) -> list[KeyHint]:
        hints = super().key_hints()
        return [one._replace(more=" and explain") if one.key == "tab" else one for one in hints]

    def on_mount(self) -> None:
        """Focus the first field that must be filled in or corrected, or the cancel button if there is no such
        field."""
        super().on_mount()
        if not self.query("#cancel"):
            return  # The console is exiting, and the dialog has not been built yet.
        fields = (one for one in fields_of(self._action, self._values) if one.required)
        empty = (one for one in fields if self._filled.get(one.name, "@").endswith("@"))
        first = next(empty, None)
        if first is not None:
            self._fields[first.name].focus()
        else:
            corrected = next(self._filled_fields(), None) if self._is_repeated and not self.is_small else None
            (corrected or self.query_one("#cancel")).focus()
        self._refresh()

    def fit_body(self, space: int, width: int) -> bool:
        """Limit the form's height so that the texts above and below it stay visible. If that would make the
        form too small, the texts scroll with it instead."""
        body, form = self.query_one("#body"), self.query_one("#form")
        form.styles.max_height = None
        left = space - sum(self.height_of(one, width) for one in body.children if one is not form)
        form_scrolls = False
        if left >= min(_MIN_FORM, self.height_of(form, width)):
            form_scrolls = self.limit(form, min(_MAX_FORM, left), width)
        return super().fit_body(space, width) or form_scrolls

    def wanted(self) -> Widget | None:
        """Return the focused field or, if none is focused, the first one that has an initial value. In small
        terminals, return only a focused field, because scrolling to any other would hide the texts above
        it."""
        return super().wanted() or (None if self.is_small else next(self._filled_fields(), None))

    def _filled_fields(self) -> Iterator[Widget]:
        """Return the fields that have an initial value."""
        return (self._fields[name] for name in self._filled if name in self._fields)

    def _field(self, field: Parameter) -> ComposeResult:
        value = self._filled.get(field.name)
        with Horizontal(classes="field"):
            yield Label(field.label)
            if field.kind == "switch":
                is_on = field.default is True if value is None else bool(value)
                self._fields[field.name] = Switch(value=is_on, id=f"field-{field.name}", compact=True)
                yield self._fields[field.name]
                yield Static(text(field.description), classes="help")
            else:
                shown = _default_text(field) if value is None else str(value)
                # A value such as "llama@" is incomplete: the operator still has to add the version number.
                is_begun = shown.endswith("@")
                self._fields[field.name] = Input(
                    shown, id=f"field-{field.name}", compact=True, select_on_focus=not is_begun
                )
                yield self._fields[field.name]
                self._present_texts[field.name] = now = hidden(f"now-{field.name}")
                now.add_class("now")
                yield now

    def _typed(self) -> str:
        """Return the text that the operator must type to confirm an irreversible action."""
        return self._action.typed_text(self._named(self._collected()) or "")

    def _target(self) -> str:
        return self._action.shown_target(self._named(self._values)).removesuffix("@")

    def _collected(self) -> Values:
        """Return the values given for parameters without a field, and all field values that differ from their
        defaults."""
        values = dict(self._values)
        for field in entered(self._action):
            if (widget := self._fields.get(field.name)) is None:
                continue
            if isinstance(widget, Switch):
                value: Any = widget.value
                changed = value != (field.default is True)
            else:
                value = widget.value.strip()
                changed = value not in ("", _default_text(field))
            if changed:
                values[field.name] = value
            else:
                values.pop(field.name, None)
        return values

    @on(Input.Changed)
    @on(Checkbox.Changed)
    def _refresh(self) -> None:
        """Show the CLI command and the impact for the entered values."""
        self.query_one("#command", Static).update(text("$ " + equivalent(self._action, self._collected())))
        self.show_error("")
        self.show_impact()
        self._show_present()

    def show_impact(self) -> None:
        """Update the displayed impact and the target's current values."""
        if not self.query("#impact"):
            return  # The dialog has not been built yet, or is already closed.
        target = self._named(self._collected())
        if (lines := self._impact.lines(target)) != self._impact_lines:
            self._impact_lines = lines
            show_text(self.query_one("#impact", Static), lines_of(lines))
            self.fit()
        if (present := self._impact.present(target)) != self._present:
            self._present = present
            self._show_present()

    def _show_present(self) -> None:
        """Show each parameter's current value inside its field if the field is empty, otherwise beside it."""
        for field in entered(self._action):
            one = self._fields.get(field.name)
            if isinstance(one, Input):
                absent = absent_text(self._action, field, self._present)
                one.placeholder = span(absent).text
                is_beside = one.value.strip() and field.name in self._present
                show_text(self._present_texts[field.name], text(absent if is_beside else ""))

    def _named(self, values: Values) -> str | None:
        """Return the target's name, or None if `values` does not contain it."""
        return values.get(self._action.named_by) if self._action.named_by else None

    @on(events.DescendantFocus)
    def _explain(self, event: events.DescendantFocus) -> None:
        """Explain the focused field. The explanation of a checkbox is always shown beside it."""
        name = event.widget.id or ""
        explained = _WHAT_IF if name == "what-if" else ""
        field = parameters_of(self._action).get(name.removeprefix("field-"))
        if isinstance(event.widget, Input) and field is not None:
            explained = field.description
            if field.name in self._present:
                now = field.shown(self._present[field.name])
                explained = f"{explained.removesuffix('.')}. Now: {now}"
        show_text(self.query_one("#hint", Static), text(explained))
        self.fit()

    @on(Button.Pressed, "#confirm")
    def _confirm(self) -> None:
        values = self._collected()
        problem = self._impact.changes(self._named(values))
        self.show_impact()
        try:
            parameters = build(self._action, values)
        except CommandError as error:
            problem = problem or str(error)
        if not problem and danger_of(self._action, values) == "typed":
            typed = self.query_one("#typed", Input).value.strip()
            problem = "" if typed == self._typed() else f"type {self._typed()} to confirm"
        if problem:
            self.show_error(problem)
            return
        self.dismiss(Confirmed(parameters, values))

    @on(Button.Pressed, "#what-if")
    def _ask_what_if(self) -> None:
        """Show a forecast of the effect of the entered values."""
        try:
            parameters = build(self._action, self._collected())
        except CommandError as error:
            self.show_error(str(error))
            return
        self._show_forecast(["replaying recent requests…"])
        self.run_worker(self._forecast(parameters), exclusive=True, group="forecast")

    async def _forecast(self, parameters: msgspec.Struct) -> None:
        assert self._what_if is not None
        self._show_forecast(await self._what_if(parameters))

    def _show_forecast(self, lines: list[str]) -> None:
        forecast = self.query_one("#forecast", Static)
        show_text(forecast, lines_of(lines))
        forecast.call_after_refresh(forecast.scroll_visible, animate=False)
        self.fit()

    @on(Input.Submitted)
    def _next_field(self) -> None:
        self.focus_next()

    @on(Button.Pressed, "#cancel")
    def _cancel(self) -> None:
        self.action_cancel()


def fields_of(action: Action, values: Values) -> list[Parameter]:
    """Return the parameters that have fields in an action's dialog. The target needs no field if `values`
    already names it completely."""
    is_named = not values.get(action.named_by, "@").endswith("@")
    return [one for one in entered(action) if not (is_named and one.name == action.named_by)]


def _default_text(field: Parameter) -> str:
    """Return a parameter's default as text, with its unit, or an empty string if it has no default."""
    default = field.default
    if default in (None, msgspec.UNSET, msgspec.NODEFAULT):
        return ""
    return span_text(default) if field.kind == "span" else str(default)
