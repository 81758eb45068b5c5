"""The key table, from which key bindings, the help, the footer and `docs/keys.md` are derived. The operator's
keymap file (`console.keymap`) can change the keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from appliance.actions import ACTIONS, Action


class KeyBinding(NamedTuple):
    """One entry in the key table."""

    command: str
    """The command that the keys run. It is also the entry's name in keymap files."""
    keys: tuple[str, ...]
    """Textual's names for the keys."""
    title: str
    group: str
    footer: str = ""
    """Short footer text; empty if the footer does not show the key."""
    past: str = ""
    """Short footer text while viewing history."""


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
    KeyBinding("screen back", ("backspace", "alt+left"), "Go back to the last screen", "Screens"),
    KeyBinding("screen forward", ("alt+right",), "Go forward again", "Screens"),
    KeyBinding(
        "help",
        ("question_mark", "f1"),
        "Show help for this screen: its keys, fields and metrics",
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
        "Pause or resume updates; in history, play or pause",
        "Console",
        "pause",
        "play",
    ),
    KeyBinding("faster", ("plus", "equals_sign"), "Refresh more often", "Console"),
    KeyBinding("slower", ("minus",), "Refresh less often", "Console"),
    KeyBinding("theme", ("t",), "Switch to the next theme", "Console"),
    KeyBinding("glyphs", ("b",), "Switch the chart characters: braille, block or ASCII", "Console"),
    KeyBinding("redraw", ("ctrl+l",), "Redraw the screen", "Console"),
    KeyBinding("quit", ("q", "ctrl+c", "ctrl+q"), "Quit", "Console", "quit", "quit"),
    KeyBinding("live", ("N",), "Return to live", "History", "", "live"),
    KeyBinding(
        "time", ("T",), "Go to a time in history: 14:03, -20m or a date", "History", "history", "time"
    ),
    KeyBinding("time back", ("left_square_bracket",), "Go back one sample", "History", "", "back"),
    KeyBinding("time forward", ("right_square_bracket",), "Go forward one sample", "History", "", "next"),
    KeyBinding(
        "time previous-event",
        ("left_curly_bracket",),
        "Go back to the previous operator action or alert",
        "History",
    ),
    KeyBinding(
        "time next-event",
        ("right_curly_bracket",),
        "Go forward to the next operator action or alert",
        "History",
        "",
        "event",
    ),
    KeyBinding("time slower", ("less_than_sign",), "Replay slower", "History"),
    KeyBinding("time faster", ("greater_than_sign",), "Replay faster", "History", "", "faster"),
    KeyBinding(
        "compare",
        ("c",),
        "Compare two times: press once at each time",
        "History",
        "",
        "compare",
    ),
    KeyBinding("compare pin", ("C",), "Use the displayed time as the first time to compare", "History"),
    KeyBinding("incident", ("E",), "Export a time range as an incident file", "History", "", "export"),
    KeyBinding("move up", ("up", "k"), "Move up", "Rows"),
    KeyBinding("move down", ("down", "j"), "Move down", "Rows"),
    KeyBinding("move left", ("left", "h"), "Move left", "Rows"),
    KeyBinding("move right", ("right", "l"), "Move right", "Rows"),
    KeyBinding("move page-up", ("pageup", "ctrl+b"), "Move up one page", "Rows"),
    KeyBinding("move page-down", ("pagedown", "ctrl+f"), "Move down one page", "Rows"),
    KeyBinding("move first", ("home", "g"), "Move to the first row", "Rows"),
    KeyBinding("move last", ("end", "G"), "Move to the last row", "Rows"),
    KeyBinding("jump", ("f",), "Label each row or panel with a letter; type a letter to go there", "Rows"),
    KeyBinding("open", ("enter",), "Open the row under the cursor", "Rows"),
    KeyBinding("back", ("escape",), "Close the details, clear the filter, or clear the marks", "Rows"),
    KeyBinding("filter", ("slash",), "Filter rows: text, field:text, field=text, field>100", "Rows"),
    KeyBinding("sort next", ("s",), "Sort by the next column", "Rows"),
    KeyBinding("sort previous", ("S",), "Sort by the previous column", "Rows"),
    KeyBinding("sort reverse", ("r",), "Reverse the sort order", "Rows"),
    KeyBinding("mark", ("space",), "Mark the row; in history, play or pause", "Rows"),
    KeyBinding("variant", ("v",), "Switch to the next view of this screen", "Rows"),
    KeyBinding("verify", ("V",), "Verify the audit chain", "Rows"),
    KeyBinding("zoom", ("z",), "Maximize the selected panel, or show all panels again", "Rows"),
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
    KeyBinding(
        "act resume",
        ("R",),
        "End the drain shown in the banner or, if there are several, choose one to end",
        "Actions",
    ),
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
"""A key that no terminal sends, for Textual bindings that need a key but must never be triggered."""


def offered() -> list[Action]:
    """Return the actions available in the console."""
    return [action for action in ACTIONS if action.visibility == "shown"]


def _without_key() -> Iterator[KeyBinding]:
    commands = {binding.command for binding in KEYS}
    for action in offered():
        if (command := f"act {action.name}") not in commands:
            yield KeyBinding(command, (), action.title, "Actions")


ALL_COMMANDS: KeyTable = (*KEYS, *_without_key())
"""All commands that can have keys: those in the key table, and actions without default keys."""


def key_of(keys: KeyTable, command: str) -> str:
    """Return a command's first key, named as in the help, or an empty string if the command has no key."""
    return next((shown_name(one.keys[0]) for one in keys if one.command == command and one.keys), "")


def shown_name(key: str) -> str:
    """Return a key's name as shown in the help."""
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
