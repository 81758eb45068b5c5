"""Operators' view of tenants, keys and mapped users, and the actions that change them."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import msgspec
from msgspec import UNSET

from appliance.actions import (
    CreateKey,
    CreateTenant,
    DeleteTenant,
    Limits,
    MapPeer,
    ResumeTenant,
    RevokeKey,
    RotateKey,
    SetKey,
    SetTenant,
    SuspendTenant,
    UnmapPeer,
)
from appliance.identities import local_uids
from appliance.messages import Identity
from appliance.protocol import Done, Key, NewKey, Peer, Tenant
from appliance.switchboard import Switchboard
from store.audit import Actor
from store.control import ControlStore, CreatedKey
from store.errors import OutcomeUnknownError
from store.policies import Change, KeyRecord, Quota, TenantRecord
from store.tenants import BUILT_IN, LOCAL

T = TypeVar("T")

_LIMITS = frozenset(Quota.__struct_fields__)
_LONGEST_CHANGE_S = 15.0
"""Longer than a change waits for its turn and for a lock of the file (`store.trail.WITHIN_S` and SQLite's
busy timeout): only a disk that does not answer takes longer."""
_SUSPENDED = "its tenant was suspended"
_REVOKED = "its key was revoked"


class Decisions:
    """Changes take effect at once: the fronts are told before the operator is answered."""

    def __init__(self, control: ControlStore, switchboard: Switchboard) -> None:
        self._control = control
        self._switchboard = switchboard

    # ── showing ──

    def tenants(self) -> list[Tenant]:
        """All tenants, oldest first."""
        policies, now = self._control.policies, time.time()
        keys = Counter(key.tenant for key in policies.keys.values() if key.valid_at(now))
        peers = Counter(peer.tenant for peer in self.peers())
        return [self._shown(tenant, keys, peers) for tenant in policies.tenants.values()]

    def keys(self) -> list[Key]:
        """All keys, revoked and expired ones too, oldest first."""
        return [self._key(record) for record in self._control.list_keys()]

    def peers(self) -> list[Peer]:
        """Users and groups that need no key: those of the settings, then those that were mapped."""
        mapped, unix = self._control.policies.peers, self._switchboard.settings.unix
        own = [
            Peer(kind="uid", number=uid, tenant=LOCAL, source="settings")
            for uid in sorted(local_uids(unix))
            if ("uid", uid) not in mapped
        ]
        if unix.uids == "any":
            own.append(Peer(kind="any", number=-1, tenant=LOCAL, source="settings"))
        return own + [
            Peer(
                kind=peer.kind,
                number=peer.number,
                tenant=peer.tenant,
                source="mapped",
                created_at=peer.created_at,
            )
            for peer in mapped.values()
        ]

    # ── doing ──

    async def perform(self, actor: Actor, parameters: msgspec.Struct) -> msgspec.Struct | None:
        """Perform and record the action, and tell the fronts; None for an action about something else.

        Raises ValueError, or a StoreError.
        """
        result = await self._perform(actor, parameters)
        if result is not None:
            self._switchboard.tell_identities()
        return result

    async def _perform(self, actor: Actor, parameters: msgspec.Struct) -> msgspec.Struct | None:
        control = self._control
        match parameters:
            case CreateTenant(name=name):
                await _done(control.create_tenant(actor=actor, name=name, changes=_changes(parameters)))
                return self._tenant(name)
            case SetTenant(name=name):
                await _done(control.set_tenant(actor=actor, name=name, changes=_changes(parameters)))
                return self._tenant(name)
            case SuspendTenant(name=name, cancel=cancel):
                await _done(control.suspend_tenant(actor=actor, name=name))
                ended = self._end(lambda identity: identity.tenant == name, _SUSPENDED) if cancel else None
                return Done(message=f"tenant {name} suspended{_effect(ended)}")
            case ResumeTenant(name=name):
                await _done(control.resume_tenant(actor=actor, name=name))
                return Done(message=f"tenant {name} resumed")
            case DeleteTenant(name=name):
                await _done(control.delete_tenant(actor=actor, name=name))
                return Done(message=f"tenant {name} deleted")
            case CreateKey():
                return _new_key(await self._create_key(actor, parameters))
            case SetKey(id=key_id):
                change: Change = await _done(
                    control.set_key(actor=actor, key_id=key_id, changes=_changes(parameters))
                )
                assert isinstance(change.after, KeyRecord)
                return self._key(change.after)
            case RotateKey(id=key_id, overlap_s=overlap_s, expires_at=expires_at):
                rotated = await _done(
                    control.rotate_key(actor=actor, key_id=key_id, overlap_s=overlap_s, expires_at=expires_at)
                )
                return _new_key(rotated.created, rotated.former)
            case RevokeKey(id=key_id, cancel=cancel):
                key = await _done(control.revoke_key(actor=actor, key_id=key_id))
                ended = self._end(lambda identity: identity.key_id == key_id, _REVOKED) if cancel else None
                return Done(message=f"key {key.id} ({key.name}) revoked{_effect(ended)}")
            case MapPeer(peer=peer, tenant=tenant):
                kind, number = parse_peer(peer)
                await _done(control.map_peer(actor=actor, kind=kind, number=number, tenant=tenant))
                return Done(message=f"{kind} {number} mapped to tenant {tenant}")
            case UnmapPeer(peer=peer):
                kind, number = parse_peer(peer)
                await _done(control.unmap_peer(actor=actor, kind=kind, number=number))
                return Done(message=f"{kind} {number} unmapped")
        return None

    async def _create_key(self, actor: Actor, asked: CreateKey) -> CreatedKey:
        rights = _changes(asked)
        limits = rights.pop("quota", {})
        return await _done(
            self._control.create_key(actor=actor, quota=Quota(**limits), **rights)  # type: ignore[arg-type]
        )

    def _shown(self, tenant: TenantRecord, keys: Counter[str], peers: Counter[str]) -> Tenant:
        return Tenant(
            **msgspec.structs.asdict(tenant),
            built_in=tenant.name in BUILT_IN,
            usage=self._switchboard.ledger.usage("tenant", tenant.name),
            keys=keys[tenant.name],
            peers=peers[tenant.name],
        )

    def _key(self, record: KeyRecord) -> Key:
        key = msgspec.convert(record, Key, from_attributes=True)
        key.usage = self._switchboard.ledger.usage("key", record.id)
        return key

    def _tenant(self, name: str) -> Tenant:
        return next(tenant for tenant in self.tenants() if tenant.name == name)

    def _end(self, theirs: Callable[[Identity], bool], why: str) -> int:
        """End the requests of these callers that run and wait; their number."""
        switchboard = self._switchboard
        ending = [request.request_id for request in switchboard.ledger if theirs(request.first.identity)]
        return sum([switchboard.cancel(request_id, why) for request_id in ending])


def parse_peer(text: str) -> tuple[str, int]:
    """Kind and number of `uid:1000` or `gid:100`. Raises ValueError."""
    found = re.fullmatch(r"(uid|gid):(\d{1,10})", text, re.ASCII)
    if not found:
        raise ValueError(f"peer is {text!r}: write for example uid:1000 or gid:100")
    return found[1], int(found[2])


def _changes(asked: msgspec.Struct) -> dict[str, object]:
    """The fields that were given, but for the record's own name; limits are together under "quota"."""
    known = ("id",) if isinstance(asked, SetKey) else ("name",) if not isinstance(asked, CreateKey) else ()
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in msgspec.structs.asdict(asked).items()
        if value is not UNSET and name not in known
    }
    if not isinstance(asked, Limits):
        return given
    limits = {name: given.pop(name) for name in _LIMITS & given.keys()}
    return given | ({"quota": limits} if limits else {})


async def _done(change: Future[T]) -> T:
    """Wait for a change. A change that has not begun in time fails by itself; one that the disk does not
    finish raises OutcomeUnknownError."""
    waiting = asyncio.wrap_future(change)
    await asyncio.wait([waiting], timeout=_LONGEST_CHANGE_S)
    if not waiting.done():
        raise OutcomeUnknownError(
            f"control.db has not answered for {_LONGEST_CHANGE_S:.0f} s: the outcome of the change is "
            "unknown; check the disk, then see: appliance audit list"
        )
    return waiting.result()


def _effect(ended: int | None) -> str:
    """Say what becomes of the requests under way: None where they are not ended."""
    if ended is None:
        return "; its running requests continue"
    return f"; ending {ended} request{'' if ended == 1 else 's'}"


def _new_key(created: CreatedKey, former: KeyRecord | None = None) -> NewKey:
    record = created.record
    return NewKey(
        id=record.id,
        key=created.key,
        name=record.name,
        tenant=record.tenant,
        expires_at=record.expires_at,
        replaces=former.id if former is not None else None,
        replaced_until=former.expires_at if former is not None else None,
    )
