"""Implements `appliance logs`, which shows the log lines kept in the service's memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from appliance import calls
from appliance.cli.following import following
from appliance.cli.output import paint, print_json, printable
from appliance.cli.service import admin_client
from appliance.client import AdminClient
from appliance.pages import CORE, MAX_PAGE_ROWS, LogLine, LogQuery
from appliance.protocol import LogLevel

_COLOURS = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "red"}


def show_logs(
    run_dir: str | None,
    *,
    limit: int,
    follow: bool,
    level: LogLevel | None,
    text: str | None,
    process: str | None,
    as_json: bool,
) -> None:
    """Print the newest log lines, oldest first. With `follow`, keep running and print new lines."""
    query = LogQuery(limit=min(limit, MAX_PAGE_ROWS), level=level, text=text, process=process)
    with admin_client(run_dir) as client:
        page = client.call(calls.log_lines(query))
        if as_json and not follow:
            print_json(page.lines)
            return
        for line in page.lines:
            _print(line, as_json)
        if follow:
            for line in _new_lines(client, query, page.number):
                _print(line, as_json)


def _new_lines(client: AdminClient, query: LogQuery, after: int) -> Iterator[LogLine]:
    """Yield new log lines. Never returns."""
    started_at = client.status().started_at

    def stream() -> Iterator[LogLine]:
        nonlocal after, started_at
        if (now := client.status().started_at) != started_at:
            after, started_at = 0, now  # the service has restarted, and its lines are numbered from 1 again
        for line in client.follow(calls.follow_log(msgspec.structs.replace(query, after=after))):
            after = line.number
            yield line

    return following(stream)


def _print(line: LogLine, as_json: bool) -> None:
    if as_json:
        print_json(line, line=True)
        return
    at = datetime.fromtimestamp(line.at, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
    process = "" if line.process == CORE else f"{line.process} "
    text = f"{at}Z {line.level.upper():7} {printable(process + line.area)}: {printable(line.message)}"
    colour = _COLOURS.get(line.level)
    print(paint(text, colour) if colour else text, flush=True)
