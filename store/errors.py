"""This package's exceptions."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path


class StoreError(Exception):
    """Base class of this package's errors. The message names the path and the problem, and ends with the
    remedy, if any."""

    def __init__(self, description: str, remedy: str = "") -> None:
        super().__init__(f"{description}: {remedy}" if remedy else description)
        self.description = description
        self.remedy = remedy


class MissingDatabaseError(StoreError):
    """The database file, or the folder in which to create it, does not exist."""


class CorruptDatabaseError(StoreError):
    """The file is damaged or is not a SQLite database."""


class SchemaVersionError(StoreError):
    """The database file was written by an incompatible version of the product."""


class NotWritableError(StoreError):
    """This process has no permission to write to the database file or its folder."""


class DatabaseInUseError(StoreError):
    """Another writer has the database open; only one is allowed at a time."""


class StorageFaultError(StoreError):
    """The disk is full or failing, or the database file was locked for longer than the busy timeout. A later
    attempt may succeed."""


class SlowQueryError(StoreError):
    """A query took longer than its time limit."""


class OutcomeUnknownError(StoreError):
    """The disk did not respond in time, so it is unknown whether the change was made."""


class WriterClosedError(StoreError):
    """The operation was submitted after `Writer.close()`, or was still waiting when `close()` timed out."""


class UnknownRecordError(StoreError):
    """There is no record with this name."""


class UnknownKeyError(UnknownRecordError):
    """No key has this id."""


class UnknownTenantError(UnknownRecordError):
    """There is no tenant with this name."""


class UnknownPeerError(UnknownRecordError):
    """This user or group is not mapped to a tenant."""


class UnknownModelError(UnknownRecordError):
    """The registry has no model, version or alias with this name."""


class ConflictError(StoreError):
    """The change conflicts with an existing record, or the record is still in use."""


def primary_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code for `error` (the low byte of an extended code), or 0 if `error` has
    no code."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


# These SQLite errors are caused by the operation itself, so every attempt would fail. All other errors are
# caused by the disk or a lock.
_OWN_FAULTS = frozenset(
    {
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_MISUSE,
        sqlite3.SQLITE_RANGE,
        sqlite3.SQLITE_TOOBIG,
    }
)


def is_own_fault(error: BaseException) -> bool:
    """Return True if the operation itself caused the error, so that every attempt would fail."""
    if not isinstance(error, sqlite3.Error):
        return True
    # Python's sqlite3 module raises ProgrammingError and InterfaceError without a SQLite error code.
    return primary_code(error) in _OWN_FAULTS or primary_code(error) == 0


# A retry may succeed after these SQLite errors. All other errors need an operator's attention.
_PASSING = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


def explain(path: Path, error: sqlite3.Error) -> StoreError:
    """Convert a SQLite error on the file at `path` to a `StoreError` that explains it."""
    code = primary_code(error)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return CorruptDatabaseError(
            f"{path} is not a valid SQLite database ({error})",
            "move the file and its -wal file away "
            "(sqlite3's .recover command can extract the remaining data), then restore a backup or "
            "start with an empty database",
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return NotWritableError(
            f"{path} cannot be opened ({error})",
            "check the owner and mode of the file, its -wal and -shm files, and its folder",
        )
    if code in _PASSING:
        return StorageFaultError(
            f"{path} cannot be written at the moment ({error})",
            "check the free space, the disk's health, and whether another program has locked the file",
        )
    return StoreError(f"{path}: {error}")


def explain_os(path: Path, error: OSError) -> StoreError:
    """Convert an OSError on the file at `path` to a `StoreError` that explains it."""
    if isinstance(error, FileNotFoundError):
        return MissingDatabaseError(
            f"{path} does not exist", "start the service once, or restore the file from a backup"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return StorageFaultError(
            f"{path} cannot be written at the moment ({error.strerror})", "free disk space"
        )
    return NotWritableError(f"{path} cannot be opened ({error.strerror})", "check its owner and mode")
