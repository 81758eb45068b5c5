"""Backs up the state directory, whether or not the service is running. A backup is checked before it gets its
final name.

SQLite's backup API copies each database in one read transaction, over a read-only connection. The copy is
therefore a consistent snapshot, and making it does not block the service's writer. The write-ahead log grows
during a backup, because only the writer may checkpoint (see `store.database`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from store.database import integrity_problems, open_readonly, sync
from store.errors import (
    CorruptDatabaseError,
    MissingDatabaseError,
    StoreError,
    explain,
    explain_os,
    primary_code,
)
from store.evidence import Recorded, examine_folder, read_audit_head
from store.heads import HEADS_FILE, KEY_FILE, heads_in
from store.spool import SPOOL_FILE

MANIFEST_FILE = "backup.json"
CONTENTS_FILE = "contents.db"
_ARCHIVES = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz"}
# These files are copied before the databases, so that the copied chain contains every copied head. An audit
# entry that moves from the spool to the chain during the backup then appears in both copies.
_FILES = (HEADS_FILE, KEY_FILE, SPOOL_FILE)
_DATABASES = ("control.db", "history.db", CONTENTS_FILE)


class BackupFile(NamedTuple):
    """A file in a backup."""

    name: str
    bytes: int
    sha256: str


class Backup(NamedTuple):
    """A completed backup."""

    path: Path
    """Path of the backup folder or archive."""
    made_at: str
    files: list[BackupFile]
    audit_rows: int
    audit_head: str
    sha256: str = ""
    """SHA-256 of the archive or, if the backup is a folder, of `backup.json`, which lists the hashes of the
    other files."""


def back_up(
    state_dir: Path,
    target: Path,
    *,
    others: Mapping[str, Path],
    recorded: Iterable[Recorded] = (),
    contents: bool = True,
) -> Backup:
    """Copy the state, and the files in `others`, to `target`. `others` maps each file's name in the backup to
    its path. The target can be

    - a new folder,
    - an existing folder, in which a new folder named after the current time is created,
    - an archive, if the name ends with .tar, .tar.gz or .tgz.

    Only the owner can read the backup.

    The backup gets its final name only after the copies have passed their checks: an integrity check of each
    database, and a check of the audit chain against the copied heads and the heads in `recorded`. Raises
    `StoreError` and leaves no files behind if the backup fails.
    """
    made_at = datetime.now(UTC)
    suffix = next((suffix for suffix in _ARCHIVES if target.name.endswith(suffix)), None)
    # isdir() returns False for paths in a folder that cannot be searched; creating the target then raises the
    # error.
    if suffix is None and os.path.isdir(target):
        target = target / f"appliance-{made_at:%Y%m%dT%H%M%SZ}"
    if os.path.lexists(target):
        raise StoreError(
            f"{target} already exists", "choose another path, or move the existing file or folder elsewhere"
        )
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except FileNotFoundError as error:
        raise StoreError(
            f"{target.parent} is not a writable folder", "create it, or choose another folder"
        ) from error
    except OSError as error:
        raise explain_os(target.parent, error) from error
    try:
        folder = unfinished / (target.name.removesuffix(suffix) if suffix else target.name)
        folder.mkdir(mode=0o700)
        done = _fill(folder, state_dir, others, recorded, contents, made_at.isoformat(timespec="seconds"))
        finished = _archive(folder, suffix) if suffix else folder
        digest = _sha256(finished if suffix else folder / MANIFEST_FILE)
        finished.rename(target)
        sync(target.parent)
    except FileNotFoundError as error:
        raise StoreError(
            f"{error.filename or target} was removed during the backup", "start the backup again"
        ) from error
    except OSError as error:
        raise explain_os(Path(error.filename or target), error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return done._replace(path=target, sha256=digest)


def _fill(
    folder: Path,
    state_dir: Path,
    others: Mapping[str, Path],
    recorded: Iterable[Recorded],
    contents: bool,
    made_at: str,
) -> Backup:
    for name in _FILES:
        if (state_dir / name).exists() and not _is_reserve(state_dir / name):
            _copy(state_dir / name, folder / name)
    for name in _DATABASES:
        # State directories from earlier versions have no `contents.db`.
        if name == CONTENTS_FILE and not (contents and (state_dir / name).exists()):
            continue
        _copy_database(state_dir / name, folder / name)
    if (folder / HEADS_FILE).exists():
        newest = read_audit_head(folder / "control.db").seq
        _append_heads(state_dir / HEADS_FILE, folder / HEADS_FILE, newest)
    for name, path in others.items():
        (folder / name).parent.mkdir(mode=0o700, exist_ok=True)
        _copy(path, folder / name)
    findings = examine_folder(folder, recorded)
    if not findings.ok:
        raise CorruptDatabaseError(
            f"the audit chain in the copy is damaged ({'; '.join(findings.problems)})",
            f"check the audit chain in {state_dir} with: appliance audit verify",
        )
    files = [
        BackupFile(str(path.relative_to(folder)), path.stat().st_size, _sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    head = findings.verdict.head
    done = Backup(folder, made_at, files, head.seq, head.hash)
    manifest = {**done._asdict(), "files": [file._asdict() for file in files]}
    del manifest["path"], manifest["sha256"]
    _write(folder / MANIFEST_FILE, json.dumps(manifest, indent=2).encode() + b"\n")
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync(path)
    return done


def _copy_database(source: Path, target: Path) -> None:
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with closing(open_readonly(source)) as reader, closing(sqlite3.connect(target)) as copy:
            reader.backup(copy)
            # Leave WAL mode, so that the copy needs no -wal file and can be read without write permission.
            copy.execute("PRAGMA journal_mode=DELETE").fetchone()
    except sqlite3.Error as error:
        damaged = primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        raise explain(source if damaged else target, error) from error
    if problems := integrity_problems(target):
        raise CorruptDatabaseError(
            f"the copy of {source} is damaged ({'; '.join(problems[:3])})",
            f"check the database and the disk that contains {target}",
        )
    sync(target)


def _is_reserve(path: Path) -> bool:
    """Return True if the file is a spool that contains only reserved space and no entries."""
    return path.name == SPOOL_FILE and not path.read_bytes().strip(b"\0")


def _copy(source: Path, target: Path) -> None:
    try:
        _write(target, source.read_bytes())
    except FileNotFoundError as error:
        raise MissingDatabaseError(f"{source} no longer exists", "start the backup again") from error


def _append_heads(source: Path, target: Path, seq: int) -> None:
    """Bring `target`, a copy of the heads file, up to date by appending the heads recorded since the copy was
    made. Heads of rows after `seq` are omitted."""
    with target.open("ab") as file, source.open("rb") as lines:
        lines.seek(file.tell())
        for line in lines:
            if all(head.seq <= seq for head in heads_in([line.decode("utf-8", "replace")])):
                file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _archive(folder: Path, suffix: str) -> Path:
    path = folder.parent / f"archive{suffix}"
    with (
        open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
        tarfile.open(fileobj=file, mode=_ARCHIVES[suffix], format=tarfile.PAX_FORMAT) as archive,  # type: ignore[call-overload]
    ):
        archive.add(folder, folder.name)
    sync(path)
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
