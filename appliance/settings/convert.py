"""From tables to typed settings, with every fault on the way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from appliance.settings.faults import Fault, Path, Place, dotted
from appliance.settings.fields import ModelSettings, Settings

Part = TypeVar("Part", bound=msgspec.Struct)

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_MAX_FAULTS = 50
NOT_SETTINGS = ("config_file",)
"""Fields of `Settings` that no file may say."""


class Converter:
    """Collects the faults of what it converts; `places` say where each setting was said."""

    def __init__(self, places: Mapping[Path, Place], source: str) -> None:
        self._places = places
        self._source = source
        self.faults: list[Fault] = []

    def settings(self, table: Mapping[str, Any]) -> Settings:
        """All of them. What could not be used has its default."""
        table = dict(table)
        for name in NOT_SETTINGS:
            if table.pop(name, None) is not None:
                self.add((name,), f"{name} is not a setting", "remove it")
        models = table.pop("models", {})
        settings = self._convert(table, Settings, ()) or Settings()
        if not isinstance(models, dict):
            self.add(("models",), f"models = {models!r} must be tables", "write [models.NAME]")
            models = {}
        for name, model in models.items():
            # One by one, so that a fault's path names the model.
            converted = self._convert(model, ModelSettings, ("models", name))
            if converted is not None:
                settings.models[name] = converted
        return settings

    def add(self, path: Path, what: str, remedy: str) -> None:
        """Note a fault of the setting at `path`."""
        self.faults.append(Fault(place=self.place(path), field=dotted(path), what=what, remedy=remedy))

    def place(self, path: Path) -> Place:
        """Where the setting, or the nearest table around it, was said."""
        for length in range(len(path), 0, -1):
            if (place := self._places.get(path[:length])) is not None:
                return place
        return Place(self._source)

    def _convert(self, value: Any, part: type[Part], prefix: Path) -> Part | None:
        value = deepcopy(value)
        for _ in range(_MAX_FAULTS):
            try:
                return msgspec.convert(value, part)
            except msgspec.ValidationError as error:
                found = _understand(str(error), value, part)
                what, remedy = found.words(dotted(prefix), value)
                names = tuple(re.sub(r"\[\d+\]$", "", piece) for piece in found.path)
                self.add(prefix + names, what, remedy)
                # Without what is wrong, the next fault shows.
                if not _remove(value, found.path):
                    return None
        return None


class _Complaint(msgspec.Struct):
    """What msgspec said, in pieces."""

    kind: str
    """"unknown", "missing" or "value"."""
    path: tuple[str, ...]
    """Of the field, indices in brackets: ("uids[1]",)."""
    said: str
    part: type[msgspec.Struct]

    def words(self, prefix: str, value: Any) -> tuple[str, str]:
        """What is wrong and what to do."""
        field = ".".join(filter(None, [prefix, *self.path])) or "the file"
        if self.kind == "unknown":
            known = _fields_at(self.part, self.path[:-1])
            near = get_close_matches(self.path[-1], known, 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            return f"{field} is not a setting", remedy
        if self.kind == "missing":
            where = ".".join(filter(None, [prefix, *self.path[:-1]])) or "the file"
            return f"{where} lacks {self.path[-1]!r}", "add it"
        wrong = f"{field} = {_found(value, self.path)!r} cannot be used"
        if field.endswith("_mode"):
            return wrong, 'write a file mode in octal, such as "0660"'
        if "cors_origins" in field:
            return wrong, 'write an origin without a path, such as "https://chat.example.com", or "*" for all'
        words = _words_at(self.part, self.path) if "enum value" in self.said else []
        return wrong, f"it can be {', '.join(words)}" if words else _remedy(self.said)


def _remedy(said: str) -> str:
    """What msgspec expected, in the words of the page of settings."""

    def named(kinds: re.Match[str]) -> str:
        return " or ".join(_KINDS.get(kind, kind) for kind in kinds[1].split(" | ") if kind != "null")

    if said.startswith("Number out of range"):  # more digits than a float can hold
        return "write a smaller number"
    expected = re.sub(r"`([^`]+)`", named, said.partition(", got ")[0]).replace("Expected ", "write ", 1)
    expected = re.sub(r"([<>]=?) (\d[\d.]*)", lambda bound: f"{bound[1]} {float(bound[2]):.15g}", expected)
    return expected.replace(">=", "≥").replace("<=", "≤")


def _understand(message: str, value: Any, part: type[msgspec.Struct]) -> _Complaint:
    said, _, where = message.partition(" - at ")
    path = tuple(piece for piece in where.strip("`").removeprefix("$").split(".") if piece)
    for kind, words in (("unknown", "contains unknown"), ("missing", "missing required")):
        if named := re.match(rf"Object {words} field `(.*)`", said):
            return _Complaint(kind, (*path, named[1]), said, part)
    return _Complaint("value", path, said, part)


def _steps(path: tuple[str, ...]) -> list[str | int]:
    steps: list[str | int] = []
    for piece in path:
        name, *indices = piece.replace("]", "").split("[")
        steps += [name, *(int(index) for index in indices if index.isdecimal())]
    return steps


def _found(value: Any, path: tuple[str, ...]) -> Any:
    for step in _steps(path):
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _remove(value: Any, path: tuple[str, ...]) -> bool:
    """Take the setting out of its table; False if it is not in one."""
    *way, last = _steps(path) or [""]
    for step in way:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return False
    if isinstance(value, dict | list) and (last in value if isinstance(value, dict) else True):
        del value[last]  # type: ignore[arg-type]
        return True
    return False


def _words_at(part: type[msgspec.Struct], path: tuple[str, ...]) -> list[str]:
    """The words that a field of literals takes."""
    for piece in path:
        inner = _type_of(part, piece)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            part = inner
            continue
        words, types = [], [inner]
        while types:
            kind = types.pop()
            words += [repr(word) for word in get_args(kind) if isinstance(word, str)]
            types += [argument for argument in get_args(kind) if get_origin(argument) is not None]
            if get_origin(kind) is list:
                words.append("a list")
        return words
    return []


def _fields_at(part: type[msgspec.Struct], path: tuple[str, ...]) -> list[str]:
    for piece in path:
        inner = _type_of(part, piece)
        if not (isinstance(inner, type) and issubclass(inner, msgspec.Struct)):
            break
        part = inner
    return [field for field in part.__struct_fields__ if field not in NOT_SETTINGS]


def _type_of(part: type[msgspec.Struct], name: str) -> Any:
    return next((field.type for field in msgspec.structs.fields(part) if field.name == name), None)
