"""The sources of the recorded history: a running service, or a file on this machine (`history.db` or an
incident file). All sources have the same methods. They block, so code on an event loop must call them in
threads."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from appliance import calls
from appliance.calls import AdminError, Call
from appliance.client import AdminClient, ServiceNotRunningError
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
from appliance.history.reader import NotRecordedError, PastReader, TooManyValuesError
from appliance.ownership import UntrustedError
from appliance.pages import (
    AuditAction,
    AuditPage,
    AuditQuery,
    LogLine,
    LogPage,
    LogQuery,
    NamedRequest,
    RequestLogQuery,
    RequestPage,
)
from store.errors import StoreError
from store.evidence import read_actions
from store.incidents import IncidentReader, readable_copy
from store.requests import RequestPosition, RequestReader

Answer = TypeVar("Answer")
ACTIONS, LOG_LINES = "operators' actions", "log lines"
"""Parts that can be missing from an incident file, because the export could not read them. The file then
contains the reason."""


class PastError(Exception):
    """Raised if the recorded history cannot be read. The message gives the reason and the remedy."""


class PastSource(Protocol):
    """A source of the recorded history. All methods can raise PastError."""

    label: str
    """The source's name, as shown in the console's header, such as the run directory or the file name."""

    def snapshot(self, query: SnapshotQuery) -> PastSnapshot:
        """Return the service state at a given time."""

    def columns(self, query: TelemetryQuery) -> TelemetryColumns:
        """Return measurements over time."""

    def stored(self, query: StoredQuery) -> StoredPage:
        """Return a page of samples as they are stored."""

    def alert_log(self, query: AlertLogQuery) -> AlertLogPage:
        """Return alerts, newest first."""

    def request_log(self, query: RequestLogQuery) -> RequestPage:
        """Return a page of the request log, newest requests first."""

    def audit(self, query: AuditQuery) -> AuditPage:
        """Return a page of operators' actions, newest first."""

    def log_lines(self, query: LogQuery) -> LogPage:
        """Return the most recent matching log lines, in chronological order."""

    def close(self) -> None:
        """Release resources such as temporary files."""


class ServicePast:
    """Reads the recorded history from a running service through the admin API. Thread-safe."""

    def __init__(self, run_dir: Path, key: str | None = None) -> None:
        """`key` is the key for the admin API. Operators need no key."""
        self.label = str(run_dir)
        self._run_dir = run_dir
        self._key = key

    def snapshot(self, query: SnapshotQuery) -> PastSnapshot:
        return self._call(calls.past_snapshot(query))

    def columns(self, query: TelemetryQuery) -> TelemetryColumns:
        return self._call(calls.telemetry(query))

    def stored(self, query: StoredQuery) -> StoredPage:
        return self._call(calls.stored_telemetry(query))

    def alert_log(self, query: AlertLogQuery) -> AlertLogPage:
        return self._call(calls.alert_log(query))

    def request_log(self, query: RequestLogQuery) -> RequestPage:
        return self._call(calls.request_log(query))

    def audit(self, query: AuditQuery) -> AuditPage:
        return self._call(calls.audit(query))

    def log_lines(self, query: LogQuery) -> LogPage:
        return self._call(calls.log_lines(query))

    def close(self) -> None:
        """Do nothing: no connection stays open between calls."""

    def _call(self, call: Call[Answer]) -> Answer:
        try:
            return AdminClient(self._run_dir, key=self._key).call(call)
        except (AdminError, ServiceNotRunningError, UntrustedError) as error:
            raise PastError(str(error)) from error


class FilePast:
    """Reads the recorded history from `history.db` or an incident file. For `history.db`, operators' actions
    are read from `control.db` in the same folder. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises PastError if the file cannot be read."""
        self.label = path.name
        self._control = path.with_name("control.db")
        self._folder = tempfile.TemporaryDirectory(prefix="appliance-replay-")
        try:
            with _explained():
                readable = readable_copy(path, Path(self._folder.name))
                self._incident = IncidentReader(readable)
                self.facts = self._incident.facts()
                """The incident file's metadata, or None for `history.db`."""
        except BaseException:
            self._folder.cleanup()
            raise
        self._past = PastReader(readable)
        self._requests = RequestReader(readable)

    def snapshot(self, query: SnapshotQuery) -> PastSnapshot:
        with _explained():
            return self._past.snapshot(query)

    def columns(self, query: TelemetryQuery) -> TelemetryColumns:
        with _explained():
            return self._past.columns(query)

    def stored(self, query: StoredQuery) -> StoredPage:
        with _explained():
            return self._past.stored(query)

    def alert_log(self, query: AlertLogQuery) -> AlertLogPage:
        with _explained():
            return self._past.alert_log(query)

    def request_log(self, query: RequestLogQuery) -> RequestPage:
        """Return a page of the request log, newest requests first. The file does not contain key names."""
        before = None
        if query.before is not None:
            at, _, request_id = query.before.partition(":")
            before = RequestPosition(float(at), request_id)
        with _explained():
            rows = self._requests.query(query, query.limit + 1, before)[::-1]
        shown = rows[: query.limit]
        return RequestPage(
            rows=[NamedRequest(**msgspec.structs.asdict(row)) for row in shown],
            next=f"{shown[-1].created_at!r}:{shown[-1].request_id}" if len(rows) > query.limit else None,
            sequence=0,
        )

    def audit(self, query: AuditQuery) -> AuditPage:
        self._check_contains(ACTIONS)
        with _explained():
            rows = self._actions(query)
        shown = rows[: query.limit]
        return AuditPage(rows=shown, next=shown[-1].seq if len(rows) > query.limit else None, sequence=0)

    def log_lines(self, query: LogQuery) -> LogPage:
        if self.facts is None:
            raise PastError(
                "history.db contains no log lines: read the journal, or open an incident file written by "
                "'appliance history export'"
            )
        self._check_contains(LOG_LINES)
        until = _END if query.until is None else query.until
        with _explained():
            documents = self._incident.lines(until, query.limit)
            lines = [msgspec.json.decode(document, type=LogLine) for document in documents]
        return LogPage(lines=lines, first=0, number=lines[-1].number if lines else 0)

    def close(self) -> None:
        """Remove the temporary copy of the file, if any."""
        self._folder.cleanup()

    def _check_contains(self, part: str) -> None:
        """Raise PastError if a part could not be exported to this incident file."""
        reason = None if self.facts is None else self.facts.get(f"without {part}")
        if reason is not None:
            raise PastError(
                f"this incident file contains no {part}, because the export could not read them: {reason}"
            )

    def _actions(self, query: AuditQuery) -> list[AuditAction]:
        """Return up to one more action than the query's limit. The extra action shows that there is another
        page."""
        if self.facts is None:
            if not self._control.exists():
                raise PastError(
                    f"{self._control} does not exist, and history.db contains no actions: open an incident "
                    "file written by 'appliance history export'"
                )
            return read_actions(self._control, query.filter, query.limit + 1, before=query.before)[::-1]
        documents = self._incident.actions(
            0.0 if query.since is None else query.since,
            _END if query.until is None else query.until,
            query.before,
            query.limit + 1,
        )
        return [msgspec.json.decode(document, type=AuditAction) for document in documents]


_END = 1e11
"""A time later than any recorded time, in unix seconds."""


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (StoreError, NotRecordedError, TooManyValuesError) as error:
        raise PastError(str(error)) from error
    except msgspec.DecodeError as error:
        raise PastError(
            f"the file has a different format ({error}): read it with the appliance version that wrote it"
        ) from error
