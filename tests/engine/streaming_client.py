"""A client that yields the outputs of one submission as an asynchronous iterator, for tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

from engine.client import ReplicaClient
from engine.messages import Output, Submit


class ReplicaDisconnectedError(Exception):
    """The replica's channel closed while a submission was running."""


class StreamingClient(ReplicaClient):
    """A `ReplicaClient` with a `generate` method. Its channel must remain open until every iterator has
    finished or failed."""

    def __init__(self, sock: socket.socket, on_disconnect: Callable[[list[int]], None]) -> None:
        self._queues: dict[int, asyncio.Queue[Output | None]] = {}
        """The queue of each running `generate` call, keyed by handle. None in a queue means that the replica
        has disconnected."""

        def disconnected(handles: list[int]) -> None:
            for queue in self._queues.values():
                queue.put_nowait(None)
            on_disconnect(handles)

        super().__init__(sock, disconnected)

    async def generate(self, submit: Submit) -> AsyncIterator[Output]:
        """Yield the outputs of a submission until every sample has finished. Closing the iterator early
        cancels the submission. Raises ReplicaDisconnectedError if the channel closes first."""
        if self.closed:
            raise ReplicaDisconnectedError(
                f"the channel was closed before request {submit.request_id} was submitted"
            )
        queue = self._queues[submit.handle] = asyncio.Queue()
        left = submit.n
        try:
            self.submit(submit, queue.put_nowait)
            while left:
                output = await queue.get()
                if output is None:
                    raise ReplicaDisconnectedError(
                        f"the channel closed while request {submit.request_id} was running"
                    )
                left -= bool(output.finish_reason)
                yield output
        finally:
            del self._queues[submit.handle]
            if left:
                self.cancel(submit.handle)
