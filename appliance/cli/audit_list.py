"""Implements `appliance audit list`. The actions come from the running service. If no service is running, or
with `--file` or `--state-dir`, they are read from `control.db`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain

import msgspec

from appliance import calls
from appliance.calls import AdminError
from appliance.cli.audit import ChainLocation, chain_location
from appliance.cli.failure import Failure, as_failure
from appliance.cli.following import following
from appliance.cli.output import Column, Layout, paint, print_json, printable, terminal_width
from appliance.cli.service import find_run_dir, service_or_files
from appliance.cli.times import local_short, moment
from appliance.client import AdminClient, ServiceNotRunningError
from appliance.pages import MAX_PAGE_ROWS, AuditAction, AuditQuery
from store.errors import StoreError
from store.evidence import matches_action, read_actions, spooled_actions

_COLUMNS = (
    Column("TIME"),
    Column("ROW", right=True),
    Column("ACTOR"),
    Column("HOST", flexible=True, drop=2),
    Column("ACTION"),
    Column("PARAMETERS", flexible=True, drop=1),
    Column("RESULT", flexible=True),
    Column("BEFORE", flexible=True, drop=4),
    Column("AFTER", flexible=True, drop=3),
)
# Minimum column widths, which keep later lines aligned with the first lines.
_WIDTHS = ("00-00 00:00:00", "_" * 6, "_" * 10, "_" * 8, "_" * 16, "_" * 16, "_" * 12, "_" * 8, "_" * 8)


def list_actions(
    run_dir: str | None,
    state_dir: str | None,
    file: str | None,
    *,
    limit: int,
    actor: str | None,
    action: str | None,
    since: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Print the actions in the audit chain, oldest first, followed by those still in the spool. If `follow`
    is set, keep running and print each action when its result is recorded."""
    query = AuditQuery(
        actor=actor,
        action=action,
        since=None if since is None else moment(since, "--since", ahead=False),
    )
    with as_failure(ServiceNotRunningError, AdminError, StoreError):
        client = service_or_files(find_run_dir(run_dir)) if file is None and state_dir is None else None
        if client is not None:
            found, sequence = _of_service(client, query, limit)
            place = str(client.socket)
        elif follow:
            raise Failure(
                "--follow needs a running service and permission to use its admin API: start the service, or "
                "omit --follow"
            )
        else:
            location = chain_location(run_dir, state_dir, file)
            found, place = _of_files(location, query, limit), str(location.database)
        if client is not None and follow:
            _print(found, _ended(client, query, sequence), as_json=as_json)
        elif as_json:
            print_json(found)
        elif found:
            _print(found, None, as_json=False)
        else:
            print(f"No matching actions in {place}.", file=sys.stderr)


def _of_service(client: AdminClient, query: AuditQuery, limit: int) -> tuple[list[AuditAction], int]:
    """Return the newest `limit` actions, oldest first, and the number of the chain's newest row."""
    rows: list[AuditAction] = []
    waiting: list[AuditAction] = []
    before, sequence = None, None
    while len(rows) < limit:
        size = min(limit - len(rows), MAX_PAGE_ROWS)
        page = client.call(calls.audit(msgspec.structs.replace(query, limit=size, before=before)))
        waiting += [action for action in page.rows if action.seq is None]
        rows += [action for action in page.rows if action.seq is not None]
        before, sequence = page.next, page.sequence if sequence is None else sequence
        if before is None:
            break
    return rows[::-1] + waiting[::-1], sequence or 0


def _of_files(location: ChainLocation, query: AuditQuery, limit: int) -> list[AuditAction]:
    found = read_actions(location.database, query.filter, limit)
    waiting = spooled_actions(location.folder) if location.folder else []
    return found + [action for action in waiting if matches_action(action, query.filter)]


def _ended(client: AdminClient, query: AuditQuery, after: int) -> Iterator[AuditAction]:
    """Yield each action when its result is recorded. Never returns."""

    def stream() -> Iterator[AuditAction]:
        nonlocal after
        for action in client.follow(calls.follow_audit(msgspec.structs.replace(query, after=after))):
            after = max(action.seq or 0, action.result_seq or 0)
            yield action

    return (action for action in following(stream) if action.result is not None)


def _print(found: list[AuditAction], more: Iterator[AuditAction] | None, *, as_json: bool) -> None:
    if as_json:
        for action in chain(found, more or ()):
            print_json(action, line=True)
        return
    cells = [_cells(action) for action in found]
    layout = Layout(_COLUMNS, cells if more is None else [*cells, _WIDTHS], terminal_width())
    print(paint(layout.heading(), "dim"), flush=True)
    for action in chain(found, more or ()):
        line = layout.line(_cells(action))
        colour = "yellow" if action.result is None else "red"
        print(line if action.result == "ok" else paint(line, colour), flush=more is not None)


def _cells(action: AuditAction) -> tuple[str, ...]:
    return (
        printable(action.at) if action.began_at is None else local_short(action.began_at),
        "spool" if action.seq is None else str(action.seq),
        printable(action.actor),
        printable(action.host or ""),
        printable(action.action),
        _values(action.params),
        printable("no result" if action.result is None else action.result),
        _values(action.before),
        _values(action.after),
    )


def _values(value: object) -> str:
    """Format a JSON value as readable text."""
    if not isinstance(value, dict):
        return "" if value is None else printable(str(value))
    return printable(" ".join(f"{name}={_value(one)}" for name, one in value.items()))


def _value(value: object) -> str:
    return (
        value
        if isinstance(value, str) and value and " " not in value
        else json.dumps(value, ensure_ascii=False)
    )
