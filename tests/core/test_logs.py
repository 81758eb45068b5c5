"""Tests that the expected log records are written, and that the process does not block if the reader of
standard error stalls."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from appliance.host import logs
from engine.logs import MAX_LINE_CHARS, MAX_QUEUED_LINES, LineQueue, UtcFormatter
from tests.waiting import wait_until


@pytest.fixture
def untouched() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (None, "store.heads", "asyncio", "httpx")]
    levels, handlers = [logger.level for logger in loggers], loggers[0].handlers[:]
    hooks = sys.excepthook, sys.unraisablehook
    yield
    logging.captureWarnings(False)
    sys.excepthook, sys.unraisablehook = hooks
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def pipe() -> Iterator[tuple[int, LineQueue]]:
    """Return the read end of a pipe, and a log that writes to the pipe."""
    reader, writer = os.pipe()
    lines = LineQueue(UtcFormatter("test"), writer)
    lines.writer.start()
    yield reader, lines
    lines.writer.stop()
    os.close(reader)
    os.close(writer)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, __file__, 0, text, (), None)


@pytest.mark.usefixtures("untouched")
def test_heads_of_the_audit_chain_are_in_the_log_at_every_level(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging("error")
    logging.getLogger("store.heads").info("audit head seq=1")
    logging.getLogger("store.trail").info("nothing of this")
    logging.getLogger().handlers[0].flush()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].endswith("INFO    heads: audit head seq=1")


def test_unread_lines_are_dropped_counted_and_reported_later(
    pipe: tuple[int, LineQueue],
) -> None:
    reader, lines = pipe
    filling, more = 3000, MAX_QUEUED_LINES + 3000  # A pipe holds 64 KiB, about 600 of these lines.
    for number in range(filling):
        lines.handle(record(f"line {number:06} {'x' * 80}"))
    # The writer continues until the pipe is full, and reports dropped lines once per write.
    wait_until(lambda: lines.state().stalled_s > 1.0)
    for number in range(more):
        lines.handle(record(f"more {number:06} {'x' * 80}"))
    sent, dropped = filling + more, lines.state().dropped_lines
    assert 3000 < dropped < sent
    received = bytearray()

    def read() -> None:
        while chunk := os.read(reader, 1 << 16):
            received.extend(chunk)

    threading.Thread(target=read, daemon=True).start()
    wait_until(lambda: received.count(b"\n") == sent - dropped + 1)
    text = received.decode().splitlines()
    assert [line for line in text if "WARNING" in line] == [line for line in text if "were dropped" in line]
    (report,) = (line for line in text if "were dropped" in line)
    assert f"{dropped} lines of this log were dropped" in report
    lines.handle(record("the last"))
    wait_until(lambda: received.endswith(b"the last\n"))
    wait_until(lambda: lines.state() == (dropped, 0.0), description="the end of the write")


def test_a_long_record_is_cut(pipe: tuple[int, LineQueue]) -> None:
    reader, lines = pipe
    lines.handle(record("y" * (MAX_LINE_CHARS + 1000)))
    received = b""
    while not received.endswith(b"\n"):
        received += os.read(reader, 1 << 16)
    assert len(received) < MAX_LINE_CHARS + 200 and b"characters omitted" in received


def test_without_a_reader_lines_are_lost_but_nothing_blocks() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    lines = LineQueue(UtcFormatter("test"), writer)
    lines.writer.start()
    for _ in range(10):
        lines.handle(record("nobody reads this"))
    wait_until(lambda: lines.state().dropped_lines == 10)
    lines.writer.stop()
    os.close(writer)
