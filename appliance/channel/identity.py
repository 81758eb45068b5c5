"""The tenant billed for a request, and the request's rights."""

from __future__ import annotations

import msgspec

from store.policies import BACKGROUND, INTERACTIVE, LogPolicy


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tenant billed for a request, and the request's rights: the tenant's rights, restricted by the key.
    The core looks up the rights by `tenant` and `key_id`. A front process uses its copy only to refuse
    requests early.
    """

    tenant: str
    key_id: str = ""
    """The key's id. Empty if the caller was identified by its uid on a Unix socket."""
    scopes: tuple[str, ...] = ("inference",)
    """Scopes from `store.policies.SCOPES`."""
    models: tuple[str, ...] | None = None
    """Models that the request may use, or None for all models."""
    highest_class: int = INTERACTIVE
    """The highest-priority service class that the request can get, as a number: 0 is P0."""
    default_class: int = INTERACTIVE
    """The service class for requests that do not specify one."""
    context_tokens: int | None = None
    """Maximum total length of prompt and output, in tokens, or None for the model's own limit."""
    default_max_tokens: int | None = None
    """Output limit, in tokens, for requests without `max_tokens`. If None, the output may fill the rest of
    the context."""
    log_policy: LogPolicy = "metadata"
    may_fall_back: bool = False
    """Whether requests made with this key may be answered by a model's fallback."""
    expires_at: float | None = None
    """When the key expires, in unix seconds."""
    suspended: bool = False
    """Whether the tenant is suspended. If so, all its requests are refused."""


SHADOW_IDENTITY = Identity(tenant="(shadow)", highest_class=BACKGROUND, default_class=BACKGROUND)
"""The identity used for copies of requests (shadow traffic). "(shadow)" is not a valid tenant name, so no
tenant is billed for the copies."""
