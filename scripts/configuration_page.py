#!/usr/bin/env python
"""Writes docs/configuration.md from the settings and their docstrings.

Settings are the fields in `appliance/settings/fields.py`. The page shows each setting's type, default and
docstring. With --check, nothing is written, and the exit code is 1 if the page is out of date.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import inspect as shapes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from appliance.channel.sampling import SamplingDefaults  # noqa: E402
from appliance.core.reload import AT_RESTART  # noqa: E402
from appliance.settings import GroupSettings, ModelPrices, ModelSettings, Settings  # noqa: E402
from appliance.settings.convert import NOT_SETTINGS  # noqa: E402
from scripts.field_tables import (  # noqa: E402
    accepted_values,
    default_value,
    field_docstrings,
    one_line,
    row,
    write_or_check,
)

PAGE = ROOT / "docs" / "configuration.md"

FIRST = "Top-level settings"
"""The first generated heading. Everything above it is written by hand."""


def page(former: str) -> str:
    """Return the page with regenerated tables. The text above the first generated heading stays unchanged."""
    head = former.partition(f"## {FIRST}")[0].rstrip() + "\n"
    parts = [head, *_section(FIRST, Settings, ()), *_section("[models.NAME]", ModelSettings, ("models",))]
    parts += _section("[models.NAME.sampling]", SamplingDefaults, ("models",))
    parts += _section("[prices.NAME]", ModelPrices, ("prices",))
    parts += _section("[groups.NAME]", GroupSettings, ("groups",))
    for field in msgspec.structs.fields(Settings):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            parts += _section(f"[{field.name}]", field.type, (field.name,))
    return "\n".join(parts)


def _section(title: str, table: type[msgspec.Struct], path: tuple[str, ...]) -> Iterator[str]:
    words = [one_line(inspect.cleandoc(table.__doc__ or "")), _when(path)]
    yield f"## {f'`{title}`' if title.startswith('[') else title}\n"
    yield "\n".join(textwrap.wrap(" ".join(filter(None, words)), 119)) + "\n"
    yield "| setting | value | if omitted | |"
    yield "| --- | --- | --- | --- |"
    said = field_docstrings(table)
    for field, shape in zip(msgspec.structs.fields(table), shapes.type_info(table).fields, strict=True):
        if field.name in NOT_SETTINGS or isinstance(shape.type, shapes.StructType | shapes.DictType):
            continue
        meaning = one_line(said.get(field.name, ""))
        if not meaning:
            raise ValueError(
                f"{table.__name__}.{field.name} has no docstring: add one that explains the setting"
            )
        if not path and field.name in AT_RESTART:
            meaning += " A change takes effect after a restart."
        cells = (f"`{field.name}`", accepted_values(shape.type), default_value(field), meaning)
        yield row(cells)
    yield ""


def _when(path: tuple[str, ...]) -> str:
    return "A change takes effect after a restart." if path and path[0] in AT_RESTART else ""


if __name__ == "__main__":
    sys.exit(write_or_check([PAGE], page, __doc__ or ""))
