"""Lists unfinished requests with their progress. The requests come from the request manager, their progress
from the front processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from appliance.channel.front_messages import RequestProgress
from appliance.front_pool.progress import ProgressReader
from appliance.protocol import RequestState
from appliance.snapshot import RequestPhase, UnfinishedRequest
from appliance.traffic.request import Request as TrackedRequest
from appliance.traffic.state import TrafficState
from store.fields import CLASS_NAMES
from store.policies import Policies

_PHASES: dict[RequestState, RequestPhase] = {
    "queued": "queued",
    "running": "prefill",
    "interrupted": "queued",  # the request has lost its replica and is waiting for another one
    "ending": "ending",
}
"""The phase of a request in each state. Once a running request has generated its first token, its phase is
"decode" instead."""


class RunningRequests:
    """Reads the unfinished requests. Must be used on the event loop thread."""

    def __init__(
        self, traffic: TrafficState, progress: ProgressReader, policies: Callable[[], Policies]
    ) -> None:
        self._traffic = traffic
        self._progress = progress
        self._policies = policies

    async def read(self) -> list[UnfinishedRequest]:
        """Return the unfinished requests, oldest first."""
        return self.known(await self.progress(), time.time())

    async def progress(self) -> Mapping[str, RequestProgress]:
        """Ask the front processes for their requests' progress."""
        return await self._progress.read() if self._traffic.running else {}

    def known(self, progress: Mapping[str, RequestProgress], unix: float) -> list[UnfinishedRequest]:
        """Return the unfinished requests with their progress, oldest first. Request ages are computed as of
        `unix` (Unix time)."""
        now, policies = self._traffic.clock(), self._policies()
        return [
            _request(request_id, one, progress.get(request_id), policies, unix, now)
            for request_id, one in self._traffic.in_flight.items()
        ]


def _request(
    request_id: str,
    one: TrackedRequest,
    progress: RequestProgress | None,
    policies: Policies,
    unix: float,
    now: float,
) -> UnfinishedRequest:
    first, identity, state = one.first, one.first.identity, one.state
    key = policies.keys.get(identity.key_id)
    ttft_s = None if progress is None else progress.ttft_s
    started = ttft_s is not None
    queue_s = None if one.queued_at is None else now - one.queued_at
    return UnfinishedRequest(
        request_id=request_id,
        state=state,
        model=first.model,
        tenant=identity.tenant,
        key_id=identity.key_id,
        key_name="" if key is None else key.name,
        peer=first.peer,
        front=one.front,
        replica=one.latest.replica if one.latest else "",
        attempt=one.admit.attempt,
        age_s=unix - first.arrived_at,
        prompt_tokens=first.prompt_tokens,
        max_tokens=first.max_tokens,
        class_name=CLASS_NAMES[one.request_class],
        phase="decode" if started and state == "running" else _PHASES[state],
        stream=first.stream,
        queue_s=queue_s if one.queue_ms is None else one.queue_ms / 1000.0,
        ttft_s=ttft_s,
        cached_tokens=progress.cached_tokens if progress is not None and started else None,
        computed_tokens=first.prompt_tokens if started else None,
        generated_tokens=None if progress is None else progress.generated_tokens,
        deadline_left_s=None if one.deadline_at is None else one.deadline_at - now,
    )
