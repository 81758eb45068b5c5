"""Policies as rows: the one place that knows how a record of `store.policies` lies in its table.

A column is a field; what SQLite has no type for (quotas, lists) is JSON text. All functions work inside the
caller's transaction.
"""

from __future__ import annotations

import sqlite3
from typing import TypeVar

import msgspec

from store.policies import KeyRecord, PeerRecord, Record, TenantRecord

R = TypeVar("R", TenantRecord, KeyRecord, PeerRecord)

_TABLES: dict[type[Record], tuple[str, tuple[str, ...]]] = {
    TenantRecord: ("tenants", ("name",)),
    KeyRecord: ("keys", ("id",)),
    PeerRecord: ("peers", ("kind", "number")),
}
"""Table and primary key."""
_AS_JSON = frozenset({"quota", "scopes", "models"})


def insert(connection: sqlite3.Connection, record: Record) -> None:
    """Add a record. Raises sqlite3.IntegrityError for one that is there."""
    values = _values(record)
    table, _ = _TABLES[type(record)]
    marks = ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", list(values.values()))


def update(connection: sqlite3.Connection, record: Record) -> None:
    """Write every field of a record that is there."""
    values = _values(record)
    table, names = _TABLES[type(record)]
    assignments = ", ".join(f"{column} = ?" for column in values)
    connection.execute(
        f"UPDATE {table} SET {assignments} WHERE {_where(names)}",
        [*values.values(), *(getattr(record, name) for name in names)],
    )


def delete(connection: sqlite3.Connection, record: Record) -> None:
    """Remove a record."""
    table, names = _TABLES[type(record)]
    connection.execute(
        f"DELETE FROM {table} WHERE {_where(names)}", [getattr(record, name) for name in names]
    )


def find(connection: sqlite3.Connection, kind: type[R], *name: object) -> R | None:
    """The record with this primary key; None if there is none."""
    _, names = _TABLES[kind]
    found = select(connection, kind, _where(names), *name)
    return found[0] if found else None


def select(connection: sqlite3.Connection, kind: type[R], where: str = "1", *values: object) -> list[R]:
    """The records for which `where` (SQL, with a mark for each value) holds, oldest first."""
    table, _ = _TABLES[kind]
    columns = kind.__struct_fields__
    rows = connection.execute(
        f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY created_at, rowid", values
    )
    return [_record(kind, dict(zip(columns, row, strict=True))) for row in rows]


def _where(names: tuple[str, ...]) -> str:
    return " AND ".join(f"{name} = ?" for name in names)


def _values(record: Record) -> dict[str, object]:
    fields = msgspec.structs.asdict(record)
    for name in _AS_JSON & fields.keys():
        if fields[name] is not None:
            fields[name] = msgspec.json.encode(fields[name], order="sorted").decode()
    return fields


def _record(kind: type[R], fields: dict[str, object]) -> R:
    for name in _AS_JSON & fields.keys():
        if isinstance(text := fields[name], str):
            fields[name] = msgspec.json.decode(text)
    return msgspec.convert(fields, kind)
