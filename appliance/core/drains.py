"""Drains: take nothing new, finish what was accepted. Of a model, or of the whole service.

Readiness goes first: new work is refused only once every front says "not ready", and gateways had a moment to
see it. What runs or waits when a drain begins is finished; what still runs when its grace is over is ended
with an error. An operator's drain lasts until it is resumed; the service's own stop is one that never is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from appliance.protocol import DrainState
from appliance.traffic.request_manager import RequestManager

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.02
STOPPING = "the service is stopping"


class House(Protocol):
    """What a drain works on."""

    requests: RequestManager

    async def announce(self) -> None:
        """Tell every front what is ready, and return when they say that they know."""

    def cancel(self, request_id: str, message: str) -> bool:
        """End a request with this word to its client. False if there is no such request."""


class Drain:
    """One drain. `run` brings it to its end; cancel that to leave off in the middle."""

    def __init__(
        self,
        house: House,
        model: str | None,
        *,
        why: str,
        grace_s: float,
        notice_s: float,
        hold: bool = False,
        hurry: asyncio.Event | None = None,
        last_words_s: float = float("inf"),
    ) -> None:
        """`model` None is the whole service; `why` is what clients are told; new requests are held instead of
        refused with `hold`; `hurry` ends every wait at once; `last_words_s` is the most that it may take to
        end what did not finish within the grace."""
        self.model = model
        self.why = why
        self.grace_s = grace_s
        self.hold = hold
        self.state: DrainState = "announced"
        self.started_at = time.time()
        self.ended = 0
        """Requests that did not finish within the grace and were ended."""
        self._house = house
        self._notice_s = notice_s
        self._announced = False
        self._hurry = hurry or asyncio.Event()
        self._last_words_s = last_words_s
        self._begun_at = time.monotonic()
        self._drained_at: float | None = None
        self._grace_ends: float | None = None

    @property
    def name(self) -> str:
        """Of what it drains."""
        return "the service" if self.model is None else f"model {self.model!r}"

    @property
    def state_word(self) -> Literal["draining", "drained"]:
        """Return the state for operators and gateways, to whom an announced drain is draining."""
        return "drained" if self.state == "drained" else "draining"

    @property
    def elapsed_s(self) -> float:
        """How long it has taken."""
        return (time.monotonic() if self._drained_at is None else self._drained_at) - self._begun_at

    @property
    def grace_left_s(self) -> float:
        """Until what still runs is ended."""
        return self.grace_s if self._grace_ends is None else max(0.0, self._grace_ends - time.monotonic())

    def replaces(self, former: Drain) -> None:
        """Go on where `former` is, with this one's grace."""
        if former.state != "drained":
            self.started_at, self._begun_at = former.started_at, former._begun_at
        if former.state != "announced":
            self.state, self._announced = "draining", True

    async def run(self) -> None:
        """From the announcement to "drained"."""
        requests = self._house.requests
        if not self._announced:
            await self._house.announce()
            await self._until(lambda: False, self._notice_s)
        requests.pause_admission(self.model, self.why, hold=self.hold)
        self.state, self._grace_ends = "draining", time.monotonic() + self.grace_s
        log.info(
            "%s drains: %d requests get %g s",
            self.name,
            len(list(requests.unfinished(self.model))),
            self.grace_s,
        )
        if not await self._until(self._empty, self.grace_s):
            why = f"{self.why}, and this request did not finish in time"
            late = [request.request_id for request in requests.unfinished(self.model)]
            self.ended = sum([self._house.cancel(request_id, why) for request_id in late])
            log.warning("%s: %d requests did not finish in time", self.name, self.ended)
            self._hurry = asyncio.Event()
            await self._until(self._empty, self._last_words_s)
        self.state, self._drained_at = "drained", time.monotonic()
        log.info("%s is drained after %.1f s", self.name, self.elapsed_s)

    def _empty(self) -> bool:
        return self._house.requests.finished(self.model)

    async def _until(self, true: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for it, for so long, or until somebody hurries; whether it came true."""
        deadline = time.monotonic() + timeout_s
        while not (came := true()) and time.monotonic() < deadline and not self._hurry.is_set():
            await asyncio.sleep(_LOOK_EVERY_S)
        return came


class DrainError(Exception):
    """A drain that cannot begin or end; the message says why and what to do."""


class Drains:
    """The operators' drains: at most one of each model and one of the service."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._active: dict[str | None, Drain] = {}
        self._tasks: dict[str | None, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Drain]:
        return iter(self._active.values())

    def of(self, model: str | None) -> Drain | None:
        """The drain of the model, or (None) the service."""
        return self._active.get(model)

    def begin(self, drain: Drain) -> None:
        """Run it; a drain of the same is replaced, so a grace can be changed under way."""
        if (former := self._active.get(drain.model)) is not None:
            drain.replaces(former)
            self.forget(drain.model)
        self._active[drain.model] = drain
        self._tasks[drain.model] = asyncio.get_running_loop().create_task(drain.run())

    def end(self, model: str | None) -> Drain:
        """Leave it off, or end it: requests are taken again, what was held first. Raises DrainError."""
        drain = self._active.get(model)
        if drain is None:
            others = ", ".join(other.name for other in self._active.values())
            name = "the service" if model is None else f"model {model!r}"
            raise DrainError(f"{name} is not draining; {others or 'nothing'} is")
        self.forget(model)
        self._house.requests.resume_admission(model)
        return drain

    def leave_off(self) -> None:
        """Stop working on every drain; what is closed stays closed."""
        for task in self._tasks.values():
            task.cancel()

    def forget(self, model: str | None) -> None:
        """Know nothing more of its drain. What it closed stays closed."""
        self._active.pop(model, None)
        if (task := self._tasks.pop(model, None)) is not None:
            task.cancel()
