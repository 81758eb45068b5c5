"""What can be wrong with a database. Every message names the path, what was found and what to do about it."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path


class StoreError(Exception):
    """Base of everything that this package raises on its own account."""


class MissingDatabaseError(StoreError):
    """There is no such file, or no folder to make it in."""


class CorruptDatabaseError(StoreError):
    """The file is not a SQLite database, or its pages contradict each other."""


class SchemaVersionError(StoreError):
    """The file was written by another version of the product than this one can use."""


class NotWritableError(StoreError):
    """The file or its folder may not be written by this process."""


class DatabaseInUseError(StoreError):
    """Another writer has the database open: there is one at a time."""


class StorageFaultError(StoreError):
    """The disk is full, fails, or is locked for longer than the busy timeout: it may work again later."""


class OutcomeUnknownError(StoreError):
    """The disk has not answered in time: whether the change is made shows later."""


class WriterClosedError(StoreError):
    """The operation came after `Writer.close()`, or was still waiting when it gave up."""


class UnknownRecordError(StoreError):
    """There is nothing of that name."""


class UnknownKeyError(UnknownRecordError):
    """No key has this id."""


class UnknownTenantError(UnknownRecordError):
    """There is no such tenant."""


class UnknownPeerError(UnknownRecordError):
    """This user or group is not mapped."""


class ConflictError(StoreError):
    """What is there already, or still in use, stands against the change."""


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code of `error` (the extended codes carry it in their low byte); 0 if it has
    none."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


# The causes that a later attempt may not meet any more. Everything else needs a person.
_PASSING = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


def explain(path: Path, error: sqlite3.Error) -> StoreError:
    """The error of ours that says what `error` means for the file at `path`."""
    code = primary_code(error)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return CorruptDatabaseError(
            f"{path} is not a sound SQLite database ({error}): move it and its -wal file away, for "
            f"recovery (sqlite3's .recover reads what is left) and start again, or restore a backup"
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return NotWritableError(
            f"{path} cannot be opened ({error}): check owner and mode of the file, of its -wal "
            f"and -shm files and of its folder"
        )
    if code in _PASSING:
        return StorageFaultError(
            f"{path} cannot be written now ({error}): check free space, the disk's health "
            f"and programs that keep the file locked"
        )
    return StoreError(f"{path}: {error}")


def explain_os(path: Path, error: OSError) -> StoreError:
    """The error of ours that says what `error` means for the file at `path`."""
    if isinstance(error, FileNotFoundError):
        return MissingDatabaseError(
            f"{path} does not exist: start the service once, or restore it from a backup"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return StorageFaultError(f"{path} cannot be written now ({error.strerror}): free some space")
    return NotWritableError(f"{path} cannot be opened ({error.strerror}): check owner and mode")
