"""Implements `appliance backup`, which makes a verified copy of the state, whether or not the service is
running."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from appliance.actions.parameters import BeginBackup, EndBackup
from appliance.cli.failure import Failure
from appliance.cli.output import of_count, print_json
from appliance.cli.service import admin_key, check_databases, find_run_dir, find_state_dir
from appliance.client import AdminClient, AdminError, NotAllowedError, ServiceNotRunningError
from appliance.protocol import AuditHead
from appliance.quantities import of_bytes
from appliance.settings import SettingsError, find_config
from store.audit import Head
from store.backup import Backup, back_up
from store.errors import StoreError
from store.evidence import AUDIT_FILES, Recorded

_MAX_ERROR_CHARS = 2000
"""Maximum length of a recorded error message, in characters."""


def take_backup(
    run_dir: str | None,
    state_dir: str | None,
    config: str | None,
    target: str,
    *,
    contents: bool,
    as_json: bool,
) -> None:
    """Copy the state, check the copy and list the copied files."""
    run = find_run_dir(run_dir, config)
    state, path = find_state_dir(state_dir, run, config), Path(target).absolute()
    check_databases(state, None if state_dir else run, *AUDIT_FILES, "history.db", "contents.db")
    head = _begun(run, BeginBackup(path=str(path), contents=contents))
    try:
        done = back_up(
            state, path, others=_settings_files(config), recorded=_recorded(head), contents=contents
        )
    except BaseException as error:
        if head is not None:
            reason = str(error) or type(error).__name__
            _ended(run, EndBackup(path=str(path), error=reason[:_MAX_ERROR_CHARS]))
        if isinstance(error, StoreError | SettingsError):
            raise Failure(str(error)) from error
        raise
    if head is not None:
        _ended(run, EndBackup(path=str(done.path), rows=done.audit_rows, sha256=done.sha256))
    if as_json:
        print_json(
            {**done._asdict(), "path": str(done.path), "files": [file._asdict() for file in done.files]}
        )
        return
    if head is None:
        print(
            f"No service is running in {run}, so the backup is not recorded in the audit chain.",
            file=sys.stderr,
        )
    _say(done)


def _begun(run: Path, begin: BeginBackup) -> Head | None:
    """Ask the running service to record the backup's start. Return the chain head that the copy must contain,
    or None if no service is running."""
    with AdminClient(run, key=admin_key()) as client:
        try:
            answer = client.act(begin)
        except (NotAllowedError, AdminError) as error:
            raise Failure(str(error)) from error
        except ServiceNotRunningError:
            return None
    assert isinstance(answer, AuditHead)
    return Head(answer.seq, answer.hash)


def _ended(run: Path, end: EndBackup) -> None:
    """Ask the service to record the backup's result. The copy is valid even if the service has stopped in the
    meantime."""
    with AdminClient(run, key=admin_key()) as client:
        try:
            client.act(end)
        except (ServiceNotRunningError, AdminError) as error:
            print(
                f"The result of this backup could not be recorded in the audit chain: {error}",
                file=sys.stderr,
            )


def _recorded(head: Head | None) -> Iterable[Recorded]:
    return [] if head is None else [Recorded(head, "the running service")]


def _settings_files(config: str | None) -> dict[str, Path]:
    path = find_config(config)
    if path is None:
        return {}
    parts = sorted((path.parent / "conf.d").glob("*.toml"))
    return {f"settings/{path.name}": path} | {f"settings/conf.d/{part.name}": part for part in parts}


def _say(done: Backup) -> None:
    width = max(len(file.name) for file in done.files)
    for file in done.files:
        print(f"{file.name:{width}}  {of_bytes(file.bytes):>10}  {file.sha256[:16]}…")
    rows = of_count(done.audit_rows)
    print(f"{done.path} is complete: databases checked, audit chain verified up to row {rows}")
