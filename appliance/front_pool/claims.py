"""Records which front process runs each request with an `Idempotency-Key`, or holds its answer.

Fronts keep the answers in memory. When a front's process exits, its answers are lost, so its claims are
removed.
"""

from __future__ import annotations

from appliance.channel.core_messages import Claimed
from appliance.channel.front_messages import Claim, Release

MAX_DROPPED_RUNS = 10_000
"""Maximum number of runs that are remembered after their answers have been dropped. The log uses them to show
that a retry ran the request again."""


class Claims:
    """The front that owns each claimed scope."""

    def __init__(self) -> None:
        self._owners: dict[bytes, tuple[str, str]] = {}
        """For each claimed scope, the front and the id of the request that it is running or has run."""
        self._dropped: dict[bytes, str] = {}
        """Request ids of runs whose answers were dropped, by scope. The oldest comes first."""

    def claim(self, front: str, claim: Claim) -> Claimed:
        """Answer a front's claim: the front must run the request unless another front has claimed the
        scope."""
        if claim.scope in self._owners:
            return Claimed(claim.scope, is_elsewhere=True)
        self._owners[claim.scope] = front, claim.request_id
        return Claimed(claim.scope, False, self._dropped.pop(claim.scope, ""))

    def release(self, release: Release) -> None:
        """Remove a claim, because its front no longer has the answer."""
        _, self._dropped[release.scope] = self._owners.pop(release.scope)
        if len(self._dropped) > MAX_DROPPED_RUNS:
            del self._dropped[next(iter(self._dropped))]

    def owner(self, scope: bytes) -> str:
        """Return the front that has claimed the scope, or an empty string."""
        return self._owners.get(scope, ("", ""))[0]

    def lose_front(self, front: str) -> int:
        """Remove the claims of a front that has exited, and return their number."""
        removed = [scope for scope in self._owners if self.owner(scope) == front]
        for scope in removed:
            self.release(Release(scope))
        return len(removed)
