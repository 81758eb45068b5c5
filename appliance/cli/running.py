"""Implements `appliance requests --running`, which shows the unfinished requests."""

from __future__ import annotations

import sys

from appliance.cli.output import Column, of_count, of_seconds, print_json, print_table, printable
from appliance.cli.service import admin_client
from appliance.snapshot import Request

_COLUMNS = (
    Column("AGE", right=True),
    Column("REQUEST", flexible=True),
    Column("CLASS"),
    Column("PHASE"),
    Column("TENANT", flexible=True, drop=4),
    Column("KEY", flexible=True, drop=6),
    Column("MODEL", flexible=True, drop=3),
    Column("PEER", flexible=True, drop=8),
    Column("IN", right=True),
    Column("CACHED", right=True, drop=5),
    Column("OUT", right=True),
    Column("AT MOST", right=True, drop=1),
    Column("QUEUE", right=True, drop=7),
    Column("TTFT", right=True, drop=2),
    Column("REPLICA", flexible=True, drop=9),
)


def show_running(run_dir: str | None, *, tenant: str | None, model: str | None, as_json: bool) -> None:
    """Print the unfinished requests, oldest first."""
    with admin_client(run_dir) as client:
        every = client.in_flight()
    found = [one for one in every if tenant in (None, one.tenant) and model in (None, one.model)]
    if as_json:
        print_json(found)
    elif found:
        print_table(_COLUMNS, [_cells(one) for one in found])
    else:
        print("No unfinished requests.", file=sys.stderr)


def _cells(one: Request) -> tuple[str, ...]:
    return (
        of_seconds(one.age_s),
        printable(one.request_id),
        one.class_name,
        one.phase or "",
        printable(one.tenant),
        printable(one.key_name or one.key_id),
        printable(one.model),
        printable(one.peer),
        of_count(one.prompt_tokens),
        _count(one.cached_tokens),
        _count(one.generated_tokens),
        of_count(one.max_tokens),
        "" if one.queue_s is None else of_seconds(one.queue_s),
        "" if one.ttft_s is None else of_seconds(one.ttft_s),
        printable(one.replica),
    )


def _count(count: int | None) -> str:
    return "" if count is None else of_count(count)
