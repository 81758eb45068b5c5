"""Lists and changes the mappings of local users and groups to tenants."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from appliance.actions.parameters import MapPeer, UnmapPeer
from appliance.admin.effects import Effect, committed, done
from appliance.front_pool.identities import local_uids
from appliance.protocol import PeerMapping
from appliance.settings import UnixSettings
from store.audit import Actor
from store.control import ControlStore
from store.policies import PeerKind
from store.tenants import LOCAL

_KINDS: dict[str, PeerKind] = {"uid": "uid", "gid": "gid"}


@dataclass(kw_only=True)
class PeerAdmin:
    """Lists and changes the local users and groups that need no key. Changes reach the front processes before
    the operator receives the response."""

    control: ControlStore
    unix: Callable[[], UnixSettings]
    publish: Callable[[], None]
    """Makes changed mappings take effect in the queue and the front processes."""

    def list(self) -> list[PeerMapping]:
        """Return the users from the settings, followed by the mapped users and groups."""
        mapped, unix = self.control.policies.peers, self.unix()
        own = [
            PeerMapping(kind="uid", number=uid, tenant=LOCAL, source="settings")
            for uid in sorted(local_uids(unix))
            if ("uid", uid) not in mapped
        ]
        if unix.uids == "any":
            own.append(PeerMapping(kind="any", number=-1, tenant=LOCAL, source="settings"))
        return own + [
            PeerMapping(
                kind=peer.kind,
                number=peer.number,
                tenant=peer.tenant,
                source="mapped",
                created_at=peer.created_at,
            )
            for peer in mapped.values()
        ]

    async def map(self, actor: Actor, asked: MapPeer) -> Effect:
        """Map a user or group to a tenant. Like `unmap`, raises ValueError for an invalid change and
        StoreError if the database fails."""
        kind, number = parse_peer(asked.peer)
        await committed(self.control.map_peer(actor=actor, kind=kind, number=number, tenant=asked.tenant))
        self.publish()
        return done(f"{kind} {number} mapped to tenant {asked.tenant}")

    async def unmap(self, actor: Actor, asked: UnmapPeer) -> Effect:
        """Remove a user's or group's mapping."""
        kind, number = parse_peer(asked.peer)
        await committed(self.control.unmap_peer(actor=actor, kind=kind, number=number))
        self.publish()
        return done(f"{kind} {number} unmapped")


def parse_peer(text: str) -> tuple[PeerKind, int]:
    """Parse `uid:1000` or `gid:100` into kind and number. Raises ValueError for any other format."""
    found = re.fullmatch(r"(uid|gid):(\d{1,10})", text, re.ASCII)
    if not found:
        raise ValueError(f"peer {text!r} is not valid: write it as uid:1000 or gid:100")
    return _KINDS[found[1]], int(found[2])
