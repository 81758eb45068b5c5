"""The log: plain lines on standard error, one a thing that happened.

2026-11-20T23:16:01.123Z INFO    models: demo-0 is ready (4.2 s, 512 blocks, cpu)
2026-11-20T23:16:01.124Z WARNING front-0 replicas: replica demo-0 is gone
"""

from __future__ import annotations

import logging
import sys
import time


class LineFormatter(logging.Formatter):
    """UTC time with milliseconds, level, the process's name where it has one, the last part of the logger's
    name, message."""

    @staticmethod
    def converter(seconds: float | None = None) -> time.struct_time:
        return time.gmtime(seconds)

    def __init__(self, process: str = "") -> None:
        self._process = f"{process} " if process else ""
        super().__init__(
            "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(area)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        record.area = self._process + record.name.rpartition(".")[2]
        return super().format(record)


def configure_logging(level: str, process: str = "") -> None:
    """Send the process's log to standard error from `level` ("debug", "info", …) on; `process` names one that
    is not the core."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Heads of the audit chain belong into the journal whatever else does: it is what speaks for the chain.
    logging.getLogger("store.heads").setLevel(logging.INFO)
    for chatty in ("asyncio", "httpx"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
