"""Keeps the newest lines of the core's log in memory, so that operators can read them over the admin API."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import get_args

from appliance.pages import Level, LogLine, LogPage, LogQuery

MAX_LINES = 2000
MAX_LINE_CHARS = 2000
"""Longer lines, such as tracebacks, are truncated. `MAX_LINES` lines of this length take 4 MB."""
_LEVELS: tuple[Level, ...] = get_args(Level)


class LogLines(logging.Handler):
    """A log handler that keeps the newest lines. Any thread may log; lines are read on the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """Number of the newest line."""
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self._order = threading.Lock()

    def attach(self) -> None:
        """Add this handler to the root logger."""
        logging.getLogger().addHandler(self)

    def close(self) -> None:
        """Remove this handler from the root logger."""
        logging.getLogger().removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        try:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
        except Exception:
            self.handleError(record)
            return
        if len(text) > MAX_LINE_CHARS:
            text = f"{text[:MAX_LINE_CHARS]}… ({len(text) - MAX_LINE_CHARS} more characters cut)"
        with self._order:
            self.number += 1
            self._lines.append(
                LogLine(
                    number=self.number,
                    at=record.created,
                    level=_level(record.levelno),
                    area=record.name.rpartition(".")[2],
                    message=text.encode("utf-8", "backslashreplace").decode(),
                )
            )

    def page(self, query: LogQuery) -> LogPage:
        """Return the newest lines that match, oldest first. If `query.after` is set, return the first lines
        after it instead."""
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
            and (query.until is None or line.at <= query.until)
        ]
        chosen = found[-query.limit :] if query.after is None else found[: query.limit]
        return LogPage(lines=chosen, first=first, number=number)


def _level(number: int) -> Level:
    return _LEVELS[min(max(number // 10 - 1, 0), len(_LEVELS) - 1)]
