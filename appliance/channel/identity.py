"""The identity of the tenant that is billed for a request, with the request's rights."""

from __future__ import annotations

import msgspec

from store.policies import BACKGROUND, INTERACTIVE, LogPolicy


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identifies the tenant that is billed for a request, and contains the request's rights: the tenant's
    rights, restricted by the key. The core looks up the rights by `tenant` and `key_id`. A front process uses
    its copy only to refuse requests early.
    """

    tenant: str
    key_id: str = ""
    """Id of the key, or empty for a Unix peer."""
    scopes: tuple[str, ...] = ("inference",)
    """Scopes from `store.policies.SCOPES`."""
    models: tuple[str, ...] | None = None
    """Models that the request may name, or None for all."""
    highest_class: int = INTERACTIVE
    """Class with the highest priority that the request can get. 0 is P0."""
    default_class: int = INTERACTIVE
    """Class of a request that does not name one."""
    context_tokens: int | None = None
    """Maximum total length of prompt and output, or None for the model's limit."""
    default_max_tokens: int | None = None
    """Output limit of a request without `max_tokens`, or None for the remaining context length."""
    log_policy: LogPolicy = "metadata"
    may_fall_back: bool = False
    """Whether a model's fallback may answer the key's requests."""
    expires_at: float | None = None
    """When the key expires, in unix seconds."""
    suspended: bool = False
    """Whether the tenant is suspended, in which case all its requests are refused."""


SHADOW_IDENTITY = Identity(tenant="(shadow)", highest_class=BACKGROUND, default_class=BACKGROUND)
"""The identity of requests copied for shadow traffic. No tenant can have this name, so no tenant is billed
for them."""
