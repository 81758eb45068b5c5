"""Schemas as ordered migrations, recorded in the database by sqlite-utils.

`PRAGMA user_version` counts the applied migrations, so that opening a current file does not need sqlite-utils
(importing it costs 116 ms). `_sqlite_migrations` records when each was applied. One transaction writes both.
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
    """One step of a schema. Released steps never change; a later change is a new step."""

    name: str
    statements: tuple[str, ...]


class Schema(NamedTuple):
    """All migrations of one kind of database, oldest first."""

    name: str
    migrations: tuple[Migration, ...]
    mode: int = 0o640
    """The file mode of a new database."""


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
    """Migrate the file to `schema`, each migration in its own transaction. Return the names of those applied
    now.

    Raises `SchemaVersionError` for a file newer than `schema`; errors of sqlite3 pass through.
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
        # Execute one statement at a time: executescript() would commit the surrounding transaction first.
        for statement in statements:
            database.conn.execute(statement)
        # The number of applied migrations, in whatever order this file got them.
        database.conn.execute(f"PRAGMA user_version = {schema_version(database.conn) + 1}")

    return apply
