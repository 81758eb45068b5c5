"""Keeps the newest log lines of all processes in memory, for operators to read through the admin API."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import get_args

from appliance.pages import CORE, LineLevel, LogLine, LogPage, LogQuery
from engine.client import child_records
from engine.logs import area_of, short_message

MAX_LINES = 2000
"""Maximum number of log lines kept in memory. If all lines have the maximum length
(`engine.logs.MAX_MESSAGE_CHARS`), they take 4 MB."""
_LEVELS: tuple[LineLevel, ...] = get_args(LineLevel)


class LogLines(logging.Handler):
    """A log handler that keeps the newest log lines. Any thread may log; lines are read on the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """Serial number of the newest line."""
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self._order = threading.Lock()

    def attach(self) -> None:
        """Add this handler to the root logger and the logger for records from fronts and replicas."""
        for logger in (logging.getLogger(), child_records):
            logger.addHandler(self)

    def close(self) -> None:
        """Remove this log handler from the loggers."""
        for logger in (logging.getLogger(), child_records):
            logger.removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Store a log record."""
        try:
            text = short_message(record)
        except Exception:
            self.handleError(record)
            return
        with self._order:
            self.number += 1
            self._lines.append(
                LogLine(
                    number=self.number,
                    at=record.created,
                    level=_level(record.levelno),
                    process=getattr(record, "process_name", CORE),
                    area=area_of(record),
                    message=text,
                )
            )

    def page(self, query: LogQuery) -> LogPage:
        """Return the newest lines that match the query, oldest first. If `query.after` is set, return the
        first matching lines with a higher serial number instead. Lines from fronts and replicas arrive
        slightly late, so serial numbers are not strictly chronological.
        """
        with self._order:
            lines, number = list(self._lines), self.number
        first = lines[0].number if lines else 0
        least = 0 if query.level is None else _LEVELS.index(query.level)
        text = (query.text or "").lower()
        found = [
            line
            for line in lines
            if line.number > (query.after or 0)
            and _LEVELS.index(line.level) >= least
            and text in line.message.lower()
            and (query.process is None or is_of(line.process, query.process))
            and (query.until is None or line.at <= query.until)
        ]
        if query.after is None:
            chosen = sorted(found, key=lambda line: line.at)[-query.limit :]
        else:
            chosen = found[: query.limit]
        return LogPage(lines=chosen, first=first, number=number)


def is_of(process: str, wanted: str) -> bool:
    """Return whether `process` is the process named `wanted`, one of its ranks, or a later incarnation of the
    same front."""
    return process == wanted or process.startswith((f"{wanted}.", f"{wanted} "))


def _level(number: int) -> LineLevel:
    return _LEVELS[min(max(number // 10 - 1, 0), len(_LEVELS) - 1)]
