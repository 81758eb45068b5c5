"""Records which front runs, or keeps the answer to, each request with an `Idempotency-Key`.

Fronts keep the answers in memory. A front's claims end with its process, because its answers are lost with
the process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from appliance.messages import Claim, Claimed, Release

MAX_LOST_RUNS = 10_000
"""Maximum number of runs with a lost answer that are remembered. They are remembered so that the log can show
that a retry ran again from the beginning."""


class _Owner(NamedTuple):
    front: str
    request_id: str


class _LostRun(NamedTuple):
    request_id: str
    until: float


class Claims:
    """The front that owns each claimed scope."""

    def __init__(self, clock: Callable[[], float], keep_s: Callable[[], float]) -> None:
        """`clock` returns seconds on a clock that never goes back. Runs with a lost answer are remembered for
        `keep_s()`."""
        self._clock = clock
        self._keep_s = keep_s
        self._owners: dict[bytes, _Owner] = {}
        self._lost: OrderedDict[bytes, _LostRun] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def claim(self, front: str, claim: Claim) -> Claimed:
        """Return whether the front must run the request."""
        owner = self._owners.get(claim.scope)
        if owner is not None and owner.front != front:
            return Claimed(claim.scope, is_elsewhere=True)
        self._owners[claim.scope] = _Owner(front, claim.request_id)
        lost = self._lost.pop(claim.scope, None)
        retry_of = lost.request_id if lost is not None and lost.until > self._clock() else ""
        return Claimed(claim.scope, False, retry_of)

    def release(self, front: str, release: Release) -> None:
        """Remove a claim, because the front no longer has the answer."""
        owner = self._owners.get(release.scope)
        if owner is None or (owner.front, owner.request_id) != (front, release.request_id):
            return
        del self._owners[release.scope]
        if release.void:
            self._remember(release.scope, release.request_id)

    def owner(self, scope: bytes) -> str | None:
        """Return the front that has claimed the scope, or None."""
        owner = self._owners.get(scope)
        return None if owner is None else owner.front

    def lose_front(self, front: str) -> int:
        """Remove the claims of a front that has ended, and return their number."""
        lost = [scope for scope, owner in self._owners.items() if owner.front == front]
        for scope in lost:
            self._remember(scope, self._owners.pop(scope).request_id)
        return len(lost)

    def _remember(self, scope: bytes, request_id: str) -> None:
        self._lost.pop(scope, None)
        self._lost[scope] = _LostRun(request_id, self._clock() + self._keep_s())
        if len(self._lost) > MAX_LOST_RUNS:
            self._lost.popitem(last=False)
