"""Identifies callers by the hash of a bearer key, or by the uid or groups of the peer process on a Unix
socket."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from appliance.channel.core_messages import Identities
from appliance.channel.identity import Identity
from appliance.front.errors import ApiError, unauthorized
from appliance.http import Peer, bearer, drop_frames

KEY_PREFIX = b"ak-"
"""Prefix of every key that this product issues."""

_KEY_HEADERS = (b"api-key", b"x-api-key")


class IdentityTable:
    """Identities by key hash, uid and gid, as last received from the core. While the table is empty, every
    caller is refused."""

    def __init__(self) -> None:
        self._keys: dict[str, Identity] = {}
        self._uids: dict[int, Identity] = {}
        self._gids: dict[int, Identity] = {}
        self._any_uid: Identity | None = None

    def take(self, news: Identities) -> None:
        """Replace the identity table, or apply changes to it."""
        if news.whole:
            self._keys = {}
        for sha256, identity in news.keys.items():
            if identity is None:
                self._keys.pop(sha256, None)
            else:
                self._keys[sha256] = identity
        self._uids, self._gids, self._any_uid = news.uids, news.gids, news.any_uid

    def identify(self, headers: Sequence[tuple[bytes, bytes]], peer: Peer) -> Identity:
        """Return the identity of a request's caller. Raises a 401 if the caller has none. On every socket, a
        valid key takes precedence. On a Unix socket, the peer's uid is sufficient, and keys without
        `KEY_PREFIX` are ignored: OpenAI's clients always send a key, so users without one configure a
        placeholder. An invalid key with the prefix (revoked or mistyped) is refused even on a Unix socket,
        since the request would otherwise be billed to the uid's tenant by mistake.
        """
        scheme, key = _credentials(headers)
        if scheme and scheme != b"bearer":
            raise unauthorized("use the header 'Authorization: Bearer KEY'", "unsupported_authorization")
        if key:
            known = self._keys.get(hashlib.sha256(key).hexdigest())
            if known is not None and (known.expires_at is None or time.time() < known.expires_at):
                return known
            if peer.kind != "unix" or key.startswith(KEY_PREFIX):
                raise unauthorized(
                    "this key is unknown, revoked or expired; create a new key with: appliance keys create",
                    "invalid_api_key",
                )
        if peer.kind != "unix":
            raise unauthorized(
                "a key is required; send the header 'Authorization: Bearer KEY' (create a key with: "
                "appliance keys create)",
                "missing_api_key",
            )
        identity = self._of_peer(peer)
        if identity is None:
            raise unauthorized(
                f"uid {peer.uid} is not permitted to use this socket without a key; send the header "
                "'Authorization: Bearer KEY'",
                "unknown_uid",
            )
        return identity

    def tenant_of(self, headers: Sequence[tuple[bytes, bytes]], state: dict[str, Any]) -> str:
        """Identify a request's caller and store the identity or the error in the request's state. Return the
        tenant, or an empty string if there is no valid identity."""
        try:
            identity = self.identify(headers, state["peer"])
        except ApiError as error:
            drop_frames(error)
            state["caller"] = error
            return ""
        state["caller"] = identity
        return identity.tenant

    def knows(self, peer: Peer) -> bool:
        """Return True if the socket's peer is a known local user, who needs no key."""
        return peer.kind == "unix" and self._of_peer(peer) is not None

    def _of_peer(self, peer: Peer) -> Identity | None:
        known = self._uids.get(peer.uid)
        if known is not None or not self._gids:
            return known or self._any_uid
        return next((self._gids[gid] for gid in peer.gids if gid in self._gids), self._any_uid)


def _credentials(headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Return the scheme and the credentials from the Authorization header. If this header is missing, return
    the key from `api-key` or `x-api-key`, which Azure's and Anthropic's clients send."""
    scheme, key = bearer(headers)
    if scheme:
        return scheme, key
    for wanted in _KEY_HEADERS:
        for name, value in headers:
            if name == wanted and value.strip():
                return b"bearer", value.strip()
    return b"", b""
