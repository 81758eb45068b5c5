"""A hub on loopback: implements the parts of the Hugging Face hub's HTTP API that downloads use, with
injected faults."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PIECE = 64 << 10


@dataclass
class Request:
    """A request that the server received."""

    path: str
    range: str | None
    authorization: str | None


@dataclass
class Repository:
    """A repository: its files and access rules."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    gated: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes to list for files, overriding their real sizes."""
    token: str | None = None
    """The only token that can read a gated repository."""


@dataclass
class Faults:
    """The faults to inject. By default, there are none."""

    close_after_bytes: int | None = None
    """Close the connection after this many bytes of a file. `times` says how often."""
    times: int = 1
    ignore_ranges: bool = False
    wrong_bytes_of: str = ""
    """The file that is sent with one corrupted byte."""
    status: int | None = None
    """The status of responses to requests for files. `times` says how often."""
    before_piece: Callable[[str, int], None] = lambda path, offset: None
    """Called before each piece of a file is sent."""


class HubServer:
    """Serves repositories on a separate port. Git LFS files come from a second port, just as a real hub sends
    them from its storage."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.storage_requests: list[Request] = []
        self.faults = Faults()
        self._counting = threading.Lock()
        self._storage = _Server(self, is_storage=True)
        self._hub = _Server(self, is_storage=False)
        self.url = f"http://127.0.0.1:{self._hub.server_address[1]}"
        self.storage_url = f"http://127.0.0.1:{self._storage.server_address[1]}"

    def add(self, name: str, files: dict[str, bytes] | Path, **changes: Any) -> Repository:
        """Add a repository with these files, or with the files of a folder."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in sorted(files.iterdir()) if path.is_file()}
        self.repositories[name] = Repository(files, **changes)
        return self.repositories[name]

    def sent(self, path: str) -> list[Request]:
        """Return the requests for a file's content."""
        return [request for request in self.storage_requests + self.requests if request.path.endswith(path)]

    def takes_fault(self) -> bool:
        """Return whether to inject a fault that happens a number of times, and count it."""
        with self._counting:
            left = self.faults.times > 0
            self.faults.times -= left
            return left

    def close(self) -> None:
        """Stop both servers."""
        for server in (self._hub, self._storage):
            server.shutdown()
            server.server_close()


def is_lfs(path: str) -> bool:
    """Return whether the hub stores a file in Git LFS."""
    return path.endswith((".safetensors", ".gguf", ".bin")) or path == "tokenizer.json"


def digest(path: str, content: bytes) -> str:
    """Return the checksum that the hub lists for a file."""
    if is_lfs(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Server(ThreadingHTTPServer):
    """One of a hub's two servers. It runs in a thread of its own."""

    daemon_threads = True

    def __init__(self, hub: HubServer, *, is_storage: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.is_storage = is_storage
        self.requests = hub.storage_requests if is_storage else hub.requests
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        request = Request(path, self.headers.get("Range"), self.headers.get("Authorization"))
        self.server.requests.append(request)
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            self._list(words)
        elif len(words) >= 5 and words[2] == "resolve":
            self._resolve(words)
        else:
            self._fail(404, "EntryNotFound", "no such page")

    def _list(self, words: list[str]) -> None:
        name, revision = "/".join(words[2:4]), "/".join(words[5:]) or "main"
        repository = self.server.hub.repositories.get(name)
        if repository is None:
            return self._fail(401, "RepoNotFound", "Repository not found")
        commit = repository.revisions.get(revision)
        if commit is None:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        siblings = []
        for path, content in repository.files.items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": "f" * 40}
            if is_lfs(path):
                entry["lfs"] = {
                    "sha256": digest(path, content),
                    "size": repository.sizes.get(path, len(content)),
                    "pointerSize": 134,
                }
            else:
                entry["blobId"] = digest(path, content)
            siblings.append(entry)
        return self._send(
            200, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode()
        )

    def _resolve(self, words: list[str]) -> None:
        name, path = "/".join(words[:2]), "/".join(words[4:])
        repository = self.server.hub.repositories[name]
        denied = self.headers.get("Authorization") != f"Bearer {repository.token}"
        if repository.gated and denied and not self.server.is_storage:
            return self._fail(403, "GatedRepo", f"Access to model {name} is restricted")
        if self.server.hub.faults.status is not None and self.server.hub.takes_fault():
            return self._fail(self.server.hub.faults.status, "", "not now")
        if is_lfs(path) and not self.server.is_storage:
            self.send_response(302)
            self.send_header("Location", f"{self.server.hub.storage_url}{self.path}")
            self.send_header("X-Repo-Commit", words[3])
            self.send_header("X-Linked-Etag", f'"{digest(path, repository.files[path])}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        return self._content(path, repository.files[path])

    def _content(self, path: str, content: bytes) -> None:
        start, asked = 0, self.headers.get("Range")
        etag = digest(path, content)
        if path == self.server.hub.faults.wrong_bytes_of:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if asked and not self.server.hub.faults.ignore_ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return self._fail(416, "", "range not satisfiable")
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        limit = self.server.hub.faults.close_after_bytes
        if limit is not None and len(content) > limit and self.server.hub.takes_fault():
            self.wfile.write(content[start : start + limit])
            self.close_connection = True
            return None
        for offset in range(start, len(content), _PIECE):
            self.server.hub.faults.before_piece(path, offset)
            try:
                self.wfile.write(content[offset : offset + _PIECE])
            except OSError:  # the client has been stopped
                self.close_connection = True
                return None
        return None

    def _fail(self, status: int, code: str, message: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
