"""Tests of the console's live source with a simulated event stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace

import msgspec

from appliance.actions.parameters import SuspendTenant
from appliance.ownership import UntrustedError
from appliance.pages import AuditAction
from appliance.snapshot import ReplicaBlocks, Snapshot
from console.fake import FIXED_TIME
from console.list_rows import audit_row
from console.live import LiveSource
from console.source import NoAnswerError, SourceError
from tests.snapshots import empty_snapshot


def test_a_shorter_interval_takes_effect_while_the_source_waits() -> None:
    """If it took effect later, a running service would be shown as stale until the longer interval has
    passed."""
    source = LiveSource(Path("/run/appliance-none"), interval_s=60.0)

    async def snapshots(hz: int) -> AsyncGenerator[Snapshot, None]:
        for number in itertools.count():
            if number == 3:
                source.interval_s = 1.0
            yield empty_snapshot(FIXED_TIME + number)

    source._client = SimpleNamespace(snapshots=snapshots)  # type: ignore[assignment]

    async def read() -> list[float]:
        found = [(await source.next()).at, (await source.next()).at]
        source.interval_s = 2.0
        found.append((await source.next()).at)
        await source.close()
        return [at - FIXED_TIME for at in found]

    assert asyncio.run(read()) == [3.0, 4.0, 6.0]


def test_an_action_is_reported_as_possibly_performed_only_if_it_was_sent(tmp_path: Path) -> None:
    source = LiveSource(tmp_path, write=True)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def act() -> list[type[SourceError]]:
        found = []
        for listens in (False, True):
            if listens:
                await asyncio.start_unix_server(hang_up, tmp_path / "admin.sock")
            try:
                await source.act(SuspendTenant(name="acme"))
            except SourceError as error:
                found.append(type(error))
        return found

    assert asyncio.run(act()) == [SourceError, NoAnswerError]


def test_an_action_whose_time_was_tampered_with_is_listed_without_a_time() -> None:
    action = AuditAction(**dict.fromkeys(AuditAction.__struct_fields__))  # type: ignore[arg-type]
    row = audit_row(msgspec.structs.replace(action, seq=2, at="yesterday", actor="uid:0", action="drain"))
    assert (row.id, row.at, row.subject) == ("2", None, "drain")


def test_an_untrusted_run_directory_does_not_end_the_console_while_blocks_are_read() -> None:
    source = LiveSource(Path("/run/appliance-none"))

    async def refused() -> list[ReplicaBlocks]:
        raise UntrustedError("the run directory belongs to another user", "choose another one")

    async def close() -> None:
        source._reading = asyncio.create_task(refused())
        await asyncio.sleep(0)
        await source.close()
        assert source._reading is None

    asyncio.run(close())
