"""Creates table columns for declared fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from appliance.cli.fields import shown
from appliance.cli.output import Column, printable
from store.fields import Declared


def field_columns(fields: Sequence[Declared], first_drop: int) -> Iterator[Column]:
    """Yield a table column for each field. On a narrow terminal, the last fields' columns are dropped
    first."""
    for number, field in enumerate(fields):
        yield Column(
            field.label.upper(),
            right=field.kind in ("number", "count"),
            flexible=field.kind in ("text", "list"),
            drop=first_drop + number,
        )


def field_cells(fields: Sequence[Declared], record: Any) -> Iterator[str]:
    """Yield a record's table cells, one for each field."""
    for field in fields:
        value = getattr(record, field.name)
        yield "" if value is None else printable(shown(field, value))
