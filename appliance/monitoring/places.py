"""Checks the service's directories and their contents: disk space, sockets, locks, and files left behind by
an earlier run."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from appliance.client import unix_connection
from appliance.monitoring.findings import Finding
from appliance.ownership import UntrustedError
from appliance.quantities import of_bytes

MAX_SOCKET_PATH_BYTES = 107
"""Maximum length of a socket path, in bytes. On Linux, `sun_path` holds 108 bytes, including the terminating
zero."""
ANSWER_TIMEOUT_S = 15.0
"""Time after which a service that has not answered is reported as not responding. A busy machine may delay an
answer for several seconds."""
_LITTLE_DISK_BYTES = 1 << 30
_NO_DISK_BYTES = 64 << 20
_SOCKETS = ("api.sock", "admin.sock")


class SocketAnswer(NamedTuple):
    """The result of one request to a Unix socket."""

    exists: bool
    answered: bool
    ready: bool = False
    text: str = ""
    """The response, or the reason why there was none."""


def directories(run_dir: Path, state_dir: Path) -> Iterator[Finding]:
    """Check that the run and state directories are usable and that the disk has enough free space."""
    for name, path, flag in (("run", run_dir, "--run-dir"), ("state", state_dir, "--state-dir")):
        yield _directory(name, path, flag)
    longest = max(len(os.fsencode(run_dir / name)) for name in _SOCKETS)
    if longest > MAX_SOCKET_PATH_BYTES:
        yield Finding(
            area="directories",
            subject="socket path",
            level="problem",
            text=f"socket paths in {run_dir} are {longest} bytes long, but the limit is "
            f"{MAX_SOCKET_PATH_BYTES} bytes",
            remedy="use a shorter --run-dir",
        )
    yield _disk(state_dir)


def api_state(socket: Path) -> SocketAnswer:
    """Request `/health/ready` on `api.sock`."""
    if not os.path.exists(socket):
        return SocketAnswer(False, False, text="does not exist")
    connection = unix_connection(socket, ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/health/ready")
        response = connection.getresponse()
        content = response.read()
    except (OSError, HTTPException, UntrustedError) as error:
        return SocketAnswer(True, False, text=str(error) or type(error).__name__)
    finally:
        connection.close()
    return SocketAnswer(True, True, response.status == 200, _reason(content))


def _reason(body: bytes) -> str:
    """Return the reason given in a health response, or the full text of any other response."""
    text = body.decode("utf-8", "replace")
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if isinstance(document, dict) and document.get("reason"):
        text = str(document["reason"])
    return " ".join(text.split())[:300]


def sockets(run_dir: Path, api: SocketAnswer, running: bool) -> Iterator[Finding]:
    """Check that the sockets respond. `running` is true if the admin socket has responded."""
    if running and not api.answered:
        yield Finding(
            area="sockets",
            subject="api.sock",
            level="problem",
            text=f"{run_dir / 'api.sock'} is not responding: {api.text}",
            remedy="check the front processes with: appliance status",
        )
    elif api.answered:
        how = "and is ready" if api.ready else f"but is not ready: {api.text}"
        yield Finding(
            area="sockets",
            subject="api.sock",
            level="ok" if api.ready else "warning",
            text=f"{run_dir / 'api.sock'} responds {how}",
            remedy="" if api.ready else "if a model is loading, wait; 'appliance status' shows the progress",
        )
    if running:
        yield Finding(
            area="sockets", subject="admin.sock", level="ok", text=f"{run_dir / 'admin.sock'} responds"
        )


def leftovers(run_dir: Path, state_dir: Path, running: bool) -> Iterator[Finding]:
    """Check for sockets and locks left behind by a stopped service, and for a hung service."""
    holder = None if running else lock_holder(run_dir / "service.lock")
    if holder is not None:
        yield Finding(
            area="leftovers",
            subject="service.lock",
            level="problem",
            text=f"process {holder} uses the run directory {run_dir} but is not responding on admin.sock",
            remedy=f"see the process's log; if the process hangs, stop it with 'kill {holder}' or 'kill -9 "
            f"{holder}' (log entries already written are kept)",
        )
    elif not running:
        for name in _SOCKETS:
            if _is_socket(run_dir / name):
                yield Finding(
                    area="leftovers",
                    subject=name,
                    level="warning",
                    text=f"{run_dir / name} was left behind by a service that was killed",
                    remedy="none needed: the next start replaces it",
                )
        for name in ("control.db", "history.db", "contents.db"):
            if (writer := lock_holder(state_dir / f"{name}-lock")) is not None:
                yield Finding(
                    area="leftovers",
                    subject=name,
                    level="problem",
                    text=f"process {writer} is writing to {state_dir / name}, but no service responds in "
                    f"{run_dir}",
                    remedy="set --run-dir to the run directory of that service, or stop the process",
                )


def lock_holder(path: Path) -> int | None:
    """Return the id of the process that holds the flock on `path`, or None. The function does not try to take
    the lock itself, because a service starting at that moment would then fail."""
    try:
        wanted = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK":
            continue
        major, minor, inode = words[5].split(":")
        if int(inode) == wanted.st_ino and os.makedev(int(major, 16), int(minor, 16)) == wanted.st_dev:
            return int(words[4])
    return None


def _directory(name: str, path: Path, flag: str) -> Finding:
    subject = f"{name} directory"
    missing = _missing(path)
    if missing is not None:
        above = missing.parent
        if os.access(above, os.W_OK | os.X_OK, effective_ids=True):
            return Finding(
                area="directories",
                subject=subject,
                level="ok",
                text=f"{path} will be created on first start",
            )
        return Finding(
            area="directories",
            subject=subject,
            level="problem",
            text=f"{path} does not exist, and uid {os.geteuid()} may not create {missing}",
            remedy=f"create the directory for the service's user, or set another one with {flag}",
        )
    if not os.path.isdir(path):
        return Finding(
            area="directories",
            subject=subject,
            level="problem",
            text=f"{path} is not a directory",
            remedy=f"move the file away, or set another directory with {flag}",
        )
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return Finding(
            area="directories",
            subject=subject,
            level="problem",
            text=f"{path} is not writable by uid {os.geteuid()}",
            remedy="run as the service's user, make that user the owner of the directory, or set another one "
            f"with {flag}",
        )
    return Finding(area="directories", subject=subject, level="ok", text=f"{path} is writable")


def _missing(path: Path) -> Path | None:
    """Return the topmost directory in `path` that does not exist."""
    found = None
    for part in (path, *path.parents):
        if os.path.lexists(part):
            return found
        found = part
    return found


def _disk(state_dir: Path) -> Finding:
    there = next(part for part in (state_dir, *state_dir.parents) if os.path.isdir(part))
    usage = shutil.disk_usage(there)
    text = f"{of_bytes(usage.free)} of {of_bytes(usage.total)} free on the disk that holds {state_dir}"
    if usage.free >= _LITTLE_DISK_BYTES:
        return Finding(area="directories", subject="disk", level="ok", text=text)
    return Finding(
        area="directories",
        subject="disk",
        level="problem" if usage.free < _NO_DISK_BYTES else "warning",
        text=text,
        remedy="free up disk space: while the disk is full, requests are served, but their log rows wait in "
        "memory",
    )


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False
