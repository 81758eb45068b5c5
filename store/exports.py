"""The audit chain as an export file: one line of JSON per row, followed by a signed trailer line.

A row's line contains every non-null column. The last line is

    {"trailer": {"at": …, "hash": …, "rows": …, "seq": …, "sha256": …, "sig": …}}

with the number of rows, the seq and hash of the newest row, and the SHA-256 of all preceding lines. `sig` is
present if the exporting process could read the service's key (`store.heads`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from store.audit import GENESIS_HASH, AuditRow, Head, canonical_json, utc_now
from store.errors import CorruptDatabaseError, explain_os
from store.heads import SigningKey

_PURPOSE = "audit export"
_FIRST_BYTE = b"{"


class Trailer(NamedTuple):
    """An export's last line. `content` is the signed text."""

    head: Head
    rows: int
    content: str
    signature: str | None
    intact: bool
    """Whether the preceding lines match the SHA-256 in the trailer and no line follows the trailer."""


def lines_of(chain: Iterable[AuditRow], key: SigningKey | None) -> Iterator[str]:
    """Yield the lines of an audit export, including newlines."""
    digest = hashlib.sha256()
    head, count = Head(0, GENESIS_HASH), 0
    for row in chain:
        line = (
            canonical_json({name: value for name, value in row._asdict().items() if value is not None}) + "\n"
        )
        digest.update(line.encode())
        head, count = Head(row.seq, row.hash), count + 1
        yield line
    trailer = {
        "at": utc_now(),
        "hash": head.hash,
        "rows": count,
        "seq": head.seq,
        "sha256": digest.hexdigest(),
    }
    if key is not None:
        trailer["sig"] = key.sign(_PURPOSE, canonical_json(trailer))
    yield canonical_json({"trailer": trailer}) + "\n"


def is_export(path: Path) -> bool:
    """Return True if the file is an export rather than a database. Raises `StoreError` if it cannot be
    read."""
    try:
        with path.open("rb") as file:
            return file.read(1) == _FIRST_BYTE
    except OSError as error:
        raise explain_os(path, error) from error


def read(path: Path) -> tuple[list[AuditRow], Trailer | None]:
    """Return an export's rows and trailer. The trailer is None if the end of the file is missing. Raises
    `StoreError` on failure."""
    rows: list[AuditRow] = []
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    fields = json.loads(line)
                    if "trailer" in fields:
                        trailer = _trailer(fields["trailer"], digest.hexdigest())
                        return rows, trailer._replace(intact=trailer.intact and not file.read(1))
                    row = AuditRow(**fields)
                    if type(row.seq) is not int:
                        raise ValueError(f"seq is {row.seq!r} instead of a whole number")
                    rows.append(row)
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise CorruptDatabaseError(
                        f"line {number} of {path} is not a valid audit row ({error})",
                        "export the audit chain again",
                    ) from error
                digest.update(line)
    except OSError as error:
        raise explain_os(path, error) from error
    return rows, None


def problems_of(trailer: Trailer | None, found: Head, key: SigningKey | None) -> list[str]:
    """Check an export's trailer against `found`, the head of its chain, and return any problems."""
    if trailer is None:
        return ["the export is incomplete: its last line, the trailer, is missing"]
    problems = []
    if not trailer.intact or trailer.head != found:
        problems.append(
            "the export was changed: according to its trailer, it should end with row "
            f"{trailer.head.seq} ({trailer.head.hash})"
        )
    if key is not None and trailer.signature is None:
        problems.append("the export is not signed")
    elif key is not None and not key.signed(_PURPOSE, trailer.content, trailer.signature or ""):
        problems.append(
            "the export is not signed by this service: it was signed with another key, or it was forged"
        )
    return problems


def _trailer(fields: dict[str, object], digest: str) -> Trailer:
    signature = fields.pop("sig", None)
    return Trailer(
        head=Head(int(str(fields["seq"])), str(fields["hash"])),
        rows=int(str(fields["rows"])),
        content=canonical_json(fields),
        signature=None if signature is None else str(signature),
        intact=fields["sha256"] == digest,
    )
