"""Control state in `control.db`: the keys that apps prove their tenant with. Every change goes through
`ControlStore.change`, which puts its audit row into the same transaction, flushed to the disk
(`synchronous=FULL`).

Reading keys costs no I/O: they are all in memory, so a sick disk never turns a caller away.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from store import audit
from store.database import reading
from store.errors import MissingDatabaseError, SchemaVersionError, StorageFaultError, UnknownKeyError
from store.schemas import CONTROL
from store.writer import Writer, WriterState

T = TypeVar("T")

_SHOWN_PREFIX_CHARS = 8


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. Times in unix seconds. Fields are the table's columns, in its order."""

    id: str
    name: str
    tenant: str
    prefix: str
    """The key's first characters, for people to recognise it by."""
    sha256: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def valid_at(self, now: float) -> bool:
        """Whether the key opens anything at unix time `now`."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class CreatedKey(NamedTuple):
    """A new key. `key` is the secret: shown once, kept nowhere."""

    record: KeyRecord
    key: str


_KEY_COLUMNS = ", ".join(KeyRecord.__struct_fields__)


class ControlStore:
    """The control database at `path`; the only one in the system that has it open for writing.

    Changes return a future that resolves when they are on the disk (`asyncio.wrap_future` awaits it) or has
    the `StoreError` that prevented them. Safe to call from any thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = Writer(path, CONTROL, synchronous="FULL")
        self._keys_by_hash: dict[str, KeyRecord] = {}

    def start(self) -> None:
        """Open (create, migrate) the database and read the keys. Raises a `StoreError`."""
        self._writer.start()
        try:
            self._keys_by_hash = {record.sha256: record for record in read_keys(self.path)}
        except BaseException as error:
            why = self._writer.state().last_error
            self._writer.close()
            if why is not None and isinstance(error, MissingDatabaseError | SchemaVersionError):
                # A new database that could not be made: what the disk said is the cause.
                raise StorageFaultError(why) from error
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the changes under way and close the file, readable without write rights."""
        self._writer.close(timeout_s)

    def state(self) -> WriterState:
        """How the writer is doing."""
        return self._writer.state()

    def change(
        self,
        *,
        actor: str,
        action: str,
        params: Mapping[str, object],
        apply: Callable[[sqlite3.Connection], T],
        after_commit: Callable[[T], None] | None = None,
    ) -> Future[T]:
        """Run `apply` on the writer thread and audit it, in one transaction; what it raises undoes both.

        `actor` is who asked (`uid:0`), `action` its name in the registry of actions, `params` what it was
        given, without secrets. `after_commit` updates what memory keeps of the change, before the future
        resolves.
        """

        def change_and_record(connection: sqlite3.Connection) -> T:
            outcome = apply(connection)
            audit.append(connection, actor=actor, action=action, params=params, result="ok")
            return outcome

        return self._writer.call(change_and_record, after_commit)

    def record(
        self, *, actor: str, action: str, params: Mapping[str, object], result: str
    ) -> Future[audit.Head]:
        """Audit an action that changes nothing here, or that was refused: `result` is `ok` or says why
        not."""
        return self._writer.call(
            lambda connection: audit.append(
                connection, actor=actor, action=action, params=params, result=result
            )
        )

    def create_key(
        self, *, actor: str, name: str, tenant: str, expires_at: float | None = None
    ) -> Future[CreatedKey]:
        """Make a key for `tenant`. The future has the secret, which nothing can show again.

        Raises `ValueError` for an empty or unprintable name or tenant, or an expiry in the past.
        """
        now = time.time()
        for field, value in (("name", name), ("tenant", tenant)):
            if not value or len(value) > 200 or not value.isprintable():
                raise ValueError(f"{field} is {value!r}: give 1 to 200 printable characters")
        if expires_at is not None and expires_at <= now:
            raise ValueError(
                f"expires_at is {expires_at}, which is past (now: {now:.0f}): give a later unix time"
            )
        key = "ak-" + secrets.token_urlsafe(32)
        record = KeyRecord(
            id="key_" + secrets.token_hex(8),
            name=name,
            tenant=tenant,
            prefix=key[:_SHOWN_PREFIX_CHARS],
            sha256=_sha256(key),
            created_at=now,
            expires_at=expires_at,
        )

        def insert(connection: sqlite3.Connection) -> CreatedKey:
            values = msgspec.structs.astuple(record)
            connection.execute(
                f"INSERT INTO keys ({_KEY_COLUMNS}) VALUES ({', '.join('?' * len(values))})", values
            )
            return CreatedKey(record, key)

        return self.change(
            actor=actor,
            action="keys.create",
            params={"id": record.id, "name": name, "tenant": tenant, "expires_at": expires_at},
            apply=insert,
            after_commit=lambda created: self._remember(created.record),
        )

    def revoke_key(self, *, actor: str, key_id: str) -> Future[KeyRecord]:
        """Make a key useless, from the moment the future resolves. Revoking again keeps the first time.

        The future raises `UnknownKeyError` if there is no such key.
        """

        def revoke(connection: sqlite3.Connection) -> KeyRecord:
            connection.execute(
                "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (time.time(), key_id)
            )
            row = connection.execute(f"SELECT {_KEY_COLUMNS} FROM keys WHERE id = ?", (key_id,)).fetchone()
            if row is None:
                raise UnknownKeyError(f"no key has id {key_id!r}: list the keys to see theirs")
            return _key_record(row)

        return self.change(
            actor=actor,
            action="keys.revoke",
            params={"id": key_id},
            apply=revoke,
            after_commit=self._remember,
        )

    def list_keys(self) -> list[KeyRecord]:
        """All keys, revoked and expired ones too, oldest first."""
        return sorted(self._keys_by_hash.values(), key=lambda record: record.created_at)

    def lookup(self, key: str) -> KeyRecord | None:
        """The record of a key that is valid now; None for every other text. Microseconds, no I/O.

        The table is keyed by SHA-256 of the secret, so the time it takes tells a guesser nothing.
        """
        record = self._keys_by_hash.get(_sha256(key))
        return record if record is not None and record.valid_at(time.time()) else None

    def _remember(self, record: KeyRecord) -> None:
        # A new dict instead of a change in place: other threads iterate over the old one.
        self._keys_by_hash = {**self._keys_by_hash, record.sha256: record}


def read_keys(path: Path) -> list[KeyRecord]:
    """All keys in the file at `path`, oldest first, through a read-only connection. Raises a `StoreError`."""
    with reading(path, CONTROL) as connection:
        return [
            _key_record(row)
            for row in connection.execute(f"SELECT {_KEY_COLUMNS} FROM keys ORDER BY created_at")
        ]


def read_audit(path: Path, after: int = 0, limit: int = 1000) -> list[audit.AuditRow]:
    """Audit rows with a seq above `after`, oldest first, through a read-only connection. Raises a
    `StoreError`."""
    with reading(path, CONTROL) as connection:
        return audit.rows(connection, after, limit)


def read_audit_head(path: Path) -> audit.Head:
    """The newest audit row's seq and hash, to be kept outside the file. Raises a `StoreError`."""
    with reading(path, CONTROL) as connection:
        return audit.head(connection)


def verify_audit(path: Path, recorded: Iterable[audit.Head] = ()) -> audit.Verdict:
    """`store.audit.verify` of the file at `path`, through a read-only connection. Raises a `StoreError`."""
    with reading(path, CONTROL) as connection:
        return audit.verify(connection, recorded)


def _key_record(row: tuple[object, ...]) -> KeyRecord:
    return msgspec.convert(dict(zip(KeyRecord.__struct_fields__, row, strict=True)), KeyRecord)


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()
