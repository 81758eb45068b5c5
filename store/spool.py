"""Where audit entries wait while the control database refuses them: a file whose room was reserved
beforehand, so that it takes them on the disk that is full; else one on another disk; else memory and the
log.

A file is lines of JSON, followed by zero bytes up to what is reserved. Each line's `mac` signs it and,
through the line before, its place: whoever is not the service's user cannot change what waits there unseen.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from store.audit import RESULT, Entry, canonical_json, new_act, utc_now
from store.heads import SigningKey

log = logging.getLogger(__name__)

SPOOL_FILE = "audit.spool"
RESERVED_BYTES = 256 << 10
"""Room for some 500 entries."""
MAX_ENTRIES = 10_000

_FIRST_MAC = "0" * 64
_UNSIGNED = "the signature of its line in the spool did not hold"
_UNREADABLE = "unreadable"


class SpoolState(NamedTuple):
    """What waits."""

    rows: int
    in_memory: int
    """Of these, how many no file took: they are in the service's log, and lost to the chain if it ends."""
    places: tuple[str, ...]
    """Paths of the files that hold the others."""
    since: str | None
    """When the oldest was made, as in `Entry.at`."""
    lost: int
    """Entries that found no room anywhere; the service's log has them."""


class SpoolFile:
    """One file. Not thread-safe."""

    def __init__(self, path: Path, key: SigningKey) -> None:
        self.path = path
        self._key = key
        self._descriptor: int | None = None
        self._end = 0
        self._mac = _FIRST_MAC

    @property
    def used_bytes(self) -> int:
        """Length of its entries."""
        return self._end

    def read(self) -> list[Entry]:
        """What a former service left, oldest first, or whatever can be read of it. Raises OSError."""
        try:
            lines = self.path.read_bytes().partition(b"\0")[0].splitlines(keepends=True)
        except FileNotFoundError:
            return []
        entries: list[Entry] = []
        for line in lines:
            whole = line.endswith(b"\n")
            entry, mac = self._parse(line)
            if entry is None:
                # A line that was being written when the power went is nobody's deed.
                if whole:
                    entries.append(_damaged(self.path, len(entries) + 1))
            else:
                entries.append(entry)
            if whole:
                self._mac = mac or self._mac
                self._end += len(line)
        return entries

    def reserve(self) -> None:
        """Take the room that later entries may need. Where there is none now, or the file system cannot, the
        file grows as far as it can when it is written."""
        with contextlib.suppress(OSError):
            os.posix_fallocate(self._open(), 0, RESERVED_BYTES)

    def append(self, entry: Entry) -> None:
        """Write an entry, on the disk when this returns. Raises OSError."""
        line, mac = self._line(entry)
        descriptor = self._open()
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(descriptor, line[written:], self._end + written)
            os.fdatasync(descriptor)
        except OSError:
            # Half a line must not stand before the next attempt's.
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, bytes(len(line)), self._end)
            raise
        self._end += len(line)
        self._mac = mac

    def clear(self) -> None:
        """Forget all entries; what is reserved stays so. Raises OSError."""
        if not self._end:
            return
        descriptor = self._open()
        os.pwrite(descriptor, bytes(min(self._end, RESERVED_BYTES)), 0)
        if os.fstat(descriptor).st_size > RESERVED_BYTES:
            os.ftruncate(descriptor, RESERVED_BYTES)
        os.fdatasync(descriptor)
        self._end, self._mac = 0, _FIRST_MAC

    def close(self) -> None:
        """Let go of the file; one without entries goes away."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if not self._end:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _open(self) -> int:
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o640)
        return self._descriptor

    def _line(self, entry: Entry) -> tuple[bytes, str]:
        content = canonical_json(
            {name: value for name, value in entry._asdict().items() if value is not None}
        )
        mac = self._key.sign("audit spool", self._mac + content)
        return canonical_json({"entry": content, "mac": mac}).encode() + b"\n", mac

    def _parse(self, line: bytes) -> tuple[Entry | None, str]:
        entry, content, mac = parsed(line)
        if entry is not None and not self._key.signed("audit spool", self._mac + content, mac):
            entry = entry._replace(note=_UNSIGNED)
        return entry, mac


class Spool:
    """Entries in the order of their making, each in a file where one takes it. Any thread may call."""

    def __init__(self, paths: Sequence[Path], key: SigningKey) -> None:
        """`paths`: the files to try, in this order. The first one's room is reserved by `start`."""
        self._files = [SpoolFile(path, key) for path in dict.fromkeys(paths)]
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._unfiled = 0  # the newest so many are in no file
        self._lost = 0

    def start(self) -> None:
        """Take up what a former service left, and reserve room. Raises OSError for a file that is there and
        cannot be read."""
        found: list[Entry] = []
        for file in self._files:
            found += file.read()
        self._entries = sorted(found, key=lambda entry: entry.at)
        self._files[0].reserve()

    def put(self, entry: Entry) -> None:
        """Keep an entry. Never raises: what finds no room is logged in full, and counted."""
        with self._lock:
            if len(self._entries) >= MAX_ENTRIES:
                self._lost += 1
                log.critical("audit entry lost, %d entries wait already: %s", MAX_ENTRIES, _text(entry))
                return
            self._entries.append(entry)
            self._unfiled += 1
            self._file_what_is_not()
            if self._unfiled:
                log.critical("audit entry in memory only: %s", _text(entry))

    def retry(self) -> None:
        """Try again to put into a file what is in memory only."""
        with self._lock:
            self._file_what_is_not()

    def waiting(self) -> list[Entry]:
        """All entries, oldest first."""
        with self._lock:
            return list(self._entries)

    def drop(self, count: int) -> None:
        """The oldest `count` are in the chain. What this leaves in a file is known by its `act` when it is
        read again."""
        with self._lock:
            del self._entries[:count]
            self._unfiled = min(self._unfiled, len(self._entries))
            if self._entries:
                return
            for file in self._files:
                try:
                    file.clear()
                except OSError as error:
                    log.warning("%s cannot be emptied (%s)", file.path, error.strerror)

    def state(self) -> SpoolState:
        """What waits now."""
        with self._lock:
            return SpoolState(
                rows=len(self._entries),
                in_memory=self._unfiled,
                places=tuple(str(file.path) for file in self._files if file.used_bytes)
                if self._entries
                else (),
                since=self._entries[0].at if self._entries else None,
                lost=self._lost,
            )

    def close(self) -> None:
        """Let go of the files. What is in memory only is lost to the chain; the log has it."""
        with self._lock:
            if self._unfiled:
                log.critical("%d audit entries end with this process: the log above has them", self._unfiled)
            for file in self._files:
                file.close()

    def _file_what_is_not(self) -> None:
        for entry in self._entries[len(self._entries) - self._unfiled :]:
            if not any(_took(file, entry) for file in self._files):
                return
            self._unfiled -= 1


def parsed(line: bytes) -> tuple[Entry | None, str, str]:
    """The entry in a line of a spool, the text that is signed, and its `mac`; None for what is none."""
    try:
        outer = json.loads(line)
        content, mac = outer["entry"], outer["mac"]
        fields = json.loads(content)
        if not all(isinstance(value, str) for value in (content, mac, *fields.values())):
            return None, "", ""
        return Entry(**fields), content, mac
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, "", ""


def entries_in(path: Path) -> list[Entry]:
    """What waits in the file, for those who only look; empty where there is none. Raises OSError."""
    try:
        lines: Iterable[bytes] = path.read_bytes().partition(b"\0")[0].splitlines()
    except FileNotFoundError:
        return []
    return [entry for entry, _, _ in map(parsed, lines) if entry is not None]


def _took(file: SpoolFile, entry: Entry) -> bool:
    try:
        file.append(entry)
    except OSError as error:
        log.warning("%s does not take an audit entry (%s)", file.path, error.strerror)
        return False
    return True


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


def _text(entry: Entry) -> str:
    return canonical_json({name: value for name, value in entry._asdict().items() if value is not None})
