"""Tests of stalls and KV blocks on a real service: a long prompt delays a stream, and the console's live
source and `appliance top` name the request, its tenant and its blocks."""

from __future__ import annotations

import asyncio
import base64
import random
import threading
import time
from array import array
from typing import Any

import msgspec
import pytest

from appliance.snapshot import NO_OWNER, Snapshot, Stall
from console.lines import plain
from console.live import LiveSource
from console.session import ConsoleSession
from tests.console.test_schema import undelivered
from tests.system.service import Service, service
from tests.system.test_deaths import stream_until

pytestmark = pytest.mark.system

_WAIT_S = 240.0
_LATE = {"kv[].hit_rate", "kv[].hit_window_s"}
"""Fields that have no value in a replica's first minute. `tests/monitoring/test_samples.py` tests them."""
_LONG_TOKENS = 100
"""Every long prompt has more tokens than this. The test needs the number because, on a busy machine, steps
without a long prompt may also be slow."""


def long_stall(snapshot: Snapshot) -> Stall | None:
    """Return the newest stall with a long prompt and a known tenant, or None. Only the last five stalls are
    searched, because the console shows no more. A stall's tenant is unknown if the request has already ended.
    """
    stalls = reversed(snapshot.stalls[-5:])
    return next((one for one in stalls if one.tenant and one.prompt_tokens > _LONG_TOKENS), None)


def ask_long_prompts(stop: threading.Event, running: Service) -> None:
    """Send one long prompt after another. Each prompt is new to the prefix cache."""
    chance = random.Random(1)
    with running.client(timeout=600) as client:
        while not stop.is_set():
            words = " ".join(str(chance.randrange(10_000)) for _ in range(180))
            client.completions.create(model="demo", prompt=words, max_tokens=2)
            stop.wait(0.3)


def named(snapshot: dict[str, Any]) -> set[str]:
    """Return the requests that own KV blocks according to `appliance top --json`."""
    found: set[str] = set()
    for one in snapshot["kv"]:
        if blocks := one["blocks"]:
            owners = array("H", base64.b64decode(blocks["owners"]))
            states = base64.b64decode(blocks["states"])
            assert len(owners) == len(states) == -(-one["blocks_total"] // blocks["stride"])
            for state, owner in zip(states, owners, strict=True):
                assert owner == NO_OWNER or state >= 2
            found |= {blocks["requests"][owner] for owner in owners if owner != NO_OWNER}
    return found


async def watch(running: Service) -> tuple[Snapshot, set[str], list[Snapshot]]:
    """Read snapshots until a stall names a tenant and every field has had a value. Return the newest
    snapshot, the fields that never had a value, and all snapshots."""
    source, seen = LiveSource(running.run_dir, interval_s=0.5), list[Snapshot]()
    source.reads_blocks = True
    deadline = time.monotonic() + _WAIT_S
    while True:
        newest = await source.next()
        seen.append(msgspec.msgpack.decode(msgspec.msgpack.encode(newest), type=Snapshot))
        missing = undelivered(seen, ("stalls[].", "kv[].", "batches[].", "requests[].blocks")) - _LATE
        shown = long_stall(newest) is not None and any(
            len(one.requests) for cache in newest.kv if (one := cache.blocks) is not None
        )
        if (shown and not missing) or time.monotonic() > deadline:
            await source.close()
            return newest, missing, seen


def wait_for_blocks(running: Service) -> None:
    """Wait for an output of `appliance top --json` in which both the cache and a running request show KV
    blocks, and a stall names its request and tenant.

    A single snapshot may show none, because a request that has just been admitted has no block yet. A stall's
    tenant is unknown if the request has already ended.
    """
    deadline = time.monotonic() + _WAIT_S
    while True:
        top: dict[str, Any] = running.command("top")
        stalled = any(one["request"] and one["tenant"] == "local" for one in top["stalls"])
        if stalled and named(top) and any(one["blocks"] for one in top["requests"]):
            return
        assert time.monotonic() < deadline, (top["requests"], top["stalls"])


def test_a_long_prompt_is_named_as_the_cause_of_a_stall_and_its_blocks_are_shown() -> None:
    with service() as running:
        stop = threading.Event()
        clients = [threading.Thread(target=stream_until, args=(stop, running), daemon=True) for _ in range(3)]
        clients.append(threading.Thread(target=ask_long_prompts, args=(stop, running), daemon=True))
        for client in clients:
            client.start()
        newest, missing, seen = asyncio.run(watch(running))
        wait_for_blocks(running)
        stop.set()
        for client in clients:
            client.join(120)
        assert not missing
        stall = long_stall(newest)
        assert stall is not None, f"no stall with a long prompt: {newest.stalls}"
        assert stall.tenant == "local" and stall.decodes >= 1
        assert stall.ms > 3 * stall.mean_ms
        session = ConsoleSession(LiveSource(running.run_dir))
        for one in seen:
            session.accept(one)
        session.run("screen batches")
        rows = [plain(row) for row in session.view.render(session.context, 120, 36)]
        assert any(f"{stall.request} (local)" in row for row in rows), rows
        session.run("screen kv")
        rows = [plain(row) for row in session.view.render(session.context, 120, 36)]
        assert any("1 cell = " in row for row in rows), rows
