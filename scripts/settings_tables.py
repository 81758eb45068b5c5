"""Builds the sections of docs/configuration.md. Settings are the fields in `appliance/settings/fields.py`.
Each section shows a table's settings with their types, defaults and docstrings."""

from __future__ import annotations

import inspect
import textwrap

import msgspec
from msgspec import inspect as shapes

from appliance.channel.sampling import SamplingDefaults
from appliance.core.reload import AT_RESTART
from appliance.settings import GroupSettings, ModelPrices, ModelSettings, Settings
from appliance.settings.convert import NOT_SETTINGS
from scripts.field_tables import accepted_values, default_value, field_docstrings, one_line, table


def settings_sections() -> str:
    """Return the sections of all settings."""
    parts = [
        _section("Top-level settings", Settings, ()),
        _section("[models.NAME]", ModelSettings, ("models",)),
        _section("[models.NAME.sampling]", SamplingDefaults, ("models",)),
        _section("[prices.NAME]", ModelPrices, ("prices",)),
        _section("[groups.NAME]", GroupSettings, ("groups",)),
    ]
    for field in msgspec.structs.fields(Settings):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            parts.append(_section(f"[{field.name}]", field.type, (field.name,)))
    return "\n".join(parts)


def _section(title: str, kind: type[msgspec.Struct], path: tuple[str, ...]) -> str:
    words = [one_line(inspect.cleandoc(kind.__doc__ or "")), _when(path)]
    head = f"## {f'`{title}`' if title.startswith('[') else title}\n\n"
    head += "\n".join(textwrap.wrap(" ".join(filter(None, words)), 119)) + "\n\n"
    texts, rows = field_docstrings(kind), []
    for field, shape in zip(msgspec.structs.fields(kind), shapes.type_info(kind).fields, strict=True):
        if field.name in NOT_SETTINGS or isinstance(shape.type, shapes.StructType | shapes.DictType):
            continue
        meaning = one_line(texts.get(field.name, ""))
        if not meaning:
            raise ValueError(
                f"{kind.__name__}.{field.name} has no docstring: add one that explains the setting"
            )
        if not path and field.name in AT_RESTART:
            meaning += " A change takes effect after a restart."
        rows.append((f"`{field.name}`", accepted_values(shape.type), default_value(field), meaning))
    return head + table(("setting", "value", "if omitted", ""), rows)


def _when(path: tuple[str, ...]) -> str:
    return "A change takes effect after a restart." if path and path[0] in AT_RESTART else ""
