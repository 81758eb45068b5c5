"""The log: plain lines on standard error, one a thing that happened.

2026-11-20T23:16:01.123Z INFO    models: demo-0 is ready (4.2 s, 512 blocks, cpu)
"""

from __future__ import annotations

import logging
import sys
import time


class LineFormatter(logging.Formatter):
    """UTC time with milliseconds, level, the last part of the logger's name, message."""

    @staticmethod
    def converter(seconds: float | None = None) -> time.struct_time:
        return time.gmtime(seconds)

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(area)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        record.area = record.name.rpartition(".")[2]
        return super().format(record)


def configure_logging(level: str) -> None:
    """Send the process's log to standard error from `level` ("debug", "info", …) on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("asyncio", "uvicorn.access", "httpx"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
