"""Who asks: a bearer key by its hash, or the peer of a Unix socket by its uid."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from appliance.front.errors import unauthorized
from appliance.http import Peer
from appliance.messages import Identities, Identity

KEY_PREFIX = b"ak-"
"""How every key of this product begins."""


class Directory:
    """The table of who may ask, as the core last sent it. Empty, it refuses everybody."""

    def __init__(self) -> None:
        self.table = Identities(keys={}, uids={})

    def identify(self, headers: Iterable[tuple[bytes, bytes]], peer: Peer) -> Identity:
        """The identity of a request. Raises a 401.

        A valid key wins everywhere. On a Unix socket the peer's uid is enough, and a key that is not one of
        ours says nothing: OpenAI's clients must send one, so people put in a placeholder. One that looks like
        ours and is not valid (revoked, mistyped) is refused there too: nobody is billed by mistake.
        """
        key = _bearer(headers)
        if key:
            known = self.table.keys.get(hashlib.sha256(key).hexdigest())
            if known is not None:
                return known
            if peer.kind != "unix" or key.startswith(KEY_PREFIX):
                raise unauthorized(
                    "this key is not valid; make one with: appliance keys create", "invalid_api_key"
                )
        if peer.kind != "unix":
            raise unauthorized(
                "no key: send the header 'Authorization: Bearer KEY'; make a key with: appliance keys create",
                "missing_api_key",
            )
        identity = self.table.uids.get(peer.uid, self.table.any_uid)
        if identity is None:
            raise unauthorized(f"uid {peer.uid} may not use this socket without a key", "unknown_uid")
        return identity


def _bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                raise unauthorized("use the header 'Authorization: Bearer KEY'", "unsupported_authorization")
            return key.strip()
    return b""
