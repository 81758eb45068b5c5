"""The console's command line. It accepts the commands in the key table, and the registry's actions in CLI
syntax: `drain --model demo --grace-s 60`, `tenants set acme --tokens-per-minute 1000`."""

from __future__ import annotations

import shlex

from appliance.actions import Action, TargetKind
from console.keys import SCREENS, offered
from console.lines import cells
from console.parameters import CommandError, Values, entered, positional, separator

WORDS: dict[str, str] = {
    "theme": "theme NAME: dark, light, ansi, mono or high-contrast",
    "glyphs": "glyphs NAME: braille, block or ascii",
    "interval": "interval SECONDS: set the refresh interval",
    "filter": "filter TEXT: show only matching rows",
    "sort": "sort COLUMN: sort by a column",
    "finished": "finished: show the finished requests",
    "usage": "usage: show usage by day, tenant and key",
    "keys": "keys: show keys and local users",
    "silences": "silences: show alert silences",
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
"""The console's own commands, with their usage."""
ALTERNATES = ("finished", "usage", "keys", "silences")
"""Commands that open screens without a tab. Each command has the same name as its screen."""


Targets = dict[TargetKind, dict[str, str]]
"""The targets that completion offers: for each kind, the names or ids, each with a short description."""


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
            known = targets.get(action.target, {})
            found += [prefix + one for one in known if (prefix + one).startswith(text)]
            found += [
                f"{text.rpartition(' ')[0]} {one}"
                for one in flags(action)
                if one.startswith(text.rpartition(" ")[2])
            ]
    return found


def shared_beginning(found: list[str]) -> str:
    """Return the command lines' longest common prefix."""
    first, last = min(found), max(found)
    size = next((at for at, letter in enumerate(first) if not last.startswith(letter, at)), len(first))
    return first[:size]


def described(found: list[str], targets: Targets) -> list[str]:
    """Return each command line without the words common to all of them. Lines that name a target are followed
    by its description."""
    notes = {name: note for kind in targets.values() for name, note in kind.items() if note}
    shared = shared_beginning(found).rfind(" ") + 1
    texts = []
    for one in found:
        note = notes.get(one.rpartition(" ")[2])
        texts.append(f"{one[shared:]} ({note})" if note else one[shared:])
    return texts


def listed(texts: list[str], width: int) -> str:
    """Join the texts into one line. If they do not all fit, the line ends with the number of texts left
    out."""
    whole = "  ".join(texts)
    if cells(whole) <= width:
        return whole
    for count in range(len(texts) - 1, 0, -1):
        line = "  ".join([*texts[:count], f"and {len(texts) - count} more"])
        if cells(line) <= width:
            return line
    return f"{len(texts)} possible completions"


def parse_action(text: str) -> tuple[Action, Values] | None:
    """Parse a command line. Return the action and its parameters as text, or None if the command line names
    no action. Raises CommandError if the command line is invalid."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CommandError(f"{error}: close the quotation mark") from error
    for action in offered():
        name = action.name.split(".")
        if words[: len(name)] == name:
            return action, _parameters(action, words[len(name) :])
    return None


def flags(action: Action) -> list[str]:
    """Return an action's command-line options."""
    return [one.flag for one in entered(action) if one.name not in positional(action)]


def _parameters(action: Action, words: list[str]) -> Values:
    values: Values = {}
    if words and (between := separator(action)) != " ":
        words = [*words[0].split(between, 1), *words[1:]]
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
        accepted = (f"--{option}", f"--{option.replace('-', '_')}")
        found = next((one for one in entered(action) if {one.flag, f"--{one.name}"} & {*accepted}), None)
        if found is None:
            raise CommandError(
                f"{action.name}: unknown option --{option}; options: {', '.join(flags(action))}"
            )
        if found.kind == "switch" and not equals:
            values[found.name] = True
            continue
        if not equals:
            if at == len(words):
                raise CommandError(f"{action.name}: --{option} needs a value")
            value = words[at]
            at += 1
        if not value.strip() and found.kind != "text":
            raise found.invalid(value)
        values[found.name] = value
    return values
