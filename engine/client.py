"""The service's interface to the engine, for launching replicas and sending requests to them from a front
process. This module does not load torch.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from engine.child_log import ChildLog, child_records
from engine.launch import ReplicaGroup, module_command, module_environment, run_module
from engine.messages import Cancel, Output, StepFrame, Submit
from engine.process_memory import return_freed_memory, return_memory_periodically
from engine.wire import MAX_BACKLOG_BYTES, Channel, socketpair

__all__ = [
    "Channel",
    "ChildLog",
    "ReplicaClient",
    "ReplicaGroup",
    "child_records",
    "module_command",
    "module_environment",
    "return_freed_memory",
    "return_memory_periodically",
    "run_module",
    "socketpair",
]

OutputSink = Callable[[Output], None]


class ReplicaClient:
    """A front process's asyncio client for one replica. It sends submissions and passes each output to its
    submission's sink. Sinks are called on the event loop, once per `Output` and in order, until every sample
    has sent its last output. When the channel closes, `on_closed` is called once with the handles of all
    unfinished submissions. Then each of these submissions' `on_disconnect` callbacks is called.
    """

    def __init__(self, sock: socket.socket, on_closed: Callable[[list[int]], None]) -> None:
        # The frame size limit is high because a long prompt's logprobs arrive in one frame. The replica is
        # trusted, so this is safe.
        self._channel: Channel[StepFrame] = Channel(sock, StepFrame, MAX_BACKLOG_BYTES)
        self._sinks: dict[int, OutputSink] = {}
        self._open_samples: dict[int, int] = {}
        self._next_handle = 0
        self._on_closed = on_closed
        self._on_disconnect: dict[int, Callable[[], None]] = {}
        self._channel.listen(self._deliver, self._disconnected)

    @property
    def closed(self) -> bool:
        """Whether the channel to the replica is closed."""
        return self._channel.closed

    @property
    def backlog_bytes(self) -> int:
        """Number of queued bytes that the replica's socket has not accepted yet."""
        return self._channel.backlog_bytes

    def next_handle(self) -> int:
        """Return a handle that has not been used on this channel."""
        self._next_handle += 1
        return self._next_handle

    def submit(
        self, submit: Submit, sink: OutputSink, on_disconnect: Callable[[], None] | None = None
    ) -> None:
        """Send `submit` and route its outputs to `sink`. `submit.handle` must have been returned by
        `next_handle`."""
        self._sinks[submit.handle] = sink
        if on_disconnect is not None:
            self._on_disconnect[submit.handle] = on_disconnect
        self._open_samples[submit.handle] = submit.n
        self._channel.send(submit)

    def cancel(self, handle: int, sample: int | None = None) -> None:
        """Cancel a submission, or only one of its samples. Each cancelled sample still produces a last
        output."""
        if handle in self._sinks:
            self._channel.send(Cancel(handle, sample))

    def forget(self, handle: int) -> None:
        """Remove a submission's `on_disconnect` callback."""
        self._on_disconnect.pop(handle, None)

    def close(self) -> None:
        """Close the channel. The replica then cancels all of this client's submissions."""
        self._channel.close()

    def _deliver(self, frame: StepFrame) -> None:
        sinks = self._sinks
        for output in frame.outputs:
            sink = sinks.get(output.handle)
            if sink is None:
                continue
            if output.finish_reason:
                self._open_samples[output.handle] -= 1
                if not self._open_samples[output.handle]:
                    del self._sinks[output.handle], self._open_samples[output.handle]
                    self._on_disconnect.pop(output.handle, None)
            sink(output)

    def _disconnected(self) -> None:
        handles = list(self._sinks)
        self._sinks.clear()
        self._open_samples.clear()
        self._on_closed(handles)
        for handle in handles:
            if (on_disconnect := self._on_disconnect.pop(handle, None)) is not None:
                on_disconnect()
