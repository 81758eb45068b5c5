"""Manifests of model folders: each file's size and SHA-256. Creating a manifest reads all files completely.
Checking one reads at most `_WHOLE_BYTES` of each file, or the whole file if its modification time has
changed. Neither may be done on the event loop thread.

For large files, only samples of the contents are compared. They reveal that a file has been replaced by
another one of the same size, because training changes every part of the weights. They do not reveal a change
of a few bytes between the samples, but such a change updates the modification time. The whole file is read if
only the modification time has changed, because copying or `touch` also updates it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from appliance.background import in_own_thread
from store.models import ModelFile

_READERS = 4
"""Number of files hashed concurrently. Hashing releases the GIL."""
_WHOLE_BYTES = 32 << 20
"""Files up to this size are compared with the manifest in full before each replica start. For larger files,
only the size and samples are compared."""
_SAMPLES, _SAMPLE_BYTES = 32, 64 << 10
"""Number and size of the samples of a large file: 2 MiB in total, regardless of the file's size. The first
sample is at the beginning of the file, the last one at its end, and the others at equal distances between
these two."""


class ManifestError(Exception):
    """Raised if a folder cannot be read or differs from its manifest. The message gives the file, the problem
    and the remedy."""


def read_manifest(folder: str) -> tuple[ModelFile, ...]:
    """Return the manifest of a folder's files, excluding hidden files and subfolders. Raises ManifestError if
    a file cannot be read."""
    try:
        paths = _files(Path(folder))
        with ThreadPoolExecutor(_READERS) as pool:
            return tuple(pool.map(_describe, paths))
    except OSError as error:
        raise _unreadable(error) from error


def check_manifest(folder: str, files: tuple[ModelFile, ...]) -> None:
    """Check that the files in a folder still match the manifest. For large files, compare the size and
    samples, and also the SHA-256 if the modification time differs. Manifests created by older releases
    contain no samples or modification times, so neither is compared. Raises ManifestError if a file differs
    or cannot be read."""
    known = {file.name: file for file in files}
    try:
        paths = {_name(path): path for path in _files(Path(folder))}
        if missing := sorted(known.keys() - paths.keys()):
            raise _changed(Path(folder) / missing[0], "has been deleted")
        if added := sorted(paths.keys() - known.keys()):
            raise _changed(paths[added[0]], "has been created")
        for name, path in paths.items():
            file, status = known[name], path.stat()
            size = status.st_size
            if size != file.bytes:
                raise _changed(path, f"has changed from {file.bytes} to {size} bytes")
            if size <= _WHOLE_BYTES:
                same = _sha256(path) == file.sha256
            else:
                same = file.samples in ("", _samples(path, size)) and (
                    file.mtime_ns in (0, status.st_mtime_ns) or _sha256(path) == file.sha256
                )
            if not same:
                raise _changed(path, "has changed")
    except OSError as error:
        raise _unreadable(error) from error


def difference(folder: str, files: tuple[ModelFile, ...]) -> str:
    """Return how the files in a folder differ from the manifest, or an empty string if they match."""
    try:
        check_manifest(folder, files)
    except ManifestError as error:
        return str(error)
    return ""


async def find_problem(check: Callable[[], str], folder: str, timeout_s: float) -> str:
    """Check a model's files in a thread, waiting at most `timeout_s`, because a disk may not respond. `check`
    returns the problem, or an empty string if there is none."""
    try:
        return await in_own_thread(check, timeout_s)
    except TimeoutError:
        return not_checked(folder, timeout_s)


def not_checked(folder: str, timeout_s: float) -> str:
    """Return the error message for files that could not be checked in time."""
    return (
        f"the files in {folder} could not be read within {timeout_s:g} s: check that their disk responds; if "
        "it is only slow, raise load_timeout_s"
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _name(path: Path) -> str:
    """Return a file's name as stored in the manifest, with bytes that are not valid UTF-8 escaped."""
    return os.fsencode(path.name).decode(errors="backslashreplace")


def _describe(path: Path) -> ModelFile:
    # Read the modification time first, so that a later check detects changes made while the file is being
    # read.
    status = path.stat()
    samples = _samples(path, status.st_size) if status.st_size > _WHOLE_BYTES else ""
    return ModelFile(_name(path), status.st_size, _sha256(path), samples, status.st_mtime_ns)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _samples(path: Path, size: int) -> str:
    """Return the SHA-256 (hex) of a large file's samples."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        # Advise the kernel of random access, since it would otherwise read ahead at each sample.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for number in range(_SAMPLES):
            file.seek(number * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _changed(path: Path, how: str) -> ManifestError:
    return ManifestError(
        f"{path} {how} since this version was added: restore the file, or add the folder as a new version "
        "with: appliance models add"
    )


def _unreadable(error: OSError) -> ManifestError:
    return ManifestError(
        f"{error.filename} cannot be read ({error.strerror}): check that the file exists and that the "
        "service's user can read it"
    )
