"""One process of a flood: `python -I attackers.py` reads its orders, a JSON object, from standard input.

It uses only the standard library, so that it starts quickly. It attacks one address for the given time, and
then prints a report as JSON: how many connections, requests and bytes there were, and the statuses of the
answers. It stops early if standard input is closed, because its parent has then exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

RECEIVE_BUFFER_BYTES = 4096
DRIP_S = 0.05
"""Interval, in seconds, at which a slow sender or reader sends or reads one byte."""
HOLD_S = 1.0
"""Time, in seconds, for which a connection with an unfinished body is kept open."""


@dataclass
class Orders:
    """The orders for one process of a flood."""

    flood: str
    address: Any
    """Path of a Unix socket, or host and port of a TCP address."""
    seconds: float
    connections: int
    path: str = "/v1/completions"
    key: str = ""
    """Key to send with requests. If it is empty, no key is sent."""
    max_body_bytes: int = 1 << 20
    source: str = ""
    """Local TCP address from which to connect. If it is empty, the kernel chooses one."""
    pause_s: float = 0.0
    """Pause, in seconds, between one connection and the next."""
    min_requests: int = 0
    """Number of requests until which the flood goes on after its time is over."""


@dataclass
class Report:
    """The report of one process of a flood."""

    connections: int = 0
    refused_connections: int = 0
    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    statuses: Counter[str] = field(default_factory=Counter)


class Wire:
    """One connection of an attacker."""

    def __init__(self, orders: Orders, report: Report, sock: socket.socket, ends_at: float) -> None:
        self.orders, self.report, self.sock, self.ends_at = orders, report, sock, ends_at
        self._loop = asyncio.get_running_loop()

    def head(self, method: str, *headers: str) -> bytes:
        """Return a request head with the path and the key from the orders."""
        lines = [f"{method} {self.orders.path} HTTP/1.1", "Host: x", *headers]
        if self.orders.key:
            lines.append(f"Authorization: Bearer {self.orders.key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    def post(self, body: Any) -> bytes:
        """Return a complete POST request with this body as JSON."""
        data = json.dumps(body).encode()
        return self.head("POST", "Content-Type: application/json", f"Content-Length: {len(data)}") + data

    async def send(self, data: bytes, requests: int = 1) -> None:
        """Send all the data, and count it as `requests` requests."""
        await self._loop.sock_sendall(self.sock, data)
        self.report.requests += requests
        self.report.sent_bytes += len(data)

    async def receive(self, size: int = 1 << 16) -> bytes:
        """Return the data that has arrived, or b"" at the end of the connection."""
        data = await self._loop.sock_recv(self.sock, size)
        self.report.received_bytes += len(data)
        return data

    async def answer(self) -> bool:
        """Read one complete answer that has a Content-Length. Returns whether the connection stays open."""
        data = b""
        while b"\r\n\r\n" not in data:
            if not (piece := await self.receive()):
                return False
            data += piece
        head, _, rest = data.partition(b"\r\n\r\n")
        self.report.statuses[head.split(b" ")[1].decode()] += 1
        fields = head.lower().split(b"\r\n")
        length = next((int(line.split(b":")[1]) for line in fields if line.startswith(b"content-length:")), 0)
        left = length - len(rest)
        while left > 0:
            if not (piece := await self.receive()):
                return False
            left -= len(piece)
        return b"connection: close" not in fields

    async def until_closed(self) -> None:
        """Discard incoming data until the connection is closed."""
        while await self.receive():
            pass

    def remaining_s(self) -> float:
        """Return the time that is left until the end of the flood."""
        return max(self.ends_at - time.monotonic(), 0.0)


async def pipelining(wire: Wire) -> None:
    """Send small requests without waiting for answers. Discard the answers."""
    data = wire.head("GET") * 2000
    reader = asyncio.ensure_future(wire.until_closed())
    try:
        while not reader.done():
            await wire.send(data, 2000)
            await asyncio.sleep(wire.orders.pause_s)
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def bad_keys(wire: Wire) -> None:
    """Send one request after another with a key that does not exist."""
    wire.orders.key = "ak-" + os.urandom(16).hex()
    await wire.send(wire.head("GET"))
    while await wire.answer():
        await wire.send(wire.head("GET"))


async def huge_prompts(wire: Wire) -> None:
    """Send prompts of the maximum body size one after another."""
    prompt = "word " * ((wire.orders.max_body_bytes - 1000) // 5)
    request = wire.post({"model": "demo", "prompt": prompt, "max_tokens": 1})
    await wire.send(request)
    while await wire.answer():
        await asyncio.sleep(wire.orders.pause_s)
        await wire.send(request)


async def huge_bodies(wire: Wire) -> None:
    """Send a body without its last byte, and keep the connection open."""
    size = wire.orders.max_body_bytes
    await wire.send(wire.head("POST", f"Content-Length: {size}"))
    await wire.send(b" " * (size - 1), 0)
    async with asyncio.timeout(min(HOLD_S, wire.remaining_s())):
        await wire.answer()


async def slow_bodies(wire: Wire) -> None:
    """Send a body byte by byte."""
    await wire.send(wire.head("POST", f"Content-Length: {min(wire.orders.max_body_bytes, 1000)}"))
    for _ in range(999):
        await asyncio.sleep(DRIP_S)
        await wire.send(b" ", 0)


async def slow_heads(wire: Wire) -> None:
    """Send a complete request, with the key if there is one. After the answer, send a large request head that
    is never completed, and keep the connection open."""
    await wire.send(wire.head("GET"))
    if await wire.answer():
        await wire.send(wire.head("GET")[:-2] + b"X-Filling: " + b"x" * 60_000)
        await wire.until_closed()


async def idle_connections(wire: Wire) -> None:
    """Send nothing until the service closes the connection."""
    await wire.until_closed()


async def slow_streams(wire: Wire) -> None:
    """Request a stream and read it byte by byte."""
    body = {"model": "demo", "prompt": "x = ", "max_tokens": 100, "ignore_eos": True, "stream": True}
    await wire.send(wire.post(body))
    while await wire.receive(1):
        await asyncio.sleep(DRIP_S)


async def slow_answers(wire: Wire) -> None:
    """Request a long answer and read it byte by byte."""
    if wire.orders.path == "/tokenize":
        text = "a b c " * (min(wire.orders.max_body_bytes, 1 << 20) // 6 - 100)
        await wire.send(wire.post({"model": "demo", "prompt": text}))
    else:
        await wire.send(wire.head("GET"))
    while await wire.receive(1):
        await asyncio.sleep(DRIP_S)


FLOODS: dict[str, Callable[[Wire], Awaitable[None]]] = {
    one.__name__: one
    for one in (
        pipelining,
        bad_keys,
        huge_prompts,
        huge_bodies,
        slow_bodies,
        slow_heads,
        idle_connections,
        slow_streams,
        slow_answers,
    )
}


async def attack(orders: Orders, report: Report) -> None:
    """Keep the given number of attacking connections active until the time is over and enough requests have
    been sent."""
    ends_at = time.monotonic() + orders.seconds
    flood = FLOODS[orders.flood]

    async def client() -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                await connect_and_attack()
            await asyncio.sleep(orders.pause_s)

    async def connect_and_attack() -> None:
        unix = isinstance(orders.address, str)
        with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as sock:
            sock.setblocking(False)
            if orders.source:
                sock.bind((orders.source, 0))
            if flood in (slow_streams, slow_answers):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            try:
                address = orders.address if unix else tuple(orders.address)
                await asyncio.get_running_loop().sock_connect(sock, address)
            except OSError:
                report.refused_connections += 1
                await asyncio.sleep(0.05)
                return
            report.connections += 1
            await flood(Wire(orders, report, sock, ends_at))

    async def end() -> None:
        await asyncio.sleep(orders.seconds)
        while report.requests < orders.min_requests:
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(end()), *(asyncio.create_task(client()) for _ in range(orders.connections))]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def burn(orders: Orders) -> None:
    """Use CPU time until the time is over, as the baseline load for a flood."""
    ends_at = time.monotonic() + orders.seconds
    while time.monotonic() < ends_at:
        pass


def main() -> None:
    """Execute the orders from standard input and print the report."""
    orders, report = Orders(**json.loads(sys.stdin.readline())), Report()

    def end_with_the_parent() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    if orders.flood == "cpu_load":
        burn(orders)
    else:
        asyncio.run(attack(orders, report))
    print(json.dumps(vars(report)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
