"""`appliance status`: the service at a glance."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from appliance.cli.output import (
    Column,
    of_count,
    of_seconds,
    paint,
    print_json,
    printable,
    shorten,
    table,
    terminal_width,
)
from appliance.cli.service import admin_client
from appliance.cli.times import local
from appliance.protocol import FrontStatus, ModelStatus, ReplicaStatus, Status
from appliance.watch.quantities import of_bytes

_COLOURS = {
    "ready": "green",
    "accepting": "green",
    "starting": "yellow",
    "loading": "yellow",
    "waiting": "yellow",
    "stopping": "yellow",
    "draining": "yellow",
    "restarting": "red",
    "degraded": "red",
    "failed": "red",
    "stopped": "red",
    "closed": "red",
}
_MOST_PROBLEMS = 8


def show_status(run_dir: str | None, *, as_json: bool) -> None:
    """Ask the service and print what it says. Raises Failure when nobody answers."""
    with admin_client(run_dir) as client:
        status = client.status()
    if as_json:
        print_json(status)
        return
    for line in status_lines(status, terminal_width(), time.time()):
        print(line)


def status_lines(status: Status, width: int | None, now: float) -> Iterable[str]:
    """The whole picture in lines of at most `width` columns; `now` in unix seconds."""
    yield from _head(status, width)
    yield from _section("SOCKETS", _sockets(status, width))
    yield from _section("FRONTS", _fronts(status.fronts, width))
    yield from _section("MODELS", _models(status.models, width))
    yield from _section("QUEUE", _queue(status, width))
    yield from _section("STORE", _stores(status, width))
    yield from _section("PROBLEMS", _problems(status, width, now))


def _head(status: Status, width: int | None) -> Iterable[str]:
    what = [
        f"appliance {printable(status.version)}",
        _state(status.state),
        f"up {of_seconds(status.uptime_s)}",
        f"pid {status.pid}",
        f"uid {status.uid}",
    ]
    yield paint(what[0], "bold") + " · " + " · ".join(what[1:])
    if status.reason:
        yield from _wrapped(printable(status.reason), width, "")
    for name, path in (
        ("run", status.run_dir),
        ("state", status.state_dir),
        ("settings", status.config_file),
    ):
        room = None if width is None else width - 9
        yield f"{paint(f'{name:8}', 'dim')} {_cut(printable(path) or 'no file: defaults and flags', room)}"


def _sockets(status: Status, width: int | None) -> list[str]:
    rows = [
        (socket.name, socket.state, printable(socket.address), of_count(socket.accepted))
        for socket in status.sockets
    ]
    columns = (
        Column("NAME"),
        Column("STATE", colours=_COLOURS),
        Column("ADDRESS", flexible=True),
        Column("ACCEPTED", right=True),
    )
    return _table(columns, rows, width)


def _fronts(fronts: list[FrontStatus], width: int | None) -> list[str]:
    columns = (
        Column("NAME"),
        Column("STATE", colours=_COLOURS),
        Column("PID", right=True, drop=2),
        Column("CONNS", right=True, drop=3),
        Column("STREAMS", right=True),
        Column("REQUESTS", right=True),
        Column("TOKENS", right=True),
        Column("µs/TOKEN", right=True, drop=4),
        Column("REFUSED", right=True, drop=5),
        Column("RESTARTS", right=True, drop=1),
        Column("DETAIL", flexible=True, drop=6),
    )
    rows = [
        (
            front.name,
            front.state,
            str(front.pid or ""),
            of_count(front.connections),
            of_count(front.streams),
            of_count(front.requests),
            of_count(front.tokens),
            "" if front.cpu_us_per_token is None else f"{front.cpu_us_per_token:.1f}",
            of_count(front.unauthenticated),
            str(front.restarts),
            printable(front.detail or front.last_error),
        )
        for front in fronts
    ]
    return _table(columns, rows, width)


def _models(models: list[ModelStatus], width: int | None) -> list[str]:
    lines = []
    for model in models:
        facts = [
            f"{model.max_model_len:,} tokens at most",
            f"{model.queued:,} queued",
            f"version {printable(model.version)}",
        ]
        detail = f": {printable(model.detail)}" if model.detail else ""
        state = _state(model.state)
        lines.append(f"  {paint(printable(model.name), 'bold')} {state}{detail} · {' · '.join(facts)}")
        lines.append(f"    {_cut(printable(model.folder), None if width is None else width - 4)}")
        lines += _replicas(model.replicas, width)
        for replica in model.replicas:
            if replica.last_error and replica.state != "ready":
                lines += _wrapped(f"{replica.name}: {printable(replica.last_error)}", width, "    ")
    return lines


def _replicas(replicas: list[ReplicaStatus], width: int | None) -> list[str]:
    columns = (
        Column("REPLICA"),
        Column("STATE", colours=_COLOURS),
        Column("ROWS", right=True),
        Column("BLOCKS USED", right=True),
        Column("CACHED", right=True, drop=4),
        Column("STEP ms", right=True, drop=3),
        Column("IDLE µs", right=True, drop=6),
        Column("TOKENS", right=True, drop=2),
        Column("PREEMPTED", right=True, drop=8),
        Column("RESTARTS", right=True, drop=7),
        Column("MEMORY", right=True, drop=1),
        Column("ON", flexible=True),
    )
    rows = [
        (
            printable(replica.name),
            replica.state,
            f"{replica.running}/{replica.max_rows}" + (f"+{replica.waiting}" if replica.waiting else ""),
            f"{replica.blocks_used:,}/{replica.blocks_total:,}",
            of_count(replica.blocks_cached),
            f"{replica.step_ms:.1f}",
            f"{replica.idle_us:.0f}",
            of_count(replica.generated_tokens),
            of_count(replica.preemptions),
            str(replica.restarts),
            of_bytes(replica.used_bytes),
            _on(replica),
        )
        for replica in replicas
    ]
    return _table(columns, rows, width, indent=4) if rows else []


def _on(replica: ReplicaStatus) -> str:
    if replica.state != "ready":
        return printable(replica.detail)
    devices = list(dict.fromkeys(replica.devices))
    ranks = f"{len(replica.devices)} ranks on " if len(replica.devices) > 1 else ""
    return printable(f"{ranks}{', '.join(devices)}, {replica.dtype}")


def _queue(status: Status, width: int | None) -> list[str]:
    queue = status.queue
    oldest = f", the oldest for {of_seconds(queue.oldest_wait_s)}" if queue.waiting else ""
    return _wrapped(
        f"{queue.waiting:,} waiting of at most {queue.limit:,}{oldest} · {queue.running:,} running · since "
        f"the start {queue.admitted:,} admitted, {queue.refused:,} refused, {queue.ended:,} ended",
        width,
        "  ",
    )


def _stores(status: Status, width: int | None) -> list[str]:
    lines = []
    for database in status.databases:
        name = database.path.rpartition("/")[2]
        facts = [f"{database.committed_rows:,} rows written", f"{database.lag_rows:,} waiting"]
        if database.lag_rows:
            facts[-1] += f" ({database.lag_ms:.0f} ms)"
        if database.dropped_rows or database.rejected_rows:
            facts.append(paint(f"{database.dropped_rows + database.rejected_rows:,} lost", "red"))
        lines.append(f"  {name:10}  {' · '.join(facts)}")
        if database.last_error:
            trouble = f"has refused writes for {of_seconds(database.failing_s)}: {database.last_error}"
            lines += [paint(line, "red") for line in _wrapped(printable(trouble), width, "    ")]
    return lines


def _problems(status: Status, width: int | None, now: float) -> list[str]:
    lines = []
    for problem in status.problems[:_MOST_PROBLEMS]:
        times = f" ({problem.count:,} times)" if problem.count > 1 else ""
        when = local(problem.at, day=now - problem.at > 86400)
        lines += _wrapped(
            f"{when}  {printable(problem.where)}: {printable(problem.what)}{times}", width, "  "
        )
    left = len(status.problems) - _MOST_PROBLEMS
    return [*lines, f"  and {left} older ones: appliance status --json"] if left > 0 else lines


def _section(title: str, lines: Iterable[str]) -> Iterable[str]:
    lines = list(lines)
    return ["", paint(title, "bold"), *lines] if lines else []


def _table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, indent: int = 2
) -> list[str]:
    heading, *lines = table(columns, rows, width=width, indent=indent)
    return [paint(heading, "dim"), *lines]


def _state(state: str) -> str:
    return paint(state, _COLOURS[state]) if state in _COLOURS else state


def _wrapped(text: str, width: int | None, indent: str) -> list[str]:
    import textwrap

    if width is None:
        return [indent + text]
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ")


def _cut(text: str, width: int | None) -> str:
    return text if width is None else shorten(text, width)
