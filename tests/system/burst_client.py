"""One client of a burst: its random request and the response that it received."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass
from typing import Any


@dataclass
class Got:
    """The result of one client's request."""

    prompt_tokens: int
    request_id: str = ""
    status: int = 0
    """HTTP status, or 0 if the connection closed without a response."""
    refusal: str = ""
    """Error code, if the response was an error."""
    whole: bool = False
    """Whether the answer was complete. If it was, `tokens` is the number of generated tokens that the answer
    reports."""
    tokens: int = 0
    """Number of tokens received. If the answer was cut off or the client abandoned it, only the tokens that
    the client certainly received are counted."""
    left: bool = False


def random_request(draw: random.Random) -> tuple[dict[str, Any], int]:
    """Return a body for /v1/completions and its number of prompt tokens."""
    size = draw.choice([1, 2, 5, 12, 30, 64, 90])
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [draw.randrange(7, 5000) for _ in range(size)],
        "n": draw.choice([1, 1, 1, 2]),
        "stream": draw.random() < 0.6,
        "ignore_eos": True,
        "temperature": draw.choice([0, 1]),
    }
    if draw.random() < 0.85:
        body["max_tokens"] = draw.choice([1, 2, 4, 8, 16, 40])
    if body["stream"]:
        body |= {"stream_options": {"include_usage": True}, "logprobs": 0}
    return body, size


async def ask(path: str, secret: str, draw: random.Random, start: asyncio.Event, found: list[Got]) -> None:
    """Send a request when the burst starts. Half of the refused clients retry immediately."""
    while True:
        body, size = random_request(draw)
        leaves_after = draw.choice([None, None, None, None, 0, 1, 3]) if body["stream"] else None
        got = Got(size)
        found.append(got)
        await _ask(path, secret, body, leaves_after, start, got)
        if got.refusal != "rate_limit_exceeded" or draw.random() < 0.5:
            return


async def _ask(
    path: str, secret: str, body: dict[str, Any], leaves_after: int | None, start: asyncio.Event, got: Got
) -> None:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: server\r\nAuthorization: Bearer {secret}\r\n"
        f"Connection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return
    received = bytearray()
    try:
        await start.wait()
        writer.write(head.encode() + content)
        while data := await reader.read(1 << 16):
            received += data
            if leaves_after is not None and received.count(b"data: {") >= leaves_after:
                got.left = True
                break
    except OSError:
        pass
    finally:
        writer.transport.abort() if got.left else writer.close()
        read_answer(bytes(received), bool(body["stream"]), got)


def read_answer(received: bytes, stream: bool, got: Got) -> None:
    """Record the response that the client received."""
    top, _, rest = received.partition(b"\r\n\r\n")
    lines = top.decode("latin-1").split("\r\n")
    if len(lines[0].split(" ")) < 2:
        return
    got.status = int(lines[0].split(" ")[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    got.request_id = headers.get("x-request-id", "")
    if got.status != 200:
        with contextlib.suppress(ValueError):
            got.refusal = json.loads(rest)["error"]["code"]
        return
    if not stream:
        if len(rest) == int(headers["content-length"]):
            got.whole, got.tokens = True, json.loads(rest)["usage"]["completion_tokens"]
        return
    for line in rest.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        try:
            event = json.loads(line.removeprefix(b"data: "))
        except ValueError:
            return
        if "error" in event:
            got.refusal = event["error"]["code"]
        elif event.get("usage"):
            said = event["usage"]["completion_tokens"]
            if said != got.tokens:
                raise AssertionError(f"{got.request_id}: {got.tokens} tokens arrived, but usage says {said}")
            got.whole = True
        else:
            got.tokens += sum(len((one["logprobs"] or {}).get("tokens", ())) for one in event["choices"])
