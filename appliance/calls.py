"""The admin API's calls: their paths, parameters and response types. `appliance.client` and
`appliance.events.async_client` perform the calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec

from appliance.actions import action_of
from appliance.history.forecasts import QuotaForecast
from appliance.protocol import Configuration, ErrorBody, Key, PeerMapping, StreamEnd, Tenant
from appliance.protocol.registry import RegisteredModel
from appliance.protocol.status import Status
from appliance.snapshot import Alert, ReplicaBlocks, UnfinishedRequest
from store.structs import Silence

if TYPE_CHECKING:
    from appliance.events.frames import Frame
    from appliance.history.pages import (
        AlertLogPage,
        AlertLogQuery,
        PastSnapshot,
        SnapshotQuery,
        StoredPage,
        StoredQuery,
        TelemetryColumns,
        TelemetryQuery,
    )
    from appliance.monitoring.findings import Examination
    from appliance.pages import (
        AuditAction,
        AuditPage,
        AuditQuery,
        ChainReport,
        LogLine,
        LogPage,
        LogQuery,
        NamedRequest,
        RequestLogQuery,
        RequestPage,
        UsageQuery,
        UsageReport,
    )

Answer = TypeVar("Answer")

READ_ONLY_HEADER = "x-appliance-read-only"
"""Header that limits a session to read access, regardless of the caller's rights. The only valid value is
"true"."""


class AdminError(Exception):
    """Raised if the service refuses the call. `status` is the HTTP status code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Call(NamedTuple, Generic[Answer]):
    """An admin API call. `answer` is the type of the response or, for a stream, of each line."""

    method: str
    path: str
    answer: Any
    body: bytes | None = None
    is_long: bool = False
    """Whether the response may take minutes, as for long actions (`Action.is_long`)."""

    def decode(self, status: int, content: bytes, place: str) -> Answer:
        """Decode a response. `place` names the sender in error messages. Raises AdminError if the response is
        an error or cannot be parsed."""
        if 200 <= status < 300:
            try:
                answer: Answer = msgspec.json.decode(content, type=self.answer)
                return answer
            except msgspec.DecodeError as error:
                raise AdminError(
                    status,
                    f"{place} sent a response to {self.method} {self.path} that this version of the "
                    f"command cannot parse ({error}): if the command was updated, restart the service",
                ) from error
        try:
            message = msgspec.json.decode(content, type=ErrorBody).message
        except msgspec.DecodeError:
            message = f"{place} responded to {self.method} {self.path} with status {status}"
        raise AdminError(status, message)

    def decode_line(self, line: bytes, place: str) -> Answer | None:
        """Decode one line of a stream. Returns None for an empty line. Raises AdminError if the line says
        that the service cannot continue the stream."""
        if not line.strip():
            return None
        if line.startswith(b'{"error":'):
            try:
                raise AdminError(503, msgspec.json.decode(line, type=StreamEnd).error)
            except msgspec.DecodeError:
                pass  # not an error, but a row whose first field is named "error"
        return self.decode(200, line, place)


STATUS: Call[Status] = Call("GET", "/status", Status)
IN_FLIGHT: Call[list[UnfinishedRequest]] = Call("GET", "/requests", list[UnfinishedRequest])
"""The unfinished requests, oldest first."""
KV_BLOCKS: Call[list[ReplicaBlocks]] = Call("GET", "/kv-blocks", list[ReplicaBlocks])
"""Each responding replica's KV blocks."""
KEYS: Call[list[Key]] = Call("GET", "/keys", list[Key])
"""All keys, including revoked keys."""
TENANTS: Call[list[Tenant]] = Call("GET", "/tenants", list[Tenant])
PEERS: Call[list[PeerMapping]] = Call("GET", "/peers", list[PeerMapping])
"""The local users and groups that need no key."""
MODELS: Call[list[RegisteredModel]] = Call("GET", "/models", list[RegisteredModel])
"""The models in the settings and in the registry, with their versions."""
ALERTS: Call[list[Alert]] = Call("GET", "/alerts", list[Alert])
"""The active alerts and those that ended within the last hour, newest first."""
SILENCES: Call[list[Silence]] = Call("GET", "/silences", list[Silence])
CONFIGURATION: Call[Configuration] = Call("GET", "/config", Configuration)
"""The settings in effect and the source of each."""


def act(parameters: msgspec.Struct) -> Call[Any]:
    """Return the call that performs the action with these parameters (`appliance.actions`). Raises AdminError
    if a parameter is not valid UTF-8."""
    action = action_of(parameters)
    try:
        body = msgspec.json.encode(parameters)
    except UnicodeEncodeError as error:
        # Command-line arguments may contain bytes that are not UTF-8.
        raise AdminError(
            400, f"{action.name}: {error.object!r} is not UTF-8 text: write it in UTF-8"
        ) from error
    return Call("POST", f"/actions/{action.name}", action.result, body, action.is_long)


def what_if(parameters: msgspec.Struct) -> Call[QuotaForecast]:
    """Return the call that predicts the effect of `tenants.set` or `keys.set` with these parameters."""
    call = act(parameters)
    path = call.path.replace("/actions/", "/what-if/", 1)
    return call._replace(path=path, answer=QuotaForecast, is_long=True)


def request_log(query: RequestLogQuery) -> Call[RequestPage]:
    """Return the call that reads a page of the request log."""
    from appliance.pages import RequestPage

    return Call("GET", _with("/request-log", query, follow=False), RequestPage)


def follow_request_log(query: RequestLogQuery) -> Call[NamedRequest]:
    """Return the call that follows the request log."""
    from appliance.pages import NamedRequest

    return Call("GET", _with("/request-log", query, follow=True), NamedRequest)


def audit(query: AuditQuery) -> Call[AuditPage]:
    """Return the call that reads a page of the audit trail."""
    from appliance.pages import AuditPage

    return Call("GET", _with("/audit", query, follow=False), AuditPage)


def follow_audit(query: AuditQuery) -> Call[AuditAction]:
    """Return the call that follows the audit trail."""
    from appliance.pages import AuditAction

    return Call("GET", _with("/audit", query, follow=True), AuditAction)


def verify_audit() -> Call[ChainReport]:
    """Return the call that verifies the audit chain on the service's machine."""
    from appliance.pages import ChainReport

    return Call("GET", "/audit/verify", ChainReport, is_long=True)


def findings() -> Call[Examination]:
    """Return the call that reads the findings of `appliance doctor` on the service's machine."""
    from appliance.monitoring.findings import Examination

    return Call("GET", "/findings", Examination, is_long=True)


def log_lines(query: LogQuery) -> Call[LogPage]:
    """Return the call that reads the newest log lines."""
    from appliance.pages import LogPage

    return Call("GET", _with("/logs", query, follow=False), LogPage)


def follow_log(query: LogQuery) -> Call[LogLine]:
    """Return the call that follows the log."""
    from appliance.pages import LogLine

    return Call("GET", _with("/logs", query, follow=True), LogLine)


def events(hz: int = 2) -> Call[Frame]:
    """Return the call that streams the service state at `hz` frames per second."""
    from appliance.events.frames import EventsQuery, Frame

    return Call("GET", _with("/events", EventsQuery(hz=hz)), Frame)


def past_snapshot(query: SnapshotQuery) -> Call[PastSnapshot]:
    """Return the call that reads the recorded service state at a given time."""
    from appliance.history.pages import PastSnapshot

    return Call("GET", _with("/telemetry/snapshot", query), PastSnapshot)


def telemetry(query: TelemetryQuery) -> Call[TelemetryColumns]:
    """Return the call that reads measurements over time."""
    from appliance.history.pages import TelemetryColumns

    return Call("GET", _with("/telemetry", query), TelemetryColumns)


def stored_telemetry(query: StoredQuery) -> Call[StoredPage]:
    """Return the call that reads a page of stored samples."""
    from appliance.history.pages import StoredPage

    return Call("GET", _with("/telemetry/stored", query), StoredPage)


def alert_log(query: AlertLogQuery) -> Call[AlertLogPage]:
    """Return the call that reads the alerts between two times."""
    from appliance.history.pages import AlertLogPage

    return Call("GET", _with("/alert-log", query), AlertLogPage)


def usage(query: UsageQuery) -> Call[UsageReport]:
    """Return the call that reports usage."""
    from appliance.pages import UsageReport

    return Call("GET", _with("/usage", query), UsageReport)


def _with(path: str, query: msgspec.Struct, *, follow: bool | None = None) -> str:
    """Return the path with these query parameters. Raises AdminError if a parameter is not valid UTF-8."""
    given: dict[str, Any] = {**msgspec.to_builtins(query), "follow": follow}
    given = {name: value for name, value in given.items() if value is not None}
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()
    }
    try:
        return f"{path}?{urlencode(texts)}"
    except UnicodeEncodeError as error:
        raise AdminError(400, f"{error.object!r} is not UTF-8 text: write it in UTF-8") from error
