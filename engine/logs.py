"""Logging that never blocks the caller, because a separate thread writes the lines to standard error.

Writing to standard error blocks if the pipe's reader is not reading, the terminal is paused, or journald is
stalled, and an event loop or a step loop must not wait for that. Loggers therefore put formatted lines into a
bounded queue, and a daemon thread writes them. If the queue is full, new lines are dropped and counted, and
their number is logged once standard error is writable again.

A process started by the core also sends a copy of its records to the core over a pipe (`engine.child_log`).
The copy has its own queue and thread, so a core that stops reading delays neither the caller
nor the lines on standard error.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from types import TracebackType
from typing import Annotated, Any, NamedTuple

import msgspec

MAX_QUEUED_LINES = 10_000
"""Maximum number of queued lines. A full queue of typical lines takes about 2 MB."""
MAX_LINE_CHARS = 16_384
"""Maximum length of a record in characters, including its traceback. Longer records are truncated."""
FLUSH_S = 1.0
"""Maximum time, in seconds, that an exiting process waits for its last lines to be written."""
MAX_MESSAGE_CHARS = 2_000
"""Maximum length, in characters, of a record's message and traceback in the copy sent to the core."""
STDERR = 2
COPY_DESCRIPTOR = "APPLIANCE_LOG_DESCRIPTOR"
"""Environment variable that contains the file descriptor to which a process writes a copy of its log."""

log = logging.getLogger(__name__)


class LogState(NamedTuple):
    """State of this process's log."""

    dropped_lines: int = 0
    """Number of lines that this process has dropped because standard error was blocked."""
    stalled_s: float = 0.0
    """Time, in seconds, since the current write began, or 0 if no write is in progress."""


class UtcFormatter(logging.Formatter):
    """Formats a log record as UTC time with milliseconds, level, `prefix` and message."""

    def __init__(self, prefix: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {prefix}: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )

    @staticmethod
    def converter(seconds: float | None = None) -> time.struct_time:
        """Convert a timestamp to UTC."""
        return time.gmtime(seconds)


class CopiedRecord(msgspec.Struct, frozen=True):
    """A log record as sent to the core."""

    at: Annotated[float, msgspec.Meta(ge=0)]
    level: Annotated[int, msgspec.Meta(ge=0, le=100)]
    area: Annotated[str, msgspec.Meta(max_length=100)]
    message: Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE_CHARS + 100)]


class CopyFormatter(logging.Formatter):
    """Formats a log record as a `CopiedRecord`, in one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of JSON."""
        copied = CopiedRecord(record.created, record.levelno, area_of(record), short_message(record))
        return msgspec.json.encode(copied).decode()


def area_of(record: logging.LogRecord) -> str:
    """Return the last component of the logger's name, e.g. "core" for "engine.core"."""
    return record.name.rpartition(".")[2][:100]


def short_message(record: logging.LogRecord) -> str:
    """Return a record's message with its traceback, truncated to `MAX_MESSAGE_CHARS`, as valid UTF-8."""
    text = record.getMessage()
    if record.exc_info:
        text += "\n" + logging.Formatter().formatException(record.exc_info)
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[:MAX_MESSAGE_CHARS]}… ({len(text) - MAX_MESSAGE_CHARS} characters omitted)"
    return text.encode("utf-8", "replace").decode()


class LineQueue(QueueHandler):
    """Formats log records on the caller's thread and queues the resulting lines."""

    def __init__(
        self, formatter: logging.Formatter, descriptor: int = STDERR, reader: str = "standard error"
    ) -> None:
        """Create an empty queue. `reader` names the process or device that reads the descriptor, for reports
        about dropped lines."""
        self._lines: queue.Queue[Any] = queue.Queue(MAX_QUEUED_LINES)
        super().__init__(self._lines)
        self.setFormatter(formatter)
        self.dropped = 0
        self.writer = LineWriter(self, descriptor, reader)

    def prepare(self, record: logging.LogRecord) -> Any:
        """Return the formatted record as a line of bytes."""
        line = self.format(record)
        if len(line) > MAX_LINE_CHARS:
            line = f"{line[:MAX_LINE_CHARS]}… ({len(line) - MAX_LINE_CHARS} characters omitted)"
        return line.encode("utf-8", "backslashreplace") + b"\n"

    def enqueue(self, record: Any) -> None:
        """Queue a line, or drop and count it if the queue is full."""
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait up to `FLUSH_S` seconds for the queued lines to be written. Called by `logging.shutdown` at
        exit."""
        deadline = time.monotonic() + FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.002)

    def state(self) -> LogState:
        """Return the number of dropped lines and the time since the current write began."""
        since = self.writer.writing_since
        return LogState(self.dropped, 0.0 if since is None else time.monotonic() - since)


class LineWriter(QueueListener):
    """The thread that writes the queued lines of a `LineQueue`."""

    def __init__(self, lines: LineQueue, descriptor: int, reader: str) -> None:
        super().__init__(lines.queue)
        self._reader = reader
        self.writing_since: float | None = None
        """`time.monotonic()` at the start of the current write, or None if no write is in progress."""
        self._lines = lines
        self._descriptor = descriptor
        self._reported = 0

    def handle(self, record: Any) -> None:
        """Write a line. If lines have been dropped since the last report, log their number."""
        began = self.writing_since = time.monotonic()
        self._write(record)
        self.writing_since = None
        if (dropped := self._lines.dropped - self._reported) > 0:
            self._reported += dropped
            waited_s = time.monotonic() - began
            text = (
                f"{dropped} lines of this log were dropped: {self._reader} was blocked for {waited_s:.1f} s"
            )
            report = log.makeRecord(log.name, logging.WARNING, __file__, 0, text, (), None)
            self._write(self._lines.prepare(report))

    def _write(self, line: bytes) -> None:
        # Write to the file descriptor rather than `sys.stderr`: a thread blocked in `sys.stderr` holds the
        # stream's lock, which the interpreter needs to exit.
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process made the shared descriptor non-blocking
                poller = select.poll()
                poller.register(self._descriptor, select.POLLOUT)
                poller.poll()
            except OSError:  # the reader has closed its end of the pipe
                self._lines.dropped += 1
                self._reported += 1
                return


def log_to_stderr(formatter: logging.Formatter) -> None:
    """Log to standard error without blocking, and copy each record to the core's pipe if the core started
    this process. The log includes Python warnings and unhandled exceptions, which Python would otherwise
    write directly to standard error."""
    root = logging.getLogger()
    if (former := _line_queue()) is not None:
        former.setFormatter(formatter)
        root.handlers[:] = [one for one in root.handlers if isinstance(one, LineQueue)]
        return
    queues = [LineQueue(formatter)]
    if (descriptor := os.environ.pop(COPY_DESCRIPTOR, None)) is not None:
        os.set_inheritable(int(descriptor), False)
        queues.append(LineQueue(CopyFormatter(), int(descriptor), "the core's pipe"))
    for lines in queues:
        lines.writer.start()
    root.handlers[:] = queues
    logging.captureWarnings(True)
    sys.excepthook = _log_exception
    sys.unraisablehook = _log_unraisable


def log_state() -> LogState:
    """Return the state of this process's log, all zeros if `log_to_stderr` was not called."""
    lines = _line_queue()
    return LogState() if lines is None else lines.state()


def _line_queue() -> LineQueue | None:
    return next((one for one in logging.getLogger().handlers if isinstance(one, LineQueue)), None)


def _log_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    log.critical("unhandled exception; this process exits", exc_info=(kind, error, traceback))


def _log_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    message = unraisable.err_msg or "ignored an exception in"
    error = unraisable.exc_value
    information = None if error is None else (type(error), error, unraisable.exc_traceback)
    log.error("%s %r", message, unraisable.object, exc_info=information)
