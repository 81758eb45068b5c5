"""Collects a child process's log in the process that started it.

A child writes its log to standard error, which both processes share, and a copy to a pipe (`engine.logs`).
The pipe is needed because standard error may be a journal, from which records cannot be read back. The parent
passes the copied records to the handlers of the `child_records` logger. Each record's `process_name`
attribute is the child process's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time

import msgspec

from engine.logs import COPY_DESCRIPTOR, CopiedRecord

READ_BYTES = 1 << 16
"""Maximum number of bytes per read from a child's log."""
_PAUSE_S = 0.1
"""Pause, in seconds, after reading `READ_BYTES` bytes. It keeps a child with excessive log output from
monopolising the event loop."""

child_records = logging.getLogger("engine.child_records")
child_records.propagate = False  # the child has already written the records to standard error
child_records.addHandler(logging.NullHandler())


class ChildLog:
    """Receives the copy of a child process's log. May only be used on the event loop's thread."""

    def __init__(self, process: str) -> None:
        """Create the pipe. `process` is the child process's name. Raises OSError if too many files are
        open."""
        self._process = process
        self._reader, self.descriptor = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._open = {self._reader, self.descriptor}
        self._unread = b""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make the child copy its log to the pipe. The child must also inherit
        `descriptor`."""
        return {COPY_DESCRIPTOR: str(self.descriptor)}

    def listen(self) -> None:
        """Start reading the child's log. Call after starting the child."""
        self._close(self.descriptor)
        asyncio.get_running_loop().add_reader(self._reader, self._readable)

    def finish(self) -> None:
        """Read the remaining records after the child has exited, then close the pipe."""
        while self._open and self._read() > 0:
            pass
        self.close()

    def close(self) -> None:
        """Close the pipe. Unread records are lost."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reader in self._open:
            with contextlib.suppress(RuntimeError):  # no event loop is running
                asyncio.get_running_loop().remove_reader(self._reader)
        for descriptor in list(self._open):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        os.close(descriptor)

    def _readable(self) -> None:
        count = self._read()
        if count == 0:
            self.close()
        elif count == READ_BYTES:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._reader)
            self._timer = loop.call_later(_PAUSE_S, loop.add_reader, self._reader, self._readable)

    def _read(self) -> int:
        """Read the available records. Returns the number of bytes read, 0 at end of file, or -1 if nothing is
        available."""
        try:
            chunk = os.read(self._reader, READ_BYTES)
        except BlockingIOError:
            return -1
        *lines, rest = (self._unread + chunk).split(b"\n")
        # Records are much shorter than READ_BYTES, but an untrusted child could send an endless line.
        self._unread = rest[:READ_BYTES]
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                self._pass_on(msgspec.json.decode(line, type=CopiedRecord))
        return len(chunk)

    def _pass_on(self, copied: CopiedRecord) -> None:
        record = logging.LogRecord(copied.area, copied.level, "", 0, copied.message, None, None)
        record.created = min(copied.at, time.time())
        record.__dict__["process_name"] = self._process
        child_records.handle(record)
