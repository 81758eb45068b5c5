"""Downloads files into a hub cache. Receives several files concurrently, resumes interrupted downloads, and
verifies checksums.

huggingface_hub removes a partial file when a download fails and does not verify checksums. This module
therefore uses only the library's HTTP client and writes the files itself.
"""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import httpx2
from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers

from appliance.hub.cache import RESERVE_BYTES, RepositoryCache
from appliance.hub.repository import Hub, HubError, Listing, RemoteFile, hub_errors
from appliance.quantities import of_bytes

_THREADS = 8
"""Number of files received concurrently, the same as in huggingface_hub."""
_CHUNK_BYTES = 1 << 20
_MAX_FAILURES = 5
"""A download fails after this many consecutive retries without receiving a byte."""
_MAX_WAIT_S = 8.0
_SHOW_EVERY_S = 0.2
_STOP_S = 2.0
"""Once a download is stopped, its threads have this many seconds to end. A thread that is still waiting for
the network after that does not keep the process from exiting."""
_RETRIED_STATUS = (408, 416, 429, 500, 502, 503, 504)
_RETRIED = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)


class DownloadProgress(Protocol):
    """Shows the progress of a download."""

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes have been received. Called several times per second."""


class Download:
    """Downloads one repository's files. When `run` returns, all files are complete."""

    def __init__(self, hub: Hub, listing: Listing, cache: RepositoryCache) -> None:
        self._hub = hub
        self._listing = listing
        self._cache = cache
        self._headers = {
            **build_hf_headers(token=hub.header_token(), library_name="appliance"),
            "Accept-Encoding": "identity",
        }
        self._stop = threading.Event()
        self._changed = threading.Lock()
        self._done = 0
        self.received_bytes = 0
        """Number of bytes received from the hub."""

    def run(self, files: Sequence[RemoteFile], progress: DownloadProgress) -> None:
        """Download the files not yet in the cache and show the progress. Raises HubError if a file cannot be
        downloaded. Complete and partial files are kept even after an error, except those with a wrong
        checksum."""
        missing = [file for file in files if not self._cache.blob(file).exists()]
        total = sum(file.size for file in missing)
        self._stop = threading.Event()
        self._done = self._cache.received_bytes(missing)
        waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        # Start with the largest file, which could otherwise be the only one left at the end.
        for file in sorted(missing, key=lambda file: -file.size):
            waiting.put(file)
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=self._work, args=(waiting, errors), daemon=True)
            for _ in range(min(_THREADS, len(missing)))
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                progress.show(self._done, total)
                if self._stop.wait(_SHOW_EVERY_S):
                    break
            progress.show(self._done, total)
        finally:
            self._stop.set()
            deadline = time.monotonic() + _STOP_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]

    def _work(self, waiting: queue.SimpleQueue[RemoteFile], errors: list[Exception]) -> None:
        try:
            while not self._stop.is_set():
                try:
                    file = waiting.get_nowait()
                except queue.Empty:
                    return
                self._fetch(file)
        except _Stopped:
            return
        except Exception as error:
            errors.append(error)
            self._stop.set()

    def _fetch(self, file: RemoteFile) -> None:
        path = self._cache.partial(file)
        try:
            with _Partial(path, file) as partial, hub_errors(self._hub, self._listing.reference):
                self._receive_all(file, partial)
                found = partial.digest()
        except OSError as error:
            raise HubError(
                f"{path} cannot be written ({error.strerror or error}): the received part is kept; run "
                "the same command again to resume"
            ) from error
        if found != file.digest:
            path.unlink()
            raise HubError(
                f"{file.path} of {self._listing.reference.repository} has the checksum {found}, but the hub "
                f"lists {file.digest}: the file was deleted, so repeat the command; if the checksum is wrong "
                "again, the copy on the hub is damaged"
            )
        self._cache.complete(file)

    def _receive_all(self, file: RemoteFile, partial: _Partial) -> None:
        failures = 0
        while partial.size < file.size:
            before = partial.size
            error: Exception | None = None
            try:
                self._receive(file, partial)
            except _RETRIED as failure:
                error = failure
            except HfHubHTTPError as failure:
                if failure.response.status_code not in _RETRIED_STATUS:
                    raise
                if failure.response.status_code == 416:
                    self._count(-partial.restart())
                error = failure
            if partial.size > before:
                failures = 0
                continue
            failures += 1
            if failures > _MAX_FAILURES:
                raise error or HubError(f"{self._hub.endpoint} stopped sending data for {file.path}")
            self._stop.wait(min(2.0 ** (failures - 1), _MAX_WAIT_S))
            self._check()

    def _receive(self, file: RemoteFile, partial: _Partial) -> None:
        """Receive the missing part of a file, until the file ends or an error occurs."""
        url = hf_hub_url(
            self._listing.reference.repository,
            file.path,
            revision=self._listing.commit,
            endpoint=self._hub.endpoint,
        )
        headers = self._headers | ({"Range": f"bytes={partial.size}-"} if partial.size else {})
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            if partial.size and response.status_code != 206:
                # The server ignored the requested range and is sending the whole file.
                self._count(-partial.restart())
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                self._check()
                self._check_space(partial.path)
                partial.append(chunk)
                self._count(len(chunk))
                self.received_bytes += len(chunk)

    def _check(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _check_space(self, path: Path) -> None:
        free = shutil.disk_usage(path.parent).free
        if free < RESERVE_BYTES:
            raise HubError(
                f"the disk that holds {self._cache.root} has only {of_bytes(free)} free: the received part "
                "is kept; free up disk space, then run the same command again to resume"
            )

    def _count(self, count: int) -> None:
        with self._changed:
            self._done += count


class _Stopped(Exception):
    """Raised in the threads of a download once the download has been stopped."""


class _Partial:
    """A partially downloaded file, and its checksum so far."""

    def __init__(self, path: Path, file: RemoteFile) -> None:
        self.path = path
        self._file = file
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.size = 0
        self._digest = self._new_digest()
        while chunk := os.read(self._descriptor, _CHUNK_BYTES):
            self._digest.update(chunk)
            self.size += len(chunk)
        if self.size > file.size:
            self.restart()

    def __enter__(self) -> _Partial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def append(self, chunk: bytes) -> None:
        """Append received bytes to the file. Raises OSError if they cannot be written."""
        rest = memoryview(chunk)
        while rest:
            written = os.write(self._descriptor, rest)
            self._digest.update(rest[:written])
            self.size += written
            rest = rest[written:]

    def restart(self) -> int:
        """Empty the file and return how many bytes it contained before."""
        former = self.size
        os.ftruncate(self._descriptor, 0)
        self.size = 0
        self._digest = self._new_digest()
        return former

    def digest(self) -> str:
        """Return the content's checksum, computed with the same algorithm as the file's `digest`."""
        return self._digest.hexdigest()

    def _new_digest(self) -> hashlib._Hash:
        if len(self._file.digest) == 64:
            return hashlib.sha256()
        # A file that is not in Git LFS is identified by its git object's hash. This hash does not protect
        # against forgery.
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(b"blob %d\0" % self._file.size)
        return digest
