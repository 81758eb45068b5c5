"""A source that reads a running service's event stream and lists through the admin socket."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from appliance import calls
from appliance.alert_rules import BUILT_IN
from appliance.calls import AdminError
from appliance.client import NoResponseError, ServiceNotRunningError
from appliance.events.async_client import AsyncAdminClient
from appliance.events.frames import MissingFrameError
from appliance.history.forecasts import QuotaForecast
from appliance.ownership import UntrustedError
from appliance.pages import AuditQuery, ChainReport, LogQuery, RequestLogQuery, UsageQuery, UsageRow
from appliance.protocol import Configuration
from appliance.snapshot import BlockMap, ReplicaBlocks, Snapshot, with_blocks
from console.list_rows import audit_row, finding_row, log_row
from console.recordings import RecordedPast
from console.source import MAX_ROWS, USAGE_DAYS, ListName, ListRow, NoAnswerError, Row, SourceError

_MAX_HZ = 4
_FINDINGS_EVERY_S = 60.0
_USAGE_EVERY_S = 15.0
_BLOCKS_EVERY_S = 1.0


class LiveSource:
    """Delivers snapshots of the service with this run directory. If the event stream ends, calling
    `next` again reopens it."""

    kind: Literal["live"] = "live"

    def __init__(
        self, run_dir: Path, *, write: bool = False, key: str | None = None, interval_s: float = 0.5
    ) -> None:
        """`write`: whether to request permission for actions; without it, the service refuses them. `key`:
        the API key to authenticate with, or None if the user is an operator."""
        self.label = str(run_dir)
        self.interval_s = interval_s
        self.reads_blocks = False
        self._blocks: dict[str, BlockMap] = {}
        """Each replica's KV blocks, from the most recent read."""
        self._blocks_at = -math.inf
        self._reading: asyncio.Task[list[ReplicaBlocks]] | None = None
        self._run_dir, self._key = run_dir, key
        self._client = AsyncAdminClient(run_dir, key=key, read_only=not write)
        self._stream: AsyncGenerator[Snapshot, None] | None = None
        self._hz = 0
        self._found: list[ListRow] = []
        self._examined_at = -math.inf
        self._usage: list[UsageRow] = []
        self._usage_at = -math.inf

    async def next(self) -> Snapshot:
        """Wait for the next snapshot."""
        hz = max(1, min(_MAX_HZ, round(1 / self.interval_s)))
        if self._stream is None or hz != self._hz:
            await self.close()
            self._stream, self._hz = self._client.snapshots(hz), hz
        try:
            with _explained():
                self._read_blocks()
                snapshot = await anext(self._stream)
                # The service sends at least one frame per second. Skip frames if the refresh interval is
                # longer. The operator may change the interval while this call is waiting.
                taken = 1
                while taken < math.floor(self.interval_s * hz + 0.5):
                    snapshot = await anext(self._stream)
                    taken += 1
                await self._take_blocks()
            return with_blocks(snapshot, self._blocks if self.reads_blocks else {})
        except StopAsyncIteration:
            await self.close()
            raise SourceError(f"the service on {self._client.socket} has stopped") from None
        except SourceError:
            await self.close()
            raise

    def _read_blocks(self) -> None:
        """Start reading the KV blocks if they are displayed and the last read started at least a second
        ago."""
        due = time.monotonic() - self._blocks_at >= _BLOCKS_EVERY_S
        if self.reads_blocks and due and self._reading is None:
            self._blocks_at = time.monotonic()
            self._reading = asyncio.create_task(self._client.call(calls.KV_BLOCKS))

    async def _take_blocks(self) -> None:
        """Store the KV blocks if they have arrived. Wait for them only if none are known yet, because waiting
        could delay the snapshot."""
        reading = self._reading
        if reading is None or not (reading.done() or not self._blocks):
            return
        self._reading = None
        try:
            self._blocks = {one.replica: one.blocks for one in await reading}
        except AdminError:  # Older services lack this admin API route.
            self._blocks = {}

    async def rows(self, name: ListName) -> Sequence[Row]:
        """Read a list from the service."""
        with _explained():
            match name:
                case "audit":
                    page = await self._client.call(calls.audit(AuditQuery(limit=MAX_ROWS)))
                    return [audit_row(action) for action in page.rows]
                case "logs":
                    lines = (await self._client.call(calls.log_lines(LogQuery(limit=MAX_ROWS)))).lines
                    return [log_row(one) for one in reversed(lines)]
                case "finished":
                    query = RequestLogQuery(state="ended", limit=MAX_ROWS)
                    return (await self._client.call(calls.request_log(query))).rows
                case "usage":
                    return await self._daily_usage()
                case "models":
                    return await self._client.call(calls.MODELS)
                case "tenants":
                    return await self._client.call(calls.TENANTS)
                case "callers":
                    return [*await self._client.call(calls.KEYS), *await self._client.call(calls.PEERS)]
                case "silences":
                    return await self._client.call(calls.SILENCES)
                case "settings":
                    return _settings(await self._client.call(calls.CONFIGURATION))
                case "rules":
                    return _rules(await self._client.call(calls.CONFIGURATION))
                case "findings":
                    return await self._findings()

    async def _daily_usage(self) -> list[UsageRow]:
        """Return usage for the last few days, read at most once every 15 seconds."""
        if time.monotonic() - self._usage_at >= _USAGE_EVERY_S:
            since = (datetime.now(UTC).date() - timedelta(days=USAGE_DAYS - 1)).isoformat()
            self._usage = (await self._client.call(calls.usage(UsageQuery(since=since)))).rows
            self._usage_at = time.monotonic()
        return self._usage

    async def _findings(self) -> list[ListRow]:
        """Return the findings of `appliance doctor` on the service's machine, read at most once a minute."""
        if time.monotonic() - self._examined_at >= _FINDINGS_EVERY_S:
            found = (await self._client.call(calls.findings())).findings
            self._found = [finding_row(number, one) for number, one in enumerate(found)]
            self._examined_at = time.monotonic()
        return self._found

    async def verify(self) -> ChainReport:
        """Have the service verify its audit chain."""
        with _explained():
            return await self._client.call(calls.verify_audit())

    async def what_if(self, parameters: msgspec.Struct) -> QuotaForecast:
        """Return a forecast of the effect of new limits."""
        with _explained():
            return await self._client.call(calls.what_if(parameters))

    async def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        """Perform an action."""
        with _explained():
            result: msgspec.Struct = await self._client.call(calls.act(parameters))
            return result

    def recording(self) -> RecordedPast:
        """Return the service's recorded history."""
        from console.stored_recording import service_recording

        return service_recording(self._run_dir, self._key)

    async def close(self) -> None:
        """Close the stream."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            with contextlib.suppress(
                asyncio.CancelledError, AdminError, ServiceNotRunningError, UntrustedError
            ):
                await reading
        self._blocks = {}
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Convert the client's exceptions to SourceError. Their messages are already written for operators."""
    try:
        yield
    except NoResponseError as error:
        raise NoAnswerError(str(error)) from error
    except (ServiceNotRunningError, AdminError, UntrustedError, MissingFrameError) as error:
        raise SourceError(str(error)) from error


def _rules(configuration: Configuration) -> list[ListRow]:
    """Return the names of the active alert rules."""
    alerts = configuration.settings.get("alerts", {})
    names = [*(rule.name for rule in BUILT_IN), *(rule["name"] for rule in alerts.get("rules", ()))]
    disabled = alerts.get("disabled", ())
    return [ListRow(id=name, subject=name) for name in dict.fromkeys(names) if name not in disabled]


def _settings(configuration: Configuration) -> list[ListRow]:
    """Return all settings with their values and sources."""
    rows = []
    for name, place in sorted(configuration.places.items()):
        value: object = configuration.settings
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        rows.append(ListRow(id=name, subject=name, text=text, actor=place))
    return rows
