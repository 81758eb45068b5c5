"""The torch-free door of the engine: launch a replica, hold a front's end of its data channel.

`appliance` imports this module, `engine.messages` and `engine.sizing`, and nothing else of the engine.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

from engine.launch import ReplicaGroup, module_command, module_environment
from engine.messages import Cancel, Output, StepFrame, Submit
from engine.wire import MAX_BACKLOG_BYTES, Channel, socketpair

__all__ = [
    "Channel",
    "ReplicaClient",
    "ReplicaGroup",
    "ReplicaLost",
    "module_command",
    "module_environment",
    "socketpair",
]

OutputSink = Callable[[Output], None]


class ReplicaLost(Exception):
    """The replica's channel closed while a submission was running."""


class ReplicaClient:
    """A front's asyncio handle on one replica: submissions go down, each output comes back to its sink.

    Handles are numbered here. A sink is called on the event loop once for each `Output`, in order; after a
    sample's last output nothing follows. When the replica dies, `on_lost` is called once with the handles
    that had not ended.
    """

    def __init__(self, sock: socket.socket, on_lost: Callable[[list[int]], None]) -> None:
        # The scores of a long prompt come in one frame, and a replica is not hostile.
        self._channel: Channel[StepFrame] = Channel(sock, StepFrame, MAX_BACKLOG_BYTES)
        self._sinks: dict[int, OutputSink] = {}
        self._open_samples: dict[int, int] = {}
        self._queues: dict[int, asyncio.Queue[Output | None]] = {}
        """Of the running `generate` calls, by handle; None says that the replica is lost."""
        self._next_handle = 0
        self._on_lost = on_lost
        self._channel.listen(self._deliver, self._lost)

    @property
    def closed(self) -> bool:
        """The replica is gone."""
        return self._channel.closed

    def next_handle(self) -> int:
        """A handle that this channel has not used."""
        self._next_handle += 1
        return self._next_handle

    def submit(self, submit: Submit, sink: OutputSink) -> None:
        """Send `submit`, whose handle came from `next_handle`, and route its outputs to `sink`."""
        self._sinks[submit.handle] = sink
        self._open_samples[submit.handle] = submit.n
        self._channel.send(submit)

    def cancel(self, handle: int, sample: int | None = None) -> None:
        """Nobody waits for the submission (or one sample of it); its last outputs still arrive."""
        if handle in self._sinks:
            self._channel.send(Cancel(handle, sample))

    def close(self) -> None:
        """Close the channel: the replica cancels what came from it."""
        self._channel.close()

    async def generate(self, submit: Submit) -> AsyncIterator[Output]:
        """Outputs of one submission until every sample has ended. Leaving early cancels it.

        Raises ReplicaLost when the channel closes first.
        """
        if self.closed:
            raise ReplicaLost(f"the replica was gone before request {submit.request_id} was submitted")
        queue = self._queues[submit.handle] = asyncio.Queue()
        left = submit.n
        try:
            self.submit(submit, queue.put_nowait)
            while left:
                output = await queue.get()
                if output is None:
                    raise ReplicaLost(f"the replica died while request {submit.request_id} was running")
                left -= bool(output.finish)
                yield output
        finally:
            del self._queues[submit.handle]
            if left:
                self.cancel(submit.handle)

    def _deliver(self, frame: StepFrame) -> None:
        sinks = self._sinks
        for output in frame.outputs:
            sink = sinks.get(output.handle)
            if sink is None:
                continue
            if output.finish:
                self._open_samples[output.handle] -= 1
                if not self._open_samples[output.handle]:
                    del self._sinks[output.handle], self._open_samples[output.handle]
            sink(output)

    def _lost(self) -> None:
        handles = list(self._sinks)
        self._sinks.clear()
        self._open_samples.clear()
        for queue in self._queues.values():
            queue.put_nowait(None)
        self._on_lost(handles)
