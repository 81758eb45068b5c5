"""Shows the progress of a data transfer: on a terminal as a bar, otherwise as a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections import deque

from appliance.cli.output import is_terminal, of_seconds, shorten, terminal_width
from appliance.quantities import of_bytes, percent

_LINE_EVERY_S = 5.0
_RATE_OVER_S = 10.0
"""Period over which the transfer rate is averaged, in seconds."""
_BAR_CELLS = 20


class ByteProgress:
    """Shows a transfer's progress on standard error."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._live = is_terminal(sys.stderr)
        self._shown_at = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque()

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes have been transferred."""
        now = time.monotonic()
        self._samples.append((now, done))
        while now - self._samples[0][0] > _RATE_OVER_S:
            self._samples.popleft()
        if self._live:
            line = shorten(self._line(done, total, bar=True), (terminal_width(sys.stderr) or 80) - 1)
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif now - self._shown_at >= _LINE_EVERY_S:
            self._shown_at = now
            print(self._line(done, total, bar=False), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _line(self, done: int, total: int, *, bar: bool) -> str:
        share = min(1.0, done / total) if total else 1.0
        filled = int(share * _BAR_CELLS)
        picture = f" [{'#' * filled}{'.' * (_BAR_CELLS - filled)}]" if bar else ""
        facts = [percent(share), f"{of_bytes(done)} of {of_bytes(total)}"]
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        rate = (last - first) / (last_at - first_at) if last_at > first_at else 0.0
        if rate > 0:
            facts += [f"{of_bytes(rate)}/s", f"{of_seconds((total - done) / rate)} left"]
        return f"{self._title}{picture} {' · '.join(facts)}"
