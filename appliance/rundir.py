"""The run directory, which contains a service's sockets. A lock ensures that only one service uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec

from appliance.ownership import UntrustedError, trusted_directory

SYSTEM_RUN_DIR = Path("/run/appliance")
"""Run directory of a service started by systemd."""
SYSTEM_STATE_DIR = Path("/var/lib/appliance")
_UNIT_FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)
UNIT = "appliance.service"
_BOOTED = Path("/run/systemd/system")
"""A directory that exists if systemd is running (sd_booted(3))."""
_LOCK = "service.lock"
_RENDEZVOUS = "ranks-"
_MAX_LOCK_BYTES = 64 << 10


class RunDirError(Exception):
    """Raised if the run or state directory cannot be used. The message gives the reason and the remedy."""


class LockHolder(msgspec.Struct, kw_only=True):
    """The process that holds, or last held, a run directory's lock."""

    pid: int
    state_dir: str
    stopped: bool = True
    """Whether the process released the lock. False if the process was killed or crashed."""


class RunDirLock:
    """Locks a run directory for this process until `release` is called or the process exits."""

    def __init__(self, run_dir: Path, state_dir: Path) -> None:
        """Lock the directory. Raises RunDirError if another service has locked it, or if the lock file cannot
        be opened."""
        path = run_dir / _LOCK
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirError(
                f"{path} cannot be opened by uid {os.geteuid()} ({error.strerror}): remove the file, or "
                "use another --run-dir"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            other = last_holder(run_dir)
            holder = f"process {other.pid}" if other else "another process"
            raise RunDirError(
                f"{run_dir} is in use by a running service ({holder}): stop that service, or start this "
                "one with a different --run-dir and --state-dir"
            ) from None
        self.former = last_holder(run_dir)
        """The lock's previous holder, or None."""
        self._holder = LockHolder(pid=os.getpid(), state_dir=str(state_dir), stopped=False)
        self._write()
        for left in run_dir.glob(f"{_RENDEZVOUS}*"):
            shutil.rmtree(left, ignore_errors=True)  # the folder was left behind by a service that was killed

    def release(self) -> None:
        """Release the directory for use by other services."""
        self._holder.stopped = True
        with contextlib.suppress(OSError):
            self._write()
        os.close(self._descriptor)

    def _write(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(self._holder), 0)


def last_holder(run_dir: Path) -> LockHolder | None:
    """Return the process that holds, or last held, the directory's lock, and the state directory of its
    service. The directory must be trusted (`appliance.ownership`)."""
    try:
        descriptor = os.open(run_dir / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return msgspec.json.decode(file.read(_MAX_LOCK_BYTES), type=LockHolder)
    except (OSError, ValueError):
        return None


def unit_is_installed() -> bool:
    """Return whether systemd is running and the service's unit is installed."""
    return _BOOTED.is_dir() and any(os.path.exists(f"{folder}/{UNIT}") for folder in _UNIT_FOLDERS)


def start_remedy(run_dir: Path) -> str:
    """Return instructions for starting the service. If its unit is installed, only the systemctl command is
    given, because a service started in any other way would begin with an empty state directory.
    """
    if unit_is_installed():
        return "start the service with: systemctl start appliance"
    return f"start a service with: appliance serve --run-dir {run_dir}"


def new_rendezvous(run_dir: Path) -> str:
    """Return the path of a new rendezvous file in the run directory, through which a replica's ranks find
    each other at startup. If the service is killed, the next start removes the file. Raises OSError if the
    file's folder cannot be created."""
    return str(Path(tempfile.mkdtemp(prefix=_RENDEZVOUS, dir=run_dir)) / "store")


def prepare_directories(run_dir: Path, state_dir: Path) -> None:
    """Create missing directories, accessible only to this user.

    Raises RunDirError if a directory cannot be used, or if clients would not trust the run directory
    (`appliance.ownership`).
    """
    for name, path in (("run_dir", run_dir), ("state_dir", state_dir)):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(
                f"{name} {path} cannot be created ({error.strerror}): use another directory"
            ) from error
        # In /tmp, any user may have created the directory first.
        if name == "run_dir" or path.parent == Path("/tmp"):
            try:
                trusted_directory(path, f"--{name.replace('_', '-')}")
            except UntrustedError as error:
                raise RunDirError(f"{name} {error}") from error
        if not path.is_dir():
            raise RunDirError(f"{name} {path} is not a directory: remove it, or use another directory")
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            raise RunDirError(f"{name} {path} is not writable by uid {os.geteuid()}: use another directory")


def remove_socket(path: Path) -> None:
    """Remove a socket file created by this service or an earlier one. Other types of files are not removed.
    The caller must hold the lock."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
