"""Drains a model or the whole service: stops accepting new requests and lets the accepted requests finish.

             Controller (stop), DrainAdmin (begin, resume), ModelManager (forget)
                 │
                 ▼
    Readiness ◄─ Drains ──► Drain ──► RequestManager (pause, resume), cancel(), FrontConfiguration

A drain begins by reporting "not ready". New requests are refused only after every front reports "not ready"
and gateways have had time to notice. Requests that are running or waiting when a drain begins may finish; any
still unfinished after the grace period end with an error. An operator's drain lasts until the operator
resumes service. A service shutdown is a drain that is never resumed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import Literal, NamedTuple, Protocol

from appliance.protocol import DrainState
from appliance.settings import Settings
from appliance.traffic.request_manager import RequestManager

log = logging.getLogger(__name__)

_POLL_S = 0.02
_ANNOUNCED_WITHIN_S = 2.0
"""A drain proceeds without the fronts that have not reported "not ready" after this many seconds."""
_ABORT_WITHIN_S = 3.0
"""When the service stops, fronts have this many seconds to end requests that outlast the grace period."""
STOPPING = "the service is stopping"


class FrontConfiguration(Protocol):
    """Sends the fronts their configuration, which includes model readiness."""

    def publish_configuration(self) -> None:
        """Send configuration changes to the fronts."""

    async def applied(self, timeout_s: float) -> bool:
        """Send configuration changes to the fronts and wait until all fronts have applied the changes. Return
        False if this takes longer than `timeout_s` seconds."""


class DrainTools(NamedTuple):
    """The parts of the service that a drain uses."""

    requests: RequestManager
    fronts: FrontConfiguration
    cancel: Callable[[str, str], bool]
    """Cancels a request and sends a message to its client. Returns False if no request has this id."""


class Drain:
    """One drain, performed from start to finish by `run`. To cancel the drain, cancel the task that runs
    it."""

    def __init__(
        self,
        tools: DrainTools,
        model: str | None,
        *,
        reason: str,
        grace_s: float,
        notice_s: float,
        hold: bool = False,
        hurry: asyncio.Event | None = None,
        abort_within_s: float = float("inf"),
    ) -> None:
        """Create a drain. `run` performs it.

        - `model` is the model to drain, or None for the whole service.
        - `reason` is the message for clients.
        - `notice_s` is how many seconds gateways have to notice the drain.
        - `hold` means that new requests are held instead of being refused.
        - `hurry` is an event that, when set, makes the drain stop waiting.
        - `abort_within_s` limits the time for ending requests that outlast the grace period.
        """
        self.model = model
        self.reason = reason
        self.grace_s = grace_s
        self.hold = hold
        self.state: DrainState = "announced"
        self.started_at = time.time()
        self.ended = 0
        """Number of requests ended because they did not finish within the grace period."""
        self._tools = tools
        self._notice_s = notice_s
        self._announced = False
        self._hurry = hurry or asyncio.Event()
        self._abort_within_s = abort_within_s
        self._began_at = time.monotonic()
        self._drained_at: float | None = None
        self._grace_ends_at: float | None = None

    @property
    def name(self) -> str:
        """The drain's target, as shown in messages: "the service" or, for example, "model 'demo'"."""
        return _name(self.model)

    @property
    def public_state(self) -> Literal["draining", "drained"]:
        """The state seen by operators and gateways: "draining" as soon as the drain has been announced."""
        return "drained" if self.state == "drained" else "draining"

    @property
    def elapsed_s(self) -> float:
        """Duration of the drain in seconds: its total if the drain is complete, otherwise the time so far."""
        return (time.monotonic() if self._drained_at is None else self._drained_at) - self._began_at

    @property
    def grace_left_s(self) -> float:
        """Time in seconds until unfinished requests are ended."""
        if self._grace_ends_at is None:
            return self.grace_s
        return max(0.0, self._grace_ends_at - time.monotonic())

    def replaces(self, former: Drain) -> None:
        """Take over the progress of an earlier drain, but use this drain's grace period."""
        if former.state != "drained":
            self.started_at, self._began_at = former.started_at, former._began_at
        if former.state != "announced":
            self.state, self._announced = "draining", True

    async def run(self) -> None:
        """Run the drain, from its announcement until no requests remain."""
        requests = self._tools.requests
        if not self._announced:
            await self._tools.fronts.applied(_ANNOUNCED_WITHIN_S)
            await self._poll(lambda: False, self._notice_s)
        requests.pause_admission(self.model, self.reason, hold=self.hold)
        self.state, self._grace_ends_at = "draining", time.monotonic() + self.grace_s
        left = len(list(requests.state.unfinished(self.model)))
        log.info("draining %s: %d unfinished requests have %g s to finish", self.name, left, self.grace_s)
        if not await self._poll(self._finished, self.grace_s):
            message = f"{self.reason}, and this request did not finish within the grace period"
            late = [request.request_id for request in requests.state.unfinished(self.model)]
            self.ended = sum([self._tools.cancel(request_id, message) for request_id in late])
            log.warning(
                "%s: %d requests did not finish within the grace period and were stopped",
                self.name,
                self.ended,
            )
            self._hurry = asyncio.Event()
            await self._poll(self._finished, self._abort_within_s)
        self.state, self._drained_at = "drained", time.monotonic()
        log.info("drained %s after %.1f s", self.name, self.elapsed_s)

    def _finished(self) -> bool:
        return self._tools.requests.state.finished(self.model)

    async def _poll(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `done` returns true or `hurry` is set, but at most `timeout_s` seconds. Return the last
        result of `done`."""
        deadline = time.monotonic() + timeout_s
        while not (result := done()) and time.monotonic() < deadline and not self._hurry.is_set():
            await asyncio.sleep(_POLL_S)
        return result


class DrainError(Exception):
    """Raised if a drain cannot begin or end. The message gives the reason and the remedy."""


class Drains:
    """All current drains: at most one per model, one for the whole service, and one for its shutdown."""

    def __init__(
        self, tools: DrainTools, settings: Callable[[], Settings], models: Callable[[], Collection[str]]
    ) -> None:
        """`settings` returns the current settings, and `models` returns the names of the served models."""
        self.stopping: Drain | None = None
        """The shutdown drain, or None before shutdown."""
        self._tools = tools
        self._settings = settings
        self._models = models
        self._active: dict[str | None, Drain] = {}
        self._tasks: dict[str | None, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Drain]:
        """Iterate over all drains, starting with the shutdown drain."""
        if self.stopping is not None:
            yield self.stopping
        yield from self._active.values()

    @property
    def of_service(self) -> Drain | None:
        """The current drain of the whole service (an operator's or the shutdown drain), or None if there is
        none."""
        return self.stopping or self._active.get(None)

    def of(self, model: str | None) -> Drain | None:
        """Return an operator's drain of the model, or of the whole service if `model` is None."""
        return self._active.get(model)

    def begin(self, model: str | None, *, grace_s: float, hold: bool) -> Drain:
        """Begin an operator's drain. If the model or service is already draining, the new drain replaces the
        existing one, so that an operator can change the grace period. Raises DrainError if the service is
        stopping or has no such model."""
        if self.stopping is not None:
            raise DrainError(f"{STOPPING}, so no drain can be started")
        if model is not None and model not in (names := self._models()):
            raise DrainError(f"unknown model {model!r}; available models: {', '.join(names) or 'none'}")
        drain = Drain(
            self._tools,
            model,
            reason=f"{_name(model)} is draining",
            grace_s=grace_s,
            notice_s=self._settings().drain_notice_s,
            hold=hold,
        )
        if (former := self._active.get(model)) is not None:
            drain.replaces(former)
            self.forget(model)
        self._active[model] = drain
        self._tasks[model] = asyncio.get_running_loop().create_task(drain.run())
        return drain

    def resume(self, model: str | None) -> Drain:
        """Cancel or end an operator's drain and resume accepting requests. Held requests are queued before
        new ones. Raises DrainError if the service is stopping or the drain does not exist."""
        if self.stopping is not None:
            raise DrainError(f"{STOPPING}, so it cannot be resumed")
        drain = self._active.get(model)
        if drain is None:
            others = ", ".join(other.name for other in self._active.values())
            raise DrainError(f"{_name(model)} is not draining; active drains: {others or 'none'}")
        self.forget(model)
        self._tools.requests.resume_admission(model)
        self._tools.fronts.publish_configuration()
        return drain

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drain the service for shutdown. Once the `hurry` event is set, the drain no longer waits for
        requests."""
        settings = self._settings()
        for task in self._tasks.values():
            task.cancel()
        self.stopping = Drain(
            self._tools,
            None,
            reason=STOPPING,
            grace_s=settings.drain_grace_s,
            notice_s=settings.drain_notice_s,
            hurry=hurry,
            abort_within_s=_ABORT_WITHIN_S,
        )
        await self.stopping.run()

    def forget(self, model: str | None) -> None:
        """Cancel an operator's drain of a model that is no longer served. Admission to it stays paused."""
        self._active.pop(model, None)
        if (task := self._tasks.pop(model, None)) is not None:
            task.cancel()


def _name(model: str | None) -> str:
    return "the service" if model is None else f"model {model!r}"
