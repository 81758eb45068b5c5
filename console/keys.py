"""The key table. Key bindings, the help, the footer and `docs/keys.md` are derived from it. The operator's
keymap file can change its keys (`console.keymap`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from appliance.actions import ACTIONS, Action


class KeyBinding(NamedTuple):
    """One binding."""

    command: str
    """Description of what the keys do. It is also the name of the entry in a keymap file."""
    keys: tuple[str, ...]
    """The keys, under Textual's names."""
    title: str
    group: str
    footer: str = ""
    """Short text for the footer; empty if the footer does not show the key."""
    past: str = ""
    """Short text for the footer while viewing history."""


SCREENS = (
    ("1", "overview", "Overview"),
    ("2", "batches", "Batches"),
    ("3", "kv", "KV cache"),
    ("4", "requests", "Requests"),
    ("5", "gpus", "GPUs"),
    ("6", "models", "Models"),
    ("7", "tenants", "Tenants"),
    ("8", "alerts", "Alerts"),
    ("9", "audit", "Audit"),
    ("0", "logs", "Logs"),
)

CHARACTERS = {
    "question_mark": "?",
    "exclamation_mark": "!",
    "quotation_mark": '"',
    "apostrophe": "'",
    "number_sign": "#",
    "dollar_sign": "$",
    "percent_sign": "%",
    "ampersand": "&",
    "left_parenthesis": "(",
    "right_parenthesis": ")",
    "asterisk": "*",
    "plus": "+",
    "comma": ",",
    "minus": "-",
    "full_stop": ".",
    "slash": "/",
    "colon": ":",
    "semicolon": ";",
    "less_than_sign": "<",
    "equals_sign": "=",
    "greater_than_sign": ">",
    "at": "@",
    "left_square_bracket": "[",
    "backslash": "\\",
    "right_square_bracket": "]",
    "circumflex_accent": "^",
    "underscore": "_",
    "grave_accent": "`",
    "left_curly_bracket": "{",
    "vertical_line": "|",
    "right_curly_bracket": "}",
    "tilde": "~",
}
"""Textual's key names for ASCII characters other than letters and digits."""

KEYS: tuple[KeyBinding, ...] = (
    *(KeyBinding(f"screen {key}", (key,), f"Show {title}", "Screens") for key, _, title in SCREENS),
    KeyBinding("screen next", ("tab",), "Show the next screen", "Screens"),
    KeyBinding("screen previous", ("shift+tab",), "Show the previous screen", "Screens"),
    KeyBinding("history back", ("backspace", "alt+left"), "Return to the screen shown before", "Screens"),
    KeyBinding("history forward", ("alt+right",), "Undo a return", "Screens"),
    KeyBinding(
        "help",
        ("question_mark", "f1"),
        "Explain the keys and figures of this screen",
        "Console",
        "help",
        "help",
    ),
    KeyBinding(
        "command",
        ("colon",),
        "Enter a command, such as drain, theme light or export csv",
        "Console",
        "command",
    ),
    KeyBinding("palette", ("ctrl+p",), "Search all commands", "Console", "palette"),
    KeyBinding(
        "pause",
        ("p",),
        "Freeze the screen, or continue; in the past, play or pause",
        "Console",
        "pause",
        "play",
    ),
    KeyBinding("faster", ("plus", "equals_sign"), "Refresh more often", "Console"),
    KeyBinding("slower", ("minus",), "Refresh less often", "Console"),
    KeyBinding("theme", ("t",), "Change the theme", "Console"),
    KeyBinding("glyphs", ("b",), "Change the characters of charts: braille, block, ascii", "Console"),
    KeyBinding("redraw", ("ctrl+l",), "Draw the whole screen again", "Console"),
    KeyBinding("quit", ("q", "ctrl+c", "ctrl+q"), "Quit", "Console", "quit"),
    KeyBinding("live", ("N",), "Return to the present", "Past", "", "live"),
    KeyBinding("time", ("T",), "Open a time of the past: 14:03, -20m or a date", "Past", "past", "time"),
    KeyBinding("past back", ("left_square_bracket",), "Go back by one recorded sample", "Past", "", "back"),
    KeyBinding(
        "past forward", ("right_square_bracket",), "Go forward by one recorded sample", "Past", "", "on"
    ),
    KeyBinding(
        "past previous-event",
        ("left_curly_bracket",),
        "Go back to the previous operator action or alert",
        "Past",
    ),
    KeyBinding(
        "past next-event",
        ("right_curly_bracket",),
        "Go forward to the next operator action or alert",
        "Past",
        "",
        "next event",
    ),
    KeyBinding("past slower", ("less_than_sign",), "Play more slowly", "Past"),
    KeyBinding("past faster", ("greater_than_sign",), "Play faster", "Past", "", "faster"),
    KeyBinding(
        "compare",
        ("c",),
        "Compare two times: choose the first, then show the figures of both",
        "Past",
        "",
        "compare",
    ),
    KeyBinding("compare pin", ("C",), "Choose the displayed time as the first of the comparison", "Past"),
    KeyBinding("incident", ("E",), "Export a part of the past as an incident file", "Past", "", "export"),
    KeyBinding("move up", ("up", "k"), "Move up", "Rows"),
    KeyBinding("move down", ("down", "j"), "Move down", "Rows"),
    KeyBinding("move left", ("left", "h"), "Move left", "Rows"),
    KeyBinding("move right", ("right", "l"), "Move right", "Rows"),
    KeyBinding("move page-up", ("pageup", "ctrl+b"), "Move up by a page", "Rows"),
    KeyBinding("move page-down", ("pagedown", "ctrl+f"), "Move down by a page", "Rows"),
    KeyBinding("move first", ("home", "g"), "Move to the first row", "Rows"),
    KeyBinding("move last", ("end", "G"), "Move to the last row", "Rows"),
    KeyBinding("jump", ("f",), "Show a letter at each row or panel, and go to the one that you type", "Rows"),
    KeyBinding("open", ("enter",), "Open the row under the cursor", "Rows"),
    KeyBinding("back", ("escape",), "Close the detail, clear the filter, then the marks", "Rows"),
    KeyBinding("filter", ("slash",), "Filter rows: text, field:text, field>100", "Rows"),
    KeyBinding("sort next", ("s",), "Sort by the next column", "Rows"),
    KeyBinding("sort previous", ("S",), "Sort by the previous column", "Rows"),
    KeyBinding("sort reverse", ("r",), "Reverse the order", "Rows"),
    KeyBinding("mark", ("space",), "Mark the row; in the past, play or pause", "Rows"),
    KeyBinding("variant", ("v",), "Show the next variant of this screen", "Rows"),
    KeyBinding(
        "zoom", ("z",), "Show the panel chosen with the arrow keys alone, or all panels again", "Rows"
    ),
    KeyBinding(
        "copy", ("y",), "Copy the marked rows, or the row under the cursor, to the clipboard (OSC 52)", "Rows"
    ),
    KeyBinding(
        "actions",
        ("a",),
        "Choose an action for the marked rows or the row under the cursor",
        "Actions",
    ),
    KeyBinding("act drain", ("D",), "Drain the model under the cursor, or the service", "Actions"),
    KeyBinding("act resume", ("R",), "Resume the model under the cursor, or the service", "Actions"),
    KeyBinding(
        "act requests.cancel",
        ("X",),
        "Cancel the marked requests, or the request under the cursor",
        "Actions",
    ),
    KeyBinding("act tenants.set", ("Q",), "Change the limits of the tenant under the cursor", "Actions"),
    KeyBinding("act config.reload", ("L",), "Reload the settings", "Actions"),
)


KeyTable = tuple[KeyBinding, ...]
NO_KEY = "no-key"
"""Key for Textual bindings that require a key but must never be triggered. No terminal sends it."""


def offered() -> list[Action]:
    """Return the actions that operators can choose in the console."""
    return [action for action in ACTIONS if action.visibility == "shown"]


def _without_key() -> Iterator[KeyBinding]:
    commands = {binding.command for binding in KEYS}
    for action in offered():
        if (command := f"act {action.name}") not in commands:
            yield KeyBinding(command, (), action.title, "Actions")


ALL_COMMANDS: KeyTable = (*KEYS, *_without_key())
"""All commands that can have keys: those of the key table, and the actions that have no key by default."""


def key_of(keys: KeyTable, command: str) -> str:
    """Return the name of a command's first key as shown in the help, or an empty string if it has none."""
    return next((shown_name(one.keys[0]) for one in keys if one.command == command and one.keys), "")


def shown_name(key: str) -> str:
    """Return the name of a key as shown in the help."""
    return {
        **CHARACTERS,
        "escape": "esc",
        "pageup": "pgup",
        "pagedown": "pgdn",
        "up": "↑",
        "down": "↓",
        "left": "←",
        "right": "→",
        "backspace": "⌫",
    }.get(key, key.replace("ctrl+", "^"))
