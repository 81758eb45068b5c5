"""Who may use the admin API: operators of the box by uid or group, and keys of scope `admin` or `read`.

A key that is shown counts, whoever shows it: so an operator can try what it opens. Every action is recorded
with the peer's uid, the key and the host.
"""

from __future__ import annotations

import grp
import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import NamedTuple

from appliance.http import Peer, bearer
from appliance.scopes import granted
from appliance.settings import AdminSettings
from store.audit import Actor
from store.control import ControlStore
from store.policies import KeyRecord, TenantRecord

log = logging.getLogger(__name__)

KeyLookup = Callable[[str], tuple[KeyRecord, TenantRecord] | None]


class TurnedAwayError(Exception):
    """Who asks may not; `status` is the HTTP status code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Caller(NamedTuple):
    """Who asks."""

    uid: int
    scopes: frozenset[str]
    host: str
    key_id: str = ""

    @property
    def actor(self) -> Actor:
        """As the audit chain names them: `uid:0`, with a key `uid:1000 key:key_12ab`."""
        return Actor(f"uid:{self.uid} key:{self.key_id}" if self.key_id else f"uid:{self.uid}", self.host)


class Doorkeeper:
    """Identifies the callers of the admin API."""

    def __init__(self, settings: AdminSettings, valid_key: KeyLookup) -> None:
        """`valid_key` finds a key that is valid now, and its tenant."""
        self._valid_key = valid_key
        self._host = socket.gethostname()
        self.gid: int | None = None
        """The group that the socket belongs to."""
        self.configure(settings)

    def configure(self, settings: AdminSettings) -> None:
        """Let these be the operators from now on."""
        gids = operator_gids(settings)
        self.gid = gids[0] if gids else None
        self._uids = frozenset({os.geteuid(), 0, *settings.uids})
        self._gids = frozenset(gids)

    def knows(self, peer: Peer) -> bool:
        """Return whether the peer may use the API without a key."""
        return peer.kind == "unix" and (peer.uid in self._uids or not self._gids.isdisjoint(peer.gids))

    def identify(self, headers: Iterable[tuple[bytes, bytes]], peer: Peer | None) -> Caller:
        """The caller, who may look at least. Raises TurnedAwayError."""
        if peer is None or peer.kind != "unix":
            raise TurnedAwayError(403, "only peers of a Unix socket may use this API")
        scheme, credentials = bearer(headers)
        if scheme:
            return self._of_key(scheme, credentials, peer)
        if self.knows(peer):
            return Caller(peer.uid, granted(("admin",)), self._host)
        raise TurnedAwayError(
            403,
            f"permission denied for uid {peer.uid}: run as the service's user, root or an operator of [admin] in "
            f"the settings, or use a key of scope admin or read",
        )

    def _of_key(self, scheme: bytes, credentials: bytes, peer: Peer) -> Caller:
        if scheme != b"bearer":
            raise TurnedAwayError(401, "use the header 'Authorization: Bearer KEY'")
        found = self._valid_key(credentials.decode("latin-1"))
        if found is None:
            raise TurnedAwayError(
                401, "this key is unknown, revoked or expired; make one with: appliance keys create"
            )
        key, tenant = found
        if tenant.suspended_at is not None:
            raise TurnedAwayError(403, f"tenant {tenant.name!r} of key {key.id} is suspended")
        scopes = granted(key.scopes)
        if "read" not in scopes:
            raise TurnedAwayError(403, f"key {key.id} has neither scope admin nor read")
        return Caller(peer.uid, scopes, self._host, key.id)


def operator_gids(settings: AdminSettings) -> list[int]:
    """The groups whose members are operators, by number. One that this box does not have is nobody's."""
    gids = []
    for group in settings.groups:
        try:
            gids.append(grp.getgrnam(group).gr_gid if isinstance(group, str) else group)
        except KeyError:
            if settings.groups != AdminSettings().groups:
                log.warning("admin.groups: this box has no group %r: its members are no operators", group)
    return gids


def keys_of(control: ControlStore) -> KeyLookup:
    """How a doorkeeper finds the keys of a control database."""

    def valid_key(secret: str) -> tuple[KeyRecord, TenantRecord] | None:
        key = control.lookup(secret)
        tenant = control.policies.tenants.get(key.tenant) if key is not None else None
        return (key, tenant) if key is not None and tenant is not None else None

    return valid_key
