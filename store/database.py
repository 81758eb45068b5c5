"""Opens and closes SQLite files, with one writer at a time and any number of readers.

SQLite up to 3.51.2 can corrupt a WAL file when two connections write or checkpoint at the same time.
Therefore only the writer's connection may write or checkpoint, and a lock file enforces this across
processes. Readers open the file with `mode=ro`, which allows neither. Memory-mapped reads stay disabled,
because a truncated file would then kill the process instead of raising an error.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from store.errors import (
    DatabaseInUseError,
    MissingDatabaseError,
    NotWritableError,
    SchemaVersionError,
    SlowQueryError,
    StoreError,
    explain,
    explain_os,
    primary_code,
)
from store.migrations import Schema, check_not_newer, migrate, schema_version

log = logging.getLogger(__name__)

Synchronous = Literal["FULL", "NORMAL"]

_BUSY_TIMEOUT_S = 5.0
_JOURNAL_SIZE_LIMIT_BYTES = 64 * 2**20
PAGE_CACHE_BYTES = 512 << 10
"""Maximum size of a writer's page cache. In an idle service, a cache with SQLite's default size of 2 MiB
fills so slowly that its growth looks like a memory leak. Pages that do not fit are read from the kernel's
page cache."""
_LEAVE_WAL_TIMEOUT_S = 2.0
_CHECKED_INSTRUCTIONS = 20_000
"""Number of SQLite instructions (about 1 ms of work) between checks of a query's time limit."""
_COPIED_PAGES = 1000
"""Number of pages that `write_back` copies between calls to `progress`."""


class WritableDatabase:
    """The only connection that writes to a database. Use and close the connection on the thread that opened
    it.

    With `synchronous="FULL"`, every commit is flushed to disk. With `"NORMAL"`, commits survive a crash of
    the process, but a power failure can lose those made since the last checkpoint.
    """

    def __init__(self, path: Path, schema: Schema, synchronous: Synchronous) -> None:
        """Open or create the file and migrate it to `schema`. On failure, raises `StorageFaultError` if a
        later attempt may succeed, otherwise another `StoreError`."""
        self.path = path
        self._mode = schema.mode
        _check_writable(path)
        self._lock = _lock(path)
        try:
            if not path.exists():
                os.close(_create(path, schema.mode))
            self.connection = _open_writer(path, schema, synchronous)
            self._files = self._identities()
        except BaseException:
            os.close(self._lock)
            raise

    def displaced(self) -> str:
        """Return a message if one of the open database's files was deleted or replaced on disk, otherwise an
        empty string. No data is lost at this point: the connection still writes to the original file, which
        no longer has a name."""
        for path, found in self._identities().items():
            known = self._files[path]
            if known is None:
                self._files[path] = found
            elif found != known:
                return (
                    f"{path} was {'deleted' if found is None else 'replaced'} while the service was running"
                )
        return ""

    def write_back(self, progress: Callable[[], None]) -> str:
        """Write the deleted or replaced file's content back to its path. The caller must then open the new
        file. If another program has put a file at the path, rename that file and return its new name;
        otherwise return an empty string.

        `progress` is called every few pages. Raises `StoreError` if the content cannot be written; the open
        file then still contains it.
        """
        if not self.path.parent.is_dir():
            raise MissingDatabaseError(
                f"{self.path}: the folder {self.path.parent} no longer exists",
                "create it, owned by the service's user; the service will then restore the file",
            )
        copy = self.path.with_name(f"{self.path.name}.restored")
        try:
            self._copy_to(copy, progress)
            aside = self._move_aside()
            copy.rename(self.path)
            sync(self.path.parent)
        except OSError as error:
            raise explain_os(self.path, error) from error
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        return aside

    def _copy_to(self, copy: Path, progress: Callable[[], None]) -> None:
        copy.unlink(missing_ok=True)
        os.close(_create(copy, self._mode))
        try:
            with closing(sqlite3.connect(copy)) as target:
                self.connection.backup(target, pages=_COPIED_PAGES, progress=lambda *_: progress())
                target.execute("PRAGMA journal_mode=DELETE").fetchone()
            sync(copy)
        except BaseException:
            with suppress(OSError):
                copy.unlink()  # A full disk needs the space.
            raise

    def _move_aside(self) -> str:
        """Rename the file that another program has put at the path and return its new name. Also remove the
        original database's -wal and -shm files, which SQLite would otherwise apply to the restored file."""
        known, found = self._files[self.path], _identity(self.path)
        foreign = found is not None and found != known
        aside = self.path.with_name(f"{self.path.name}.replaced-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
        for suffix in ("-wal", "-shm"):
            path = self.path.with_name(self.path.name + suffix)
            if foreign and path.exists() and _identity(path) != self._files[path]:
                path.rename(aside.with_name(aside.name + suffix))
            else:
                path.unlink(missing_ok=True)
        if not foreign:
            return ""
        self.path.rename(aside)
        return str(aside)

    def _identities(self) -> dict[Path, tuple[int, int] | None]:
        """Return the device and inode of each database file."""
        paths = [self.path.with_name(self.path.name + suffix) for suffix in ("", "-wal", "-shm")]
        return {path: _identity(path) for path in paths}

    def close(self) -> None:
        """Checkpoint, leave WAL mode and close the connection. The file then needs no -wal file and can be
        read without write permission.

        Leaving WAL mode needs exclusive access. If a reader has the file open, the file stays in WAL mode.
        This is logged but harmless: the next startup can open the file.
        """
        try:
            self._leave_wal()
        except sqlite3.Error as error:
            log.warning("%s stays in WAL mode (%s): keep its -wal file in the same folder", self.path, error)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the connection without a checkpoint, for use after a disk failure or after `write_back`."""
        try:
            self.connection.close()
        except sqlite3.Error as error:
            log.warning("failed to close %s: %s", self.path, error)
        finally:
            os.close(self._lock)

    def _leave_wal(self) -> None:
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        # The busy timeout does not apply when the journal mode changes, so retry until no reader has the file
        # open.
        deadline = time.monotonic() + _LEAVE_WAL_TIMEOUT_S
        while True:
            try:
                self.connection.execute("PRAGMA journal_mode=DELETE").fetchone()
                return
            except sqlite3.OperationalError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.02)


def open_readonly(path: Path, schema: Schema | None = None) -> sqlite3.Connection:
    """Open a read-only connection, whether or not the file is in use. The caller must close it soon, because
    an open reader keeps the writer from leaving WAL mode when the service stops. If `schema` is given, a file
    with a different schema version is refused. Raises `StoreError` on failure.
    """
    try:
        path.stat()
    except FileNotFoundError as error:
        raise MissingDatabaseError(
            f"{path} does not exist",
            "start the service once to create it, or set the state directory that contains it",
        ) from error
    except OSError as error:
        raise StoreError(
            f"{path} cannot be opened ({error.strerror})",
            "run this command as root, as the service's user or as a member of its group",
        ) from error
    try:
        connection = _open_and_touch(path, "mode=ro")
    except sqlite3.Error as error:
        # A database in WAL mode, such as a copy, may have no -wal and -shm files, and this process may be
        # unable to create them. Without a -wal file, the database file is complete and not being written, so
        # open it as immutable.
        wal = path.with_name(path.name + "-wal")
        stopped = not wal.exists() or wal.stat().st_size == 0
        if primary_code(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or not stopped:
            raise explain(path, error) from error
        try:
            connection = _open_and_touch(path, "immutable=1")
        except sqlite3.Error as second:
            raise explain(path, second) from second
    if schema is not None:
        try:
            check_not_newer(connection, path, schema)
            if schema_version(connection) < len(schema.migrations):
                raise SchemaVersionError(
                    f"{path} has schema version {schema_version(connection)}, but this release of "
                    f"Appliance needs schema version {len(schema.migrations)}",
                    "start the service once, which upgrades the file",
                )
        except SchemaVersionError:
            connection.close()
            raise
    return connection


@contextmanager
def reading(path: Path, schema: Schema, limit_s: float | None = None) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection for a `with` block. SQLite errors in the block are raised as `StoreError`.
    After `limit_s` seconds, the running query is interrupted and raises `SlowQueryError`."""
    connection = open_readonly(path, schema)
    if limit_s is not None:
        deadline = time.monotonic() + limit_s
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _CHECKED_INSTRUCTIONS)
    try:
        yield connection
    except sqlite3.Error as error:
        if primary_code(error) == sqlite3.SQLITE_INTERRUPT:
            raise SlowQueryError(
                f"reading {path.name} took longer than the limit of {limit_s:g} s",
                "select fewer rows, for example with a shorter time span",
            ) from error
        raise explain(path, error) from error
    finally:
        connection.close()


def insert_sql(table: str, columns: Sequence[str], verb: str = "INSERT") -> str:
    """Return the SQL that inserts a row, with a placeholder for each column."""
    return f"{verb} INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def integrity_problems(path: Path) -> list[str]:
    """Return the problems found by SQLite's full integrity check, which reads the whole file."""
    connection = open_readonly(path)
    try:
        found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check")]
    except sqlite3.Error as error:
        return [str(error)]
    finally:
        connection.close()
    return [] if found == ["ok"] else found


def _open_writer(path: Path, schema: Schema, synchronous: Synchronous) -> sqlite3.Connection:
    connection: sqlite3.Connection | None = None
    try:
        # isolation_level=None: transactions begin only where this package executes BEGIN.
        connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        check_not_newer(connection, path, schema)
        connection.execute("PRAGMA mmap_size=0")
        connection.execute("PRAGMA foreign_keys=ON")
        # Set auto_vacuum before WAL mode: it can only be set before the first page is written, and entering
        # WAL mode writes that page.
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise NotWritableError(
                f"{path}: the file system supports only journal mode {mode!r}, not 'wal'",
                "put the state directory on a local disk",
            )
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute(f"PRAGMA journal_size_limit={_JOURNAL_SIZE_LIMIT_BYTES}")
        connection.execute(f"PRAGMA cache_size=-{PAGE_CACHE_BYTES // 1024}")
        migrate(connection, path, schema)
        return connection
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error):
            raise explain(path, error) from error
        raise


def _open_and_touch(path: Path, how: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(path))}?{how}", uri=True, timeout=_BUSY_TIMEOUT_S)
    try:
        connection.execute("PRAGMA mmap_size=0")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the file's device and inode, or None if the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def sync(path: Path) -> None:
    """Sync a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir():
        raise MissingDatabaseError(
            f"{path}: the folder {path.parent} does not exist", "create it, owned by the service's user"
        )
    for place in (path.parent, path):
        if place.exists() and not os.access(place, os.W_OK, effective_ids=True):
            raise NotWritableError(
                f"{place} is not writable by uid {os.geteuid()}",
                "make the service's user its owner, or set another state directory",
            )


def _create(path: Path, mode: int = 0o640) -> int:
    """Open `path`, creating it if it is missing. Unlike a file that SQLite creates, the new file is not
    readable by users outside the service's group. SQLite gives the -wal and -shm files the same mode."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    except OSError as error:
        raise explain_os(path, error) from error


def _lock(path: Path) -> int:
    """Acquire the writer's lock and return its file descriptor. Closing the descriptor or exiting releases
    the lock. The lock is on a separate file, because opening and closing the database file would drop
    SQLite's own POSIX locks on it.
    """
    descriptor = _create(path.with_name(path.name + "-lock"))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise DatabaseInUseError(
            f"{path} is being written by process {holder}",
            "make the change through that service, or stop it first",
        ) from error
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        pass  # The process id in the lock file is informational; the lock does not depend on it.
    return descriptor
