"""Signed heads of the audit chain, recorded outside the database. They reveal whether the chain was rewritten
or shortened. A signed head is one line of text, in the same format in the service's journal and in
`audit.heads` next to the database:

    audit head seq=41 hash=<64 hex> at=2026-11-20T23:16:01.123456+00:00 key=<16 hex> sig=<64 hex>

In the journal, the line continues with ` of ` and the path of the state directory, because a journal may also
contain other services' heads. `sig` is an HMAC-SHA256 under `audit.key`, which the service creates at its
first startup and which only its user can read. `key` is that key's id, which changes when the key is
replaced.

The signature proves that this service wrote the head. It does not protect against attackers who can read the
key, because they can sign any head. Only a head that was copied off the machine before the attack, for
example in a forwarded journal or on paper, reveals their changes.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from store.audit import Head, utc_now
from store.errors import NotWritableError, explain_os

log = logging.getLogger(__name__)

KEY_FILE = "audit.key"
HEADS_FILE = "audit.heads"
ROWS_BETWEEN_HEADS = 16
"""A new head is recorded after this many audit rows."""

_KEY_BYTES = 32
_LINE = re.compile(
    r"\baudit head seq=(?P<seq>[0-9]{1,18}) hash=(?P<hash>[0-9a-f]{64}) "
    r"at=(?P<at>[0-9T:.+-]{10,40}) (?:key=(?P<key>[0-9a-f]{16}) )?sig=(?P<signature>[0-9a-f]{64})\b"
)


class SignedHead(NamedTuple):
    """A head, the time when it was recorded, and the signature over both."""

    seq: int
    hash: str
    at: str
    signature: str
    key: str = ""
    """Id of the signing key; empty in heads written by the first versions."""

    @property
    def head(self) -> Head:
        """The head without its signature."""
        return Head(self.seq, self.hash)

    @property
    def line(self) -> str:
        """The head as one line of text, for the journal and the heads file."""
        key = f" key={self.key}" if self.key else ""
        return f"audit head seq={self.seq} hash={self.hash} at={self.at}{key} sig={self.signature}"


class SigningKey:
    """The service's secret key. Only the service's user and root can sign with it."""

    def __init__(self, secret: bytes, fresh: bool = False) -> None:
        """`fresh` is True if the key was created at this startup."""
        self._secret = secret
        self.fresh = fresh

    @property
    def id(self) -> str:
        """The key's id, which reveals nothing about the secret."""
        return self.sign("audit key id", "")[:16]

    def sign(self, purpose: str, content: str) -> str:
        """Sign `content`. The signature (hex) is valid only for this `purpose`."""
        return hmac.new(self._secret, f"{purpose}\n{content}".encode(), hashlib.sha256).hexdigest()

    def signed(self, purpose: str, content: str, signature: str) -> bool:
        """Return True if `signature` is valid for `content`."""
        return hmac.compare_digest(self.sign(purpose, content), signature)

    def sign_head(self, head: Head, at: str) -> SignedHead:
        """Sign the head together with the time `at`."""
        signature = self.sign("audit head", f"{head.seq} {head.hash} {at}")
        return SignedHead(head.seq, head.hash, at, signature, self.id)

    def signed_head(self, head: SignedHead) -> bool:
        """Return True if this key signed the head."""
        return self.signed("audit head", f"{head.seq} {head.hash} {head.at}", head.signature)


def make_or_read_key(folder: Path) -> SigningKey:
    """Return the signing key in the state directory `folder`, creating it if necessary. Raises `StoreError`
    on failure."""
    path = folder / KEY_FILE
    if not path.exists():
        secret = secrets.token_bytes(_KEY_BYTES)
        # Create the file atomically, so that a crash cannot leave a partial key.
        fresh = folder / f"{KEY_FILE}.new"
        try:
            fresh.unlink(missing_ok=True)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secret.hex().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(path)
        except OSError as error:
            raise explain_os(path, error) from error
        return SigningKey(secret, fresh=True)
    return read_key(path)


def read_key(path: Path) -> SigningKey:
    """Return the key stored in this file. Raises `StoreError` if it cannot be read or is invalid."""
    try:
        secret = bytes.fromhex(path.read_text("ascii").strip())
    except OSError as error:
        raise explain_os(path, error) from error
    except ValueError:
        secret = b""
    if len(secret) != _KEY_BYTES:
        raise NotWritableError(
            f"{path} does not contain a key ({_KEY_BYTES} bytes in hex)",
            "restore the file from a backup, or move it elsewhere; the next start then creates a new key and "
            "records it in the audit chain, but signatures of older heads can no longer be checked",
        )
    return SigningKey(secret)


def heads_in(lines: Iterable[str]) -> Iterator[SignedHead]:
    """Yield the chain heads found in the lines of a journal, a heads file or any other text."""
    for line in lines:
        for match in _LINE.finditer(line):
            yield SignedHead(
                int(match["seq"]), match["hash"], match["at"], match["signature"], match["key"] or ""
            )


def lines_of(folder: Path, lines: Iterable[str]) -> Iterator[str]:
    """Yield only the log lines that contain chain heads for the state directory `folder`."""
    ending = _of(folder)
    return (line for line in lines if line.rstrip("\n").endswith(ending))


def _of(folder: Path) -> str:
    return f" of {folder.resolve()}"


class HeadKeeper:
    """Signs chain heads and records them in the heads file and in the log, which systemd's journal stores.
    Not thread-safe: only the database's writer thread may record heads."""

    def __init__(self, path: Path, key: SigningKey) -> None:
        self.path = path
        self.last_error: str | None = None
        """Why the latest head is only in the log and not in the heads file, or None if it is in both."""
        self.recorded: SignedHead | None = None
        self.newest = Head(0, "")
        self._key = key

    @property
    def key_id(self) -> str:
        """The id of the signing key."""
        return self._key.id

    def start(self) -> None:
        """Create the heads file if it does not exist. The file is created before the chain's first row, so a
        chain with rows but without a heads file means that the file was removed."""
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640))
        except OSError as error:
            self.last_error = f"{self.path} cannot be created ({error.strerror})"

    def replaced_another(self, named: int, newest: int) -> bool:
        """Return True if the chain needs a new row that names this key as the signing key. This is the case
        if

        - the key was just created, or
        - the heads file contains heads, signed with a different key, of rows after `named`.

        `named` is the latest row that names this key; `newest` is the newest row of the chain.
        """
        return self._key.fresh or any(
            named < head.seq <= newest and not self._key.signed_head(head) for head in self._filed()
        )

    def beyond(self, newest: int) -> SignedHead | None:
        """Return the newest signed head whose row comes after `newest` (the chain's last row), or None. A
        head beyond the end of the chain shows that the chain has lost rows."""
        ours = (head for head in self._filed() if head.seq > newest and self._key.signed_head(head))
        return max(ours, key=lambda head: head.seq, default=None)

    def _filed(self) -> list[SignedHead]:
        """Return the heads in the heads file, or an empty list if the file cannot be read."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as lines:
                return list(heads_in(lines))
        except OSError:
            return []

    def saw(self, head: Head) -> None:
        """Keep the chain's newest head in memory. Record it if it is the first, or if the chain has grown by
        `ROWS_BETWEEN_HEADS` rows since the last recorded head."""
        self.newest = head
        if self.recorded is None or head.seq - self.recorded.seq >= ROWS_BETWEEN_HEADS:
            self.record()

    def record(self) -> None:
        """Record the newest head unless it is already recorded."""
        known = self.recorded is not None and self.recorded.head == self.newest
        if self.newest.seq == 0 or (known and self.last_error is None):
            return
        head = self._key.sign_head(self.newest, utc_now())
        log.info("%s%s", head.line, _of(self.path.parent))
        self.recorded = head
        try:
            append_line(self.path, head.line)
            self.last_error = None
        except OSError as error:
            self.last_error = (
                f"the head of audit row {head.seq} could not be written to {self.path} ({error.strerror})"
            )
            log.error("%s; this log has the only copy of the head", self.last_error)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file and sync it to disk. If this fails, remove the partial line and raise OSError.
    A partial last line, left by a crash, is ended first, because it could hide the new line."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o640), "rb+", 0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            data = line.encode() + b"\n"
            if end:
                file.seek(end - 1)
                data = (b"" if file.read(1) == b"\n" else b"\n") + data
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise
