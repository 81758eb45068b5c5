"""Sources of snapshots. The console has one protocol with three implementations: a running service
(`console.live`), the recorded past (`console.replay`) and a seeded load generator (`console.fake`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from appliance.history.forecasts import QuotaForecast
from appliance.pages import ChainReport, NamedRequest, UsageRow
from appliance.protocol import Key, PeerMapping, Silence, Tenant
from appliance.protocol.registry import RegisteredModel
from appliance.snapshot import Snapshot

if TYPE_CHECKING:
    from console.recordings import RecordedPast

ListName = Literal[
    "audit",
    "logs",
    "settings",
    "findings",
    "finished",
    "usage",
    "models",
    "tenants",
    "callers",
    "silences",
    "rules",
]
"""Lists that are not part of a snapshot. They are read when their screen is shown. "rules" are the alert
rules, whose names the command line completes."""


MAX_ROWS = 500
"""Maximum number of rows shown from a list. The newest rows are shown."""
USAGE_DAYS = 7
"""Number of days, including today, for which the console shows usage."""


class SourceError(Exception):
    """Raised if a source cannot provide data. The message gives the reason and says what to do."""


class UnsupportedListError(SourceError):
    """Raised if a source does not provide the requested list."""


class ListRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the audit trail, the log, the settings, doctor's findings or the alert rules."""

    id: str
    at: float | None = None
    level: str = ""
    """Level of a log line or finding: "info", "warning", "error", "problem" or "ok"."""
    actor: str = ""
    """Operator of an audit row, process of a log line, source of a setting, or area of a finding."""
    subject: str = ""
    """Action of an audit row, name of a setting or rule, or subject of a finding."""
    target: str = ""
    text: str = ""
    detail: dict[str, str] = {}
    """Additional fields, keyed by name."""


Row = ListRow | NamedRequest | UsageRow | RegisteredModel | Tenant | Key | PeerMapping | Silence
"""A row of a list: `NamedRequest` for finished requests, `UsageRow` for usage, `RegisteredModel` for models
with their versions, `Tenant` for tenants, `Key` or `PeerMapping` for callers, `Silence` for silences, and
`ListRow` for all other lists."""


class SnapshotSource(Protocol):
    """Delivers snapshots and lists, and performs actions."""

    label: str
    """Description for the header, such as "demo" or the run directory."""
    interval_s: float
    """Time between two snapshots, in seconds."""
    reads_blocks: bool
    """Whether the snapshots of a running service contain individual KV blocks and the blocks of each request.
    The service collects these only on request."""

    @property
    def kind(self) -> Literal["live", "demo", "replay"]:
        """Kind of the source."""
        ...

    async def next(self) -> Snapshot:
        """Wait for the next snapshot. Raises SourceError if the service does not answer; the caller may then
        try again."""
        ...

    async def rows(self, name: ListName) -> Sequence[Row]:
        """Return a list, newest rows first. Raises SourceError."""
        ...

    async def verify(self) -> ChainReport:
        """Verify the audit chain, and return the result. Raises SourceError."""
        ...

    async def what_if(self, parameters: msgspec.Struct) -> QuotaForecast:
        """Return the effect that the limits in the parameters of `tenants.set` or `keys.set` would have,
        without changing anything. Raises SourceError."""
        ...

    async def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        """Perform an action from the registry (`appliance.actions`). Raises SourceError."""
        ...

    def recording(self) -> RecordedPast:
        """Return the recorded history of the source."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
