"""Builds Markdown tables, with descriptions of struct fields, for `scripts/generated_tables.py`."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import inspect as shapes


def field_docstrings(table: type[msgspec.Struct]) -> dict[str, str]:
    """Return the field docstrings of a class and its bases, keyed by field name."""
    texts: dict[str, str] = {}
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
                texts[field.target.id] = str(after.value.value)
    return texts


def one_line(text: str) -> str:
    """Return a docstring's text as one line."""
    return " ".join(text.split())


def accepted_values(shape: shapes.Type) -> str:
    """Describe the values that a setting accepts."""
    if isinstance(shape, shapes.Metadata):
        return accepted_values(shape.type)
    if isinstance(shape, shapes.UnionType):
        return " or ".join(
            accepted_values(part) for part in shape.types if not isinstance(part, shapes.NoneType)
        )
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
        return f"list of {accepted_values(shape.item_type)}"
    if isinstance(shape, shapes.TupleType):
        return f"list of {len(shape.item_types)}: {accepted_values(shape.item_types[0])}"
    raise TypeError(f"no description for a setting of type {shape}")


def default_value(field: msgspec.structs.FieldInfo) -> str:
    """Return a setting's default value as JSON, or an empty string if there is none."""
    if field.required:
        return "required"
    value: Any = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or value == "":
        return ""
    return f"`{json.dumps(value)}`"


def row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "".join(f"{row(line)}\n" for line in (headings, ["---"] * len(headings), *rows))
