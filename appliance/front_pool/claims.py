"""Records the owner of each request with an `Idempotency-Key`: the front process that runs it or keeps its
answer. When the process exits, its answers are lost, and its records are removed."""

from __future__ import annotations

from appliance.channel.core_messages import Claimed
from appliance.channel.front_messages import Claim

MAX_DROPPED_RUNS = 10_000
"""Maximum number of dropped answers whose requests are remembered, so that the log can name them."""


class Claims:
    """Records which front owns each claimed `Idempotency-Key`. A scope is a combination of a caller, an
    endpoint and a key."""

    def __init__(self) -> None:
        self._owners: dict[bytes, tuple[str, str]] = {}
        """For each claimed scope: the name of the owning front, and the id of its request."""
        self._dropped: dict[bytes, str] = {}
        """For each scope with a dropped answer, oldest first: the id of its request."""

    def claim(self, front: str, claim: Claim) -> Claimed:
        """Answer a front's claim: the front must run the request unless another front owns the scope."""
        if claim.scope in self._owners:
            return Claimed(claim.scope, hand_over=True)
        self._owners[claim.scope] = front, claim.request_id
        return Claimed(claim.scope, retry_of=self._dropped.pop(claim.scope, ""))

    def release(self, scope: bytes) -> None:
        """Remove a front's claim, because the front no longer has the answer."""
        _, self._dropped[scope] = self._owners.pop(scope)
        if len(self._dropped) > MAX_DROPPED_RUNS:
            del self._dropped[next(iter(self._dropped))]

    def owner(self, scope: bytes) -> str:
        """Return the name of the front that has claimed the scope, or an empty string."""
        return self._owners.get(scope, ("", ""))[0]

    def lose_front(self, front: str) -> int:
        """Remove the claims of a front that has exited and return their number."""
        removed = [scope for scope in self._owners if self.owner(scope) == front]
        for scope in removed:
            self.release(scope)
        return len(removed)
