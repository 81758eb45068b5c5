"""Remembers the requests of the last few minutes, so that they can be replayed with different limits
(`appliance.traffic.what_if`). The request log lacks some of the information that a replay needs, such as the
output limit requested by the client."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from appliance.traffic.quotas import Quotas
from appliance.traffic.request import Request
from store.quotas import QuotaLevels

KEPT_S = 900.0
"""Requests that finished more than this many seconds ago are forgotten."""
NOTED_EVERY_S = 60.0
"""Interval, in seconds, at which quota levels are recorded. A replay can begin only at a recorded time."""
MAX_RECENT = 20_000
"""Maximum number of remembered requests. Each takes about 200 bytes."""


class PastRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A request as sent by its client, and its outcome."""

    arrived_at: float
    """Unix time at which the request arrived."""
    tenant: str
    key_id: str
    """Id of the key whose limits restrict the request; empty for a request without a key."""
    unit: str
    """The request manager's name for the model that answers the request."""
    request_class: int
    submissions: int
    num_seqs: int
    prompt_tokens: int
    cached_tokens: int = 0
    max_tokens: int
    """Maximum number of output tokens over all samples, before any quota lowered it."""
    may_lower: bool
    deadline_ms: float | None = None
    output_tokens: int | None = None
    """Number of generated tokens over all samples, or None if the request never ran."""
    status: int
    """HTTP status, or 0 while the request is unfinished."""
    ttft_ms: float | None = None
    e2e_ms: float | None = None


class RecentRequests:
    """The requests that finished in the last `KEPT_S` seconds, at most `MAX_RECENT`. They are stored encoded,
    which takes less memory than objects."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(PastRequest).decode
        self._ended: deque[tuple[float, bytes]] = deque(maxlen=MAX_RECENT)
        self._levels: deque[tuple[float, list[QuotaLevels]]] = deque(maxlen=int(KEPT_S / NOTED_EVERY_S))

    def add(self, request: Request, now: float) -> None:
        """Remember a request that finished at unix time `now`."""
        ended = self._ended
        while ended and ended[0][0] < now - KEPT_S:
            ended.popleft()
        ended.append((now, self._encode(past(request))))

    def note(self, quotas: Quotas, now: float) -> None:
        """Record the levels of all partly used quotas at unix time `now`. Do nothing if levels were recorded
        less than `NOTED_EVERY_S` seconds ago."""
        if not self._levels or now - self._levels[-1][0] >= NOTED_EVERY_S:
            self._levels.append((now, quotas.used_levels(now)))

    def start(self, since: float) -> tuple[float, list[QuotaLevels]]:
        """Return the first unix time after `since` at which a replay can begin, and the quota levels at that
        time. If there is no such time, return the latest time before `since` instead. Raises LookupError if
        the service has just started."""
        if len(self._ended) == MAX_RECENT:
            since = max(since, self._ended[0][0])
        if not self._levels:
            raise LookupError("the service has just started: try again in a minute")
        return next((one for one in self._levels if one[0] >= since), self._levels[-1])

    def requests(self, unfinished: Iterable[Request]) -> list[PastRequest]:
        """Return the remembered requests and the `unfinished` ones in order of arrival."""
        found = [self._decode(one) for _, one in self._ended] + [past(request) for request in unfinished]
        return sorted(found, key=lambda one: one.arrived_at)


def past(request: Request) -> PastRequest:
    """Return a request in the form required for a replay."""
    first, end = request.first, request.settled
    return PastRequest(
        arrived_at=first.arrived_at,
        tenant=request.tenant,
        key_id=request.key_id,
        unit=request.unit,
        request_class=request.request_class,
        submissions=first.submissions,
        num_seqs=first.num_seqs,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=request.cached_tokens,
        max_tokens=request.asked_max_tokens,
        may_lower=first.may_lower,
        deadline_ms=first.deadline_ms,
        output_tokens=request.known_tokens if request.counted else None,
        status=end.status if end else 0,
        ttft_ms=end.ttft_ms if end else None,
        e2e_ms=end.e2e_ms if end else None,
    )
