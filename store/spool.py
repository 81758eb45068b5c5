"""Stores audit entries in a file next to the control database while the database refuses writes. Space for
the file is reserved at each startup, so it can hold entries even when the disk is full. Entries that do not
fit into the file are kept in memory and also written to the service's log in full.

The file consists of lines of JSON, followed by zero bytes up to the reserved size. Each line's `mac` signs
the line's entry and the previous line's `mac`. Without the service's key, no one can change, remove or
reorder lines undetected.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import NamedTuple

from store.audit import RESULT, Entry, canonical_json, new_act, utc_now
from store.heads import SigningKey

log = logging.getLogger(__name__)

SPOOL_FILE = "audit.spool"
RESERVED_BYTES = 256 << 10
"""Size reserved for the spool file, enough for about 500 entries."""
MAX_ENTRIES = 10_000

_PURPOSE = "audit spool"
_FIRST_MAC = "0" * 64
_UNSIGNED = "the spool line of this entry has an invalid signature"
_UNREADABLE = "unreadable"


class SpoolState(NamedTuple):
    """Number and location of the audit entries waiting in the spool."""

    rows: int
    in_memory: int
    """Number of waiting entries that are not in the spool file. If the service is killed, these entries exist
    only in its log."""
    path: Path | None
    """The spool file, or None if it contains no entries."""
    since: str | None
    """Time of the oldest entry, in the format of `Entry.at`."""
    dropped: int
    """Number of entries dropped because too many were waiting. They are only in the service's log."""


class SpoolContent(NamedTuple):
    """The contents of a spool file."""

    entries: list[Entry]
    end: int = 0
    """Total length of all lines, in bytes."""
    mac: str = _FIRST_MAC
    """The `mac` of the last line."""


def read_spool(path: Path, key: SigningKey | None = None) -> SpoolContent:
    """Read a spool file; a missing file has no entries. If `key` is given, entries with a wrong signature get
    a note. A line that cannot be parsed is returned as an entry that reports the damage. Raises OSError if
    the file cannot be read."""
    try:
        lines = path.read_bytes().partition(b"\0")[0].splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    entries: list[Entry] = []
    end, mac = 0, _FIRST_MAC
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break  # the service or the machine stopped while this line was being written
        entry, content, own_mac = _parse(line)
        if entry is None:
            entry = _damaged(path, number)
        elif key is not None and not key.signed(_PURPOSE, mac + content, own_mac):
            entry = entry._replace(note=_UNSIGNED)
        entries.append(entry)
        end, mac = end + len(line), own_mac or mac
    return SpoolContent(entries, end, mac)


class Spool:
    """Holds the waiting audit entries, oldest first. Safe to call from any thread."""

    def __init__(self, path: Path, key: SigningKey) -> None:
        self._path = path
        self._key = key
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._entries, self._end, self._mac = SpoolContent([])
        self._in_memory = 0
        """Number of entries that are not in the spool file. These are always the newest."""
        self._dropped = 0

    def start(self) -> None:
        """Read the entries left by an earlier run and reserve space. Raises OSError if the file cannot be
        read."""
        self._entries, self._end, self._mac = read_spool(self._path, self._key)
        # If space cannot be reserved, the file grows when entries are written.
        with contextlib.suppress(OSError):
            os.posix_fallocate(self._open(), 0, RESERVED_BYTES)

    def put(self, entry: Entry) -> None:
        """Store an entry. Never raises. An entry that does not fit into the file is logged in full and kept
        in memory unless too many entries are waiting."""
        with self._lock:
            if len(self._entries) >= MAX_ENTRIES:
                self._dropped += 1
                log.critical(
                    "the audit spool is full (%d entries), so this log has the only copy of this entry: %s",
                    MAX_ENTRIES,
                    _content(entry),
                )
                return
            self._entries.append(entry)
            self._in_memory += 1
            self._write()
            if self._in_memory:
                log.critical("this audit entry is only in memory: %s", _content(entry))

    def retry(self) -> None:
        """Retry writing the entries that are not yet in the spool file."""
        with self._lock:
            self._write()

    def waiting(self) -> list[Entry]:
        """Return all entries, oldest first."""
        with self._lock:
            return list(self._entries)

    def drop(self, count: int) -> None:
        """Remove the oldest `count` entries, which have been appended to the chain. The file is cleared only
        when no entry is waiting. Until then, it also contains entries already in the chain, which a later
        startup recognises by their action id (`act`).
        """
        with self._lock:
            del self._entries[:count]
            self._in_memory = min(self._in_memory, len(self._entries))
            if self._entries:
                return
            try:
                self._clear()
            except OSError as error:
                log.warning("%s cannot be cleared (%s)", self._path, error.strerror)

    def state(self) -> SpoolState:
        """Return the number of waiting entries and their locations."""
        with self._lock:
            rows = len(self._entries)
            return SpoolState(
                rows=rows,
                in_memory=self._in_memory,
                path=self._path if rows > self._in_memory else None,
                since=self._entries[0].at if self._entries else None,
                dropped=self._dropped,
            )

    def close(self) -> None:
        """Close the file and remove it if it contains no entries."""
        with self._lock:
            if self._in_memory:
                log.critical(
                    "the service is stopping: %d audit entries could not be stored and are only in the log "
                    "above",
                    self._in_memory,
                )
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
            if not self._end:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        """Write the entries that are not yet in the file, oldest first, until a write fails."""
        for entry in self._entries[len(self._entries) - self._in_memory :]:
            try:
                self._append(entry)
            except OSError as error:
                log.warning("an audit entry cannot be written to %s (%s)", self._path, error.strerror)
                return
            self._in_memory -= 1

    def _append(self, entry: Entry) -> None:
        """Write an entry to the file and sync it. Raises OSError."""
        content = _content(entry)
        mac = self._key.sign(_PURPOSE, self._mac + content)
        line = canonical_json({"entry": content, "mac": mac}).encode() + b"\n"
        descriptor = self._open()
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(descriptor, line[written:], self._end + written)
            os.fdatasync(descriptor)
        except OSError:
            # Remove the partial line; otherwise, the next attempt would be appended to it.
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, bytes(len(line)), self._end)
            raise
        self._end, self._mac = self._end + len(line), mac

    def _clear(self) -> None:
        """Remove all lines from the file but keep the reserved space. Raises OSError."""
        if not self._end:
            return
        descriptor = self._open()
        os.pwrite(descriptor, bytes(min(self._end, RESERVED_BYTES)), 0)
        if os.fstat(descriptor).st_size > RESERVED_BYTES:
            os.ftruncate(descriptor, RESERVED_BYTES)
        os.fdatasync(descriptor)
        self._end, self._mac = 0, _FIRST_MAC

    def _open(self) -> int:
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self._path, flags, 0o640)
        return self._descriptor


def _content(entry: Entry) -> str:
    return canonical_json({name: value for name, value in entry._asdict().items() if value is not None})


def _parse(line: bytes) -> tuple[Entry | None, str, str]:
    """Return the line's entry, its signed text, and its `mac`. The entry is None for a damaged line."""
    try:
        outer = json.loads(line)
        content, mac = outer["entry"], outer["mac"]
        fields = json.loads(content)
        if not all(isinstance(value, str) for value in (content, mac, *fields.values())):
            return None, "", ""
        return Entry(**fields), content, mac
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, "", ""


def _damaged(path: Path, number: int) -> Entry:
    return Entry(
        at=utc_now(),
        actor="unknown",
        action=_UNREADABLE,
        params=canonical_json({"spool": str(path), "line": number}),
        result=f"line {number} of the spool could not be read",
        act=new_act(),
        phase=RESULT,
    )
