"""Measures the run time of CUDA graphs. The runs of several graphs can be interleaved, so that a drift of the
GPU's clock does not favour one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

_REPLAYS = 11


class Graphs:
    """Captures CUDA graphs on a separate stream, and times them.

    The graphs share memory for temporary tensors. They may run one after another in any order, but never at
    the same time. A replay overwrites the results of earlier replays.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool: tuple[Any, ...] = ()
        # A memory pool can be shared only with a graph that still exists. This graph keeps the pool alive.
        self._first = self.capture(lambda: torch.zeros(1, device="cuda"))
        self._pool = (self._first.pool(),)

    def capture(
        self, run: Callable[[], object], before: Callable[[], object] | None = None
    ) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of `run`. First, `before` (by default `run`) is called without being captured.
        It must load every kernel and allocate every workspace that `run` uses. Exceptions from launches
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
        """Return the time of each replay in microseconds. `order` contains the indices of the graphs to
        replay. Before the timed replays, the first graph is replayed once."""
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
    # The first timed replay is not representative, so it is dropped.
    times = graphs.microseconds([graphs.capture(run)], [0] * (_REPLAYS + 1))[1:]
    return sorted(times)[len(times) // 2]
