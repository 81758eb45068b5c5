"""Limits the memory used by the bodies of requests that are being received or prepared."""

from __future__ import annotations

from appliance.channel.front_settings import Limits
from appliance.front.errors import ApiError

_RETRY_AFTER_S = 1.0


class BodyBudget:
    """Counts the bytes of request bodies in this front's memory, in total and per tenant."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.held_bytes = 0
        self.refused = 0
        """Requests refused because request bodies already used too much memory."""
        self._by_tenant: dict[str, int] = {}

    def reserve(self, tenant: str, size: int) -> None:
        """Reserve `size` more bytes. Raises `ApiError` (503) if that would exceed the tenant's limit or the
        overall limit."""
        held = self._by_tenant.get(tenant, 0)
        # Always allow one body of maximum size, even if a limit in the settings is lower.
        tenant_limit = max(self.limits.max_tenant_body_bytes, self.limits.max_body_bytes)
        front_limit = max(self.limits.max_front_body_bytes, self.limits.max_body_bytes)
        if held + size > tenant_limit:
            self._refuse(
                f"unfinished requests of tenant {tenant!r} already use {held:,} bytes for request bodies",
                tenant_limit,
            )
        if self.held_bytes + size > front_limit:
            self._refuse(
                f"unfinished requests already use {self.held_bytes:,} bytes for request bodies", front_limit
            )
        self._by_tenant[tenant] = held + size
        self.held_bytes += size

    def release(self, tenant: str, size: int) -> None:
        """Release `size` bytes reserved for the tenant."""
        self.held_bytes -= size
        left = self._by_tenant[tenant] - size
        if left:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]

    def _refuse(self, held: str, limit: int) -> None:
        self.refused += 1
        raise ApiError(
            503,
            f"{held}, and the limit is {limit:,} bytes: retry later",
            code="too_many_body_bytes",
            retry_after_s=_RETRY_AFTER_S,
            headers={"connection": "close"},
        )


class BodyReservation:
    """Memory reserved for one request's body. The memory is held until the request has been prepared or, if
    the tenant's log policy keeps prompts, until the request has finished."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self._bytes = 0

    def grow_to(self, size: int) -> None:
        """Increase the reservation to `size` bytes in total. Raises `ApiError` (503) if that would exceed a
        memory limit."""
        if size > self._bytes:
            self._budget.reserve(self._tenant, size - self._bytes)
            self._bytes = size

    def release(self) -> None:
        """Release the whole reservation. Calling this again has no effect."""
        if self._bytes:
            self._budget.release(self._tenant, self._bytes)
            self._bytes = 0
