"""Lists unfinished requests with their progress. The requests come from the request manager, their progress
from the front processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from appliance.channel.front_messages import RequestProgress
from appliance.front_pool.progress import ProgressReader
from appliance.snapshot import Phase, UnfinishedRequest
from appliance.traffic.request import Request as TrackedRequest
from appliance.traffic.state import TrafficState
from store.policies import Policies


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
        """Return the unfinished requests as of unix time `unix`, oldest first, with the given progress."""
        now, policies = self._traffic.clock(), self._policies()
        return [
            _request(one, progress.get(one.request_id), policies, unix, now)
            for one in self._traffic.in_flight.values()
        ]


def _request(
    one: TrackedRequest, progress: RequestProgress | None, policies: Policies, unix: float, now: float
) -> UnfinishedRequest:
    first, state = one.first, one.state
    key = policies.keys.get(first.identity.key_id)
    started = progress is not None and progress.ttft_s is not None
    return UnfinishedRequest(
        request_id=one.request_id,
        state=state,
        model=first.model,
        tenant=first.identity.tenant,
        key_id=first.identity.key_id,
        key_name="" if key is None else key.name,
        peer=first.peer,
        front=one.front,
        replica=one.latest.replica if one.latest else "",
        attempt=one.admit.attempt,
        age_s=unix - first.arrived_at,
        prompt_tokens=first.prompt_tokens,
        max_tokens=first.max_tokens,
        class_name=f"P{one.request_class}",
        phase=_phase(one, started),
        stream=first.stream,
        queue_s=_queue_s(one, now),
        ttft_s=None if progress is None else progress.ttft_s,
        cached_tokens=progress.cached_tokens if progress is not None and started else None,
        computed_tokens=first.prompt_tokens if started else None,
        generated_tokens=None if progress is None else progress.generated_tokens,
        deadline_left_s=None if one.deadline_at is None else one.deadline_at - now,
    )


def _phase(one: TrackedRequest, started: bool) -> Phase:
    match one.state:
        case "running":
            return "decode" if started else "prefill"
        case "ending":
            return "ending"
        case _:
            return "queued"  # includes requests that have lost their replica and are waiting for another one


def _queue_s(one: TrackedRequest, now: float) -> float | None:
    if one.queue_ms is not None:
        return one.queue_ms / 1000.0
    return None if one.queued_at is None else now - one.queued_at
