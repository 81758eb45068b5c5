"""Implements `appliance requests`, which shows the request log. The requests come from the running service.
If no service is running, or with `--state-dir`, they are read from `history.db`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import chain

import msgspec

from appliance.calls import AdminError
from appliance.cli.failure import CommandLineError, Failure, as_failure
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
from appliance.cli.request_sources import FileLog, RequestSource, ServiceLog
from appliance.cli.service import check_databases, find_run_dir, find_state_dir, service_or_files
from appliance.cli.times import local, local_short, moment
from appliance.client import ServiceNotRunningError
from appliance.pages import NamedRequest, RequestLogQuery

_COLUMNS = (
    Column("TIME"),
    Column("REQUEST", flexible=True),
    Column("TENANT", flexible=True, drop=4),
    Column("MODEL", flexible=True, drop=2),
    Column("UNIT", flexible=True, drop=10),
    Column("KEY", flexible=True, drop=9),
    Column("PEER", flexible=True, drop=8),
    Column("STATUS"),
    Column("FINISH REASON", flexible=True),
    Column("IN", right=True),
    Column("CACHED", right=True, drop=5),
    Column("OUT", right=True),
    Column("QUEUE ms", right=True, drop=6),
    Column("TTFT ms", right=True, drop=1),
    Column("ITL ms", right=True, drop=7),
    Column("E2E ms", right=True),
    Column("ERROR", flexible=True, drop=3),
)
# Minimum column widths, which keep later lines aligned with the first lines.
_MIN_CELLS = (
    "00-00 00:00:00",
    "req-" + "0" * 24,
    *["_" * 12] * 5,
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
    query: RequestLogQuery,
    *,
    limit: int,
    follow: bool,
    as_json: bool,
) -> None:
    """Print the matching requests, oldest first. If `follow` is set, keep running and print requests when
    they end."""
    with as_failure(ServiceNotRunningError, AdminError):
        source = _source(run_dir, state_dir)
        rows, sequence = source.newest(query, limit)
        if query.request_id is not None and not rows and not follow:
            raise Failure(
                f"{source.name} has no request {query.request_id!r}; list the requests with: appliance "
                "requests"
            )
        if follow:
            shown = {row.request_id: row for row in rows}
            _show_as_they_come(rows, unseen(source.follow(query, sequence), shown), as_json)
        elif as_json:
            print_json(rows)
        elif query.request_id is not None:
            _show_fields(rows[0])
        elif rows:
            _show_as_they_come(rows, None, as_json)
        else:
            print(f"No matching requests in {source.name}.", file=sys.stderr)


def _source(run_dir: str | None, state_dir: str | None) -> RequestSource:
    run = find_run_dir(run_dir)
    if state_dir is None and (client := service_or_files(run)) is not None:
        return ServiceLog(client)
    folder = find_state_dir(state_dir, run)
    check_databases(folder, None if state_dir else run, "history.db")
    return FileLog(folder / "history.db")


def request_query(
    request_id: str | None,
    tenant: str | None,
    model: str | None,
    status: str | None,
    failed: bool,
    since: str | None,
) -> RequestLogQuery:
    """Return the query described by these options. Raises CommandLineError for an invalid option."""
    wanted = RequestLogQuery(
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


def _show_as_they_come(rows: list[NamedRequest], more: Iterator[NamedRequest] | None, as_json: bool) -> None:
    if as_json:
        for row in chain(rows, more or ()):
            print_json(row, line=True)
        return
    cells = [_cells(row) for row in rows]
    layout = Layout(_COLUMNS, cells if more is None else [*cells, _MIN_CELLS], terminal_width())
    print(paint(layout.heading(), "dim"), flush=True)
    for row, line in zip(rows, cells, strict=True):
        _print_line(layout, row, line)
    sys.stdout.flush()
    for row in more or ():
        _print_line(layout, row, _cells(row))
        sys.stdout.flush()


def _print_line(layout: Layout, row: NamedRequest, cells: tuple[str, ...]) -> None:
    line = layout.line(cells)
    print(paint(line, "red") if row.failed else paint(line, "dim") if row.state == "open" else line)


def _cells(row: NamedRequest) -> tuple[str, ...]:
    ended = row.state == "ended"
    return (
        local_short(row.created_at),
        printable(row.request_id),
        printable(row.tenant or ""),
        printable(f"{row.model} (for {row.fallback_of})" if row.fallback_of else row.model or ""),
        printable(row.unit or ""),
        printable(row.key_name or row.key_id or ""),
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


def _show_fields(row: NamedRequest) -> None:
    fields = msgspec.to_builtins(row)
    for name, value in fields.items():
        if name.endswith("_at") and value is not None:
            value = f"{local(value)} ({value:.3f})"
        if isinstance(value, float):
            value = f"{value:.3f}"
        print(f"{name:20} {'' if value is None else printable(str(value))}".rstrip())


def unseen(changes: Iterator[NamedRequest], shown: dict[str, NamedRequest]) -> Iterator[NamedRequest]:
    """Yield the requests in `changes` that have not been shown in this state yet. A request that ended while
    `shown` was being read is also in `changes`."""
    for row in changes:
        before = shown.pop(row.request_id, None)
        if before is None or before.state != row.state:
            yield row
