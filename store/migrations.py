"""Schemas as ordered migrations, recorded in the database by sqlite-utils.

`PRAGMA user_version` counts the applied migrations. An up-to-date file can therefore be opened without
importing sqlite-utils, which takes 116 ms. `_sqlite_migrations` records when each migration was applied. The
counter and this table are updated in one transaction.
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
    """One step of a schema. Released steps never change; later changes are added as new steps."""

    name: str
    statements: tuple[str, ...]


class Schema(NamedTuple):
    """All migrations for one kind of database, oldest first."""

    name: str
    migrations: tuple[Migration, ...]
    mode: int = 0o640
    """Permissions of a new database file."""


def schema_version(connection: sqlite3.Connection) -> int:
    """Return the number of migrations applied to the open database."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def check_not_newer(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    """Raise `SchemaVersionError` if the file has migrations unknown to this version of the product."""
    found, known = schema_version(connection), len(schema.migrations)
    if found > known:
        raise SchemaVersionError(
            f"{path} has schema version {found}, but this release of Appliance supports only schema "
            f"version {known}",
            "install the version that wrote the file, or restore a backup from before the upgrade",
        )


def migrate(connection: sqlite3.Connection, path: Path, schema: Schema) -> list[str]:
    """Apply the missing migrations to the file, each in its own transaction. Returns the names of the applied
    migrations. Raises `SchemaVersionError` if the file is newer than `schema`; errors from sqlite3
    propagate."""
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
        # Store how many migrations were applied rather than the number of the last one, because the order may
        # differ between files.
        database.conn.execute(f"PRAGMA user_version = {schema_version(database.conn) + 1}")

    return apply
