"""`python -m appliance.bench.worker --channel FD`: one process that sends requests as its parent plans them.

It ends when the channel does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator

from appliance.bench.bodies import completion
from appliance.bench.client import Client, Streamed
from appliance.bench.messages import STOPPED, Done, Go, Plan, Progress, Ready, Record, ToWorker
from engine.client import Channel

PROGRESS_S = 0.2
_MADE_AHEAD = 4096
"""Requests whose bytes are ready before the start; later ones are made when they are sent."""
_MADE_AHEAD_TOKENS = 16 << 20
"""Of those together: a token takes about six bytes."""


class Run:
    """One plan, carried out."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._client = Client(plan.target, plan.timeout_s)
        ahead = min(_MADE_AHEAD, _MADE_AHEAD_TOKENS // plan.prompting.prompt_tokens)
        self._ahead = [self._body(number) for number in plan.requests[:ahead]]
        self._running: dict[int, tuple[float, Streamed]] = {}
        self._records: list[Record] = []
        self._chunks = 0

    async def carry_out(self, start: float) -> None:
        """Send everything, beginning at `start`; cancel to give up."""
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        try:
            if self._plan.arrivals:
                await self._open_loop(start)
            else:
                await self._closed_loop()
        finally:
            self._client.close()

    def progress(self) -> Progress:
        """What happened since the last time."""
        records, self._records = self._records, []
        now = time.monotonic()
        first_since, end_since = now - self._plan.ttft_limit_s, now - self._plan.e2e_limit_s
        return Progress(
            records=records,
            running=len(self._running),
            chunks=self._chunks + sum(streamed.chunks for _, streamed in self._running.values()),
            overdue=sum(
                began < end_since or (streamed.first_at is None and began < first_since)
                for began, streamed in self._running.values()
            ),
        )

    async def _closed_loop(self) -> None:
        requests = enumerate(self._plan.requests)
        async with asyncio.TaskGroup() as streams:
            for _ in range(min(self._plan.concurrency, len(self._plan.requests))):
                streams.create_task(self._one_after_another(requests))

    async def _one_after_another(self, requests: Iterator[tuple[int, int]]) -> None:
        for index, number in requests:
            body = self._take_body(index, number)
            await self._send(number, body, time.monotonic())

    async def _open_loop(self, start: float) -> None:
        async with asyncio.TaskGroup() as streams:
            for index, (number, arrival) in enumerate(
                zip(self._plan.requests, self._plan.arrivals, strict=True)
            ):
                body = self._take_body(index, number)
                # At least once, however late we are: what was sent must be read, and Stop be heard.
                await asyncio.sleep(max(0.0, start + arrival - time.monotonic()))
                while (wait := start + arrival - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                streams.create_task(self._send(number, body, start + arrival))

    async def _send(self, number: int, body: bytes, due_at: float) -> None:
        streamed = Streamed()
        self._running[number] = (due_at, streamed)
        try:
            record = await self._client.complete(number, body, streamed, due_at)
            self._records.append(record)
        except asyncio.CancelledError:
            self._records.append(
                Record(number, due_at, 0.0, time.monotonic(), streamed.first_at, failure=STOPPED)
            )
            raise
        finally:
            del self._running[number]
            self._chunks += streamed.chunks

    def _take_body(self, index: int, number: int) -> bytes:
        if index < len(self._ahead):
            body, self._ahead[index] = self._ahead[index], b""
            return body
        return self._body(number)

    def _body(self, number: int) -> bytes:
        return completion(self._plan.target, self._plan.prompting, number)


class Worker:
    """Carries out plan after plan, until the parent closes the channel."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel: Channel[ToWorker] = Channel(sock, ToWorker)
        self._over = asyncio.Event()
        self._run: Run | None = None
        self._work: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Do as the parent says, to the end. A mistake of ours is raised: a worker that dies is noticed, a
        run that lacks requests might not be."""
        self._channel.listen(self._hear, self._over.set)
        await self._over.wait()
        if self._work is not None and self._work.done():
            self._work.result()

    def _hear(self, message: ToWorker) -> None:
        if isinstance(message, Plan):
            self._run = Run(message)
            self._channel.send(Ready())
        elif isinstance(message, Go) and self._run is not None:
            self._work = asyncio.create_task(self._carry_out(self._run, message.at))
            self._work.add_done_callback(self._worked)
        elif self._work is not None:
            self._work.cancel()

    def _worked(self, work: asyncio.Task[None]) -> None:
        if work.exception() is not None:
            self._over.set()

    async def _carry_out(self, run: Run, start: float) -> None:
        cpu, wall = time.process_time(), time.monotonic()
        gc.freeze()
        reporter = asyncio.create_task(self._report(run))
        try:
            await run.carry_out(start)
        except asyncio.CancelledError:
            pass  # Stop: what was cut off is on record
        finally:
            reporter.cancel()
            gc.unfreeze()
        self._channel.send(run.progress())
        self._channel.send(Done(time.process_time() - cpu, time.monotonic() - wall))

    async def _report(self, run: Run) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._channel.send(run.progress())


async def _serve(sock: socket.socket) -> None:
    await Worker(sock).serve()


def main() -> int:
    """Become a worker."""
    parser = argparse.ArgumentParser(prog="python -m appliance.bench.worker", description=__doc__)
    parser.add_argument("--channel", type=int, required=True, help="descriptor of the channel to the parent")
    arguments = parser.parse_args()
    # Ctrl-C reaches the whole group; the parent decides when a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    import uvloop

    # Chunks make no cycles; the default looks for them every 700 objects.
    gc.set_threshold(50_000, 20, 100)
    uvloop.run(_serve(socket.socket(fileno=arguments.channel)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
