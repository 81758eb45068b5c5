"""Writes comments into event streams that have been idle for a while, because proxies close idle
connections."""

from __future__ import annotations

import asyncio
import time

from appliance.front.stream import EventStream
from appliance.http import Connection

HEAD_DELAY_S = 0.5
"""How long, in seconds, a stream's response head may wait for the first token. If the request is refused
within this time, the response still gets the error's HTTP status."""
COMMENT = b": waiting\n\n"


async def happens_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for the event, with an optional time limit. Return True if the event was set in time."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True


async def send_comments(client: Connection, stream: EventStream, interval_s: float) -> None:
    """Until the stream is done, write a comment to the client whenever `interval_s` seconds have passed since
    the last comment or since the arrival of the last token written, whichever is later. The response head
    must already have been written."""
    silent_since = time.monotonic()
    while not await happens_within(stream.done, silent_since + interval_s - time.monotonic()):
        silent_since = max(silent_since, stream.wrote_at)
        if time.monotonic() - silent_since >= interval_s:
            if client.writable and not client.disconnected:
                client.write_chunk(COMMENT)
            silent_since = time.monotonic()
