"""Schemas as ordered migrations, recorded in the database by sqlite-utils.

`PRAGMA user_version` counts the migrations that a file has, so that opening a current file needs no
sqlite-utils (importing it costs 116 ms); `_sqlite_migrations` is the record of when each was applied. One
transaction writes both.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from store.errors import SchemaVersionError

if TYPE_CHECKING:
    from sqlite_utils import Database


class Migration(NamedTuple):
    """One step of a schema. Released steps never change; append a new step instead."""

    name: str
    statements: tuple[str, ...]


class Schema(NamedTuple):
    """All migrations of one kind of database, oldest first."""

    name: str
    migrations: tuple[Migration, ...]
    mode: int = 0o640
    """The version of a file that is created with this schema."""


def schema_version(connection: sqlite3.Connection) -> int:
    """Return the number of migrations that were applied to the open database."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def check_not_newer(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    """Raise `SchemaVersionError` if the file has migrations that this version does not know."""
    found, known = schema_version(connection), len(schema.migrations)
    if found > known:
        raise SchemaVersionError(
            f"{path} has schema version {found}, this version of the product knows {known}: "
            f"install the version that wrote it, or restore a backup from before the upgrade"
        )


def migrate(connection: sqlite3.Connection, path: Path, schema: Schema) -> list[str]:
    """Bring the file up to `schema`, each migration in its own transaction; return the names applied now.

    Raises `SchemaVersionError` for a file newer than `schema`; sqlite3's errors pass through.
    """
    check_not_newer(connection, path, schema)
    if schema_version(connection) == len(schema.migrations):
        return []
    from sqlite_utils import Database
    from sqlite_utils.migrations import Migrations

    database = Database(connection, recursive_triggers=False, execute_plugins=False)
    migrations = Migrations(schema.name)
    for migration in schema.migrations:
        migrations(name=migration.name)(_step(migration.statements))
    names = [pending.name for pending in migrations.pending(database)]
    migrations.apply(database)
    return names


def _step(statements: tuple[str, ...]) -> Callable[[Database], None]:
    def apply(database: Database, /) -> None:
        # Statement by statement: executescript() would commit the surrounding transaction first.
        for statement in statements:
            database.conn.execute(statement)
        # The number of applied migrations, independent of their order in this file.
        database.conn.execute(f"PRAGMA user_version = {schema_version(database.conn) + 1}")

    return apply
