"""One repository's folder in a hub cache. `blobs/` contains each file once, named after its checksum.
`snapshots/` contains a folder of links for each commit. All tools that use huggingface_hub can read this
cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.hub.repository import HubError, RemoteFile
from appliance.quantities import of_bytes

RESERVE_BYTES = 64 << 20
"""Free disk space in bytes that a download must leave, because the service's databases may be on the same
disk."""


class RepositoryCache:
    """One repository's folder in a hub cache."""

    def __init__(self, root: Path, repository: str) -> None:
        self.root = root
        self.folder = root / f"models--{repository.replace('/', '--')}"
        self._repository = repository

    def blob(self, file: RemoteFile) -> Path:
        """Return the path of a file once it has been downloaded completely."""
        return self.folder / "blobs" / file.digest

    def partial(self, file: RemoteFile) -> Path:
        """Return the path of a file while it is only partially downloaded."""
        return self.folder / "blobs" / f"{file.digest}.incomplete"

    def snapshot(self, commit: str) -> Path:
        """Return the path of a commit's snapshot folder."""
        return self.folder / "snapshots" / commit

    def received_bytes(self, files: Iterable[RemoteFile]) -> int:
        """Return how many bytes of the given files have been received."""
        received = 0
        for file in files:
            size = file.size if self.blob(file).exists() else _size(self.partial(file))
            received += size if size <= file.size else 0
        return received

    def prepare(self) -> None:
        """Create the repository's folders in the cache. Raises OSError if this fails."""
        for name in ("blobs", "snapshots", "refs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def check_space(self, needed_bytes: int) -> None:
        """Raise HubError if the disk has too little free space for `needed_bytes`."""
        free = shutil.disk_usage(self.root).free
        if needed_bytes + RESERVE_BYTES > free:
            raise HubError(
                f"{self._repository} needs {_exact(needed_bytes)} on the disk that holds {self.root}, but "
                f"only {_exact(free)} are free, of which {of_bytes(RESERVE_BYTES)} are reserved: free up "
                "disk space, or choose a folder on another disk with --cache-dir"
            )

    def complete(self, file: RemoteFile) -> None:
        """Rename a completely downloaded file to its final path."""
        os.replace(self.partial(file), self.blob(file))

    def link(self, commit: str, files: Iterable[RemoteFile]) -> None:
        """Link the complete files into a commit's snapshot folder."""
        for file in files:
            link = self.snapshot(commit) / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(self.blob(file), link.parent)
            if not (link.is_symlink() and os.readlink(link) == target):
                link.unlink(missing_ok=True)
                link.symlink_to(target)

    def record(self, revision: str, commit: str) -> None:
        """Record the commit that a branch or tag refers to."""
        if revision != commit:
            path = self.folder / "refs" / revision
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Prevent other processes from pulling this repository at the same time. Raises HubError if another
        process is pulling it."""
        path = self.root / ".locks" / self.folder.name / "pull.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HubError(
                    f"another process is pulling {self._repository} into {self.root}: wait for it, or stop it"
                ) from None
            yield
        finally:
            os.close(descriptor)


@contextmanager
def as_owner(root: Path) -> Iterator[None]:
    """While the context is active, create files in `root` with that folder's owner and group. Root acts as
    the folder's owner, so that the service's user can read the files and no link that this user may have
    placed in the folder can redirect root's writes to other files. For other users, files stay group-writable
    if they inherit the folder's group (set-group-ID), because every operator must be able to continue a pull.
    """
    found = root.stat()
    shared = bool(found.st_mode & stat.S_ISGID)
    former = os.umask(0o002 if shared else 0o022)
    drop = os.geteuid() == 0 and found.st_uid != 0
    groups = os.getgroups() if drop else []
    try:
        if drop:
            os.setgroups([])
            os.setegid(found.st_gid)
            os.seteuid(found.st_uid)
        yield
    finally:
        if drop:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(groups)
        os.umask(former)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _exact(count: int) -> str:
    return f"{of_bytes(count)} ({count:,} bytes)"
