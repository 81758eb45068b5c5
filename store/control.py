"""The control state in `control.db`: tenants, keys and peers. Every change goes through
`ControlStore.change`, which writes the change and its audit row, with the old and new values, in one
transaction. Every commit is flushed to disk (`synchronous=FULL`).

All records are also kept in memory (`ControlStore.policies`). Reads therefore need no I/O, and keys still
work while the disk is failing.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from store import audit, keys, records, tenants
from store.audit import Actor
from store.control_schema import CONTROL
from store.database import reading
from store.errors import MissingDatabaseError, SchemaVersionError, StorageFaultError, explain_os
from store.heads import HEADS_FILE, HeadKeeper, make_or_read_key
from store.policies import Change, KeyRecord, PeerKind, PeerRecord, Policies, PolicyRecord, TenantRecord
from store.rules import check_key
from store.spool import SPOOL_FILE, Spool
from store.trail import WITHIN_S, Appended, AuditTrail
from store.writer import Writer, WriterState

T = TypeVar("T")

BeforeAndAfter = tuple[Mapping[str, object] | None, Mapping[str, object] | None]
"""A change's old and new values, as JSON objects."""

_MAX_OVERLAP_S = 366 * 86400.0
_UNAUDITED = frozenset({"sha256"})
"""Fields that are not audited. A key's hash is not secret, but auditors have no use for it."""


class CreatedKey(NamedTuple):
    """A new key. `key` is the secret, which is shown once and never stored."""

    record: KeyRecord
    key: str


class RotatedKey(NamedTuple):
    """The result of a rotation: the new key with its secret, and the record of the replaced key."""

    created: CreatedKey
    former: KeyRecord


class ControlStore:
    """The control database at `path`. Nothing else in the service opens the file for writing. Methods that
    make changes return a future (await it with `asyncio.wrap_future`), which resolves once the change is on
    disk, or raises the `StoreError` or `ValueError` that prevented the change. Safe to call from any thread.
    """

    trail: AuditTrail
    """The audit trail of operator actions, available after `start`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = Writer(path, CONTROL, synchronous="FULL")
        self._policies = Policies()

    def start(self) -> None:
        """Open the database, creating or migrating it if necessary, and load its records. Raises `StoreError`
        on failure."""
        self._writer.start()
        try:
            self._policies = read_policies(self.path)
            key = make_or_read_key(self.path.parent)
            spool = Spool(self.path.with_name(SPOOL_FILE), key)
            spool.start()
            self.trail = AuditTrail(self._writer, spool, HeadKeeper(self.path.with_name(HEADS_FILE), key))
            self.trail.start()
        except OSError as error:
            self._writer.close()
            raise explain_os(Path(error.filename or self.path), error) from error
        except BaseException as error:
            reason = self._writer.state().last_error
            self._writer.close()
            if reason is not None and isinstance(error, MissingDatabaseError | SchemaVersionError):
                # The database could not be created, so report the writer's error as the cause.
                raise StorageFaultError(reason) from error
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the changes in progress and close the file. Afterwards, the file can be read without write
        permission."""
        self.trail.close(timeout_s)
        self._writer.close(timeout_s)

    def state(self) -> WriterState:
        """Return the writer's state."""
        return self._writer.state()

    @property
    def stalled_s(self) -> float:
        """How long the writer has spent on its current operation, in seconds."""
        return self._writer.stalled_s

    # ── reading from memory ──

    @property
    def policies(self) -> Policies:
        """Return the current tenants, keys and peers."""
        return self._policies

    def list_keys(self) -> list[KeyRecord]:
        """Return all keys, oldest first, including revoked and expired ones."""
        return list(self._policies.keys.values())

    def lookup(self, key: str) -> KeyRecord | None:
        """Return the valid key with this secret, or None. Takes microseconds and needs no I/O.

        The table is indexed by the SHA-256 of the secret, so lookup times reveal nothing about valid keys.
        """
        record = self._policies.keys_by_hash.get(keys.sha256(key))
        return record if record is not None and record.valid_at(time.time()) else None

    # ── changing ──

    def change(
        self,
        *,
        actor: Actor | str,
        action: str,
        params: Mapping[str, object],
        apply: Callable[[sqlite3.Connection], T],
        after_commit: Callable[[T], None] | None = None,
        values: Callable[[T], BeforeAndAfter] | None = None,
    ) -> Future[T]:
        """Run `apply` on the writer thread and audit the change in the same transaction. An exception in
        `apply` rolls the transaction back.

        - `actor` is the caller, whose intent `trail.intend` has recorded.
        - `action` is the action's name in the action registry, and `params` are its parameters without
          secrets.
        - `values` returns the old and new values.
        - `after_commit` updates the in-memory copy before the future resolves.
        """
        changed: Future[T] = Future()
        changed.set_running_or_notify_cancel()

        def change_and_record(connection: sqlite3.Connection) -> tuple[T, Appended]:
            outcome = apply(connection)
            before, after = (None, None) if values is None else values(outcome)
            entry = audit.outcome(actor, action, params, "ok", before, after)
            return outcome, self.trail.append(connection, entry)

        def follow_up(done: tuple[T, Appended]) -> None:
            outcome, appended = done
            if after_commit is not None:
                after_commit(outcome)
            self.trail.committed(appended)

        def settle(done: Future[tuple[T, Appended]]) -> None:
            error = done.exception()
            if error is not None:
                changed.set_exception(error)
            else:
                changed.set_result(done.result()[0])

        self._writer.call(change_and_record, follow_up, within_s=WITHIN_S).add_done_callback(settle)
        return changed

    def write(self, apply: Callable[[sqlite3.Connection], T], after_commit: Callable[[T], None]) -> Future[T]:
        """Run `apply` on the writer thread, in a transaction without an audit row. Use this only for changes
        already described by an action's audit rows."""
        return self._writer.call(apply, after_commit, within_s=WITHIN_S)

    # ── tenants ──

    def create_tenant(
        self, *, actor: Actor | str, name: str, changes: Mapping[str, object]
    ) -> Future[Change]:
        """Create a tenant. `changes` contains the `TenantRecord` fields that differ from their defaults. A
        quota is a mapping that contains only the fields that differ.

        The future raises `ValueError` for an invalid value, and `ConflictError` if a tenant with this
        name exists.
        """

        def apply(connection: sqlite3.Connection) -> Change:
            plain = TenantRecord(name=name, created_at=time.time())
            return tenants.create(connection, tenants.replaced(plain, changes))

        return self._decide(actor, "tenants.create", {"name": name}, apply)

    def set_tenant(self, *, actor: Actor | str, name: str, changes: Mapping[str, object]) -> Future[Change]:
        """Change fields of a tenant. `changes` has the same format as in `create_tenant`.

        The future raises `ValueError` for an invalid value, and `UnknownTenantError` if there is no such
        tenant.
        """
        return self._decide(
            actor, "tenants.set", {"name": name}, lambda connection: tenants.alter(connection, name, changes)
        )

    def suspend_tenant(self, *, actor: Actor | str, name: str) -> Future[Change]:
        """Suspend a tenant, so that its requests are refused. The future raises `UnknownTenantError` if there
        is no such tenant."""
        return self._decide(
            actor,
            "tenants.suspend",
            {"name": name},
            lambda connection: tenants.suspend(connection, name, time.time()),
        )

    def resume_tenant(self, *, actor: Actor | str, name: str) -> Future[Change]:
        """Accept a suspended tenant's requests again. The future raises `UnknownTenantError` if there is no
        such tenant."""
        return self._decide(
            actor,
            "tenants.resume",
            {"name": name},
            lambda connection: tenants.suspend(connection, name, None),
        )

    def delete_tenant(self, *, actor: Actor | str, name: str) -> Future[Change]:
        """Delete a tenant. Its name remains in the records of its old keys and requests. The future raises
        `UnknownTenantError` if there is no such tenant, and `ConflictError` if it has a valid key or a peer.
        """
        return self._decide(
            actor,
            "tenants.delete",
            {"name": name},
            lambda connection: tenants.delete(connection, name, time.time()),
        )

    # ── local users and groups ──

    def map_peer(self, *, actor: Actor | str, kind: PeerKind, number: int, tenant: str) -> Future[Change]:
        """Map a local user ("uid") or group ("gid") to a tenant.

        The future raises `ValueError` for an invalid kind or number, and `UnknownTenantError` if there is no
        such tenant.
        """
        peer = PeerRecord(kind=kind, number=number, tenant=tenant, created_at=time.time())
        return self._decide(
            actor,
            "peers.map",
            {"peer": f"{kind}:{number}"},
            lambda connection: tenants.map_peer(connection, peer),
        )

    def unmap_peer(self, *, actor: Actor | str, kind: PeerKind, number: int) -> Future[Change]:
        """Remove a user or group mapping. The future raises `UnknownPeerError` if there is no such
        mapping."""
        return self._decide(
            actor,
            "peers.unmap",
            {"peer": f"{kind}:{number}"},
            lambda connection: tenants.unmap_peer(connection, kind, number),
        )

    # ── keys ──

    def create_key(
        self, *, actor: Actor | str, name: str, tenant: str, **fields: object
    ) -> Future[CreatedKey]:
        """Create a key for `tenant`. `fields` contains the declared fields that differ from their defaults.
        The future returns the key with its secret, which is shown only once, or raises `UnknownTenantError`
        if there is no such tenant. Raises `ValueError` for an invalid value, such as an unprintable name or
        an expiry time in the past.
        """
        now, secret = time.time(), keys.new_secret()
        plain = KeyRecord(id=keys.new_id(), name="", tenant=tenant, prefix="", sha256="", created_at=now)
        changed = tenants.replaced(plain, {"name": name, **fields})
        check_key(changed, now)
        key = keys.of_secret(changed, secret)
        return self._decide_all(
            actor,
            "keys.create",
            {"id": key.id},
            lambda connection: [keys.create(connection, key)],
            lambda changes: CreatedKey(key, secret),
        )

    def set_key(self, *, actor: Actor | str, key_id: str, changes: Mapping[str, object]) -> Future[Change]:
        """Change fields of a key. `changes` contains only the fields to change, which must be declared in
        `KeyFields`. A quota is a mapping that contains only the fields to change.

        The future raises `ValueError` for an invalid value, `UnknownKeyError` if there is no such key, and
        `ConflictError` if the key is revoked or expired.
        """
        return self._decide(
            actor,
            "keys.set",
            {"id": key_id},
            lambda connection: keys.alter(connection, key_id, changes, time.time()),
        )

    def rotate_key(
        self, *, actor: Actor | str, key_id: str, overlap_s: float, expires_at: float | None = None
    ) -> Future[RotatedKey]:
        """Replace a key with a new one that has the same rights. The old key stays valid for at most
        `overlap_s` seconds. Without `expires_at`, the new key gets the old key's original lifetime.

        Raises `ValueError` for an invalid `overlap_s`. The future raises `ValueError` for an invalid expiry
        time, `UnknownKeyError` if there is no such key, and `ConflictError` if the key is revoked or expired,
        or was rotated before.
        """
        if not 0 <= overlap_s <= _MAX_OVERLAP_S:
            raise ValueError(
                f"overlap_s is {overlap_s}: use a value from 0 to {_MAX_OVERLAP_S} seconds (one year)"
            )
        secret = keys.new_secret()

        def rotated(changes: list[Change]) -> RotatedKey:
            former, successor = changes[0].after, changes[1].after
            assert isinstance(former, KeyRecord) and isinstance(successor, KeyRecord)
            return RotatedKey(CreatedKey(successor, secret), former)

        return self._decide_all(
            actor,
            "keys.rotate",
            {"id": key_id, "overlap_s": overlap_s},
            lambda connection: list(
                keys.rotate(
                    connection, key_id, secret, now=time.time(), overlap_s=overlap_s, expires_at=expires_at
                )
            ),
            rotated,
        )

    def revoke_key(self, *, actor: Actor | str, key_id: str) -> Future[Change]:
        """Revoke a key. Once the future resolves, requests with the key are refused. Revoking a key again
        keeps the original revocation time.

        The future raises `UnknownKeyError` if there is no such key.
        """
        return self._decide(
            actor,
            "keys.revoke",
            {"id": key_id},
            lambda connection: keys.revoke(connection, key_id, time.time()),
        )

    # ── shared by all changes ──

    def _decide(
        self,
        actor: Actor | str,
        action: str,
        params: Mapping[str, object],
        apply: Callable[[sqlite3.Connection], Change],
    ) -> Future[Change]:
        return self._decide_all(
            actor, action, params, lambda connection: [apply(connection)], lambda changes: changes[0]
        )

    def _decide_all(
        self,
        actor: Actor | str,
        action: str,
        params: Mapping[str, object],
        apply: Callable[[sqlite3.Connection], list[Change]],
        outcome: Callable[[list[Change]], T],
    ) -> Future[T]:
        """Apply changes to records, audit the old and new values, and update the in-memory copy after the
        commit."""
        changes: list[Change] = []

        def apply_and_keep(connection: sqlite3.Connection) -> T:
            changes[:] = apply(connection)
            return outcome(changes)

        def remember(_: T) -> None:
            self._policies = self._policies.with_changes(*changes)

        return self.change(
            actor=actor,
            action=action,
            params=params,
            apply=apply_and_keep,
            after_commit=remember,
            values=lambda _: _before_and_after(changes),
        )


def _before_and_after(changes: list[Change]) -> BeforeAndAfter:
    """Return the old and new values to audit. For a changed record, these are only the fields that differ;
    for a created or deleted record, all fields. In a rotation, the second change creates the new key, whose
    fields are audited as `successor`."""
    before, after = (_shown(record) for record in changes[0])
    if before is not None and after is not None:
        same = {name for name in before if before[name] == after[name]}
        before, after = ({n: v for n, v in side.items() if n not in same} for side in (before, after))
    if len(changes) > 1:
        after = {**(after or {}), "successor": _shown(changes[1].after)}
    return before, after


def _shown(record: PolicyRecord | None) -> dict[str, object] | None:
    if record is None:
        return None
    fields: dict[str, object] = msgspec.to_builtins(record)
    return {name: value for name, value in fields.items() if name not in _UNAUDITED}


def read_policies(path: Path) -> Policies:
    """Read all tenants, keys and peers from the file at `path`, through a read-only connection. Raises
    `StoreError` on failure."""
    with reading(path, CONTROL) as connection:
        return Policies(
            records.select(connection, TenantRecord),
            records.select(connection, KeyRecord),
            records.select(connection, PeerRecord),
        )
