"""Converts the tables in the settings files to typed settings, collecting all faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from appliance.settings.faults import Fault, Path, Place, dotted
from appliance.settings.fields import GroupSettings, ModelPrices, ModelSettings, Settings
from store.fields import either

Part = TypeVar("Part", bound=msgspec.Struct)

NOT_SETTINGS = ("config_file",)
"""Fields of `Settings` that cannot be set in a file."""


class Converter:
    """Converts settings and collects faults. `places` holds the file and line of each setting."""

    def __init__(self, places: Mapping[Path, Place], source: str) -> None:
        self._places = places
        self._source = source
        self.faults: list[Fault] = []

    def settings(self, table: Mapping[str, Any]) -> Settings:
        """Convert all settings. A setting with an invalid value falls back to its default."""
        table = dict(table)
        models, prices, groups = (table.pop(name, {}) for name in ("models", "prices", "groups"))
        settings = self._table(table, Settings, ()) or Settings()
        settings.models |= self._named_tables(models, ModelSettings, "models")
        settings.prices |= self._named_tables(prices, ModelPrices, "prices")
        settings.groups |= self._named_tables(groups, GroupSettings, "groups")
        return settings

    def _named_tables(self, tables: Any, part: type[Part], name: str) -> dict[str, Part]:
        """Convert the tables [name.KEY], omitting invalid ones."""
        if not isinstance(tables, dict):
            self.add((name,), f"{name} = {tables!r} is not valid", f"write [{name}.NAME]")
            return {}
        converted = {key: self._table(table, part, (name, key)) for key, table in tables.items()}
        return {key: table for key, table in converted.items() if table is not None}

    def add(self, path: Path, description: str, remedy: str) -> None:
        """Add a fault for the setting at `path`."""
        self.faults.append(
            Fault(place=self.place(path), field=dotted(path), description=description, remedy=remedy)
        )

    def place(self, path: Path) -> Place:
        """Return the file and line of a setting, or of the nearest table that contains it."""
        for length in range(len(path), 0, -1):
            if (place := self._places.get(path[:length])) is not None:
                return place
        return Place(self._source)

    def _table(self, table: Any, part: type[Part], path: Path) -> Part | None:
        """Convert a settings table. Return None if the value is not a table, or if a required setting is
        missing or invalid."""
        if not isinstance(table, dict):
            self.add(path, f"{dotted(path)} = {table!r} is not valid", "write a table")
            return None
        fields = {field.name: field for field in msgspec.structs.fields(part)}
        names = [name for name in fields if name not in NOT_SETTINGS]
        values: dict[str, Any] = {}
        for name, value in table.items():
            own = (*path, name)
            if name not in names:
                near = get_close_matches(name, names, 1)
                remedy = f"did you mean {near[0]!r}?" if near else f"available settings: {', '.join(names)}"
                self.add(own, f"{dotted(own)} is not a setting", remedy)
            elif (converted := self._value(value, fields[name].type, own)) is not None:
                values[name] = converted
        for name in names:
            if fields[name].required and name not in table:
                self.add(
                    (*path, name),
                    f"{name!r} is missing from {dotted(path) or 'the file'}",
                    f"add {name}",
                )
        complete = all(name in values for name in names if fields[name].required)
        return part(**values) if complete else None

    def _value(self, value: Any, kind: Any, path: Path) -> Any:
        """Convert a setting's value. Return None if the value is invalid; TOML values are never None."""
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._table(value, kind, path)
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and "\0" in text for text in texts):
            # The operating system accepts no such path or name.
            self.add(path, f"{dotted(path)} = {value!r} is not valid", "remove the null character")
            return None
        if isinstance(value, list) and (item := _struct_of_items(kind)) is not None:
            rows = [self._table(row, item, (*path, str(number))) for number, row in enumerate(value, 1)]
            return [row for row in rows if row is not None]
        if _fits(value, kind):
            return msgspec.convert(value, kind)
        wrong = [(f"[{at}]", item, each) for at, item, each in _items(value, kind) if not _fits(item, each)]
        for index, item, each in wrong or [("", value, kind)]:
            expected = _expected(inspect.type_info(each))
            self.add(path, f"{dotted(path)}{index} = {item!r} is not valid", f"write {expected}")
        return None


def _struct_of_items(kind: Any) -> type[msgspec.Struct] | None:
    """If the type is an array of tables, return the type of its tables; otherwise, return None."""
    items = get_args(kind)
    if get_origin(kind) is list and isinstance(items[0], type) and issubclass(items[0], msgspec.Struct):
        return items[0]
    return None


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _items(value: Any, kind: Any) -> Iterator[tuple[int, Any, Any]]:
    """Yield the index, value and type of each item in a list. Yield nothing if `value` is not a list, or if
    the setting's type does not allow lists."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    for each in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        kinds = get_args(each)
        if not isinstance(value, list) or get_origin(each) not in (list, tuple):
            continue
        if get_origin(each) is list or kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(kinds) == len(value):
            yield from ((at, item, kinds[at]) for at, item in enumerate(value))


def _expected(kind: inspect.Type) -> str:
    """Describe the values that a type allows."""
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            described = (extra or {}).get("description")
            return described if isinstance(described, str) else _expected(inner)
        case inspect.IntType():
            return f"a whole number{_bounds(kind)}"
        case inspect.FloatType():
            return f"a number{_bounds(kind)}"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return either(tuple(map(repr, values)))
        case inspect.UnionType(types=types):
            return ", or ".join(_expected(one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.ListType() | inspect.VarTupleType():
            return "a list"
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)} values"
        case _:
            return "text"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    signs = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
    bounds = [f"{sign} {bound:.15g}" for sign, bound in signs if bound is not None]
    return f" {' and '.join(bounds)}" if bounds else ""
