"""Checks whether the service's user can read files, and explains missing permissions."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import NamedTuple

from appliance.ownership import SERVICE_USER, user_name
from appliance.rundir import unit_is_installed

_UNIT_USER = "appliance"
"""The service's user in systemd/appliance.service."""
_HIDDEN_BY_UNIT = (Path("/home"), Path("/root"), Path("/run/user"))
"""Directories hidden from the service by the systemd unit's ProtectHome=."""


class FileReader(NamedTuple):
    """A user whose permissions are checked."""

    uid: int
    groups: frozenset[int]
    is_this_process: bool
    """Whether this process runs as this user. If so, the kernel can check the permissions."""


class Unreadable(NamedTuple):
    """A file or directory that the user cannot read, and a remedy."""

    description: str
    remedy: str


def this_process() -> FileReader:
    """Return this process's user."""
    return FileReader(os.geteuid(), frozenset((os.getegid(), *os.getgroups())), is_this_process=True)


def service_user() -> FileReader:
    """Return the service's user. This is the current user, unless root is running a command for a service
    that runs as a different user."""
    if os.geteuid() == 0:
        named = os.environ.get(SERVICE_USER) or (_UNIT_USER if unit_is_installed() else "")
        try:
            user = pwd.getpwuid(int(named)) if named.isdecimal() else pwd.getpwnam(named)
        except KeyError:
            return this_process()
        if user.pw_uid != 0:
            groups = frozenset(os.getgrouplist(user.pw_name, user.pw_gid))
            return FileReader(user.pw_uid, groups, is_this_process=False)
    return this_process()


def unreadable_reason(path: Path, reader: FileReader) -> Unreadable | None:
    """Return why the user cannot read an existing file or list an existing directory. Return None if the user
    can, or if the path does not exist. Symbolic links are followed, because a hub cache consists of links."""
    if _readable(path, reader):
        return None
    real = Path(os.path.realpath(path))
    name = user_name(reader.uid)
    for folder in reversed(real.parents):
        if not _allowed(folder, reader, os.X_OK):
            return Unreadable(
                f"{path} cannot be read by {name}, because {name} has no access to the directory {folder}",
                f"move the model to a directory that every user can access, such as /srv/models, or run: "
                f"chmod a+x {folder}",
            )
    try:
        found = real.stat()
    except OSError:
        return None
    folder = real if os.path.isdir(real) else real.parent
    target = "" if real == path else f" ({real})"
    return Unreadable(
        f"{path}{target} cannot be read by {name}: its owner is {user_name(found.st_uid)} and its mode is "
        f"{stat.S_IMODE(found.st_mode):o}",
        f"let the user read the model: chmod -R a+rX {folder}, or chown -R {reader.uid} {folder}",
    )


def hidden_by_unit(path: Path) -> bool:
    """True if this process runs as a systemd unit that may hide the path (ProtectHome=)."""
    return "INVOCATION_ID" in os.environ and any(path.is_relative_to(top) for top in _HIDDEN_BY_UNIT)


def _readable(path: Path, reader: FileReader) -> bool:
    if not reader.is_this_process:
        real = Path(os.path.realpath(path))
        wanted = os.R_OK | (os.X_OK if os.path.isdir(real) else 0)
        return all(_allowed(folder, reader, os.X_OK) for folder in real.parents) and _allowed(
            real, reader, wanted
        )
    return os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0), effective_ids=True)


def _allowed(path: Path, reader: FileReader, wanted: int) -> bool:
    """True if the path's mode bits grant the user these rights (os.R_OK, os.X_OK), or if the path does not
    exist. Access control lists are considered only if the user is this process's user."""
    if reader.is_this_process:
        try:
            return os.access(path, wanted, effective_ids=True) or not os.path.lexists(path)
        except OSError:
            return True
    try:
        found = path.stat()
    except OSError:
        return True
    if found.st_uid == reader.uid:
        mode = found.st_mode >> 6
    elif found.st_gid in reader.groups:
        mode = found.st_mode >> 3
    else:
        mode = found.st_mode
    return mode & 7 & wanted == wanted
