"""Logging that never blocks the caller: a separate thread writes the lines to standard error.

A write to standard error blocks while the pipe's reader does not read, the terminal is stopped or journald is
stalled. An event loop or a step loop must not wait for that. So loggers put finished lines into a bounded
queue, and a daemon thread writes them. Lines are dropped and counted while the queue is full. When standard
error can be written again, a line reports how many were dropped.
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
from typing import Any, NamedTuple

MAX_QUEUED_LINES = 10_000
"""Maximum number of queued lines: about 2 MB at their usual length."""
MAX_LINE_CHARS = 16_384
"""Maximum length of one record with its traceback; the rest is cut."""
FLUSH_S = 1.0
"""How long an exiting process waits until the last lines are written."""
STDERR = 2

log = logging.getLogger(__name__)


class LogState(NamedTuple):
    """The state of this process's log."""

    dropped_lines: int = 0
    """Lines dropped since the start because standard error could not be written."""
    stalled_s: float = 0.0
    """Duration of the current write so far; 0 if there is none."""


class UtcFormatter(logging.Formatter):
    """UTC time with milliseconds, level, `prefix`, message."""

    def __init__(self, prefix: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {prefix}: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )

    @staticmethod
    def converter(seconds: float | None = None) -> time.struct_time:
        """Return UTC."""
        return time.gmtime(seconds)


class LineQueue(QueueHandler):
    """Formats records on the caller's thread and queues the lines."""

    def __init__(self, formatter: logging.Formatter, descriptor: int = STDERR) -> None:
        self._lines: queue.Queue[Any] = queue.Queue(MAX_QUEUED_LINES)
        super().__init__(self._lines)
        self.setFormatter(formatter)
        self.dropped = 0
        self.writer = LineWriter(self, descriptor)

    def prepare(self, record: logging.LogRecord) -> Any:
        """Return the line as bytes."""
        line = self.format(record)
        if len(line) > MAX_LINE_CHARS:
            line = f"{line[:MAX_LINE_CHARS]}… ({len(line) - MAX_LINE_CHARS} more characters cut)"
        return line.encode("utf-8", "backslashreplace") + b"\n"

    def enqueue(self, record: Any) -> None:
        """Queue a line; count it as dropped if the queue is full."""
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait at most `FLUSH_S` until the queued lines are written. `logging.shutdown` calls it at exit."""
        deadline = time.monotonic() + FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.002)

    def state(self) -> LogState:
        """Return the current state."""
        since = self.writer.writing_since
        return LogState(self.dropped, 0.0 if since is None else time.monotonic() - since)


class LineWriter(QueueListener):
    """The thread that writes the lines of a `LineQueue`."""

    def __init__(self, lines: LineQueue, descriptor: int) -> None:
        super().__init__(lines.queue)
        self.writing_since: float | None = None
        """`time.monotonic()` at the beginning of the current write; None if there is none."""
        self._lines = lines
        self._descriptor = descriptor
        self._reported = 0

    def handle(self, record: Any) -> None:
        """Write a line, then report how many were dropped during the write."""
        began = self.writing_since = time.monotonic()
        self._write(record)
        self.writing_since = None
        if (dropped := self._lines.dropped - self._reported) > 0:
            self._reported += dropped
            waited_s = time.monotonic() - began
            text = (
                f"{dropped} lines of this log were dropped: standard error was blocked for {waited_s:.1f} s"
            )
            report = log.makeRecord(log.name, logging.WARNING, __file__, 0, text, (), None)
            self._write(self._lines.prepare(report))

    def _write(self, line: bytes) -> None:
        # Written to the descriptor, not through `sys.stderr`: a thread that is blocked inside a buffered
        # stream holds the stream's lock, and the interpreter needs that lock to exit.
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process that shares the descriptor made it non-blocking
                room = select.poll()
                room.register(self._descriptor, select.POLLOUT)
                room.poll()
            except OSError:  # the reader has closed its end
                self._lines.dropped += 1
                self._reported += 1
                return


def log_to_stderr(formatter: logging.Formatter) -> None:
    """Send this process's log to standard error without blocking, including Python's warnings and unhandled
    exceptions, which would otherwise be written directly."""
    root = logging.getLogger()
    if (former := _line_queue()) is not None:
        former.setFormatter(formatter)
        root.handlers[:] = [former]
        return
    lines = LineQueue(formatter)
    lines.writer.start()
    root.handlers[:] = [lines]
    logging.captureWarnings(True)
    sys.excepthook = _log_exception
    sys.unraisablehook = _log_unraisable


def log_state() -> LogState:
    """Return the state of this process's log; zeros if `log_to_stderr` was not called."""
    lines = _line_queue()
    return LogState() if lines is None else lines.state()


def _line_queue() -> LineQueue | None:
    return next((one for one in logging.getLogger().handlers if isinstance(one, LineQueue)), None)


def _log_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    log.critical("unhandled exception; this process exits", exc_info=(kind, error, traceback))


def _log_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    what = unraisable.err_msg or "ignored an exception in"
    error = unraisable.exc_value
    information = None if error is None else (type(error), error, unraisable.exc_traceback)
    log.error("%s %r", what, unraisable.object, exc_info=information)
