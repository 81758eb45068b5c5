"""Types for the lists that the admin API returns in pages or as streams: request log, audit trail, log lines
and usage. These types are not in `appliance.protocol`, because they need store modules that front processes
should not import."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from appliance.protocol import AuditHead
from store.evidence import ActionFilter, Findings
from store.evidence import AuditAction as AuditAction
from store.requests import LoggedRequest, RequestFilter, Text
from store.requests import Time as Time

MAX_PAGE_ROWS = 1000
"""Maximum number of rows in a page."""

Rows = Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE_ROWS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
LineLevel = Literal["debug", "info", "warning", "error", "critical"]


# ── the request log ──


class NamedRequest(LoggedRequest, frozen=True, kw_only=True):
    """A request log row, with the name of the request's key."""

    key_name: str | None = None
    """Current name of the key with id `key_id`. Null if the request used no key, or an unknown one."""


class RequestPage(msgspec.Struct, kw_only=True):
    """A page of the request log, newest requests first."""

    rows: list[NamedRequest]
    next: str | None
    """Value of `before` for the next page, with older requests. Null on the last page."""
    sequence: int
    """Sequence number of the latest change when the page was read. Pass it as `after` to follow the log
    without missing a change."""


class RequestLogQuery(RequestFilter, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /request-log`. Rows that match all conditions are returned; times are in unix
    seconds."""

    # These fields are not keyword-only, so that they come before the filter's fields.
    limit: Rows = 100
    """Maximum number of rows in a page."""
    before: Text | None = None
    """The value of `next` in the previous page."""
    follow: bool = False
    """Keep the response open and send each matching request as a line of JSON when it ends or, with `state` =
    "open", when it is admitted."""
    after: Number | None = None
    """Sequence number of a change. Only later changes are sent. Default: the latest change."""


# ── the audit trail ──


class AuditPage(msgspec.Struct, kw_only=True):
    """A page of the audit trail, newest actions first. Actions still in the spool come first, on the first
    page."""

    rows: list[AuditAction]
    next: int | None
    """Value of `before` for the next page, with older actions. Null on the last page."""
    sequence: int
    """Sequence number of the chain's newest row when the page was read. Pass it as `after` to follow the
    chain."""


class AuditQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /audit`."""

    limit: Rows = 100
    """Maximum number of actions in a page."""
    before: Number | None = None
    """The value of `next` in the previous page."""
    follow: bool = False
    """Keep the response open and send each matching action as a line of JSON: when it begins, and again when
    its result is recorded."""
    after: Number | None = None
    """Sequence number of a row in the chain. Only later rows are sent. Default: the newest row."""
    actor: Text | None = None
    """Include only actions by this actor, such as "uid:0"."""
    action: Text | None = None
    """Include only actions with this name, such as "keys.create". A name that ends with a dot, such as
    "keys.", selects all actions with this prefix."""
    since: Time | None = None
    """Include only actions that began at or after this time, in unix seconds."""
    until: Time | None = None
    """Include only actions that began at or before this time, in unix seconds."""

    @property
    def filter(self) -> ActionFilter:
        """The query's conditions, as a filter for the store."""
        since, until = (None if at is None else iso_utc(at) for at in (self.since, self.until))
        return ActionFilter(self.actor, self.action, since, until)


class ChainReport(msgspec.Struct, kw_only=True):
    """The result of verifying the audit chain."""

    at: float
    """Time when the verification ended, in unix seconds."""
    path: str
    """Path of the verified database."""
    ok: bool
    """Whether the chain is complete and unchanged."""
    rows: int
    """Number of unchanged rows, from the start of the chain to the first fault."""
    head: AuditHead
    """The newest unchanged row of the chain, up to the first fault."""
    broken_seq: int | None
    """Sequence number of the first wrong or missing row, or null."""
    problems: list[str]
    """Descriptions of the faults. A fault in the chain comes first."""
    notes: list[str]
    """Remarks, for example about checks that could not be performed."""
    heads: int
    """Number of recorded heads that the chain was compared with, including those from the journal."""
    journal_heads: int
    journal_missing: str | None
    """Reason why the journal contained no chain heads, or why some may be missing."""
    confirmed_seq: int
    """Sequence number of the newest row confirmed by a recorded head."""
    spooled: int
    """Number of audit entries still in the spool rather than the chain."""


def chain_report(path: Path, findings: Findings, journal_heads: int, missing: str | None) -> ChainReport:
    """Return a report on the chain at `path`. `missing` becomes its `journal_missing` field."""
    verdict = findings.verdict
    return ChainReport(
        at=time.time(),
        path=str(path),
        ok=findings.ok,
        rows=verdict.rows,
        head=AuditHead(seq=verdict.head.seq, hash=verdict.head.hash),
        broken_seq=verdict.broken_seq,
        problems=findings.problems,
        notes=findings.notes,
        heads=findings.heads,
        journal_heads=journal_heads,
        journal_missing=missing,
        confirmed_seq=findings.confirmed_seq,
        spooled=findings.spooled,
    )


def iso_utc(seconds: float) -> str:
    """Format a unix time in ISO 8601 (UTC), as the audit trail does. Times outside the years 1970 to 9999 are
    clamped to that range."""
    inside = min(max(seconds, 0.0), 253_402_300_799.0)
    return datetime.fromtimestamp(inside, UTC).isoformat(timespec="microseconds")


# ── log lines ──


CORE = "core"
"""The core's name in log lines."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A log line."""

    number: int
    """The line's sequence number since the service started."""
    at: float
    level: LineLevel
    area: str
    """The part of the program that wrote the line, such as "replica"."""
    message: str
    process: str = CORE
    """The process that wrote the line: "core", the name of a front process, or the name of a replica,
    followed by the rank if the replica has several ranks."""


class LogPage(msgspec.Struct, kw_only=True):
    """The newest lines of the log, oldest first."""

    lines: list[LogLine]
    first: int
    """Number of the oldest log line still kept by the core. Older lines are only in the journal."""
    number: int
    """Number of the newest log line, or 0 if there are none. Pass it as `after` to get only newer lines."""


class LogQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /logs`."""

    limit: Rows = 100
    """Maximum number of log lines."""
    follow: bool = False
    """Keep the response open and send each new log line as a line of JSON."""
    after: Number | None = None
    """Include only lines with a higher number. With `follow`, the default is the newest line's number."""
    level: LineLevel | None = None
    """Include only lines at or above this level."""
    text: Text | None = None
    """Include only lines that contain this text, ignoring case."""
    process: Text | None = None
    """Include only lines from this process: "core", or the name of a front process or replica (including all
    its ranks)."""
    until: Time | None = None
    """Include only lines written at or before this time, in unix seconds."""


# ── usage ──

Day = Annotated[
    str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$", description="a day in UTC, such as 2026-11-20")
]
UsageColumn = Literal["day", "tenant", "key", "model"]
USAGE_COLUMNS: tuple[UsageColumn, ...] = ("day", "tenant", "key", "model")


class UsageRow(msgspec.Struct, kw_only=True):
    """Usage of one group of finished requests. Columns that the query does not group by are null."""

    day: str | None = None
    """Day when the requests ended, in UTC."""
    tenant: str | None = None
    key_id: str | None = None
    """Id of the key that the requests used. Empty for requests without a key."""
    key_name: str | None = None
    model: str | None = None
    """Name of the model. Empty for requests that named an unknown model."""
    requests: int
    failed: int
    """Requests with a status of 400 or more, or with an error."""
    prompt_tokens: int
    """Prompt tokens of the requests that ran, including `cached_tokens`."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    output_tokens: int
    """Output tokens delivered to clients."""
    cost: float | None = None
    """Cost at the prices in the settings. Null if none of the group's models has a price."""


class UsageReport(msgspec.Struct, kw_only=True):
    """Usage, sorted by the grouping columns."""

    rows: list[UsageRow]
    total: UsageRow
    """The totals of all rows."""
    unpriced_models: list[str] = []
    """Models without prices in the settings. Their tokens are not included in any cost. Empty if the settings
    contain no prices at all."""


class UsageQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /usage`."""

    since: Day | None = None
    """First day. Default: 30 days before today."""
    until: Day | None = None
    """Last day. Default: today."""
    tenant: Text | None = None
    key_id: Text | None = None
    model: Text | None = None
    by: Annotated[str, msgspec.Meta(pattern=r"^(day|tenant|key|model)(,(day|tenant|key|model)){0,3}$")] = (
        "day,tenant,key"
    )
    """Columns to group by, separated by commas: day, tenant, key, model."""
