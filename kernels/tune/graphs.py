"""CUDA graphs that are timed: one alone, or several in turns, so that no drift of the clocks chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

_REPLAYS = 11


class Graphs:
    """Captures on a stream of its own, and times what it captured.

    The graphs share memory for what lives within one replay: they may run one after another, in any order,
    but never at once, and their results do not outlive the next replay.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool: tuple[Any, ...] = ()
        # Memory can be shared with graphs that live: this one does until the last.
        self._first = self.capture(lambda: torch.zeros(1, device="cuda"))
        self._pool = (self._first.pool(),)

    def capture(
        self, run: Callable[[], object], before: Callable[[], object] | None = None
    ) -> torch.cuda.CUDAGraph:
        """A graph of `run`. `before` runs first, uncaptured: it must load every kernel and make every
        workspace that `run` needs; None: `run` itself. Raises what a launch raises."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            (before or run)()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(*self._pool)
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def microseconds(self, graphs: Sequence[torch.cuda.CUDAGraph], order: Sequence[int]) -> list[float]:
        """Of each replay, in this order of indices; one more, of the first, goes ahead and does not count."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
            for event, index in zip(events, [order[0], *order], strict=True):
                graphs[index].replay()
                event.record()
            self._stream.synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in pairwise(events)]


def graph_microseconds(run: Callable[[], object]) -> float:
    """Of one replay of `run` in a graph: the median of some."""
    graphs = Graphs()
    # The second counts as little as the first.
    times = graphs.microseconds([graphs.capture(run)], [0] * (_REPLAYS + 1))[1:]
    return sorted(times)[len(times) // 2]
