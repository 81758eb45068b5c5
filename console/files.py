"""Resolves file names entered by operators and writes the files to which the console exports tables."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_Identity = tuple[int, int, int, int]


class FileError(ValueError):
    """Raised if a file cannot be used. The message names the file and the remedy."""


def path_of(name: str) -> Path:
    """Return the absolute path of a file named by an operator. The name may start with `~` or `~user`. Raises
    FileError if there is no such user."""
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError as error:
        raise FileError(f"cannot use {name}: no such user; enter the full path") from error


class ExportedFiles:
    """Writes exported tables to files. It overwrites only files that it has written itself."""

    def __init__(self) -> None:
        self._written: dict[Path, _Identity] = {}
        """The files written, each with its state after the last write."""

    def write(self, path: Path, text: str) -> None:
        """Write a file that only this user can read. Raises FileError if the file exists and was written by
        another program, and OSError if it cannot be written."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            descriptor = self._own(path)
        with open(descriptor, "w") as file:
            try:
                file.write(text)
                file.flush()
            finally:
                # A file left incomplete, for example by a full disk, can be overwritten later.
                self._written[path] = _identity(os.fstat(descriptor))

    def _own(self, path: Path) -> int:
        """Open and empty a file that this console wrote and that has not changed since."""
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            if _identity(os.fstat(descriptor)) == self._written.get(path):
                os.ftruncate(descriptor, 0)
                return descriptor
            os.close(descriptor)
        raise FileError(
            f"{path} already exists and was not written by this console: choose another name, as in "
            "export csv NAME, or remove the file"
        )


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
