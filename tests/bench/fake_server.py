"""A minimal OpenAI-compatible server with known timings, in a thread of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.waiting import until


@dataclass
class Behaviour:
    """How the fake server answers completion requests. Times are in seconds."""

    ttft_s: Callable[[int], float] = lambda number: 0.0
    """A function that returns the time to first token of completion n. Completion 0 is the probe before the
    run."""
    gap_s: float = 0.0
    tokens_per_chunk: int = 1
    most_tokens: int = 1 << 30
    """Maximum number of tokens in an answer, even if the request allows more."""
    sends_usage: bool = True
    keeps_alive: bool = True
    status: Callable[[int], int] = lambda number: 200
    breaks_after: int | None = None
    """Number of chunks after which the server closes the connection."""
    error_event_after: int | None = None
    hangs_after: int | None = None
    hangs_up_idle: bool = False
    """Whether to close a keep-alive connection, without an answer, when its next request arrives."""
    streams: bool = True
    api_key: str = ""
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "fake", "max_model_len": 10_000}])
    tokenizes: bool = False
    answers: Callable[[], bool] = lambda: True
    """Completions are answered only once this function has returned true."""
    at_once: int | None = None
    """Number of completions that run concurrently; additional requests wait."""


class FakeServer:
    """A fake server that listens on a TCP port of the loopback interface, or on a Unix socket."""

    def __init__(self, socket: str = "") -> None:
        self.behaviour = Behaviour()
        self.bodies: list[dict[str, Any]] = []
        """Bodies of the completion requests, in order of arrival."""
        self.connections = 0
        self.left = 0
        """Number of clients that disconnected during an answer."""
        self.busy_s = 0.0
        """Total time, in seconds, spent on completions that ran under the `at_once` limit."""
        self._done = 0
        self.port = 0
        self._socket = socket
        self._loop = asyncio.new_event_loop()
        self._turn: asyncio.Semaphore | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        started.wait(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def capacity(self) -> float:
        """The maximum throughput with `at_once`, in completions per second, calculated from the measured time
        per completion."""
        return self._done * (self.behaviour.at_once or 1) / self.busy_s

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _serve(self, started: threading.Event) -> None:
        async def start() -> None:
            if self._socket:
                await asyncio.start_unix_server(self._connection, self._socket)
            else:
                server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024)
                self.port = server.sockets[0].getsockname()[1]

        self._loop.run_until_complete(start())
        self._loop.call_soon(started.set)  # the server can be stopped only after its loop has started
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            first = True
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not first and self.behaviour.hangs_up_idle:
                    break
                first = False
                await self._answer(lines[0].split()[1], headers, body, reader, writer)
                await writer.drain()
                if not self.behaviour.keeps_alive:
                    break
        writer.close()

    async def _answer(
        self,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        behaviour = self.behaviour
        if behaviour.api_key and headers.get("authorization") != f"Bearer {behaviour.api_key}":
            self._plain(writer, 401, {"error": {"message": "unknown key"}})
        elif path == "/v1/models":
            self._plain(writer, 200, {"object": "list", "data": behaviour.models})
        elif path == "/tokenize" and behaviour.tokenizes:
            self._plain(writer, 200, {"tokens": [3, 4711, 12], "count": 3})
        elif path != "/v1/completions":
            self._plain(writer, 404, {"error": {"message": "unknown route"}})
        else:
            request = json.loads(body)
            number = len(self.bodies)
            self.bodies.append(request)
            if behaviour.at_once is None:
                await self._complete(number, request, reader, writer)
                return
            self._turn = self._turn or asyncio.Semaphore(behaviour.at_once)
            async with self._turn:
                began = time.monotonic()
                await self._complete(number, request, reader, writer)
                self.busy_s += time.monotonic() - began
                self._done += 1

    async def _complete(
        self,
        number: int,
        request: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        behaviour = self.behaviour
        await until(behaviour.answers, timeout_s=600)
        await asyncio.sleep(behaviour.ttft_s(number))
        status = behaviour.status(number)
        if status != 200:
            self._plain(writer, status, {"error": {"message": f"no, {status}"}})
            return
        if not behaviour.streams:
            self._plain(writer, 200, {"choices": [{"text": "whole", "finish_reason": "length"}]})
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            + (b"" if behaviour.keeps_alive else b"Connection: close\r\n")
            + b"\r\n"
        )
        tokens = min(request["max_tokens"], behaviour.most_tokens)
        chunks = -(-tokens // behaviour.tokens_per_chunk)
        for chunk in range(chunks):
            if chunk:
                await asyncio.sleep(behaviour.gap_s)
            if chunk == behaviour.breaks_after:
                writer.close()
                return
            if chunk == behaviour.hangs_after:
                await reader.read()
                self.left += 1
                return
            if chunk == behaviour.error_event_after:
                _event(writer, {"error": {"message": "the engine failed"}})
                break
            _event(writer, {"choices": [{"index": 0, "text": "x", "finish_reason": None}]})
            await writer.drain()
        else:
            _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            if behaviour.sends_usage:
                usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": tokens}
                _event(writer, {"choices": [], "usage": usage})
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _plain(self, writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        close = "" if self.behaviour.keeps_alive else "Connection: close\r\n"
        writer.write(f"HTTP/1.1 {status} X\r\n{close}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    writer.write(_chunk(b"data: " + json.dumps(document).encode() + b"\n\n"))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
