"""The base class of all dialogs, and the dialogs that show a list or a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple, TypeVar

from textual import events, on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.screen import ModalScreen, Screen
from textual.scrollbar import ScrollDown, ScrollTo, ScrollUp
from textual.widget import Widget
from textual.widgets import Button, Checkbox, Input, OptionList, Static
from textual.widgets.option_list import Option

from console.lines import cells, span
from console.screens.base import MIN_HEIGHT, MIN_WIDTH

R = TypeVar("R")
_MIN_BODY = 2
"""Minimum height of the dialog body, in lines."""
_BORDER = 2
"""Height of the dialog border, in lines."""
_GAP = "  "


def text(value: str) -> Content:
    """Return `value` as Textual content, without markup or control characters."""
    return Content(span(value).text)


def lines_of(texts: Sequence[str]) -> Content:
    """Join the texts, one per line, with markup and control characters removed."""
    return Content("\n").join([text(one) for one in texts])


def hidden(name: str) -> Static:
    """Return a text widget that takes up no space until `show_text` gives it text."""
    found = Static("", id=name)
    found.display = False
    return found


def show_text(widget: Static, content: Content) -> None:
    """Show a text in a widget. An empty text takes up no space."""
    widget.update(content)
    widget.display = bool(content.plain)


class KeyHint(NamedTuple):
    """A key and its effect, as shown on a dialog's last line."""

    key: str
    does: str
    more: str = ""
    """Additional text, shown after `does` if there is enough space."""


class ScrollArea(VerticalScroll, can_focus=False):
    """Part of a dialog that scrolls if it does not fit."""

    is_scrolled = False
    """Whether the operator has scrolled since the focus last moved."""

    @on(events.MouseScrollDown)
    @on(events.MouseScrollUp)
    @on(ScrollDown)
    @on(ScrollUp)
    @on(ScrollTo)
    def _scrolled(self) -> None:
        self.is_scrolled = True

    def page(self, pages: int) -> None:
        """Scroll by pages."""
        self.is_scrolled = True
        self.scroll_relative(y=pages * max(1, self.size.height - 1), animate=False)


class Dialog(ModalScreen[R]):
    """A dialog with a title, a body, buttons and a line of key hints. The body scrolls if it does not fit;
    everything else is always visible. A dialog closes only once: otherwise, pressing `enter` twice would also
    close the screen below it.
    """

    AUTO_FOCUS = ""
    """Keeps Textual from focusing the first field before the dialog sets the focus."""
    BINDINGS: ClassVar = [
        ("escape", "cancel", "Cancel"),
        ("up,left", "app.focus_previous", "Previous field"),
        ("down,right", "app.focus_next", "Next field"),
        ("pageup", "scroll(-1)", "Scroll up"),
        ("pagedown", "scroll(1)", "Scroll down"),
    ]
    DEFAULT_CSS = """
    Dialog { align: center middle; background: transparent; }
    Dialog #dialog { width: 76; max-width: 96%; height: auto; max-height: 94%; border: round $primary;
        padding: 0 1; background: $surface; }
    Dialog.-small #dialog { max-width: 100%; max-height: 100%; }
    Dialog #title { text-style: bold; color: $primary; height: auto; max-height: 3; }
    Dialog.-small #title { max-height: 2; }
    Dialog #body { height: auto; }
    Dialog Input { width: 1fr; background: $panel; }
    Dialog #error { color: $error; height: auto; max-height: 4; }
    Dialog.-small #error { max-height: 2; }
    Dialog #buttons { height: auto; align-horizontal: right; margin-top: 1; }
    Dialog.-small #buttons { margin-top: 0; }
    Dialog Button { min-width: 12; margin-left: 2; }
    Dialog .-stacked Button { margin-left: 0; max-width: 100%; }
    Dialog.-small Button { min-width: 0; margin-left: 1; }
    Dialog Button:focus { text-style: bold reverse; }
    Dialog #keys { color: $text-muted; height: 1; }
    """
    _shown_keys = ""
    _width = 0
    """Width between the borders, in columns, when the dialog was last fitted."""
    _area_sizes: Sequence[Size] = ()
    """Sizes of the scroll areas after the last layout."""

    def compose(self) -> ComposeResult:
        """Build the dialog."""
        with Vertical(id="dialog"):
            yield Static(text(self.title_text()), id="title")
            yield from self.body()
            yield hidden("error")
            if buttons := list(self.buttons()):
                with Horizontal(id="buttons"):
                    yield from buttons
            yield Static("", id="keys")

    def title_text(self) -> str:
        """Return the title."""
        raise NotImplementedError

    def body(self) -> ComposeResult:
        """Build the part between the title and the buttons. The widget with the id "body" scrolls."""
        raise NotImplementedError

    def buttons(self) -> Iterator[Button]:
        """Return the buttons."""
        yield from ()

    def key_hints(self) -> list[KeyHint]:
        """Return the dialog's keys, most important first."""
        focused = self.focused
        hints = [KeyHint("esc", "cancel"), KeyHint("tab", "move")]
        if isinstance(focused, Button):
            hints.insert(0, KeyHint("enter", "press", " the button"))
        elif isinstance(focused, Checkbox):
            hints.insert(0, KeyHint("space", "switch", " on or off"))
        elif isinstance(focused, Input):
            hints.insert(0, KeyHint("enter", "next", " field"))
        return hints

    def on_mount(self) -> None:
        """Turn off cursor blinking in the fields and fit the dialog to the terminal."""
        for one in self.query(Input):
            one.cursor_blink = False
        self.screen_layout_refresh_signal.subscribe(self, self._show_wanted, immediate=True)
        self.fit()

    def on_resize(self) -> None:
        """Fit the dialog to the new size."""
        self.fit()

    @on(events.DescendantFocus)
    def _focus_moved(self) -> None:
        for area in self.query(ScrollArea):
            area.is_scrolled = False
        self.fit()

    def _show_wanted(self, _: Screen[object]) -> None:
        """Scroll to the field returned by `wanted` if a scroll area has a new size, unless the operator has
        scrolled since focusing the field.

        Textual calls this method after each layout. Before the layout, Textual would compute scroll positions
        from the old sizes. A `Resize` event cannot be used instead: Textual sends none if the region of any
        widget was read between a change of the styles and the layout."""
        areas = self.query(ScrollArea)
        sizes = [area.outer_size for area in areas]
        if sizes == self._area_sizes:
            return
        self._area_sizes = sizes
        if self.display and not any(area.is_scrolled for area in areas):
            wanted = self.wanted()
            if wanted is not None:
                wanted.scroll_visible(animate=False)

    def wanted(self) -> Widget | None:
        """Return the focused field."""
        return self.focused if isinstance(self.focused, Input | Checkbox) else None

    @property
    def is_small(self) -> bool:
        """Whether the terminal is too small for panels, so that space must be saved."""
        size = self.app.size
        return size.width < MIN_WIDTH or size.height < MIN_HEIGHT

    def fit(self) -> None:
        """Fit the body between the title and the buttons after the next layout."""
        self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        if not self.display or not self.query("#keys"):
            return  # The dialog was closed after this call was scheduled.
        small = self.is_small
        self.set_class(small, "-small")
        dialog = self.query_one("#dialog")
        width = dialog.content_size.width
        for buttons in self.query("#buttons"):
            needed = sum(_button_width(one, small=small) for one in buttons.query(Button))
            is_stacked = needed > width
            buttons.styles.layout = "vertical" if is_stacked else "horizontal"
            buttons.set_class(is_stacked, "-stacked")
        height = self.size.height if small else int(self.size.height * 0.94)
        others = sum(self.height_of(one, width) for one in dialog.children if one.id != "body")
        scrolls = self.fit_body(max(_MIN_BODY, height - _BORDER - others), width)
        self._show_keys(width, scrolls=scrolls)
        if width != self._width:
            self._width = width
            self.fit()  # The class "-small" may have changed the width and the heights.

    def height_of(self, widget: Widget, width: int) -> int:
        """Return the number of lines that a widget needs at this width. Textual knows only the sizes of
        visible widgets."""
        if not widget.display:
            return 0
        height = widget.get_content_height(Size(width, self.size.height), self.size, width)
        limit = widget.styles.max_height
        if limit is not None and limit.cells is not None:
            height = min(height, limit.cells)
        return height + widget.styles.margin.height

    def fit_body(self, space: int, width: int) -> bool:
        """Limit the body, which is `width` columns wide, to `space` lines. Return whether it scrolls."""
        return self.limit(self.query_one("#body"), space, width)

    def limit(self, area: Widget, lines: int, width: int) -> bool:
        """Limit an area's height and return whether the area scrolls."""
        area.styles.max_height = None
        scrolls = self.height_of(area, width) > lines
        area.styles.max_height = lines
        # A scroll bar that appears during an intermediate layout would narrow the texts, so that they would
        # wrap and no longer fit without the scroll bar.
        area.styles.overflow_y = "auto" if scrolls else "hidden"
        return scrolls

    def _show_keys(self, width: int, *, scrolls: bool) -> None:
        """Show the keys, leaving out the last ones if they do not fit."""
        hints = [*self.key_hints(), *([KeyHint("pgdn", "scroll")] if scrolls else [])]
        full = [f"{one.key} {one.does}{one.more}" for one in hints]
        brief = [f"{one.key} {one.does}" for one in hints]
        lines = [_GAP.join(full), *(_GAP.join(brief[:count]) for count in range(len(brief), 0, -1))]
        shown = next((line for line in lines if cells(line) <= width), "")
        if shown != self._shown_keys:
            self._shown_keys = shown
            self.query_one("#keys", Static).update(text(shown))

    def show_error(self, message: str) -> None:
        """Show why the dialog cannot be confirmed. An empty message removes the previous one."""
        show_text(self.query_one("#error", Static), text(message))
        self.fit()

    def action_scroll(self, pages: int) -> None:
        """Scroll by pages."""
        for area in self.query(ScrollArea):
            area.page(pages)

    def action_cancel(self) -> None:
        """Close the dialog without a result."""
        self.dismiss(None)

    def dismiss(self, result: R | None = None) -> AwaitComplete:
        """Close the dialog with this result, unless it is already closed."""
        return super().dismiss(result) if self.is_current else AwaitComplete.nothing()


def _button_width(button: Button, *, small: bool) -> int:
    """Return the width of a button and its margin, in columns."""
    label = cells(str(button.label)) + 2
    return label + 1 if small else max(12, label) + 2


class Choice(NamedTuple):
    """An entry in a list of choices."""

    name: str
    """The dialog's result if this entry is chosen."""
    title: str
    note: str = ""


class ChoiceDialog(Dialog[str | None]):
    """Offers a list of choices. Typing narrows the list."""

    BINDINGS: ClassVar = [
        ("up", "cursor('up')", "Up"),
        ("down", "cursor('down')", "Down"),
        ("pageup", "cursor('page_up')", "Page up"),
        ("pagedown", "cursor('page_down')", "Page down"),
    ]
    DEFAULT_CSS = """
    ChoiceDialog #dialog { width: 64; }
    ChoiceDialog OptionList { background: $surface; }
    """
    _TITLE_WIDTH = 36

    def __init__(self, title: str, choices: Sequence[Choice]) -> None:
        super().__init__()
        self._title = title
        self._choices = choices

    def title_text(self) -> str:
        return self._title

    def body(self) -> ComposeResult:
        yield Input(id="filter", placeholder="type to narrow the list", compact=True)
        choices = OptionList(id="body", compact=True)
        choices.can_focus = False
        yield choices

    def key_hints(self) -> list[KeyHint]:
        return [
            KeyHint("type", "to narrow"),
            KeyHint("enter", "choose"),
            KeyHint("esc", "cancel"),
            KeyHint("↑↓", "move"),
        ]

    def fit_body(self, space: int, width: int) -> bool:
        super().fit_body(space, width)
        return False  # The cursor keys scroll the list.

    def on_mount(self) -> None:
        super().on_mount()
        self._narrow()
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _narrow(self) -> None:
        """Show the choices that contain every typed word."""
        words = self.query_one(Input).value.lower().split()
        shown = [
            Option(text(f"{one.title:<{self._TITLE_WIDTH}} {one.note}".rstrip()), id=one.name)
            for one in self._choices
            if all(word in f"{one.title} {one.note}".lower() for word in words)
        ]
        choices = self.query_one(OptionList)
        choices.clear_options()
        choices.add_options(shown or [Option(text("no choice contains this text"), disabled=True)])
        choices.highlighted = 0 if shown else None
        self.fit()

    def action_cursor(self, move: str) -> None:
        """Move the cursor."""
        choices = self.query_one(OptionList)
        {
            "up": choices.action_cursor_up,
            "down": choices.action_cursor_down,
            "page_up": choices.action_page_up,
            "page_down": choices.action_page_down,
        }[move]()

    @on(Input.Submitted)
    def _submit(self) -> None:
        self.query_one(OptionList).action_select()

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)


class TextDialog(Dialog[None]):
    """Shows a result that must not be missed, such as a new key, until the operator closes the dialog.
    `enter` does not close it, because operators may press `enter` twice when confirming the action."""

    BINDINGS: ClassVar = [("q", "cancel", "Close"), ("up", "line(-1)", "Up"), ("down", "line(1)", "Down")]
    DEFAULT_CSS = "TextDialog #dialog { width: 90; }"

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title = title
        self._lines = lines

    def title_text(self) -> str:
        return self._title

    def body(self) -> ComposeResult:
        with ScrollArea(id="body"):
            yield Static(lines_of(self._lines))

    def key_hints(self) -> list[KeyHint]:
        return [KeyHint("esc", "to close")]

    def action_line(self, lines: int) -> None:
        """Scroll by lines."""
        self.query_one("#body").scroll_relative(y=lines, animate=False)
