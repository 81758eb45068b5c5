"""Implements `appliance history export`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from appliance.cli.failure import CommandLineError, as_failure
from appliance.cli.output import of_count, print_json
from appliance.cli.service import (
    admin_key,
    check_databases,
    find_run_dir,
    find_state_dir,
    service_or_files,
)
from appliance.cli.times import local, moment
from appliance.history.incident_export import export_incident
from appliance.history.sources import FilePast, PastError, PastSource, ServicePast
from appliance.quantities import of_bytes


def export_history(
    run_dir: str | None, state_dir: str | None, file: str, *, since: str, until: str | None, as_json: bool
) -> None:
    """Write an incident file and print a summary of its contents."""
    now = time.time()
    begin = moment(since, "--since", ahead=False, now=now)
    end = now if until is None else moment(until, "--until", ahead=False, now=now)
    if begin >= end:
        raise CommandLineError(
            f"--since is {local(begin)}, which is not before --until, {local(end)}: swap the two times"
        )
    with as_failure(PastError):
        past = _source(run_dir, state_dir)
        try:
            done = export_incident(past, begin, end, Path(file).absolute())
        finally:
            past.close()
    if as_json:
        print_json(done)
        return
    for note in done.notes:
        print(note, file=sys.stderr)
    print(
        f"{done.path}: {of_bytes(done.bytes)}, from {local(begin)} to {local(end)}: {of_count(done.samples)} "
        f"samples, {of_count(done.requests)} requests, {of_count(done.alerts)} alerts, "
        f"{of_count(done.actions)} actions, {of_count(done.log_lines)} log lines"
    )
    print(f"Open it with: appliance console --replay {file}")


def _source(run_dir: str | None, state_dir: str | None) -> PastSource:
    run = find_run_dir(run_dir)
    if state_dir is None and service_or_files(run) is not None:
        return ServicePast(run, admin_key())
    folder = find_state_dir(state_dir, run)
    check_databases(folder, None if state_dir else run, "history.db", "control.db")
    return FilePast(folder / "history.db")
