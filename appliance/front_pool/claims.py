"""Who runs, or keeps the answer of, each request with an `Idempotency-Key`.

Answers are in the fronts' memory; what is here says only which front that is. Both forget together: a front
takes its `Release` back before it claims the same scope again, and with a front's death its claims are void.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from appliance.messages import Claim, Claimed, Release

MAX_VOID = 10_000
"""Runs remembered whose answer is lost: so that the log can say that a retry ran anew."""


class _Owner(NamedTuple):
    front: str
    request_id: str


class _Void(NamedTuple):
    request_id: str
    until: float


class Claims:
    """The index. `clock` gives seconds that never go back; a lost run is remembered for `keep_s`."""

    def __init__(self, clock: Callable[[], float], keep_s: float) -> None:
        self.keep_s = keep_s
        self._clock = clock
        self._owners: dict[bytes, _Owner] = {}
        self._void: OrderedDict[bytes, _Void] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def claim(self, front: str, claim: Claim) -> Claimed:
        """The answer to a front that asks who runs a request."""
        owner = self._owners.get(claim.scope)
        if owner is not None and owner.front != front:
            return Claimed(claim.scope, is_elsewhere=True)
        self._owners[claim.scope] = _Owner(front, claim.request_id)
        lost = self._void.pop(claim.scope, None)
        retry_of = lost.request_id if lost is not None and lost.until > self._clock() else ""
        return Claimed(claim.scope, False, retry_of)

    def release(self, front: str, release: Release) -> None:
        """A front has the answer no more."""
        owner = self._owners.get(release.scope)
        if owner is None or (owner.front, owner.request_id) != (front, release.request_id):
            return
        del self._owners[release.scope]
        if release.void:
            self._remember(release.scope, release.request_id)

    def owner(self, scope: bytes) -> str | None:
        """The front that runs or keeps it."""
        owner = self._owners.get(scope)
        return None if owner is None else owner.front

    def lose_front(self, front: str) -> int:
        """The front is dead, and its answers with it; their number."""
        lost = [scope for scope, owner in self._owners.items() if owner.front == front]
        for scope in lost:
            self._remember(scope, self._owners.pop(scope).request_id)
        return len(lost)

    def _remember(self, scope: bytes, request_id: str) -> None:
        self._void.pop(scope, None)
        self._void[scope] = _Void(request_id, self._clock() + self.keep_s)
        if len(self._void) > MAX_VOID:
            self._void.popitem(last=False)
