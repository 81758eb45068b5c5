"""Who may ask: the table of keys and Unix users that fronts check requests against."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from appliance.messages import Identities, Identity
from appliance.settings import UnixSettings
from store.control import KeyRecord

LOCAL_TENANT = "local"
"""Who the requests of Unix socket peers are billed to."""


def identities(keys: Iterable[KeyRecord], unix: UnixSettings, now: float | None = None) -> Identities:
    """The table at unix time `now`: keys that are valid, and the uids that may use `api.sock`."""
    now = time.time() if now is None else now
    local = Identity(tenant=LOCAL_TENANT)
    uids = {os.geteuid(), 0}
    if isinstance(unix.uids, list):
        uids.update(unix.uids)
    return Identities(
        keys={key.sha256: Identity(tenant=key.tenant, key_id=key.id) for key in keys if key.valid_at(now)},
        uids=dict.fromkeys(sorted(uids), local),
        any_uid=local if unix.uids == "any" else None,
    )
