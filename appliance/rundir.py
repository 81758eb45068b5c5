"""The run directory: one service each, held by a lock; the sockets' place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec

_LOCK = "service.lock"
_MEETINGS = "ranks-"


class RunDirError(Exception):
    """The run or state directory cannot be used; the message says why and what to do."""


class Holder(msgspec.Struct, kw_only=True):
    """Who holds, or last held, a run directory."""

    pid: int
    state_dir: str


class RunDirLock:
    """Holds a run directory for this process, until `release` or the process's end."""

    def __init__(self, run_dir: Path, state_dir: Path) -> None:
        """Raises RunDirError when another service holds it, or the lock's file cannot be opened."""
        path = run_dir / _LOCK
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirError(
                f"{path} cannot be opened by uid {os.geteuid()} ({error.strerror}): remove it, or name "
                f"another --run-dir"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            other = last_holder(run_dir)
            who = f"process {other.pid}" if other else "another process"
            raise RunDirError(
                f"{run_dir} belongs to a running service ({who}): stop that one, or give this one its own "
                f"--run-dir and --state-dir"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(Holder(pid=os.getpid(), state_dir=str(state_dir))), 0)
        for left in run_dir.glob(f"{_MEETINGS}*"):
            shutil.rmtree(left, ignore_errors=True)  # of a service that was killed

    def release(self) -> None:
        """Let another service have it."""
        os.close(self._descriptor)


def last_holder(run_dir: Path) -> Holder | None:
    """Who holds the directory, or held it last: where clients learn which state directory belongs to it."""
    try:
        return msgspec.json.decode((run_dir / _LOCK).read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError):
        return None


def new_meeting(run_dir: Path) -> str:
    """Path of a file that does not exist yet, in a new folder, where the ranks of one life of a replica meet.

    In the run directory, so that nothing stays behind for good when the service is killed. Raises OSError.
    """
    return str(Path(tempfile.mkdtemp(prefix=_MEETINGS, dir=run_dir)) / "store")


def prepare_directories(run_dir: Path, state_dir: Path) -> None:
    """Make both directories, for this user alone, where they are missing. Raises RunDirError."""
    for name, path in (("run_dir", run_dir), ("state_dir", state_dir)):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.lstat() if path.parent == Path("/tmp") else path.stat()
        except OSError as error:
            raise RunDirError(f"{name} {path} cannot be made ({error.strerror}): name another one") from error
        # In /tmp anybody can have made it first.
        if not stat.S_ISDIR(found.st_mode) or (path.parent == Path("/tmp") and found.st_uid != os.geteuid()):
            raise RunDirError(
                f"{name} {path} is not a directory of this user's: remove it or name another one"
            )
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            raise RunDirError(f"{name} {path} cannot be written by uid {os.geteuid()}: name another one")


def remove_socket(path: Path) -> None:
    """Remove a socket that this or a former service left; anything else stays. The lock must be held."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
