"""A request in flight, and the row in the log that tells of it."""

from __future__ import annotations

import logging

from appliance.classes import service_class
from appliance.messages import Admit, Rejected, Settle
from appliance.traffic.credits import CreditAccount
from store.requests import RequestRow

log = logging.getLogger(__name__)


class OnReplica:
    """What of a request is on one replica and has not left it."""

    __slots__ = ("rows", "submissions", "tokens")

    def __init__(self, admit: Admit) -> None:
        self.submissions = admit.submissions
        self.rows = admit.rows
        self.tokens = admit.prompt_tokens


class Request:
    """One request in flight. Only the ledger changes it."""

    def __init__(self, front: str, admit: Admit, version: str) -> None:
        self.front = front
        self.first = admit
        self.admit = admit
        """Of the latest attempt."""
        self.version = version
        self.request_class = service_class(admit.asked_class, admit.identity)
        self.queued_at: float | None = None
        """Set while it waits for its turn."""
        self.queue_ms: float | None = None
        self.dispatched: dict[CreditAccount, OnReplica] = {}
        self.tried: set[CreditAccount] = set()
        self.latest: CreditAccount | None = None
        self.settled: Settle | None = None
        self.lost_counts = False
        """A replica died with its count of what it generated."""
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.batch_size_at_start: int | None = None

    @property
    def request_id(self) -> str:
        """The front's name for it."""
        return self.first.request_id

    @property
    def state(self) -> str:
        """In a word: see `appliance.protocol.InFlight`."""
        if self.settled is not None:
            return "ending"
        if self.queued_at is not None:
            return "queued"
        return "running" if self.dispatched else "lost" if self.lost_counts else "ending"


def row_of(request: Request, now: float) -> RequestRow:
    """The request's row as it is at unix time `now`."""
    first, end = request.first, request.settled
    delivered = end.delivered_tokens if end else 0
    generated = request.generated_tokens
    if request.lost_counts:
        # The dead replica's count is lost; what arrived was surely generated.
        generated = max(generated, delivered)
    elif delivered > generated and end is not None and not request.dispatched:
        log.error("request %s: %d tokens delivered, %d generated", first.request_id, delivered, generated)
    return RequestRow(
        request_id=first.request_id,
        created_at=first.arrived_at,
        finished_at=now if end else None,
        tenant=first.identity.tenant,
        key_id=first.identity.key_id or None,
        peer=first.peer,
        endpoint=first.endpoint,
        model=first.model,
        version=(request.latest.version if request.latest else "") or request.version or None,
        request_class=f"P{request.request_class}",
        stream=first.stream,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=min(request.cached_tokens, first.prompt_tokens),
        generated_tokens=generated,
        billed_tokens=delivered,
        queue_ms=request.queue_ms,
        ttft_ms=end.ttft_ms if end else None,
        itl_ms=end.itl_ms if end else None,
        e2e_ms=end.e2e_ms if end else None,
        finish_reason=end.finish_reason if end else None,
        status=end.status if end else None,
        error=(end.error or None) if end else None,
        batch_size_at_start=request.batch_size_at_start,
        replica=request.latest.replica if request.latest else None,
        devices=(request.latest.devices or None) if request.latest else None,
        preemptions=request.preemptions,
        resubmissions=request.admit.attempt,
    )


def rejected_row(rejected: Rejected, version: str | None, now: float) -> RequestRow:
    """The row of a request that its front refused by itself; `version` is that of the model's files."""
    return RequestRow(
        request_id=rejected.request_id,
        created_at=rejected.arrived_at,
        finished_at=now,
        tenant=rejected.identity.tenant,
        key_id=rejected.identity.key_id or None,
        peer=rejected.peer,
        endpoint=rejected.endpoint,
        model=rejected.model or None,
        version=version,
        stream=rejected.stream,
        prompt_tokens=rejected.prompt_tokens,
        e2e_ms=rejected.e2e_ms,
        finish_reason="error",
        status=rejected.status,
        error=rejected.error,
    )
