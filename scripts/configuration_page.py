#!/usr/bin/env python
"""Writes docs/configuration.md from the settings and their docstrings: scripts/configuration_page.py
[--check]

A setting is a field of `appliance/settings/fields.py`. The page shows its type, its default and its
docstring. With --check, nothing is written, and the exit code is 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as shapes

from appliance.core.reload import AT_RESTART
from appliance.sampling import SamplingDefaults
from appliance.settings import ModelPrices, ModelSettings, Settings
from appliance.settings.convert import NOT_SETTINGS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

FIRST = "Outside of any table"
"""The first generated heading. The text above it is written by hand."""


def page(former: str) -> str:
    """Return the whole page. The text above the first generated heading is left unchanged."""
    head = former.partition(f"## {FIRST}")[0].rstrip() + "\n"
    parts = [head, *_section(FIRST, Settings, ()), *_section("[models.NAME]", ModelSettings, ("models",))]
    parts += _section("[models.NAME.sampling]", SamplingDefaults, ("models",))
    parts += _section("[prices.NAME]", ModelPrices, ("prices",))
    for field in msgspec.structs.fields(Settings):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            parts += _section(f"[{field.name}]", field.type, (field.name,))
    return "\n".join(parts)


def _section(title: str, table: type[msgspec.Struct], path: tuple[str, ...]) -> Iterator[str]:
    words = [_sentence(inspect.cleandoc(table.__doc__ or "")), _when(path)]
    yield f"## {f'`{title}`' if title.startswith('[') else title}\n"
    yield "\n".join(textwrap.wrap(" ".join(filter(None, words)), 119)) + "\n"
    yield "| setting | value | without it | |"
    yield "| --- | --- | --- | --- |"
    said = _words_of_fields(table)
    for field, shape in zip(msgspec.structs.fields(table), shapes.type_info(table).fields, strict=True):
        if field.name in NOT_SETTINGS or isinstance(shape.type, shapes.StructType | shapes.DictType):
            continue
        meaning = _sentence(said.get(field.name, ""))
        if not meaning:
            raise ValueError(
                f"{table.__name__}.{field.name} has no docstring: add one that explains the setting"
            )
        if not path and field.name in AT_RESTART:
            meaning += " A change takes effect after a restart."
        cells = (f"`{field.name}`", _type(shape.type), _default(field), meaning)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _when(path: tuple[str, ...]) -> str:
    return "A change takes effect after a restart." if path and path[0] in AT_RESTART else ""


def _words_of_fields(table: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring of each field of the class and its base classes, by field name."""
    said: dict[str, str] = {}
    for kind in reversed(table.__mro__):
        if kind in (object, msgspec.Struct) or kind.__module__.startswith("msgspec"):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                said[field.target.id] = str(after.value.value)
    return said


def _sentence(text: str) -> str:
    return " ".join(text.split())


def _type(shape: shapes.Type) -> str:
    """Return a description of the values that a setting accepts."""
    if isinstance(shape, shapes.Metadata):
        return _type(shape.type)
    if isinstance(shape, shapes.UnionType):
        return " or ".join(_type(part) for part in shape.types if not isinstance(part, shapes.NoneType))
    if isinstance(shape, shapes.LiteralType):
        return ", ".join(f"`{json.dumps(value)}`" for value in shape.values)
    if isinstance(shape, shapes.BoolType):
        return "`true` or `false`"
    if isinstance(shape, shapes.StrType):
        return "text"
    if isinstance(shape, shapes.IntType | shapes.FloatType):
        kind = "whole number" if isinstance(shape, shapes.IntType) else "number"
        bounds = (("≥", shape.ge), (">", shape.gt), ("≤", shape.le), ("<", shape.lt))
        limits = " and ".join(f"{sign} {bound:.10g}" for sign, bound in bounds if bound is not None)
        return f"{kind} {limits}".strip()
    if isinstance(shape, shapes.StructType):
        return "tables"
    if isinstance(shape, shapes.ListType | shapes.VarTupleType):
        return f"list of {_type(shape.item_type)}"
    if isinstance(shape, shapes.TupleType):
        return f"list of {len(shape.item_types)}: {_type(shape.item_types[0])}"
    raise TypeError(f"no description for a setting of type {shape}")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value: Any = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or value == "":
        return ""
    return f"`{json.dumps(value)}`"


def write_or_check(path: Path, page: Callable[[str], str], description: str) -> int:
    """Write a generated page, or with `--check` only compare it, and return the exit code. `page` returns the
    new text of the page for the former text."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the page is out of date"
    )
    former = path.read_text(encoding="utf-8")
    text = page(former)
    if not parser.parse_args().check:
        path.write_text(text, encoding="utf-8")
        return 0
    if former == text:
        return 0
    print(f"{path} is out of date: run scripts/{Path(sys.argv[0]).name}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page, __doc__ or ""))
