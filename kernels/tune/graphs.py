"""Measures the run time of CUDA graphs. Runs of several graphs can be interleaved, so that GPU clock drift
does not favour one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

_REPLAYS = 11


class Graphs:
    """Captures CUDA graphs on a separate stream and times them. The graphs share memory for temporary
    tensors: they may run in any order, but never at the same time, and a replay overwrites the results of
    earlier ones.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool: tuple[Any, ...] = ()
        # Hold on to this graph, because a memory pool can be shared only with a graph that still exists.
        self._first = self.capture(lambda: torch.zeros(1, device="cuda"))
        self._pool = (self._first.pool(),)

    def capture(
        self, run: Callable[[], object], before: Callable[[], object] | None = None
    ) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of `run`. First, `before` (by default `run`) is called without being captured;
        it must load every kernel and allocate every workspace used by `run`. Exceptions from launches
        propagate."""
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
        """Return each replay's time in microseconds. `order` contains the indices of the graphs to replay.
        The first of them is replayed once beforehand, untimed."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
            for event, index in zip(events, [order[0], *order], strict=True):
                graphs[index].replay()
                event.record()
            self._stream.synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in pairwise(events)]


def graph_microseconds(run: Callable[[], object]) -> float:
    """Return the median time, in microseconds, of one replay of `run` captured in a CUDA graph."""
    graphs = Graphs()
    # Drop the first timed replay, which is not representative.
    times = graphs.microseconds([graphs.capture(run)], [0] * (_REPLAYS + 1))[1:]
    return sorted(times)[len(times) // 2]
