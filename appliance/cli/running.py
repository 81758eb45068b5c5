"""Implements `appliance requests --running`, which shows the unfinished requests."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator

from appliance.cli.following import following
from appliance.cli.output import (
    Column,
    is_terminal,
    of_count,
    of_seconds,
    paint,
    print_json,
    printable,
    table,
    terminal_width,
)
from appliance.cli.service import admin_client
from appliance.client import AdminClient
from appliance.snapshot import UnfinishedRequest

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
    Column("MAX OUT", right=True, drop=1),
    Column("QUEUE", right=True, drop=7),
    Column("TTFT", right=True, drop=2),
    Column("REPLICA", flexible=True, drop=9),
)


_CLEAR = "\x1b[H\x1b[2J"


def show_running(
    run_dir: str | None, *, tenant: str | None, model: str | None, watch: bool, as_json: bool
) -> None:
    """Print the unfinished requests, oldest first. If `watch` is set, keep running and print the list every
    second. On a terminal, each list overwrites the previous one."""

    def chosen(every: Iterable[UnfinishedRequest]) -> list[UnfinishedRequest]:
        return [one for one in every if tenant in (None, one.tenant) and model in (None, one.model)]

    with admin_client(run_dir) as client:
        if not watch:
            _print(chosen(client.in_flight()), as_json)
            return
        for every in following(lambda: _every_second(client)):
            found = chosen(every)
            if as_json:
                print_json(found, line=True)
            elif is_terminal(sys.stdout):
                height = shutil.get_terminal_size().lines - 1
                print(_CLEAR + "\n".join(_lines(found)[:height]), flush=True)
            else:
                print("\n".join([*_lines(found), ""]), flush=True)


def _every_second(client: AdminClient) -> Iterator[list[UnfinishedRequest]]:
    return (snapshot.requests for snapshot in client.snapshots(hz=1))


def _print(found: list[UnfinishedRequest], as_json: bool) -> None:
    if as_json:
        print_json(found)
    elif found:
        print("\n".join(_lines(found)))
    else:
        print("No unfinished requests.", file=sys.stderr)


def _lines(found: list[UnfinishedRequest]) -> list[str]:
    heading, *lines = table(_COLUMNS, [_cells(one) for one in found], width=terminal_width())
    return [paint(heading, "dim"), *lines]


def _cells(one: UnfinishedRequest) -> tuple[str, ...]:
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
        "" if one.max_tokens is None else of_count(one.max_tokens),
        "" if one.queue_s is None else of_seconds(one.queue_s),
        "" if one.ttft_s is None else of_seconds(one.ttft_s),
        printable(one.replica),
    )


def _count(count: int | None) -> str:
    return "" if count is None else of_count(count)
