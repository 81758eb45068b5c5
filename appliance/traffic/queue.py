"""Determines the order in which one model's waiting requests are dispatched:

1. Requests that must start now to meet a deadline promised on admission.
2. Requests of a class whose oldest request has waited too long. They receive up to the class's reserved share
   of the service, so that no class starves.
3. Requests of the highest-priority class that has waiting requests.

`FairQueue` determines the order within a class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from appliance.traffic.credits import Levels
from appliance.traffic.fairness import FairQueue, Ticket
from appliance.traffic.rules import QueueRules
from appliance.traffic.timeline import Promises
from engine.levels import LEVELS, URGENCIES, level_of
from store.policies import BACKGROUND, CLASSES, INTERACTIVE

Item = TypeVar("Item")

_PROMISES_LOOKED_AT = 8
"""Maximum number of requests with a promised start to consider. One is not enough, because requests from
tenants at their limits are skipped."""


class Next(NamedTuple, Generic[Item]):
    """The next request to dispatch, and the service level at which it will run."""

    ticket: Ticket[Item]
    level: int


class RequestQueue(Generic[Item]):
    """One model's waiting requests. All times are in seconds on the caller's clock."""

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules
        self.classes: list[FairQueue[Item]] = [FairQueue() for _ in range(CLASSES)]
        self.promises: Promises[Ticket[Item]] = Promises()
        self.promised_requests = 0
        """Number of requests with a promised start."""
        self.promised_prompt_tokens = 0
        """Total number of prompt tokens in requests with a promised start."""
        self._length = 0
        self._lengths = [0] * CLASSES
        self._arrivals: list[deque[Ticket[Item]]] = [deque() for _ in range(CLASSES)]
        """Each class's requests in order of arrival. A request that has left the queue is removed from here
        once all earlier requests have been removed."""
        self._owed = [0.0] * CLASSES
        """Amount of service that each class with late requests may still receive before higher-priority
        classes are served."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        """Iterate over the waiting requests by class and tenant."""
        for fair in self.classes:
            for ticket in fair:
                yield ticket.item

    def length(self, request_class: int) -> int:
        """Return the number of waiting requests in a class."""
        return self._lengths[request_class]

    def push(self, ticket: Ticket[Item], weight: float, light: bool, promised_s: float = 0.0) -> None:
        """Queue a request from a tenant with the given weight. If the request has a promised start
        (`Ticket.begin_by`), `promised_s` is the delay, in seconds, that it causes for other requests with a
        promised start."""
        number = ticket.request_class
        self.classes[number].push(ticket, weight, light)
        self._length += 1
        self._lengths[number] += 1
        arrivals = self._arrivals[number]
        arrivals.append(ticket)
        if len(arrivals) > 2 * self._lengths[number] + 64:
            self._arrivals[number] = deque(one for one in arrivals if one.waiting)
        if ticket.begin_by is not None:
            self.promises.add(ticket.begin_by, ticket.serial, promised_s, ticket)
            self.promised_requests += 1
            self.promised_prompt_tokens += ticket.prompt_tokens

    def remove(self, ticket: Ticket[Item]) -> None:
        """Remove a waiting request."""
        self.classes[ticket.request_class].remove(ticket)
        self._forget(ticket)

    def next(self, levels: Levels, now: float, promises_from: float) -> Next[Item] | None:
        """Return the next request that a replica can accept at its level, or None. `promises_from` is the
        earliest time at which promised requests can be served."""
        open_levels = levels.open
        if not open_levels >> self._best_level():
            return None
        for ticket in (self._promised(promises_from), self._lifted(now)):
            if ticket is not None and open_levels >> (level := self._overtaking_level(ticket)) & 1:
                return Next(ticket, level)
        for number, fair in enumerate(self.classes):
            for urgency in range(URGENCIES):
                # Any slot that a request may use is also open to more urgent requests in its class.
                if open_levels >> (level := level_of(number, urgency)) & 1:
                    free = bool(levels.free >> level & 1)
                    only_reserved = free and not levels.slots >> level_of(number, 0) & 1
                    if (ticket := fair.next(urgency, only_reserved=only_reserved)) is not None:
                        return Next(ticket, level_of(number, fair.urgency(ticket)))
                    break
        return None

    def would_be_next(
        self,
        ticket: Ticket[Item],
        weight: float,
        light: bool,
        levels: Levels,
        now: float,
        promises_from: float,
    ) -> bool:
        """True if a new request would be dispatched next if it were queued now."""
        fair = self.classes[ticket.request_class]
        fair.push(ticket, weight, light)
        found = self.next(levels, now, promises_from)
        fair.remove(ticket)
        return found is not None and found.ticket is ticket

    def take(self, ticket: Ticket[Item], now: float) -> None:
        """Remove a request because it is starting, and update the reserved shares of classes with late
        requests."""
        number = ticket.request_class
        self.classes[number].take(ticket)
        self._forget(ticket)
        self._owed[number] = max(0.0, self._owed[number] - ticket.service)
        for lower in range(number + 1, CLASSES):
            if self.classes[lower].backlog.tickets and self._is_late(lower, now):
                share = self.rules.background_share if lower == BACKGROUND else self.rules.lifted_share
                self._owed[lower] += share * ticket.service
            else:
                self._owed[lower] = 0.0

    def oldest(self, request_class: int) -> float | None:
        """Return the time at which a class's oldest waiting request was queued, or None if no request is
        waiting."""
        arrivals = self._arrivals[request_class]
        while arrivals and not arrivals[0].waiting:
            arrivals.popleft()
        return arrivals[0].queued_at if arrivals else None

    # ── dispatch order ──

    def _best_level(self) -> int:
        """Return the highest-priority level at which a request may be waiting, or LEVELS if no request is
        waiting."""
        for number, fair in enumerate(self.classes):
            if fair.tenants:
                return level_of(number, URGENCIES - 1)
        return LEVELS

    def _overtaking_level(self, ticket: Ticket[Item]) -> int:
        """Return the level at which to run a request that is dispatched before higher-priority classes: the
        level of the highest-priority class with waiting requests, but never P0. At any lower-priority level,
        the engine would serve that class before this request.
        """
        number = ticket.request_class
        level = level_of(number, self.classes[number].urgency(ticket))
        for better, fair in enumerate(self.classes[:number]):
            if fair.tenants:
                return min(level, level_of(max(better, INTERACTIVE), 0))
        return level

    def _promised(self, begins_at: float) -> Ticket[Item] | None:
        if self.promises.latest_begin() > begins_at:
            return None
        for ticket in islice(self.promises, _PROMISES_LOOKED_AT):
            if not ticket.parked and not self.classes[ticket.request_class].is_held(ticket.tenant):
                return ticket
        return None

    def _lifted(self, now: float) -> Ticket[Item] | None:
        for number in range(1, CLASSES):
            if self._owed[number] > 0.0 and self._is_late(number, now):
                ticket = self.classes[number].next()
                if ticket is not None and self._owed[number] >= ticket.service:
                    return ticket
        return None

    def _is_late(self, request_class: int, now: float) -> bool:
        oldest = self.oldest(request_class)
        if oldest is None:
            return False
        return request_class == BACKGROUND or oldest <= now - self.rules.late_s(request_class)

    def _forget(self, ticket: Ticket[Item]) -> None:
        self._length -= 1
        self._lengths[ticket.request_class] -= 1
        if ticket.begin_by is not None:
            self.promises.remove(ticket.begin_by, ticket.serial)
            self.promised_requests -= 1
            self.promised_prompt_tokens -= ticket.prompt_tokens
