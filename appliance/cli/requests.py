"""Implements `appliance requests`, which reads `history.db` directly and therefore works whether or not the
service is running."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from itertools import chain

import msgspec

from appliance.cli.failure import CommandLineError, Failure
from appliance.cli.output import (
    Column,
    Layout,
    of_count,
    of_ms,
    paint,
    print_json,
    printable,
    terminal_width,
)
from appliance.cli.service import check_databases, find_run_dir, find_state_dir
from appliance.cli.times import local, local_short, moment
from store.errors import CorruptDatabaseError, MissingDatabaseError, SchemaVersionError, StoreError
from store.requests import LoggedRequest, RequestFilter, RequestReader

_POLL_S = 0.25
_UNREADABLE_FOR_S = 10.0
"""Time for which `--follow` tolerates an unreadable log. A service briefly locks the log while it starts or
stops."""

_COLUMNS = (
    Column("TIME"),
    Column("REQUEST", flexible=True),
    Column("TENANT", flexible=True, drop=4),
    Column("MODEL", flexible=True, drop=2),
    Column("PEER", flexible=True, drop=8),
    Column("STATUS"),
    Column("FINISH", flexible=True),
    Column("IN", right=True),
    Column("CACHED", right=True, drop=5),
    Column("OUT", right=True),
    Column("QUEUE ms", right=True, drop=6),
    Column("TTFT ms", right=True, drop=1),
    Column("ITL ms", right=True, drop=7),
    Column("E2E ms", right=True),
    Column("ERROR", flexible=True, drop=3),
)
# Set minimum column widths, so that lines printed later are aligned with the first lines.
_ROOM = (
    "00-00 00:00:00",
    "req-" + "0" * 24,
    *["_" * 12] * 3,
    "200",
    "cancelled",
    *["9,999"] * 3,
    "9999",
    "9999",
    "9999",
    "99999",
    "_" * 24,
)


def show_requests(
    run_dir: str | None,
    state_dir: str | None,
    wanted: RequestFilter,
    *,
    limit: int,
    follow: bool,
    as_json: bool,
) -> None:
    """Print the matching rows, oldest first. With `follow`, keep printing requests as they end."""
    run = find_run_dir(run_dir)
    folder = find_state_dir(state_dir, run)
    check_databases(folder, None if state_dir else run, "history.db")
    reader = RequestReader(folder / "history.db")
    try:
        last = reader.last_sequence() if follow else 0
        rows = reader.query(wanted, limit)
    except StoreError as error:
        raise Failure(str(error)) from error
    if wanted.request_id is not None and not rows and not follow:
        raise Failure(
            f"{reader.path} has no request {wanted.request_id!r}: list the requests with: appliance requests"
        )
    if follow:
        shown: dict[str, LoggedRequest] = {row.request_id: row for row in rows}
        _show_as_they_come(rows, _ends(reader, last, wanted, shown), as_json)
    elif as_json:
        print_json(rows)
    elif wanted.request_id is not None:
        _show_fields(rows[0])
    elif rows:
        _show_as_they_come(rows, None, as_json)
    else:
        print(f"No matching requests in {reader.path}.", file=sys.stderr)


def request_filter(
    request_id: str | None,
    tenant: str | None,
    model: str | None,
    status: str | None,
    failed: bool,
    since: str | None,
) -> RequestFilter:
    """Return the filter that these options describe. Raises CommandLineError."""
    wanted = RequestFilter(
        request_id=request_id,
        tenant=tenant,
        model=model,
        failed=True if failed else None,
        since=None if since is None else moment(since, "--since", ahead=False),
    )
    if status is None:
        return wanted
    if status == "open":
        return msgspec.structs.replace(wanted, state="open")
    if status == "ended":
        return msgspec.structs.replace(wanted, state="ended")
    if re.fullmatch("[1-5][0-9][0-9]", status):
        return msgspec.structs.replace(wanted, status=int(status))
    raise CommandLineError(
        f"--status {status[:40]!r} is not valid: use open, ended, or an HTTP status such as 503"
    )


def _show_as_they_come(
    rows: list[LoggedRequest], more: Iterator[LoggedRequest] | None, as_json: bool
) -> None:
    if as_json:
        for row in chain(rows, more or ()):
            print_json(row, line=True)
        return
    cells = [_cells(row) for row in rows]
    layout = Layout(_COLUMNS, cells if more is None else [*cells, _ROOM], terminal_width())
    print(paint(layout.heading(), "dim"), flush=True)
    for row, line in zip(rows, cells, strict=True):
        _print_line(layout, row, line)
    sys.stdout.flush()
    for row in more or ():
        _print_line(layout, row, _cells(row))
        sys.stdout.flush()


def _print_line(layout: Layout, row: LoggedRequest, cells: tuple[str, ...]) -> None:
    line = layout.line(cells)
    print(paint(line, "red") if _failed(row) else paint(line, "dim") if row.state == "open" else line)


def _cells(row: LoggedRequest) -> tuple[str, ...]:
    ended = row.state == "ended"
    return (
        local_short(row.created_at),
        printable(row.request_id),
        printable(row.tenant or ""),
        printable(row.model or ""),
        printable(row.peer or ""),
        str(row.status or "") if ended else "open",
        printable(row.finish_reason or ""),
        of_count(row.prompt_tokens),
        of_count(row.cached_tokens) if ended else "",
        of_count(row.generated_tokens) if ended else "",
        of_ms(row.queue_ms),
        of_ms(row.ttft_ms),
        of_ms(row.itl_ms),
        of_ms(row.e2e_ms),
        printable(row.error or ""),
    )


def _show_fields(row: LoggedRequest) -> None:
    fields = msgspec.to_builtins(row)
    for name, value in fields.items():
        if name.endswith("_at") and value is not None:
            value = f"{local(value)} ({value:.3f})"
        if isinstance(value, float):
            value = f"{value:.3f}"
        print(f"{name:20} {'' if value is None else printable(str(value))}".rstrip())


def _ends(
    reader: RequestReader, last: int, wanted: RequestFilter, shown: dict[str, LoggedRequest]
) -> Iterator[LoggedRequest]:
    """Yield matching requests when they end, or when they begin if the filter selects open requests. Never
    stops."""
    failing_since: float | None = None
    while True:
        try:
            changes = reader.changes(last)
            failing_since = None
        except (MissingDatabaseError, CorruptDatabaseError, SchemaVersionError) as error:
            raise Failure(str(error)) from error
        except StoreError as error:
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since > _UNREADABLE_FOR_S:
                raise Failure(str(error)) from error
            changes = []
        for row in changes:
            last = row.sequence
            before = shown.pop(row.request_id, None)
            seen = before is not None and before.state == row.state
            if not seen and row.state == (wanted.state or "ended") and _matches(row, wanted):
                yield row
        if not changes:
            time.sleep(_POLL_S)


def _matches(row: LoggedRequest, wanted: RequestFilter) -> bool:
    """Return whether a row matches the filter fields that this command sets, with the same result as
    `RequestReader.query`."""
    return (
        wanted.request_id in (None, row.request_id)
        and wanted.tenant in (None, row.tenant)
        and wanted.model in (None, row.model)
        and wanted.status in (None, row.status)
        and wanted.state in (None, row.state)
        and (wanted.since is None or row.created_at >= wanted.since)
        and (not wanted.failed or _failed(row))
    )


def _failed(row: LoggedRequest) -> bool:
    return row.error is not None or (row.status or 0) >= 400
