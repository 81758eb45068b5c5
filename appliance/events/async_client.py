"""The admin client for asyncio programs, such as the console. Other programs use `appliance.client`. Both
clients make the calls defined in `appliance.calls`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import TypeVar

import httptools

from appliance import calls
from appliance.calls import READ_ONLY_HEADER, Call
from appliance.client import (
    STREAM_TIMEOUT_S,
    ServiceNotRunningError,
    call_timeout_s,
    no_response,
    not_running,
)
from appliance.events.frames import SnapshotAssembler
from appliance.ownership import check_peer, trusted_directory
from appliance.snapshot import Snapshot

Answer = TypeVar("Answer")

_READ_BYTES = 64 << 10
_MAX_LINE_BYTES = 64 << 20


class AsyncAdminClient:
    """Sends calls to the service that uses a given run directory. Each call opens a separate connection, so
    any number of calls can run concurrently. Cancelling a call closes its connection. Raises the same errors
    as `appliance.client.AdminClient`.
    """

    def __init__(
        self,
        run_dir: str | Path,
        timeout_s: float = 10.0,
        key: str | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        """`key` must have the `read` or `admin` scope; operators need no key. If `read_only` is true, the
        service refuses this client's actions."""
        self.socket = Path(run_dir) / "admin.sock"
        self._timeout_s = timeout_s
        self._key = key
        self._read_only = read_only

    async def call(self, call: Call[Answer]) -> Answer:
        """Make an admin API call and return its result."""
        async with self._sent(call, call_timeout_s(call, self._timeout_s)) as response:
            content = b"".join([piece async for piece in response.pieces()])
        return call.decode(response.status, content, str(self.socket))

    async def follow(self, call: Call[Answer]) -> AsyncGenerator[Answer, None]:
        """Make a streaming call and yield values until the service ends the stream. Close the iterator to
        close the connection."""
        async with self._sent(call, STREAM_TIMEOUT_S) as response:
            rest = b""
            async for piece in response.pieces():
                if response.status != 200:
                    rest += piece
                    continue
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if (value := call.decode_line(line, str(self.socket))) is not None:
                        yield value
                if len(rest) > _MAX_LINE_BYTES:
                    raise ServiceNotRunningError(
                        f"{self.socket} sent a line longer than {_MAX_LINE_BYTES} bytes: if the command "
                        "was updated, restart the service"
                    )
            if response.status != 200:
                call.decode(response.status, rest, str(self.socket))

    async def snapshots(self, hz: int = 2) -> AsyncGenerator[Snapshot, None]:
        """Yield snapshots of the service, `hz` times a second, until the service ends the stream."""
        assembler = SnapshotAssembler()
        async with contextlib.aclosing(self.follow(calls.events(hz))) as frames:
            async for frame in frames:
                yield assembler.add(frame)

    @contextlib.asynccontextmanager
    async def _sent(self, call: Call[Answer], timeout_s: float | None) -> AsyncIterator[_ResponseStream]:
        """Send an admin API call and yield its response. Leaving the `with` block closes the connection."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._connect()
        except (OSError, TimeoutError) as error:
            raise not_running(self.socket, error) from error
        try:
            writer.write(self._request(call))
            response = _ResponseStream(reader, timeout_s)
            await response.read_head()
            yield response
        except (OSError, httptools.HttpParserError) as error:
            raise no_response(self.socket, call, error) from error
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        uids = trusted_directory(self.socket.parent, "--run-dir")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, os.fspath(self.socket))
            check_peer(sock, uids)
            return await asyncio.open_unix_connection(sock=sock)
        except BaseException:
            sock.close()
            raise

    def _request(self, call: Call[Answer]) -> bytes:
        lines = [f"{call.method} {call.path} HTTP/1.1", "host: appliance", "connection: close"]
        if self._key is not None:
            lines.append(f"authorization: Bearer {self._key}")
        if self._read_only:
            lines.append(f"{READ_ONLY_HEADER}: true")
        if call.body is not None:
            lines += ["content-type: application/json", f"content-length: {len(call.body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (call.body or b"")


class _ResponseStream:
    """Parses a response as it arrives. Raises OSError if the connection breaks or no data arrives within the
    time limit."""

    def __init__(self, reader: asyncio.StreamReader, timeout_s: float | None) -> None:
        self.status = 0
        self._reader = reader
        self._timeout_s = timeout_s
        self._parser = httptools.HttpResponseParser(self)
        self._content: list[bytes] = []
        self._has_head = self._is_complete = False

    async def read_head(self) -> None:
        """Read until the response status is known."""
        while not self._has_head:
            await self._read()
        self.status = self._parser.get_status_code()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the response body in chunks."""
        while self._content or not self._is_complete:
            content, self._content = self._content, []
            if content:
                yield b"".join(content)
            else:
                await self._read()

    async def _read(self) -> None:
        async with asyncio.timeout(self._timeout_s):
            received = await self._reader.read(_READ_BYTES)
        if not received:
            raise ConnectionResetError("the connection was closed before the end of the response")
        self._parser.feed_data(received)

    # ── called by the HTTP parser ──

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._content.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True
