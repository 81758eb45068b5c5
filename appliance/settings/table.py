"""Converts settings to plain tables, for display and comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from appliance.protocol import Configuration
from appliance.settings.faults import Path, dotted
from appliance.settings.fields import Settings
from appliance.settings.load import Loaded


class SettingChange(NamedTuple):
    """A changed setting, with its values before and after the change."""

    path: Path
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {_shown(self.before)} → {_shown(self.after)}"


def as_table(loaded: Loaded) -> Configuration:
    """Return all settings and their sources, for operators."""
    table = _table(loaded.settings)
    return Configuration(
        files=[str(file) for file in loaded.files],
        settings=table,
        places={
            dotted(path): str(loaded.places[path]) if path in loaded.places else "default"
            for path, _ in _leaves(table)
        },
    )


def differences(before: Settings, after: Settings) -> Iterator[SettingChange]:
    """Yield the settings that differ between `before` and `after`. If a setting exists only before or only
    after the change, the missing value is None. If a model was added or removed, only its folder is
    listed."""
    old, new = dict(_leaves(_table(before))), dict(_leaves(_table(after)))
    lone = before.models.keys() ^ after.models.keys()
    for path in sorted(old.keys() | new.keys()):
        if path[0] == "models" and path[1] in lone and path[2] != "folder":
            continue
        if old.get(path) != new.get(path):
            yield SettingChange(path, old.get(path), new.get(path))


def _table(settings: Settings) -> dict[str, Any]:
    table: dict[str, Any] = msgspec.to_builtins(settings)
    del table["config_file"]
    return table


def _leaves(table: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _shown(value: Any) -> str:
    return "unset" if value is None else msgspec.json.encode(value).decode()
