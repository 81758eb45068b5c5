"""Orders the requests within a class: weighted fair sharing between tenants, and earliest due time first
within each tenant. If no replica has credit for the level of a tenant's first request, the tenant's more
urgent requests are served first.

The algorithm is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024). Each tenant has a counter: the service it has received, divided by its weight. The tenant with the
lowest counter is next. A request's prompt is charged when the request starts, and its output as it is
generated. A tenant returning after an idle period starts at the lowest counter among the tenants that were
waiting when a request was last served, so idle tenants earn no credit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from appliance.traffic.timeline import Timeline
from engine.levels import URGENCIES, urgency_of

Item = TypeVar("Item")

_MAX_PASSED = 8
"""A search for an urgent request skips at most this many tenants that have received more than their fair
share."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[Item]):
    """A waiting request's entry in the queue."""

    item: Item
    tenant: str
    key_id: str
    request_class: int
    serial: int
    """Order of arrival."""
    queued_at: float
    due: float
    """Sort key among the tenant's requests: the request's deadline or, if it has none, the time at which it
    becomes late for its class."""
    service: float
    """Expected service, in tokens weighted by cost."""
    prompt_tokens: int
    output_tokens: float
    """Expected number of output tokens over all samples."""
    num_seqs: int = 1
    """Total number of samples over all prompts."""
    begin_by: float | None = None
    """Time by which the request must start to meet its deadline, as promised on admission."""
    waiting: bool = False
    parked: bool = False
    """Whether the request's key has reached its running-request limit."""
    urgency_if_light: int = 0
    """The request's urgency while its tenant is light. Set by `FairQueue`."""


@dataclass(slots=True)
class QueuedTokens:
    """The number of waiting requests and their token totals."""

    tickets: int = 0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0

    def add(self, other: QueuedTokens, sign: int = 1) -> None:
        """Add the totals of another set of waiting requests, or subtract them if `sign` is -1."""
        self.tickets += sign * other.tickets
        self.prompt_tokens += sign * other.prompt_tokens
        self.output_tokens += sign * other.output_tokens

    def count(self, ticket: Ticket[Item], sign: int) -> None:
        """Count a waiting request, or stop counting it if `sign` is -1."""
        self.tickets += sign
        self.prompt_tokens += sign * ticket.prompt_tokens
        self.output_tokens += sign * ticket.output_tokens


class _Reach(NamedTuple):
    """The urgencies that determine a tenant's place in the serving order."""

    first: int
    """Urgency of the tenant's first request."""
    overtaking: int
    """Highest urgency among the tenant's waiting requests, or 0 if more than a few of them are that
    urgent."""


_NO_REACH = _Reach(0, 0)


@dataclass(slots=True, eq=False)
class _Line(Generic[Item]):
    """One tenant's waiting requests in one service class."""

    tenant: str
    weight: float
    light: bool
    counter: float = 0.0
    tickets: Timeline[Ticket[Item]] = field(default_factory=Timeline)
    backlog: QueuedTokens = field(default_factory=QueuedTokens)
    parked: dict[str, Timeline[Ticket[Item]]] = field(default_factory=dict)
    held: bool = False
    entry: int = 0
    """Serial number of the tenant's valid heap entry, or 0 if it has none."""
    reach: _Reach = _NO_REACH
    """The tenant's `_Reach` when the valid heap entry was added."""
    urgent: dict[int, Timeline[Ticket[Item]]] = field(default_factory=dict)
    """Waiting requests that count as urgent while the tenant has few running sequences, keyed by urgency."""

    def first(self, urgency: int) -> Ticket[Item] | None:
        """Return the first request with at least the given urgency."""
        if not urgency:
            return self.tickets.first()
        firsts = [tickets.first() for number, tickets in self.urgent.items() if number >= urgency]
        return min((one for one in firsts if one is not None), key=_due, default=None)

    def count(self, urgency: int) -> int:
        """Return the number of waiting requests with at least the given urgency."""
        if not urgency:
            return len(self.tickets)
        return sum(len(tickets) for number, tickets in self.urgent.items() if number >= urgency)

    def before(self, due: float, urgency: int) -> tuple[float, float]:
        """Return the total prompt and output tokens in requests that have at least the given urgency and are
        due no later than `due`."""
        if not urgency:
            return self.tickets.before(due)
        both = [tickets.before(due) for number, tickets in self.urgent.items() if number >= urgency]
        return sum(prompt for prompt, _ in both), sum(output for _, output in both)


_Entry = tuple[float, int, _Line[Item]]


class FairQueue(Generic[Item]):
    """The waiting requests of one class, in the order in which they will be served.

    A tenant is *light* while it has few running sequences. A light tenant's requests are *urgent* unless they
    have many samples. A tenant is *held* while it is at its running-request limit. A request is *parked*
    while its key is at its limit. The *serving order* excludes held tenants and parked requests.
    """

    def __init__(self) -> None:
        self.backlog = QueuedTokens()
        """Totals of the waiting requests that are neither held nor parked."""
        self.weight = 0.0
        """Total weight of the tenants in the serving order."""
        self.tenants = 0
        """Number of tenants in the serving order."""
        self.floor = 0.0
        """The lowest virtual token counter among the waiting tenants when a request was last served."""
        self._lines: dict[str, _Line[Item]] = {}
        self._orders: list[list[_Entry[Item]]] = [[] for _ in range(URGENCIES)]
        """For each urgency, a heap of the tenants whose first request is at least that urgent, ordered by the
        tenants' virtual token counters. Tenants with equal counters are served in insertion order."""
        self._overtaking: list[list[_Entry[Item]]] = [[] for _ in range(URGENCIES)]
        """For each urgency, a heap of the tenants whose `_Reach.overtaking` is at least that urgency, ordered
        like the heaps in `_orders`."""
        self._entries = 0
        self._max_samples = 1
        """Maximum number of samples for an urgent request."""
        self._max_prompt_tokens = 0
        """Number of prompt tokens that fit in one step."""

    def push(self, ticket: Ticket[Item], weight: float, light: bool) -> None:
        """Queue a request from a tenant with the given weight."""
        line = self._lines.get(ticket.tenant)
        if line is None:
            line = self._lines[ticket.tenant] = _Line(ticket.tenant, weight, light, self.floor)
        ticket.waiting, ticket.parked = True, False
        ticket.urgency_if_light = self._urgency_if_light(ticket)
        self._insert(line, ticket)

    def remove(self, ticket: Ticket[Item]) -> None:
        """Remove a waiting request, parked or not."""
        line = self._lines[ticket.tenant]
        ticket.waiting = False
        if ticket.parked:
            parked = line.parked[ticket.key_id]
            parked.remove(ticket.due, ticket.serial)
            if not parked:
                del line.parked[ticket.key_id]
        else:
            self._extract(line, ticket)

    def next(self, urgency: int = 0, *, only_reserved: bool = False) -> Ticket[Item] | None:
        """Return the next request with at least the given urgency.

        An urgent request may overtake earlier, less urgent requests of its own tenant, and tenants with a
        lower counter. Overtaking is allowed only while few of the tenant's requests are at least as urgent.
        To overtake other tenants, the request's own tenant must also have received no more than its fair
        share plus one step's tokens. If `only_reserved` is set, the fair share is ignored, because the only
        free slots are reserved ones, which non-urgent requests cannot use.
        """
        least, line = _first(self._orders[0]), _first(self._orders[urgency])
        if least is None or (line is not None and line.counter <= least.counter):
            return None if line is None else line.tickets.first()
        order = self._overtaking[urgency]
        passed: list[_Entry[Item]] = []
        found: Ticket[Item] | None = None
        while found is None and (line := _first(order)) is not None and len(passed) < _MAX_PASSED:
            if only_reserved or (line.counter - least.counter) * line.weight <= self._max_prompt_tokens:
                few = (one for one in range(urgency, URGENCIES) if line.count(one) <= self._max_samples)
                found = line.first(next(few))
            else:
                passed.append(heappop(order))
        for entry in passed:
            heappush(order, entry)
        return found

    def urgency(self, ticket: Ticket[Item]) -> int:
        """Return a waiting request's urgency, as sent in `Submit.urgency`."""
        return ticket.urgency_if_light if self._lines[ticket.tenant].light else 0

    def _urgency_if_light(self, ticket: Ticket[Item]) -> int:
        if ticket.num_seqs > self._max_samples:
            return 0
        return urgency_of(ticket.prompt_tokens, self._max_prompt_tokens)

    def set_urgent(self, max_samples: int, max_prompt_tokens: int) -> None:
        """Set the maximum number of samples for an urgent request, and the number of prompt tokens that fit
        in one step. Both determine the urgency of a light tenant's requests."""
        if (max_samples, max_prompt_tokens) != (self._max_samples, self._max_prompt_tokens):
            self._max_samples, self._max_prompt_tokens = max_samples, max_prompt_tokens
            for ticket in self:
                ticket.urgency_if_light = self._urgency_if_light(ticket)
            for line in self._lines.values():
                line.urgent.clear()
                for ticket in line.tickets:
                    self._add_urgent(line, ticket)
                self._reorder(line)

    def take(self, ticket: Ticket[Item]) -> None:
        """Remove a waiting request because it is about to start, and charge its tenant for the prompt."""
        line = self._lines[ticket.tenant]
        # If the request is urgent, it may have overtaken the tenant with the lowest token counter.
        least = _first(self._orders[0])
        self.floor = max(self.floor, line.counter if least is None else min(line.counter, least.counter))
        line.counter += ticket.prompt_tokens / line.weight
        self.remove(ticket)
        if line.entry:
            self._enter(line)

    def charge(self, tenant: str, service: float) -> None:
        """Charge a tenant for generated output. A negative amount corrects an earlier charge."""
        line = self._lines.get(tenant)
        if line is None or not service:
            return
        line.counter += service / line.weight
        if line.entry:
            self._enter(line)

    # ── tenants and keys at their limits ──

    def set_tenant(self, tenant: str, weight: float, light: bool) -> None:
        """Set a tenant's weight, and whether the tenant is light."""
        line = self._lines.get(tenant)
        if line is None or (line.weight, line.light) == (weight, light):
            return
        if line.entry:
            self.weight += weight - line.weight
        line.weight, line.light = weight, light
        self._reorder(line)

    def hold(self, tenant: str) -> None:
        """Remove a tenant's requests from the serving order."""
        line = self._lines[tenant]
        if not line.held:
            line.held = True
            self._leave(line)

    def is_held(self, tenant: str) -> bool:
        """True if the tenant's requests are currently excluded from the serving order."""
        line = self._lines.get(tenant)
        return line is not None and line.held

    def release(self, tenant: str) -> None:
        """Put a held tenant's requests back into the serving order. The tenant is not compensated for the
        time it was held."""
        line = self._lines.get(tenant)
        if line is not None and line.held:
            line.held = False
            self._join(line)

    def park(self, ticket: Ticket[Item]) -> None:
        """Remove a request from the serving order until its key's requests are unparked."""
        line = self._lines[ticket.tenant]
        self._extract(line, ticket)
        ticket.parked = True
        parked = line.parked.setdefault(ticket.key_id, Timeline())
        parked.add(ticket.due, ticket.serial, ticket.prompt_tokens, ticket.output_tokens, ticket)

    def unpark(self, tenant: str, key_id: str, most: int | None = None) -> None:
        """Put a key's parked requests back into the serving order, those due earliest first. `most` is the
        maximum number of requests to put back (None for all)."""
        line = self._lines.get(tenant)
        while line is not None and key_id in line.parked and (most is None or most > 0):
            parked = line.parked[key_id]
            ticket = parked.first()
            assert ticket is not None
            parked.remove(ticket.due, ticket.serial)
            if not parked:
                del line.parked[key_id]
            ticket.parked = False
            self._insert(line, ticket)
            most = None if most is None else most - 1

    # ── the work ahead of a request ──

    def ahead(self, tenant: str, weight: float, due: float, *, urgency: int = 0) -> tuple[float, float]:
        """Return how many prompt and output tokens will be served before the tenant's request that is due at
        `due`: the tokens of the tenant's earlier requests and, in proportion to the tenants' weights, the
        tokens of other tenants' requests. The result never exceeds the total of all waiting requests. An
        urgent request overtakes other tenants' requests and its own tenant's less urgent ones.
        """
        total = self.backlog
        line = self._lines.get(tenant)
        if not total.tickets:
            return 0.0, 0.0
        if line is not None and urgency and line.count(urgency) >= self._max_samples:
            own = line.tickets.before(due)
        else:
            own = line.before(due, urgency) if line is not None else (0.0, 0.0)
        if urgency:
            return own
        joins = line is None or not line.entry
        shares = (self.weight + (weight if joins else 0.0)) / weight
        # Waiting tenants' counters differ by no more than about one request.
        others = (self.tenants if joins else self.tenants - 1) / total.tickets
        return (
            min(total.prompt_tokens, own[0] * shares + others * total.prompt_tokens),
            min(total.output_tokens, own[1] * shares + others * total.output_tokens),
        )

    def __iter__(self) -> Iterator[Ticket[Item]]:
        """Iterate over the waiting requests, tenant by tenant."""
        for line in self._lines.values():
            yield from line.tickets
            for parked in line.parked.values():
                yield from parked

    def forget_idle(self) -> None:
        """Forget tenants without waiting requests, unless their counter is above `floor`. Call this
        periodically."""
        idle = [line for line in self._lines.values() if not (line.tickets or line.parked)]
        for line in idle:
            if line.counter <= self.floor:
                del self._lines[line.tenant]

    # ── each tenant's waiting requests ──

    def _insert(self, line: _Line[Item], ticket: Ticket[Item]) -> None:
        line.tickets.add(ticket.due, ticket.serial, ticket.prompt_tokens, ticket.output_tokens, ticket)
        line.backlog.count(ticket, 1)
        self._add_urgent(line, ticket)
        if line.entry:
            self.backlog.count(ticket, 1)
            self._reorder(line)
        else:
            self._join(line)

    def _extract(self, line: _Line[Item], ticket: Ticket[Item]) -> None:
        line.tickets.remove(ticket.due, ticket.serial)
        line.backlog.count(ticket, -1)
        if urgency := ticket.urgency_if_light:
            line.urgent[urgency].remove(ticket.due, ticket.serial)
            if not line.urgent[urgency]:
                del line.urgent[urgency]
        if line.entry:
            self.backlog.count(ticket, -1)
            if not line.tickets:
                self._leave(line)
            else:
                self._reorder(line)

    def _add_urgent(self, line: _Line[Item], ticket: Ticket[Item]) -> None:
        if urgency := ticket.urgency_if_light:
            tickets = line.urgent.setdefault(urgency, Timeline())
            tickets.add(ticket.due, ticket.serial, ticket.prompt_tokens, ticket.output_tokens, ticket)

    def _join(self, line: _Line[Item]) -> None:
        if line.held or line.entry or not line.tickets:
            return
        line.counter = max(line.counter, self.floor)
        self.tenants += 1
        self.weight += line.weight
        self.backlog.add(line.backlog)
        self._enter(line)

    def _leave(self, line: _Line[Item]) -> None:
        if line.entry:
            line.entry = 0
            self.tenants -= 1
            self.weight = self.weight - line.weight if self.tenants else 0.0
            self.backlog.add(line.backlog, -1)

    def _enter(self, line: _Line[Item]) -> None:
        """Push a new heap entry for the tenant, which invalidates earlier entries."""
        self._entries += 1
        line.entry = self._entries
        line.reach = self._reach(line)
        orders = self._orders[: line.reach.first + 1] + self._overtaking[1 : line.reach.overtaking + 1]
        new, max_entries = (line.counter, line.entry, line), 2 * self.tenants + 64
        for order in orders:
            heappush(order, new)
            if len(order) > max_entries:
                order[:] = [entry for entry in order if entry[2].entry == entry[1]]
                heapify(order)

    def _reorder(self, line: _Line[Item]) -> None:
        """Push a new heap entry for the tenant if its `_Reach` has changed."""
        if line.entry and line.tickets and self._reach(line) != line.reach:
            self._enter(line)

    def _reach(self, line: _Line[Item]) -> _Reach:
        if not line.light or not line.urgent:
            return _NO_REACH
        first, highest = line.tickets.first(), max(line.urgent)
        overtaking = highest if len(line.urgent[highest]) <= self._max_samples else 0
        return _Reach(0 if first is None else first.urgency_if_light, overtaking)


def _due(ticket: Ticket[Item]) -> tuple[float, int]:
    return ticket.due, ticket.serial


def _first(order: list[_Entry[Item]]) -> _Line[Item] | None:
    while order:
        _, entry, line = order[0]
        if line.entry == entry:
            return line
        heappop(order)
    return None
