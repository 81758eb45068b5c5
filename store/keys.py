"""Creates, changes, rotates and revokes keys, in the caller's transaction. Key secrets are generated
here; the database stores only their hashes."""

from __future__ import annotations

import hashlib
import re
import secrets
import sqlite3
from collections.abc import Mapping

import msgspec

from store import records, tenants
from store.errors import ConflictError, UnknownKeyError
from store.policies import Change, KeyRecord
from store.rules import check_key

_SHOWN_PREFIX_CHARS = 8
_SECRET = re.compile(r"ak-[A-Za-z0-9_-]{43}")


def new_secret() -> str:
    """Return a new secret with 256 random bits."""
    return "ak-" + secrets.token_urlsafe(32)


def without_secrets(text: str) -> str:
    """Shorten every secret in the text to the prefix shown in lists, because users sometimes type a secret
    where a key id is expected."""
    return _SECRET.sub(lambda found: found[0][:_SHOWN_PREFIX_CHARS] + "...", text)


def new_id() -> str:
    """Return a new key id, which identifies the key in lists, logs and commands."""
    return "key_" + secrets.token_hex(8)


def sha256(secret: str) -> str:
    """Return the hash that is stored for a secret. A plain hash is safe because the secret has 256 random
    bits."""
    return hashlib.sha256(secret.encode("utf-8", "backslashreplace")).hexdigest()


def of_secret(record: KeyRecord, secret: str) -> KeyRecord:
    """Return a copy of the record with this secret's prefix and hash."""
    return msgspec.structs.replace(record, prefix=secret[:_SHOWN_PREFIX_CHARS], sha256=sha256(secret))


def create(connection: sqlite3.Connection, key: KeyRecord) -> Change:
    """Add a key. Raises UnknownTenantError if its tenant does not exist."""
    tenants.find(connection, key.tenant)
    records.insert(connection, key)
    return Change(None, key)


def alter(connection: sqlite3.Connection, key_id: str, changes: Mapping[str, object], now: float) -> Change:
    """Set a key's fields. Raises ValueError for an invalid value, UnknownKeyError if there is no such key,
    and ConflictError if the key is not valid at unix time `now`."""
    before = _valid(connection, key_id, now)
    after = tenants.replaced(before, changes)
    check_key(after, now)
    records.update(connection, after)
    return Change(before, after)


def rotate(
    connection: sqlite3.Connection,
    key_id: str,
    secret: str,
    *,
    now: float,
    overlap_s: float,
    expires_at: float | None,
) -> tuple[Change, Change]:
    """Replace a key with a new one that has the same rights. The old key stays valid for at most `overlap_s`
    seconds. Without `expires_at`, the new key gets the old key's original lifetime. Returns the changes to
    the old key and to the new one.

    Raises ValueError for an invalid expiry time, UnknownKeyError if there is no such key, and ConflictError
    if the key is not valid or was rotated before.
    """
    before = _valid(connection, key_id, now)
    if before.replaced_by is not None:
        raise ConflictError(
            f"key {key_id} was replaced by key {before.replaced_by}", "rotate that key instead"
        )
    if expires_at is None and before.expires_at is not None:
        expires_at = now + (before.expires_at - before.created_at)
    successor = of_secret(
        msgspec.structs.replace(before, id=new_id(), created_at=now, expires_at=expires_at), secret
    )
    check_key(successor, now)
    overlap_end = now + overlap_s if before.expires_at is None else min(before.expires_at, now + overlap_s)
    after = msgspec.structs.replace(before, expires_at=overlap_end, replaced_by=successor.id)
    records.update(connection, after)
    records.insert(connection, successor)
    return Change(before, after), Change(None, successor)


def revoke(connection: sqlite3.Connection, key_id: str, now: float) -> Change:
    """Revoke a key at unix time `now`. If the key is already revoked, keep its original revocation time.
    Raises UnknownKeyError if there is no such key."""
    before = find(connection, key_id)
    if before.revoked_at is not None:
        return Change(before, before)
    after = msgspec.structs.replace(before, revoked_at=now)
    records.update(connection, after)
    return Change(before, after)


def find(connection: sqlite3.Connection, key_id: str) -> KeyRecord:
    """Return the key with this id. Raises UnknownKeyError if there is no such key."""
    key = records.find(connection, KeyRecord, key_id)
    if key is None:
        raise UnknownKeyError(
            f"no key has id {key_id!r}", "list the keys and their ids with: appliance keys list"
        )
    return key


def _valid(connection: sqlite3.Connection, key_id: str, now: float) -> KeyRecord:
    key = find(connection, key_id)
    if not key.valid_at(now):
        how = "revoked" if key.revoked_at is not None else "expired"
        raise ConflictError(f"key {key_id} is {how}", "create a new key")
    return key
