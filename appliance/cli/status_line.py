"""A terminal line that is overwritten while a command waits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from appliance.cli.output import is_terminal, printable, terminal_width
from appliance.protocol import LoadStatus, ReplicaStatus

_BAR_CELLS = 16
_MAX_WIDTH = 110
_INTERVAL_S = 0.25


class StatusLine:
    """A terminal line that each call to `show` overwrites. Nothing is written if the stream is not a
    terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.is_visible = is_terminal(self._stream)
        self._is_drawn = False

    def show(self, text: str) -> None:
        """Replace the text of the status line."""
        if self.is_visible:
            # A line that wraps cannot be overwritten.
            width = min(_MAX_WIDTH, terminal_width(self._stream) or _MAX_WIDTH) - 1
            print(f"\r{text[:width]}\x1b[K", end="", file=self._stream, flush=True)
            self._is_drawn = True

    def clear(self) -> None:
        """Remove the status line from the terminal."""
        if self._is_drawn:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
            self._is_drawn = False


def bar(share: float) -> str:
    """Return a progress bar for a fraction from 0 to 1."""
    filled = round(_BAR_CELLS * min(max(share, 0.0), 1.0))
    return f"[{'#' * filled}{'.' * (_BAR_CELLS - filled)}]"


def load_line(replica: str, detail: str, load: LoadStatus | None) -> str:
    """Format a loading replica's progress as one line, with a bar if the amount of work is known."""
    drawn = f"{bar(load.done / load.total)} " if load is not None and load.total else ""
    return printable(f"{replica} {drawn}{detail}")


@contextmanager
def loads_shown(replicas: Callable[[], list[ReplicaStatus]], stream: TextIO | None = None) -> Iterator[None]:
    """Show the progress of loading replicas on `stream` (default: standard error) while the context is
    active. Nothing is shown if `stream` is not a terminal. `replicas` returns the replicas' current status
    and is called in a thread. If this call raises an error, the progress is no longer shown.
    """
    line, ended = StatusLine(stream), threading.Event()

    def draw() -> None:
        while not ended.wait(_INTERVAL_S):
            loading = [one for one in replicas() if one.state in ("starting", "loading")]
            if loading:
                line.show(load_line(loading[0].name, loading[0].detail or loading[0].state, loading[0].load))
            else:
                line.clear()

    def draw_until_error() -> None:
        try:
            draw()
        except Exception:  # if the service does not respond, the command itself reports this
            line.clear()

    if not line.is_visible:
        yield
        return
    thread = threading.Thread(target=draw_until_error, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        line.clear()
