"""The log: plain lines on standard error, one a thing that happened.

2026-11-20T23:16:01.123Z INFO    models: demo-0 is ready (4.2 s, 512 blocks, cpu)
2026-11-20T23:16:01.124Z WARNING front-0 replicas: replica demo-0 disconnected
"""

from __future__ import annotations

import logging

from engine import logs


class LineFormatter(logs.UtcFormatter):
    """UTC time with milliseconds, level, the process's name where it has one, the last part of the logger's
    name, message."""

    def __init__(self, process: str = "") -> None:
        self._process = f"{process} " if process else ""
        super().__init__("%(area)s")

    def format(self, record: logging.LogRecord) -> str:
        record.area = self._process + record.name.rpartition(".")[2]
        return super().format(record)


def configure_logging(level: str, process: str = "") -> None:
    """Send the process's log to standard error from `level` ("debug", "info", …) on, without ever waiting for
    its reader; `process` is the name of a process that is not the core."""
    logs.log_to_stderr(LineFormatter(process))
    root = logging.getLogger()
    root.setLevel(level.upper())
    # Heads of the audit chain are logged at every level: the journal's copy proves that the chain is whole.
    logging.getLogger("store.heads").setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, root.level))
