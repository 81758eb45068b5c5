"""Snapshot sources: one protocol with three implementations, for a running service (`console.live`), recorded
history (`console.replay`) and a simulated service (`console.fake`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from appliance.history.forecasts import QuotaForecast
from appliance.pages import ChainReport, LineLevel, NamedRequest, UsageRow
from appliance.protocol import FindingLevel, Key, PeerMapping, Silence, Tenant
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
"""Lists that are not part of snapshots. Each is read when its screen is shown. "rules" contains the alert
rules, whose names the command line offers as completions."""


RowLevel = Literal[LineLevel, FindingLevel, ""]
"""The level of a log line or finding; empty for rows of other lists."""
MAX_ROWS = 500
"""Maximum number of rows shown from a list, newest first."""
USAGE_DAYS = 7
"""Number of days of usage shown, including today."""


class SourceError(Exception):
    """Raised if a source cannot provide data. The message says why, and what to do."""


class NoAnswerError(SourceError):
    """Raised if the service did not answer. The service may still have performed the action."""


class UnsupportedListError(SourceError):
    """Raised if a source does not provide the requested list."""


class ListRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the audit trail, log, settings, doctor findings or alert rules."""

    id: str
    at: float | None = None
    level: RowLevel = ""
    actor: str = ""
    """An audit row's operator, a log line's process, a setting's source, or a finding's area."""
    subject: str = ""
    """An audit row's action, the name of a setting or rule, or a finding's subject."""
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
    """Description of the source for the console's header, such as "demo" or the run directory."""
    interval_s: float
    """Interval between snapshots, in seconds."""
    reads_blocks: bool
    """Whether a running service's snapshots contain individual KV blocks and each request's blocks. The
    service collects this data only on demand."""

    @property
    def kind(self) -> Literal["live", "demo", "replay"]:
        """The kind of source."""
        ...

    async def next(self) -> Snapshot:
        """Wait for the next snapshot. Raises SourceError if the service does not respond; the caller may then
        try again."""
        ...

    async def rows(self, name: ListName) -> Sequence[Row]:
        """Return the rows of a list, newest first. Raises SourceError if the list cannot be read."""
        ...

    async def verify(self) -> ChainReport:
        """Verify the audit chain and return the result. Raises SourceError if the chain cannot be read."""
        ...

    async def what_if(self, parameters: msgspec.Struct) -> QuotaForecast:
        """Forecast the effect of limits given as parameters of `tenants.set` or `keys.set`, without changing
        anything. Raises SourceError if no forecast is possible."""
        ...

    async def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        """Perform an action from the registry (`appliance.actions`). Raises SourceError if the action
        fails."""
        ...

    def recording(self) -> RecordedPast:
        """Return the source's recorded history."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
