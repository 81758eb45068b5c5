"""The operator's keymap file: a TOML table that assigns keys to commands in the key table. Example:

"time back" = "b"
"act models.load" = ["M", "ctrl+o"]
"compare pin" = []
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from console.files import FileError, path_of
from console.keys import ALL_COMMANDS, CHARACTERS, KEYS, NO_KEY, KeyTable, shown_name

_MODIFIERS = ("alt", "ctrl", "shift")
"""Modifiers, in Textual's order."""
_MOVING = ("up", "down", "left", "right", "home", "end", "pageup", "pagedown", "insert", "delete")
_EDITING = ("tab", "enter", "escape", "space", "backspace")
_FUNCTION = tuple(f"f{number}" for number in range(1, 25))
_NAMES = {name: key for key, name in CHARACTERS.items()} | {
    " ": "space",
    "esc": "escape",
    "pgup": "pageup",
    "pgdn": "pagedown",
    "del": "delete",
    **{shown_name(key): key for key in ("up", "down", "left", "right", "backspace")},
}
"""Maps alternative key names (characters, and names shown in the help) to Textual's names."""
_SAME_CODE = {"ctrl+i": "tab", "ctrl+m": "enter", "ctrl+h": "backspace", "ctrl+left_square_bracket": "escape"}
"""Keys that terminals cannot tell apart from another key, because both send the same code."""
QUIT_KEYS = ("ctrl+c", "ctrl+q")
"""Keys that always quit the console, so that no keymap can prevent quitting."""


class Keymap(NamedTuple):
    """A console's key assignments."""

    keys: KeyTable = KEYS
    """The commands, with their keys."""
    overrides: dict[str, str] = {}  # noqa: RUF012
    """Commands whose keys differ from the default. Each value is a comma-separated list of keys, as Textual
    expects."""
    problems: tuple[str, ...] = ()
    """Errors in the keymap file. If there are any, the file is not used."""


DEFAULT_KEYMAP = Keymap()


class _KeyError(ValueError):
    """Raised for keys that terminals cannot send. The message says what to do."""


def default_path() -> Path:
    """Return the path of the user's keymap file."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return path_of(base) / "appliance" / "keys.toml"


def read_keymap(named: str | None = None) -> Keymap:
    """Read a keymap file; by default, the user's file if it exists. If the file contains errors, return the
    default keys along with the errors."""
    try:
        path = default_path() if named is None else path_of(named)
    except FileError as error:
        return _unusable(str(error))
    try:
        text = path.read_text()
        table = tomllib.loads(text + "\n")  # Without "\n", errors on the last line have no line number.
    except FileNotFoundError:
        if named is None:
            return DEFAULT_KEYMAP
        return _unusable(f"{path} does not exist: create it, or leave out --keys")
    except OSError as error:
        return _unusable(f"cannot read {path} ({error.strerror}): choose a file that you can read")
    except ValueError as error:
        return _unusable(
            f'{path}: {error}: expected lines of the form "<command>" = "<key>", such as "time back" = "b"'
        )
    return _keymap(path, text, table)


def _unusable(*problems: str) -> Keymap:
    return Keymap(problems=problems)


def _keymap(path: Path, text: str, table: dict[str, object]) -> Keymap:
    known = {one.command for one in ALL_COMMANDS}
    chosen: dict[str, tuple[str, ...]] = {}
    user_of: dict[str, str] = {}
    problems = []
    for command, value in table.items():
        where = f"{path}, line {_line(text, command)}"
        if command not in known:
            problems.append(f"{where}: unknown command {command!r}: {_similar(command, known)}")
            continue
        if not isinstance(value, str | list):
            problems.append(f'{where}: "{command}" = {value!r}: write a key such as "b", or a list of keys')
            continue
        keys = []
        for given in value if isinstance(value, list) else [value]:
            try:
                key = _key(given)
                if key in QUIT_KEYS and command != "quit":
                    raise _KeyError("this key always quits the console: choose another key")
            except _KeyError as error:
                problems.append(f'{where}: "{command}" = {given!r}: {error}')
                continue
            if (other := user_of.setdefault(key, command)) != command:
                problems.append(
                    f'{where}: "{command}" = {given!r}: line {_line(text, other)} gives this key to '
                    f'"{other}": remove one of them'
                )
            keys.append(key)
        chosen[command] = tuple(dict.fromkeys(keys))
    return _unusable(*problems) if problems else _applied(chosen, set(user_of))


def _applied(chosen: dict[str, tuple[str, ...]], used: set[str]) -> Keymap:
    """Return the key table with the chosen keys. Keys in `used` are removed from the commands that have them
    by default, because other commands now use them."""
    if "quit" in chosen:
        chosen["quit"] = tuple(dict.fromkeys((*chosen["quit"], *QUIT_KEYS)))
    bound, overrides = [], {}
    for one in ALL_COMMANDS:
        keys = chosen.get(one.command, tuple(key for key in one.keys if key not in used))
        if keys or one.keys:
            bound.append(one._replace(keys=keys))
        if keys != one.keys:
            overrides[one.command] = ",".join(keys) or NO_KEY
    return Keymap(tuple(bound), overrides)


def _key(given: object) -> str:
    """Return Textual's name for a key. Raises _KeyError if there is no such key, or if terminals cannot send
    it."""
    if not isinstance(given, str) or not given:
        raise _KeyError('not a key: write a name such as "b", "f5" or "ctrl+o"')
    if len(given) > 1 and given[0] == "^":
        given = f"ctrl+{given[1:]}"
    *modifiers, base = [given] if len(given) == 1 else re.split(r"\+(?=.)", given)
    base = base if len(base) == 1 else base.lower()
    base = _NAMES.get(base, base)
    modifiers = [one.lower() for one in modifiers]
    if unknown := [one for one in modifiers if one not in _MODIFIERS]:
        raise _KeyError(f"unknown modifier {unknown[0]!r}: use ctrl, alt or shift")
    if not base.isprintable() if len(base) == 1 else base not in _NAMED:
        raise _KeyError(f"unknown key {base!r}: {_similar(base, _NAMED)}")
    if base in _MOVING or base in _FUNCTION or not modifiers or [*modifiers, base] == ["shift", "tab"]:
        return "+".join([*sorted(set(modifiers)), base])
    if (same := _SAME_CODE.get(f"{'+'.join(modifiers)}+{base.lower()}")) is not None:
        raise _KeyError(f"terminals send the same code for this key as for {same}: write {same!r}")
    letter = len(base) == 1 and base.isascii() and base.isalpha()
    if letter and modifiers in (["ctrl"], ["alt"]) and base.islower():
        return f"{modifiers[0]}+{base}"
    if letter and modifiers == ["shift"]:
        raise _KeyError(f"write the capital letter: {base.upper()!r}")
    raise _KeyError(
        "terminals send no code for this combination: use ctrl or alt with a lowercase letter, or modifiers "
        "with an arrow or function key"
    )


_NAMED = frozenset((*_MOVING, *_EDITING, *_FUNCTION, *CHARACTERS))


def _similar(name: str, known: set[str] | frozenset[str]) -> str:
    """Suggest the most similar known name or, if none is similar, where to find the names."""
    close = difflib.get_close_matches(name, sorted(known), 1, 0.5)
    return f"did you mean {close[0]!r}?" if close else "see docs/keys.md for the names"


def _line(text: str, command: str) -> int:
    """Return the line number of a command's entry in the keymap file."""
    entry = re.compile(rf"""\s*\[?\s*["']?{re.escape(command)}["']?\s*[=.\]]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if entry.match(line)), 1)
