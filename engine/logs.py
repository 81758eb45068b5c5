"""Logging that never blocks the caller: a thread of its own writes the lines to standard error.

A write to standard error blocks while nobody reads the pipe, the terminal is stopped or journald is stalled.
An event loop or a step loop must not wait for that. So loggers put finished lines into a bounded queue, and a
daemon thread writes them. Lines that find the queue full are dropped and counted. When the reader is back, a
line says how many were dropped.
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
"""Lines that wait for the reader of standard error: about 2 MB of usual length."""
MAX_LINE_CHARS = 16_384
"""Of one record, its traceback included; the rest is cut."""
FLUSH_S = 1.0
"""How long a process that ends waits for the reader to take the last lines."""
STDERR = 2

log = logging.getLogger(__name__)


class LogState(NamedTuple):
    """How the log of this process is doing."""

    dropped_lines: int = 0
    """Lines dropped since the start because standard error did not take them."""
    stalled_s: float = 0.0
    """How long the write under way has been waiting for the reader; 0 without one."""


class LineFormatter(logging.Formatter):
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
        """Queue a line, or count it as dropped."""
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait until the queued lines are written, `FLUSH_S` at most. `logging.shutdown` calls it at exit."""
        deadline = time.monotonic() + FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.002)

    def state(self) -> LogState:
        """Return the counters as of now."""
        since = self.writer.writing_since
        return LogState(self.dropped, 0.0 if since is None else time.monotonic() - since)


class LineWriter(QueueListener):
    """The thread that writes the lines of a `LineQueue`."""

    def __init__(self, lines: LineQueue, descriptor: int) -> None:
        super().__init__(lines.queue)
        self.writing_since: float | None = None
        """`time.monotonic()` at the beginning of the write under way."""
        self._lines = lines
        self._descriptor = descriptor
        self._reported = 0

    def handle(self, record: Any) -> None:
        """Write a line; then say how many were dropped meanwhile."""
        began = self.writing_since = time.monotonic()
        self._write(record)
        self.writing_since = None
        if (dropped := self._lines.dropped - self._reported) > 0:
            self._reported += dropped
            waited_s = time.monotonic() - began
            text = (
                f"{dropped} lines of this log were dropped: standard error took nothing for {waited_s:.1f} s"
            )
            report = log.makeRecord(log.name, logging.WARNING, __file__, 0, text, (), None)
            self._write(self._lines.prepare(report))

    def _write(self, line: bytes) -> None:
        # To the descriptor, not through `sys.stderr`: a thread that is blocked inside a buffered stream holds
        # the stream's lock, and the interpreter needs that lock to exit.
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # somebody who shares the descriptor made it non-blocking
                room = select.poll()
                room.register(self._descriptor, select.POLLOUT)
                room.poll()
            except OSError:  # nobody can read it any more
                self._lines.dropped += 1
                self._reported += 1
                return


def log_to_stderr(formatter: logging.Formatter) -> None:
    """Send this process's log to standard error, without ever waiting for its reader: Python's warnings and
    exceptions that nobody handles included, which would otherwise be written directly."""
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
    """Return how the log of this process is doing; zeros where `log_to_stderr` was not called."""
    lines = _line_queue()
    return LogState() if lines is None else lines.state()


def _line_queue() -> LineQueue | None:
    return next((one for one in logging.getLogger().handlers if isinstance(one, LineQueue)), None)


def _log_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    log.critical("this process ends: nothing handled an exception", exc_info=(kind, error, traceback))


def _log_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    what = unraisable.err_msg or "an exception was ignored in"
    error = unraisable.exc_value
    information = None if error is None else (type(error), error, unraisable.exc_traceback)
    log.error("%s %r", what, unraisable.object, exc_info=information)
