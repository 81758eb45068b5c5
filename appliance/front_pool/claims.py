"""Records the owner of each request with an `Idempotency-Key`: the front process that runs it or holds its
answer. Fronts keep answers in memory, so when a front process exits, its answers are lost and its records are
removed.
"""

from __future__ import annotations

from appliance.channel.core_messages import Claimed
from appliance.channel.front_messages import Claim, Release

MAX_DROPPED_RUNS = 10_000
"""Maximum number of requests remembered after their answers have been dropped. If a client retries such a
request, the log can show that it ran before."""


class Claims:
    """Records which front owns each claimed `Idempotency-Key`. A scope is a combination of a caller, an
    endpoint and a key."""

    def __init__(self) -> None:
        self._owners: dict[bytes, tuple[str, str]] = {}
        """For each claimed scope: the name of the owning front and the id of its request, which may have
        finished."""
        self._dropped: dict[bytes, str] = {}
        """For each scope with a dropped answer, oldest first: the id of its request."""

    def claim(self, front: str, claim: Claim) -> Claimed:
        """Answer a front's claim: the front must run the request unless the scope has already been
        claimed."""
        if owner := self.owner(claim.scope):
            return Claimed(claim.request_id, "repeat" if owner == front else "hand over")
        self._owners[claim.scope] = front, claim.request_id
        return Claimed(claim.request_id, "run", self._dropped.pop(claim.scope, ""))

    def release(self, release: Release) -> None:
        """Remove a front's claim, because the front no longer has the answer."""
        _, self._dropped[release.scope] = self._owners.pop(release.scope)
        if len(self._dropped) > MAX_DROPPED_RUNS:
            del self._dropped[next(iter(self._dropped))]

    def owner(self, scope: bytes) -> str:
        """Return the name of the front that has claimed the scope, or an empty string."""
        return self._owners.get(scope, ("", ""))[0]

    def lose_front(self, front: str) -> int:
        """Remove the claims of a front that has exited and return their number."""
        removed = [scope for scope in self._owners if self.owner(scope) == front]
        for scope in removed:
            self.release(Release(scope))
        return len(removed)
