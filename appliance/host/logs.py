"""The log: plain lines on standard error, one per event.

2026-11-20T23:16:01.123Z INFO    replica: demo-0 is starting (models/demo, pid 4711)
2026-11-20T23:16:01.124Z WARNING front-0 replicas: disconnected from replica demo-0
"""

from __future__ import annotations

import logging

from appliance.protocol import LogLevel
from engine import logs


class LineFormatter(logs.UtcFormatter):
    """Formats a record as UTC time with milliseconds, level, process name (unless the process is the core),
    last component of the logger's name, and message."""

    def __init__(self, process: str = "") -> None:
        self._process = f"{process} " if process else ""
        super().__init__("%(area)s")

    def format(self, record: logging.LogRecord) -> str:
        record.area = self._process + record.name.rpartition(".")[2]
        return super().format(record)


def configure_logging(level: LogLevel, process: str = "") -> None:
    """Set up logging to standard error for records of at least `level`. Logging does not block, even if
    standard error is read slowly. `process` is this process's name, or empty for the core."""
    logs.log_to_stderr(LineFormatter(process))
    root = logging.getLogger()
    root.setLevel(level.upper())
    # Log the audit chain's heads at every log level, because their copies in the journal prove that the chain
    # is complete.
    logging.getLogger("store.heads").setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, root.level))
