"""Implements `appliance status`, which shows the service's state."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from appliance.cli.drain import line as drain_line
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
from appliance.cli.times import local_short
from appliance.protocol import ModelStatus, ReplicaStatus, ScalingStatus, precision
from appliance.protocol.status import AuditStatus, CurrentProblem, FrontStatus, Status
from appliance.quantities import of_bytes, percent

_COLOURS = {
    "ready": "green",
    "accepting": "green",
    "starting": "yellow",
    "loading": "yellow",
    "waiting": "yellow",
    "stopping": "yellow",
    "draining": "yellow",
    "sleeping": "yellow",
    "silent": "red",
    "restarting": "red",
    "degraded": "red",
    "failed": "red",
    "stopped": "red",
    "closed": "red",
}
_MAX_PROBLEMS = 8
_MIN_TOKENS = 1000
_INDENT = 9


def show_status(run_dir: str | None, *, as_json: bool) -> None:
    """Print the service status. Raises Failure if the service does not answer."""
    with admin_client(run_dir) as client:
        status = client.status()
    if as_json:
        print_json(status)
        return
    for line in status_lines(status, terminal_width()):
        print(line)


def status_lines(status: Status, width: int | None) -> Iterable[str]:
    """Yield the status as lines of at most `width` columns, or of any length if `width` is None."""
    yield from _head(status, width)
    if status.current_problems:
        yield from ("", paint("CURRENT PROBLEMS", "red"), *_current(status.current_problems, width))
    yield from ("", *_sockets(status, width))
    yield from ("", *_fronts(status.fronts, width))
    for model in status.models:
        yield from ("", *_model(model, width))
    yield from ("", *_queue(status, width), *_stores(status, width), *_audit(status.audit, width))
    if status.problems:
        yield from ("", paint("RECENT EVENTS", "dim"), *_problems(status, width))


def _head(status: Status, width: int | None) -> Iterable[str]:
    description = [
        f"appliance {printable(status.version)}",
        _state(status.state),
        f"up {of_seconds(status.uptime_s)}",
        f"pid {status.pid}",
        f"uid {status.uid}",
    ]
    yield paint(description[0], "bold") + " · " + " · ".join(description[1:])
    if status.reason and all(drain.model is not None for drain in status.drains):
        yield from _wrapped(printable(status.reason), width, "")
    for drain in status.drains:
        yield from _wrapped(drain_line(drain), width, "")
    for name, path in (
        ("run", status.run_dir),
        ("state", status.state_dir),
        ("settings", status.config_file),
    ):
        space = None if width is None else width - _INDENT
        yield f"{_label(name)}{_cut(printable(path) or 'no settings file; defaults and flags apply', space)}"


def _sockets(status: Status, width: int | None) -> list[str]:
    rows = [
        (socket.name, socket.state, printable(socket.address), of_count(socket.accepted))
        for socket in status.sockets
    ]
    columns = (
        Column("SOCKET"),
        Column("STATE", colours=_COLOURS),
        Column("ADDRESS", flexible=True),
        Column("ACCEPTED", right=True),
    )
    return _table(columns, rows, width)


def _fronts(fronts: list[FrontStatus], width: int | None) -> list[str]:
    columns = (
        Column("FRONT"),
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
            _per_token(front),
            of_count(front.unauthenticated),
            str(front.restarts),
            printable(front.detail or front.last_error),
        )
        for front in fronts
    ]
    return _table(columns, rows, width)


def _per_token(front: FrontStatus) -> str:
    # With few streamed tokens, most of the CPU time was spent starting the process, so the time per token
    # would be misleading.
    if front.cpu_us_per_token is None or front.tokens < _MIN_TOKENS:
        return ""
    return f"{front.cpu_us_per_token:.1f}"


def _model(model: ModelStatus, width: int | None) -> list[str]:
    facts = [
        f"up to {model.max_model_len:,} tokens",
        f"{model.queued:,} queued",
        f"version {printable(model.version)}",
    ]
    if model.fallback:
        facts.append(f"fallback {printable(model.fallback)}")
    detail = f": {printable(model.detail)}" if model.detail else ""
    space = None if width is None else width - _INDENT
    lines = [
        f"{_label('MODEL')}{paint(printable(model.name), 'bold')} {_state(model.state)}{detail}",
        " " * _INDENT + _cut(" · ".join(facts), space),
        " " * _INDENT + _cut(printable(model.folder), space),
        *_scaling(model.scaling, width),
        *_replicas(model.replicas, width),
    ]
    for replica in model.replicas:
        if experts := _experts(replica):
            lines += _wrapped(f"{printable(replica.name)}: {experts}", width, " " * _INDENT)
        if replica.state != "ready" and replica.last_error and replica.last_error != model.detail:
            lines += _wrapped(f"{replica.name}: {printable(replica.last_error)}", width, " " * _INDENT)
    return lines


def _scaling(scaling: ScalingStatus | None, width: int | None) -> list[str]:
    """Describe the replica count of a model that scales with load."""
    if scaling is None:
        return []
    text = f"{scaling.replicas} of {scaling.min_replicas} to {scaling.max_replicas} replicas"
    facts = [f"{text}: {scaling.reason}" if scaling.reason else text]
    if scaling.refusal:
        facts.append(f"no replica can be added: {printable(scaling.refusal)}")
    if scaling.changes:
        latest = scaling.changes[0]
        ago = of_seconds(max(0.0, time.time() - latest.at))
        facts.append(f"{latest.former} → {latest.replicas} {ago} ago: {latest.reason}")
    return [line for fact in facts for line in _wrapped(fact, width, " " * _INDENT)]


def _replicas(replicas: list[ReplicaStatus], width: int | None) -> list[str]:
    columns = (
        Column("REPLICA"),
        Column("STATE", colours=_COLOURS),
        Column("SEQS", right=True),
        Column("BLOCKS USED", right=True),
        Column("CACHED", right=True, drop=4),
        Column("HITS", right=True, drop=5),
        Column("STEP ms", right=True, drop=3),
        Column("IDLE µs", right=True, drop=6),
        Column("TOKENS", right=True, drop=2),
        Column("PREEMPTED", right=True, drop=8),
        Column("RESTARTS", right=True, drop=7),
        Column("MEMORY", right=True, drop=1),
        Column("DEVICES", flexible=True),
    )
    rows = [
        (
            printable(replica.name),
            replica.state,
            f"{replica.running}/{replica.max_num_seqs}" + (f"+{replica.waiting}" if replica.waiting else ""),
            f"{replica.blocks_used:,}/{replica.blocks_total:,}",
            of_count(replica.blocks_cached),
            "-" if replica.prefix_cache_hit_rate is None else percent(replica.prefix_cache_hit_rate),
            _by_kind(replica, f"{replica.step_ms:.1f}", f"{replica.mixed_step_ms:.1f}"),
            _by_kind(replica, f"{replica.idle_us:.0f}", f"{replica.mixed_idle_us:.0f}"),
            of_count(replica.generated_tokens),
            of_count(replica.preemptions),
            str(replica.restarts),
            of_bytes(replica.used_bytes),
            replica_devices(replica),
        )
        for replica in replicas
    ]
    return _table(columns, rows, width) if rows else []


def _experts(replica: ReplicaStatus) -> str:
    """Describe how evenly a replica's tokens are distributed over experts. Return an empty string if
    nothing was counted."""
    layers = [use for use in replica.expert_layers if use.choices]
    if not layers:
        return ""
    use = max(layers, key=lambda use: use.imbalance)
    unused = sum(use.unused for use in layers)
    return (
        f"expert {use.busiest} in layer {use.layer} is chosen {use.imbalance:.1f} times as often as the "
        "average expert in that layer; "
        f"{unused:,} of {sum(use.experts for use in layers):,} experts have not been "
        f"chosen ({of_count(sum(use.choices for use in layers))} choices across all layers)"
    )


def _by_kind(replica: ReplicaStatus, decode: str, mixed: str) -> str:
    """Return two values as text: the first for decode-only steps, the second for steps that compute prompts.
    "-" means that there were no such steps."""
    return f"{decode if replica.step_ms else '-'}/{mixed if replica.mixed_step_ms else '-'}"


def replica_devices(replica: ReplicaStatus) -> str:
    """Return the devices that a replica runs on, or why it is not running."""
    if replica.state != "ready":
        return printable(replica.detail)
    devices = list(dict.fromkeys(replica.devices))
    ranks = f"{len(replica.devices)} ranks on " if len(replica.devices) > 1 else ""
    held = precision(replica.dtype, replica.weights, replica.kv_cache_dtype)
    joined = ", ".join(part for part in (replica.links, replica.collectives) if part)
    return printable(f"{ranks}{', '.join(devices)}{f' ({joined})' if joined else ''}, {held}")


def _queue(status: Status, width: int | None) -> list[str]:
    queue = status.queue
    oldest = f", the oldest for {of_seconds(queue.oldest_wait_s)}" if queue.waiting else ""
    facts = (
        f"{queue.waiting:,} of at most {queue.limit:,} waiting{oldest} · {queue.running:,} running · "
        f"{queue.admitted:,} admitted · {queue.refused:,} refused · {queue.ended:,} ended"
    )
    if queue.preemptions:
        facts += f" · {queue.preemptions:,} preempted"
    lines = _labelled("QUEUE", facts, width)
    for one in queue.classes:
        if one.waiting:
            target = "" if one.target_s is None else f" (target {of_seconds(one.target_s)})"
            expected = "unknown" if one.expected_wait_s is None else of_seconds(one.expected_wait_s)
            waits = (
                f"{one.name}  {one.waiting:,} waiting, the oldest for {of_seconds(one.oldest_wait_s)}; "
                f"expected wait for new requests {expected}{target}"
            )
            lines += _labelled("", waits, width)
    if queue.overload:
        lines += [paint(line, "red") for line in _wrapped(printable(queue.overload), width, " " * _INDENT)]
    return lines


def _stores(status: Status, width: int | None) -> list[str]:
    lines = []
    for number, database in enumerate(status.databases):
        facts = [f"{database.committed_rows:,} rows written", f"{database.lag_rows:,} waiting"]
        if database.lag_rows:
            facts[-1] += f" ({database.lag_ms:.0f} ms)"
        if dropped := database.dropped_rows + database.rejected_rows:
            facts.append(f"{dropped:,} dropped")
        name = database.path.rpartition("/")[2]
        lines += _labelled("" if number else "STORE", f"{name:10}  {' · '.join(facts)}", width)
        if database.restored:
            lines += [
                paint(line, "yellow") for line in _wrapped(printable(database.restored), width, " " * _INDENT)
            ]
        if database.last_error:
            trouble = f"writes have failed for {of_seconds(database.failing_s)}: {database.last_error}"
            lines += [paint(line, "red") for line in _wrapped(printable(trouble), width, " " * _INDENT)]
    return lines


def _audit(audit: AuditStatus, width: int | None) -> list[str]:
    anchored = (
        f"heads anchored up to row {audit.recorded_rows:,}" if audit.recorded_rows else "no head anchored"
    )
    facts = f"{audit.rows:,} row{'' if audit.rows == 1 else 's'} · {anchored}"
    lines = _labelled("AUDIT", facts, width)
    troubles = []
    if audit.spooled:
        places = " and ".join([*audit.places, *(["memory only"] if audit.in_memory else [])])
        since = "" if audit.spooled_since is None else f" since {local_short(audit.spooled_since)}"
        troubles.append(f"{audit.spooled:,} rows waiting in {places}{since}")
    if audit.dropped:
        troubles.append(
            f"{audit.dropped:,} rows are missing from the chain and are only in the service's log"
        )
    if audit.last_error:
        troubles.append(audit.last_error)
    for trouble in troubles:
        lines += [paint(line, "red") for line in _wrapped(printable(trouble), width, " " * _INDENT)]
    return lines


def _current(problems: list[CurrentProblem], width: int | None) -> Iterable[str]:
    for problem in problems:
        yield from _wrapped(f"{printable(problem.where)}: {printable(problem.description)}", width, "  ")
        yield from _wrapped(f"→ {printable(problem.remedy)}", width, "    ")


def _problems(status: Status, width: int | None) -> list[str]:
    lines = []
    for problem in status.problems[:_MAX_PROBLEMS]:
        times = f" ({problem.count:,} times)" if problem.count > 1 else ""
        when = local_short(problem.at)
        lines += _wrapped(
            f"{when}  {printable(problem.where)}: {printable(problem.description)}{times}", width, "  "
        )
    left = len(status.problems) - _MAX_PROBLEMS
    return [*lines, f"  {left} older events are shown by: appliance status --json"] if left > 0 else lines


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    heading, *lines = table(columns, rows, width=width)
    return [paint(heading, "dim"), *lines]


def _label(name: str) -> str:
    return paint(f"{name:{_INDENT}}", "dim")


def _labelled(name: str, text: str, width: int | None) -> list[str]:
    first, *more = _wrapped(text, width, " " * _INDENT)
    return [_label(name) + first[_INDENT:], *more]


def _state(state: str) -> str:
    return paint(state, _COLOURS[state]) if state in _COLOURS else state


def _wrapped(text: str, width: int | None, indent: str) -> list[str]:
    import textwrap

    if width is None:
        return [indent + text]
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ")


def _cut(text: str, width: int | None) -> str:
    return text if width is None else shorten(text, width)
