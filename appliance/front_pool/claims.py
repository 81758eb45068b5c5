"""Records which front process is running, or holds the answer to, each request with an `Idempotency-Key`.
Fronts keep answers in memory. When a front process exits, its answers are lost, so its records are removed.
"""

from __future__ import annotations

from appliance.channel.core_messages import Claimed
from appliance.channel.front_messages import Claim, Release

MAX_DROPPED_RUNS = 10_000
"""Maximum number of requests remembered after their answers have been dropped. If a client retries one of
them, the log can show that it ran before."""


class Claims:
    """Records which front owns each claimed `Idempotency-Key`. A scope is a combination of a caller, an
    endpoint and a key."""

    def __init__(self) -> None:
        self._owners: dict[bytes, tuple[str, str]] = {}
        """For each claimed scope, the owning front's name and the id of the request that it is running or has
        run."""
        self._dropped: dict[bytes, str] = {}
        """Request id for each scope whose answer was dropped, oldest first."""

    def claim(self, front: str, claim: Claim) -> Claimed:
        """Answer a front that wants to run a scope's request: it must do so unless another front has already
        claimed the scope."""
        if claim.scope in self._owners:
            return Claimed(claim.scope, is_elsewhere=True)
        self._owners[claim.scope] = front, claim.request_id
        return Claimed(claim.scope, False, self._dropped.pop(claim.scope, ""))

    def release(self, release: Release) -> None:
        """Remove a front's claim, because it no longer has the answer."""
        _, self._dropped[release.scope] = self._owners.pop(release.scope)
        if len(self._dropped) > MAX_DROPPED_RUNS:
            del self._dropped[next(iter(self._dropped))]

    def owner(self, scope: bytes) -> str:
        """Return the name of the front that has claimed the scope, or an empty string."""
        return self._owners.get(scope, ("", ""))[0]

    def lose_front(self, front: str) -> int:
        """Remove an exited front's claims, and return their number."""
        removed = [scope for scope in self._owners if self.owner(scope) == front]
        for scope in removed:
            self.release(Release(scope))
        return len(removed)
