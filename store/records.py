"""Stores the records of `store.policies` and `store.models` in their tables.

Each field is a column. Quotas, lists and objects, for which SQLite has no type, are JSON text. All functions
run inside the caller's transaction."""

from __future__ import annotations

import sqlite3
from functools import cache
from typing import Any, TypeVar, get_origin, get_type_hints

import msgspec

from store.database import insert_sql
from store.fields import without_none
from store.models import AliasRecord, ModelRecord, ShadowRecord, SplitRecord, VersionRecord
from store.policies import KeyRecord, PeerRecord, TenantRecord

StoredRecord = (
    TenantRecord
    | KeyRecord
    | PeerRecord
    | ModelRecord
    | VersionRecord
    | AliasRecord
    | SplitRecord
    | ShadowRecord
)
R = TypeVar(
    "R",
    TenantRecord,
    KeyRecord,
    PeerRecord,
    ModelRecord,
    VersionRecord,
    AliasRecord,
    SplitRecord,
    ShadowRecord,
)

_TABLES: dict[type[StoredRecord], tuple[str, tuple[str, ...]]] = {
    TenantRecord: ("tenants", ("name",)),
    KeyRecord: ("keys", ("id",)),
    PeerRecord: ("peers", ("kind", "number")),
    ModelRecord: ("models", ("name",)),
    VersionRecord: ("model_versions", ("model", "version")),
    AliasRecord: ("aliases", ("name",)),
    SplitRecord: ("splits", ("name",)),
    ShadowRecord: ("shadows", ("name",)),
}
"""Each record type's table and primary key."""


def insert(connection: sqlite3.Connection, record: StoredRecord) -> None:
    """Insert a record. Raises sqlite3.IntegrityError if the primary key already exists."""
    values = _values(record)
    table, _ = _TABLES[type(record)]
    connection.execute(insert_sql(table, list(values)), list(values.values()))


def update(connection: sqlite3.Connection, record: StoredRecord) -> None:
    """Write every field of an existing record."""
    values = _values(record)
    table, names = _TABLES[type(record)]
    assignments = ", ".join(f"{column} = ?" for column in values)
    connection.execute(
        f"UPDATE {table} SET {assignments} WHERE {_where(names)}",
        [*values.values(), *(getattr(record, name) for name in names)],
    )


def delete(connection: sqlite3.Connection, record: StoredRecord) -> None:
    """Delete a record."""
    table, names = _TABLES[type(record)]
    connection.execute(
        f"DELETE FROM {table} WHERE {_where(names)}", [getattr(record, name) for name in names]
    )


def find(connection: sqlite3.Connection, kind: type[R], *name: object) -> R | None:
    """Return the record with this primary key, or None if there is no such record."""
    _, names = _TABLES[kind]
    found = select(connection, kind, _where(names), *name)
    return found[0] if found else None


def select(connection: sqlite3.Connection, kind: type[R], where: str = "1", *values: object) -> list[R]:
    """Return the records that match `where`, oldest first. `where` is SQL with a placeholder for each
    value."""
    table, _ = _TABLES[kind]
    columns = kind.__struct_fields__
    rows = connection.execute(
        f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY created_at, rowid", values
    )
    return [_record(kind, dict(zip(columns, row, strict=True))) for row in rows]


def _where(names: tuple[str, ...]) -> str:
    return " AND ".join(f"{name} = ?" for name in names)


def column_type(hint: Any) -> str:
    """Return the SQL column type for a field of this type."""
    inner = without_none(hint)
    return {int: "INTEGER", float: "REAL"}.get(inner, "TEXT")


def column_value(value: object) -> object:
    """Convert a field's value to its SQLite representation."""
    if isinstance(value, tuple | dict | msgspec.Struct):
        return msgspec.json.encode(value, order="sorted").decode()
    return value


def _values(record: StoredRecord) -> dict[str, object]:
    return {name: column_value(value) for name, value in msgspec.structs.asdict(record).items()}


def _record(kind: type[R], fields: dict[str, object]) -> R:
    for name in _as_json(kind):
        if isinstance(text := fields[name], str):
            fields[name] = msgspec.json.decode(text)
    return msgspec.convert(fields, kind)


@cache
def _as_json(kind: type[StoredRecord]) -> tuple[str, ...]:
    """Return the names of the record's fields that are stored as JSON."""
    found = []
    for name, hint in get_type_hints(kind).items():
        inner = without_none(hint)
        if get_origin(inner) in (tuple, dict) or (
            isinstance(inner, type) and issubclass(inner, msgspec.Struct)
        ):
            found.append(name)
    return tuple(found)
