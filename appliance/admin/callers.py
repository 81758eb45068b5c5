"""Authenticates admin API callers: operators by their uid or groups, and everyone else by a key with the
`admin` or `read` scope. If a request carries a key, the key alone determines the caller's rights, so that
operators can test what a key permits.

A request with the `x-appliance-read-only: true` header is limited to read access, regardless of the caller's
rights.

Each action's audit rows contain the peer's uid, the key and the host.
"""

from __future__ import annotations

import grp
import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import NamedTuple

from appliance.calls import READ_ONLY_HEADER
from appliance.http import Peer, bearer
from appliance.scopes import granted
from appliance.settings import AdminSettings
from store.audit import Actor
from store.control import ControlStore
from store.policies import KeyRecord, TenantRecord

log = logging.getLogger(__name__)

KeyLookup = Callable[[str], tuple[KeyRecord, TenantRecord] | None]


class DeniedError(Exception):
    """Raised if access is denied. `status` is the HTTP status code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Caller(NamedTuple):
    """An authenticated caller."""

    uid: int
    scopes: frozenset[str]
    host: str
    key_id: str = ""
    read_only: bool = False
    """Whether the caller has requested a read-only session. If so, `scopes` contains only `read`."""

    @property
    def actor(self) -> Actor:
        """The caller's name in the audit chain: `uid:0`, or `uid:1000 key:key_12ab` for a request with a
        key."""
        return Actor(f"uid:{self.uid} key:{self.key_id}" if self.key_id else f"uid:{self.uid}", self.host)


class Authenticator:
    """Identifies admin API callers."""

    def __init__(self, settings: AdminSettings, valid_key: KeyLookup) -> None:
        """`valid_key` looks up a valid key and returns its record and its tenant."""
        self._valid_key = valid_key
        self._host = socket.gethostname()
        self.gid: int | None = None
        """Id of the group that owns the admin socket."""
        self.configure(settings)

    def configure(self, settings: AdminSettings) -> None:
        """Take the list of operators from these settings."""
        gids = operator_gids(settings)
        self.gid = gids[0] if gids else None
        self._uids = frozenset({os.geteuid(), 0, *settings.uids})
        self._gids = frozenset(gids)

    def knows(self, peer: Peer) -> bool:
        """Return whether the peer may use the admin API without a key."""
        return peer.kind == "unix" and (peer.uid in self._uids or not self._gids.isdisjoint(peer.gids))

    def identify(self, headers: Iterable[tuple[bytes, bytes]], peer: Peer | None) -> Caller:
        """Identify a request's caller. Raises DeniedError unless the caller has at least read access."""
        fields = list(headers)
        caller = self._caller(fields, peer)
        return caller._replace(scopes=_READ, read_only=True) if _is_read_only(fields) else caller

    def _caller(self, headers: Iterable[tuple[bytes, bytes]], peer: Peer | None) -> Caller:
        if peer is None or peer.kind != "unix":
            raise DeniedError(403, "this API is available only over a Unix socket")
        scheme, credentials = bearer(headers)
        if scheme:
            return self._of_key(scheme, credentials, peer)
        if self.knows(peer):
            return Caller(peer.uid, granted(("admin",)), self._host)
        raise DeniedError(
            403,
            f"permission denied for uid {peer.uid}: run as root, as the service's user or as an "
            "operator listed under [admin] in the settings, or set APPLIANCE_ADMIN_KEY to a key "
            "with the admin or read scope",
        )

    def _of_key(self, scheme: bytes, credentials: bytes, peer: Peer) -> Caller:
        if scheme != b"bearer":
            raise DeniedError(401, "use the header 'Authorization: Bearer KEY'")
        found = self._valid_key(credentials.decode("latin-1"))
        if found is None:
            raise DeniedError(
                401, "this key is unknown, revoked or expired; create a new key with: appliance keys create"
            )
        key, tenant = found
        if tenant.suspended_at is not None:
            raise DeniedError(403, f"tenant {tenant.name!r} of key {key.id} is suspended")
        scopes = granted(key.scopes)
        if "read" not in scopes:
            raise DeniedError(
                403, f"key {key.id} has neither scope 'admin' nor scope 'read'; use a key with one of them"
            )
        return Caller(peer.uid, scopes, self._host, key.id)


_READ = granted(("read",))


def _is_read_only(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether the caller has requested a read-only session. Raises DeniedError if the header has a
    value other than "true", because a mistyped value must not permit actions."""
    name = READ_ONLY_HEADER.encode()
    values = [value for field, value in headers if field == name]
    for value in values:
        if value != b"true":
            raise DeniedError(
                400,
                f"{READ_ONLY_HEADER} = {value[:40].decode('latin-1')!r} is not valid: use 'true', or omit "
                "the header",
            )
    return bool(values)


def operator_gids(settings: AdminSettings) -> list[int]:
    """Return the ids of the groups whose members are operators. Groups that do not exist are ignored."""
    gids = []
    for group in settings.groups:
        try:
            gids.append(grp.getgrnam(group).gr_gid if isinstance(group, str) else group)
        except KeyError:
            if settings.groups != AdminSettings().groups:
                log.warning("admin.groups: group %r does not exist on this machine and is ignored", group)
    return gids


def keys_of(control: ControlStore) -> KeyLookup:
    """Return a function that looks up valid keys in the control database."""

    def valid_key(secret: str) -> tuple[KeyRecord, TenantRecord] | None:
        key = control.lookup(secret)
        tenant = control.policies.tenants.get(key.tenant) if key is not None else None
        return (key, tenant) if key is not None and tenant is not None else None

    return valid_key
