"""A client process, started as `python -m appliance.bench.worker FD`. The process receives a load over the
pipe with file descriptor FD, reports that it is ready, and receives the start time. The process then sends
its share of the requests and reports the results."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from appliance.bench.client import Client, TargetExchange
from appliance.bench.load import STOPPED, BenchProgress, Load, Record

PROGRESS_S = 0.2
_MAX_PREPARED = 4096
_MAX_PREPARED_TOKENS = 16 << 20
"""Requests are encoded in advance until their prompts total this many tokens, at about six bytes per token.
All later requests are encoded just before they are sent."""


class Sender:
    """Sends a client process's requests."""

    def __init__(self, load: Load, worker: int, workers: int) -> None:
        self._load = load
        self._numbers = load.numbers(worker, workers)
        self._streams = len(range(worker, load.streams, workers))
        prepared = min(_MAX_PREPARED, _MAX_PREPARED_TOKENS // load.prompt_tokens)
        self._bodies = {number: load.body(number) for number in self._numbers[:prepared]}
        self._running: set[TargetExchange] = set()
        self._records: list[Record] = []
        self._chunks = 0

    async def run(self, start: float, pipe: Connection) -> None:
        """Send all requests, starting at time `start`, and report the results over the pipe."""
        cpu, wall = time.process_time(), time.monotonic()

        def report(is_done: bool) -> None:
            records, self._records = self._records, []
            chunks = self._chunks + sum(exchange.chunks for exchange in self._running)
            share = (time.process_time() - cpu) / max(time.monotonic() - wall, 1e-9)
            pipe.send(BenchProgress(records, len(self._running), chunks, share, is_done))

        async def report_regularly() -> None:
            while True:
                await asyncio.sleep(PROGRESS_S)
                report(is_done=False)

        reporter = asyncio.create_task(report_regularly())
        client = Client(self._load.target, self._load.timeout_s)
        try:
            async with asyncio.timeout(start + self._load.stop_after_s - time.monotonic()):
                await asyncio.sleep(max(0.0, start - time.monotonic()))
                await (self._open_loop(client, start) if self._load.arrivals else self._closed_loop(client))
        except TimeoutError:
            pass  # `_send` has already recorded the open requests as stopped
        finally:
            reporter.cancel()
            client.close()
        report(is_done=True)

    async def _closed_loop(self, client: Client) -> None:
        numbers = iter(self._numbers)

        async def stream(numbers: Iterator[int]) -> None:
            for number in numbers:
                body = self._body(number)
                await self._send(client, body, time.monotonic())

        async with asyncio.TaskGroup() as streams:
            for _ in range(self._streams):
                streams.create_task(stream(numbers))

    async def _open_loop(self, client: Client, start: float) -> None:
        async with asyncio.TaskGroup() as streams:
            for number in self._numbers:
                body, due_at = self._body(number), start + self._load.arrivals[number]
                # Let the event loop read chunks that have arrived, even if requests are late.
                await asyncio.sleep(0)
                while (wait := due_at - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                streams.create_task(self._send(client, body, due_at))

    async def _send(self, client: Client, body: bytes, due_at: float) -> None:
        exchange = TargetExchange(streamed=True)
        self._running.add(exchange)
        try:
            record = await client.complete(body, exchange, due_at)
            # `report` may have replaced `_records` during the await, so read it only now
            self._records.append(record)
        except asyncio.CancelledError:
            self._records.append(Record(due_at, 0.0, time.monotonic(), exchange.first_at, failure=STOPPED))
            raise
        finally:
            self._running.discard(exchange)
            self._chunks += exchange.chunks

    def _body(self, number: int) -> bytes:
        return self._bodies.pop(number, b"") or self._load.body(number)


def main() -> None:
    """Run one load as a client process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which stops its workers
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    import uvloop

    pipe = Connection(int(sys.argv[1]))
    try:
        sender = Sender(*pipe.recv())
        gc.freeze()
        # Run the garbage collector less often than the default of once per 700 objects, because chunks create
        # no reference cycles.
        gc.set_threshold(50_000, 20, 100)
        pipe.send(None)
        uvloop.run(sender.run(pipe.recv(), pipe))
    except (EOFError, BrokenPipeError):
        pass  # the parent process has exited


if __name__ == "__main__":
    main()
