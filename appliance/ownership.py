"""Checks whether clients can trust the owners of the service's directories and databases, and the process
behind a socket.

Clients make these checks before they send a key, a prompt or a command, because any user can create a
directory in /tmp. Three users are trusted: root, the caller, and the service's user. $APPLIANCE_SERVICE_USER
names the service's user. A run directory's owner also counts as the service's user if only root or the caller
could have created the directory. For example, systemd, which runs as root, creates /run/appliance.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import struct
from pathlib import Path

SERVICE_USER = "APPLIANCE_SERVICE_USER"
"""Environment variable that names the service's user. Required if the service runs neither as root nor as the
caller."""
UCRED = struct.Struct("3i")
"""The process id, user and group that SO_PEERCRED returns (unix(7))."""
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(Exception):
    """Raised if a directory, file or process belongs to an untrusted user. No data has been sent or read. The
    message ends with the remedy."""

    def __init__(self, description: str, remedy: str) -> None:
        super().__init__(f"{description}: {remedy}")
        self.description = description
        self.remedy = remedy


def trusted_directory(path: Path, option: str, service: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return the users who are trusted to listen on sockets in this directory: root, the caller, and the
    service's user. If the directory does not exist, no process can listen there, so return only root and the
    caller. `option` is the command-line option that selects a different directory. `service` contains users
    who are trusted because they own one of the service's other directories.

    Raises UntrustedError if the path is a symbolic link, if other users can write to the directory, or if its
    owner is not trusted.
    """
    uids = _given_uids() | service
    try:
        found = path.lstat()
    except OSError:
        return uids
    remedy = f"use another directory with {option}"
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        raise UntrustedError(f"{path} is {kind}", remedy)
    if found.st_uid not in uids:
        if not _placed_by(path, uids):
            raise UntrustedError(
                f"{path} belongs to {user_name(found.st_uid)}, not to you or root",
                f"{remedy}, or, if "
                f"{user_name(found.st_uid)} runs the service, set {SERVICE_USER}={found.st_uid}",
            )
        uids |= {found.st_uid}
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise UntrustedError(
            f"{path} is writable by other users (mode {stat.S_IMODE(found.st_mode):o})",
            f"run 'chmod go-w {path}', or {remedy}",
        )
    return uids


def trusted_state(state_dir: Path, run_dir: Path | None) -> frozenset[int]:
    """Return the users who may own the files in a state directory: root, the caller, and the owner of
    the service's run directory, `run_dir`. Raises UntrustedError in the same cases as `trusted_directory`."""
    service = frozenset[int]() if run_dir is None else trusted_directory(run_dir, "--run-dir")
    return trusted_directory(state_dir, "--state-dir", service)


def check_file(path: Path, uids: frozenset[int]) -> None:
    """Check that `path`, if it exists, is a regular file that belongs to one of these users and is writable
    only by its owner. Otherwise, raise UntrustedError."""
    try:
        found = path.lstat()
    except OSError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise UntrustedError(f"{path} is not a regular file", "remove or rename it")
    if found.st_uid not in uids:
        raise UntrustedError(
            f"{path} belongs to {user_name(found.st_uid)}, not to you, root or the service's user",
            f"remove "
            f"it, or, if {user_name(found.st_uid)} runs the service, set {SERVICE_USER}={found.st_uid}",
        )
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise UntrustedError(
            f"{path} is writable by other users (mode {stat.S_IMODE(found.st_mode):o})",
            f"run 'chmod go-w {path}'",
        )


def check_database(path: Path, uids: frozenset[int]) -> None:
    """Apply `check_file` to a database and to the files next to it that SQLite also reads."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        check_file(path.with_name(path.name + suffix), uids)


def check_peer(sock: socket.socket, uids: frozenset[int]) -> None:
    """Raise UntrustedError unless the process that listens on a connected Unix socket runs as one of these
    users."""
    _, uid, _ = UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
    if uid not in uids:
        raise UntrustedError(
            f"the process on socket {os.fsdecode(sock.getpeername())} runs as {user_name(uid)}, not as "
            f"you, root or the service's user, so no data was sent to it",
            f"if {user_name(uid)} runs the service, set {SERVICE_USER}={uid}",
        )


def user_name(uid: int) -> str:
    """Return a user's name and number, as shown in messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _given_uids() -> frozenset[int]:
    """Return the uids of root, the caller, and the user in $APPLIANCE_SERVICE_USER."""
    uids = {0, os.geteuid()}
    if named := os.environ.get(SERVICE_USER):
        uids.add(_uid_of(named))
    return frozenset(uids)


def _uid_of(name: str) -> int:
    if name.isascii() and name.isdigit() and len(name) <= 10:
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        raise UntrustedError(
            f"${SERVICE_USER} is {name!r}, which is not a user of this machine",
            "set it to the name or number of the user who runs the service",
        ) from None


def _placed_by(path: Path, uids: frozenset[int]) -> bool:
    """Return whether only these users could have created `path`. This is the case if every parent directory
    belongs to one of them and no other user can write to it. Returns False for paths in /tmp: the sticky bit
    protects existing entries, but any user may have created them.
    """
    for parent in Path(os.path.realpath(path.parent)), *Path(os.path.realpath(path.parent)).parents:
        try:
            found = parent.stat()
        except OSError:
            return False
        if found.st_uid not in uids or found.st_mode & _WRITABLE_BY_OTHERS:
            return False
    return True
