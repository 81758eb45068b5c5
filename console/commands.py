"""The console's command line. It accepts the commands of the key table and, in the CLI's syntax, the actions
of the registry: `drain --model demo --grace-s 60`, `tenants set acme --tokens-per-minute 1000`."""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from datetime import datetime
from typing import Any

import msgspec

from appliance.actions import Action, flag
from appliance.quantities import span_seconds
from console import units
from console.keys import SCREENS, offered
from console.lines import cells

_POSITIONAL = {
    "models.add": ("name", "folder"),
    "models.alias": ("name", "target"),
    "models.split": ("name", "weights"),
    "models.shadow": ("name",),
}
_OPTIONS = {"target": "--to"}
"""Maps a parameter to its CLI option if their names differ."""
CLASS_NAMES = ("P0", "P1", "P2", "P3")
WORDS: dict[str, str] = {
    "theme": "theme NAME: dark, light, ansi, mono or high-contrast",
    "glyphs": "glyphs NAME: braille, block or ascii",
    "interval": "interval SECONDS: set the refresh interval",
    "filter": "filter TEXT: show only matching rows",
    "sort": "sort COLUMN: sort by a column",
    "finished": "finished: show the finished requests",
    "usage": "usage: show usage by day, tenant and key",
    "keys": "keys: show keys and local users",
    "silences": "silences: show the silences of alerts",
    "audit verify": "audit verify: verify the audit chain",
    "export": "export csv|json [FILE]: export this table to a file",
    "help": "help: show help for this screen",
    "pause": "pause: pause or resume updates",
    "time": "time TIME: go to a time in history, such as 14:03, -20m or 2026-11-20T14:03",
    "compare": "compare TIME: compare the displayed time with another time",
    "incident": "incident: export a time range as an incident file",
    "live": "live: return to live",
    "quit": "quit: quit the console",
}
"""Commands of the console itself, with their usage."""
ALTERNATES = ("finished", "usage", "keys", "silences")
"""Commands that show a screen without a tab. Each command has the name of its screen."""


class CommandError(ValueError):
    """Raised for an invalid command. The message says what to do."""


Targets = dict[str, dict[str, str]]
"""The targets that can be completed: for each kind, the names or ids with a short description of each."""


def kind_of_target(action: Action) -> str:
    """Return the kind of target that an action takes, as a key of `Targets`."""
    if action.name == "alerts.unsilence":
        return "silence"
    return "rule" if action.named_by == "rule" else action.target


def completions(text: str, targets: Targets) -> list[str]:
    """Return the command lines that begin with `text`."""
    names = (
        [name for _, name, _ in SCREENS]
        + list(WORDS)
        + [action.name.replace(".", " ") for action in offered()]
    )
    found = [name for name in names if name.startswith(text)]
    for action in offered():
        name = action.name.replace(".", " ")
        if action.named_by and text.startswith(name + " "):
            prefix = f"{name} " if action.is_target_required else f"{name} --{action.named_by} "
            known = targets.get(kind_of_target(action), {})
            found += [prefix + one for one in known if (prefix + one).startswith(text)]
            found += [
                f"{text.rpartition(' ')[0]} {one}"
                for one in flags(action)
                if one.startswith(text.rpartition(" ")[2])
            ]
    return found


def shared_beginning(found: list[str]) -> str:
    """Return the longest common prefix of the command lines."""
    first, last = min(found), max(found)
    size = next((at for at, letter in enumerate(first) if not last.startswith(letter, at)), len(first))
    return first[:size]


def described(found: list[str], targets: Targets) -> list[str]:
    """Return each command line without the words that all of them share, with the description of the target
    that it names."""
    notes = {name: note for kind in targets.values() for name, note in kind.items() if note}
    shared = shared_beginning(found).rfind(" ") + 1
    texts = []
    for one in found:
        note = notes.get(one.rpartition(" ")[2])
        texts.append(f"{one[shared:]} ({note})" if note else one[shared:])
    return texts


def listed(texts: list[str], width: int) -> str:
    """Return the texts on one line. If they do not all fit, the line ends with the number of omitted
    texts."""
    whole = "  ".join(texts)
    if cells(whole) <= width:
        return whole
    for count in range(len(texts) - 1, 0, -1):
        line = "  ".join([*texts[:count], f"and {len(texts) - count} more"])
        if cells(line) <= width:
            return line
    return f"{len(texts)} possible completions"


def parse_action(text: str) -> tuple[Action, dict[str, Any]] | None:
    """Return the action named by a command line, with its parameters as text, or None if the command line
    names no action. Raises CommandError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CommandError(f"{error}: close the quotation mark") from error
    for action in offered():
        name = action.name.split(".")
        if words[: len(name)] == name:
            return action, _parameters(action, words[len(name) :])
    return None


def flag_of(parameter: str) -> str:
    """Return the CLI's option for a parameter."""
    return _OPTIONS.get(parameter) or flag(parameter)


def flags(action: Action) -> list[str]:
    """Return the options of an action."""
    names = action.parameters.__struct_fields__
    return [flag_of(name) for name in names if name not in positional(action) and not is_hidden(action, name)]


def build(action: Action, values: dict[str, Any]) -> msgspec.Struct:
    """Convert text values to an action's parameters. Raises a CommandError that names the invalid
    parameter."""
    converted = {name: _value(action, name, value) for name, value in values.items()}
    try:
        parameters = msgspec.convert(converted, action.parameters, strict=False)
    except msgspec.ValidationError as error:
        raise CommandError(f"{action.name}: {error}") from error
    for name, value in values.items():
        number = getattr(parameters, name)
        # JSON has no such numbers: the service would receive null, which removes a limit or an expiry time.
        if isinstance(number, float) and not math.isfinite(number):
            raise CommandError(f"{flag_of(name)} {str(value)[:40]!r} is not a number: enter a finite number")
    return parameters


def equivalent(action: Action, values: dict[str, Any]) -> str:
    """Return the CLI command that performs the same action."""
    given = {name: value for name, value in values.items() if value not in (None, "")}
    named = [str(given.pop(name)) for name in positional(action) if name in given]
    if action.name == "models.add":
        named = ["=".join(named)]
    if action.name == "models.alias" and named[1:] == ["none"]:
        named[1] = "--delete"
    if action.name == "models.shadow":
        if given.get("target") == "none":
            del given["target"]
            named.append("--clear")
        if "share" in given:
            given["share"] = _percentage(given["share"])
    if action.name == "models.split" and named[1:]:
        named[1:] = ["--clear"] if named[1] == "none" else named[1].split(",")
    words = ["appliance", *action.name.split("."), *named]
    for name, value in given.items():
        if isinstance(value, bool):
            words += [flag_of(name)] if value else []
        else:
            words += [flag_of(name), _option_value(name, str(value))]
    return shlex.join(words) + (" --yes" if action.danger != "none" else "")


def _option_value(name: str, text: str) -> str:
    """Return a value in the CLI's format: a number of seconds as a time span, and a unix time as a date."""
    if name.endswith("_s") and text[-1:].isdigit():
        return f"{text}s"
    if name.endswith("_at") and text.replace(".", "", 1).isdecimal():
        return units.date(float(text))
    return text


def _percentage(share: Any) -> Any:
    """Return a share in the CLI's format. Text that is not a number is returned unchanged."""
    try:
        return share if str(share).endswith("%") else f"{100 * float(share):g}%"
    except ValueError:
        return share


def positional(action: Action) -> tuple[str, ...]:
    """Return the CLI's positional parameters."""
    if action.name in _POSITIONAL:
        return _POSITIONAL[action.name]
    return (action.named_by,) if action.is_target_required else ()


def _parameters(action: Action, words: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    names = [name for name in action.parameters.__struct_fields__ if not is_hidden(action, name)]
    if action.name == "models.add" and words and "=" in words[0]:
        words = [*words[0].split("=", 1), *words[1:]]
    free = list(positional(action))
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            if not free:
                raise CommandError(f"{action.name}: unexpected {word!r}; options: {', '.join(flags(action))}")
            values[free.pop(0)] = word
            continue
        option, equals, value = word[2:].partition("=")
        name = next(
            (one for one in names if f"--{option}" in (flag_of(one), f"--{one.replace('_', '-')}")), ""
        )
        if not name:
            raise CommandError(
                f"{action.name}: unknown option --{option}; options: {', '.join(flags(action))}"
            )
        if is_switch(action, name) and not equals:
            values[name] = True
            continue
        if not equals:
            if at == len(words):
                raise CommandError(f"{action.name}: --{option} needs a value")
            value = words[at]
            at += 1
        values[name] = value
    return values


def is_hidden(action: Action, parameter: str) -> bool:
    """Return whether a parameter cannot be entered in the console because its value is a table."""
    return _kind(action, parameter) is dict and parameter not in positional(action)


def is_switch(action: Action, parameter: str) -> bool:
    """Return whether a parameter is a boolean."""
    return _kind(action, parameter) is bool


def _kind(action: Action, name: str) -> object:
    """Return the type of a parameter, with None, UNSET and annotations removed."""
    field = next(one for one in msgspec.structs.fields(action.parameters) if one.name == name)
    kind = msgspec.inspect.type_info(field.type)
    if isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    options = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    for option in options:
        if isinstance(option, msgspec.inspect.Metadata):
            option = option.type
        if isinstance(option, msgspec.inspect.BoolType):
            return bool
        if isinstance(option, msgspec.inspect.DictType):
            return dict
        if isinstance(option, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
            return tuple
        if isinstance(option, msgspec.inspect.FloatType | msgspec.inspect.IntType):
            return float
    return str


def _value(action: Action, name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value == "none":
        return None
    kind = _kind(action, name)
    if kind is dict:
        return {name.strip(): one for name, _, one in (part.rpartition("=") for part in value.split(","))}
    if kind is tuple:
        return [part.strip() for part in value.split(",") if part.strip()]
    if name.endswith("_class") and value in CLASS_NAMES:
        return CLASS_NAMES.index(value)
    if name == "share" and value.endswith("%"):
        try:
            return float(value.removesuffix("%")) / 100
        except ValueError:
            return value
    if kind is float and name.endswith("_s"):
        seconds = span_seconds(value)
        return value if seconds is None else seconds
    if kind is float and name.endswith("_at"):
        return _time(name, value)
    return value


def _time(name: str, text: str) -> float:
    """Return a future time, given as a time span from now, as a date or in unix seconds. Raises
    CommandError."""
    if (seconds := span_seconds(text)) is not None:
        return time.time() + seconds
    with contextlib.suppress(ValueError):
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise CommandError(
            f"{flag_of(name)} {text[:40]!r} is not a time: use a time span such as 90d, or a date such as "
            "2026-11-20 or 2026-11-20T14:30"
        ) from None
