"""Who of one class is next: weighted fair service over tenants, earliest due first inside a tenant.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each
tenant has a counter of the service it got, divided by its weight, and the least counter is next. Service is
charged for a prompt when its request gets its turn, and for output as it is made. A tenant that had nothing
waiting returns at the counter of the last turn: the least of the active ones, so that nobody saves up
idleness.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from appliance.traffic.timeline import Timeline
from engine.messages import URGENCIES

Item = TypeVar("Item")

_MAX_PASSED = 8
"""Urgent tenants that are passed over at a time because they got more than their share."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[Item]):
    """A request that waits."""

    item: Item
    tenant: str
    key_id: str
    request_class: int
    serial: int
    """Order of arrival."""
    queued_at: float
    due: float
    """Its tenant's requests go by this: the deadline, or the time at which its class would call it late."""
    service: float
    """Weighted tokens that it is expected to take."""
    prompt_tokens: int
    output_tokens: float
    """As expected, over all samples."""
    rows: int = 1
    """Samples of all prompts."""
    begin_by: float | None = None
    """When it must get its turn for its deadline to be met, as promised on admission."""
    waiting: bool = False
    parked: bool = False
    """Its key has as many running as it may."""


@dataclass(slots=True)
class Backlog:
    """Tokens that wait."""

    tickets: int = 0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0

    def add(self, other: Backlog, sign: int = 1) -> None:
        """Add or (-1) subtract."""
        self.tickets += sign * other.tickets
        self.prompt_tokens += sign * other.prompt_tokens
        self.output_tokens += sign * other.output_tokens

    def count(self, ticket: Ticket[Item], sign: int) -> None:
        """Add or (-1) subtract one."""
        self.tickets += sign
        self.prompt_tokens += sign * ticket.prompt_tokens
        self.output_tokens += sign * ticket.output_tokens


@dataclass(slots=True, eq=False)
class _Line(Generic[Item]):
    """A tenant's requests of the class."""

    tenant: str
    weight: float
    light: bool
    counter: float = 0.0
    tickets: Timeline[Ticket[Item]] = field(default_factory=Timeline)
    backlog: Backlog = field(default_factory=Backlog)
    parked: dict[str, Timeline[Ticket[Item]]] = field(default_factory=dict)
    held: bool = False
    entry: int = 0
    """Its entry in the order; 0 while it takes no part."""
    urgency: int = 0
    """That of its first request."""


_Entry = tuple[float, int, _Line[Item]]


class FairQueue(Generic[Item]):
    """The waiting requests of one class. What it is asked costs the logarithm of the tenants, or the square
    root of a tenant's requests.

    A tenant is *light* while it has little running. Its requests are *urgent* unless they are wide. A tenant
    that is *held* (it runs as much as it may), and a request that is *parked* (its key does), wait aside.
    """

    def __init__(self) -> None:
        self.backlog = Backlog()
        """Of those who take part: neither held nor parked."""
        self.weight = 0.0
        """Of the tenants that take part."""
        self.tenants = 0
        """That take part."""
        self.floor = 0.0
        """The counter of the last turn."""
        self._lines: dict[str, _Line[Item]] = {}
        self._orders: list[list[_Entry[Item]]] = [[] for _ in range(URGENCIES)]
        """Heaps of tenants by counter, then by who has waited longer with it. The heap of an urgency has the
        tenants whose first request is at least as urgent."""
        self._entries = 0
        self._most_rows = 1
        """Samples of an urgent request."""
        self._step_tokens = 0
        """Prompt tokens of the most urgent ones."""

    def push(self, ticket: Ticket[Item], weight: float, light: bool) -> None:
        """Queue a request of a tenant of this weight."""
        line = self._lines.get(ticket.tenant)
        if line is None:
            line = self._lines[ticket.tenant] = _Line(ticket.tenant, weight, light, self.floor)
        ticket.waiting, ticket.parked = True, False
        self._insert(line, ticket)

    def remove(self, ticket: Ticket[Item]) -> None:
        """Take out a request that waits, wherever it stands."""
        line = self._lines[ticket.tenant]
        ticket.waiting = False
        if ticket.parked:
            parked = line.parked[ticket.key_id]
            parked.remove(ticket.due, ticket.serial)
            if not parked:
                del line.parked[ticket.key_id]
        else:
            self._extract(line, ticket)

    def next(self, urgency: int = 0) -> Ticket[Item] | None:
        """Return the request whose turn it is among those that are at least so urgent.

        An urgent request may go before a tenant that got less, as long as its own tenant has few requests
        waiting and got at most one step's tokens more than its share.
        """
        order, least = self._orders[urgency], _first(self._orders[0])
        passed: list[_Entry[Item]] = []
        found: Ticket[Item] | None = None
        while (line := _first(order)) is not None and least is not None and len(passed) < _MAX_PASSED:
            slack = self._step_tokens if len(line.tickets) <= self._most_rows else 0
            if (line.counter - least.counter) * line.weight <= slack:
                found = line.tickets.first()
                break
            passed.append(heapq.heappop(order))
        for entry in passed:
            heapq.heappush(order, entry)
        return found

    def urgency(self, ticket: Ticket[Item]) -> int:
        """Return the urgency of a request that waits (`Submit.urgency`)."""
        if not self._lines[ticket.tenant].light or ticket.rows > self._most_rows:
            return 0
        return 2 if ticket.prompt_tokens <= self._step_tokens else 1

    def set_urgent(self, most_rows: int, step_tokens: int) -> None:
        """Take requests of light tenants with at most so many samples as urgent, and most urgent if all their
        prompts fit into a step of so many tokens."""
        if (most_rows, step_tokens) != (self._most_rows, self._step_tokens):
            self._most_rows, self._step_tokens = most_rows, step_tokens
            for line in self._lines.values():
                self._reorder(line)

    def take(self, ticket: Ticket[Item]) -> None:
        """It gets its turn: its tenant is charged for the prompt."""
        line = self._lines[ticket.tenant]
        self.floor = max(self.floor, line.counter)
        line.counter += ticket.prompt_tokens / line.weight
        self.remove(ticket)
        if line.entry:
            self._enter(line)

    def charge(self, tenant: str, service: float) -> None:
        """Charge a tenant for what was made for it, or (less than 0) correct that."""
        line = self._lines.get(tenant)
        if line is None or not service:
            return
        line.counter += service / line.weight
        if line.entry:
            self._enter(line)

    def counter(self, tenant: str) -> float:
        """Service of a tenant divided by its weight; idle ones that fell behind stand at the last turn's."""
        line = self._lines.get(tenant)
        return self.floor if line is None else line.counter

    # ── tenants and keys at their limits ──

    def set_tenant(self, tenant: str, weight: float, light: bool) -> None:
        """Its weight, or how much it has running, is another."""
        line = self._lines.get(tenant)
        if line is None or (line.weight, line.light) == (weight, light):
            return
        if line.entry:
            self.weight += weight - line.weight
        line.weight, line.light = weight, light
        self._reorder(line)

    def hold(self, tenant: str) -> None:
        """Nothing of this tenant gets a turn."""
        line = self._lines[tenant]
        if not line.held:
            line.held = True
            self._leave(line)

    def is_held(self, tenant: str) -> bool:
        """Whether nothing of the tenant gets a turn."""
        line = self._lines.get(tenant)
        return line is not None and line.held

    def release(self, tenant: str) -> None:
        """It may have turns again. What it could not use meanwhile is not made up for."""
        line = self._lines.get(tenant)
        if line is not None and line.held:
            line.held = False
            self._join(line)

    def park(self, ticket: Ticket[Item]) -> None:
        """Let its tenant's other requests go first until its key is unparked."""
        line = self._lines[ticket.tenant]
        self._extract(line, ticket)
        ticket.parked = True
        parked = line.parked.setdefault(ticket.key_id, Timeline())
        parked.add(ticket.due, ticket.serial, ticket.prompt_tokens, ticket.output_tokens, ticket)

    def unpark(self, tenant: str, key_id: str, most: int | None = None) -> None:
        """Bring a key's parked requests back, the first `most` of them."""
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

    # ── how much is ahead ──

    def ahead(self, tenant: str, weight: float, due: float) -> tuple[float, float]:
        """Prompt and output tokens that get their turn before a request of this tenant that is due then: its
        own, as many more of each other tenant as their weights say, and at most all that wait."""
        total = self.backlog
        line = self._lines.get(tenant)
        if not total.tickets:
            return 0.0, 0.0
        own = line.tickets.before(due) if line is not None else (0.0, 0.0)
        joins = line is None or not line.entry
        shares = (self.weight + (weight if joins else 0.0)) / weight
        # Counters of tenants that wait differ by about a request.
        others = (self.tenants if joins else self.tenants - 1) / total.tickets
        return (
            min(total.prompt_tokens, own[0] * shares + others * total.prompt_tokens),
            min(total.output_tokens, own[1] * shares + others * total.output_tokens),
        )

    def waiting(self, tenant: str) -> int:
        """Requests of a tenant that wait, parked and held ones included."""
        line = self._lines.get(tenant)
        return 0 if line is None else len(line.tickets) + sum(map(len, line.parked.values()))

    def __iter__(self) -> Iterator[Ticket[Item]]:
        """Every request that waits, tenant by tenant."""
        for line in self._lines.values():
            yield from line.tickets
            for parked in line.parked.values():
                yield from parked

    def forget_idle(self) -> None:
        """Drop the counters of tenants that would return at the last turn's anyway. To be called at times."""
        idle = [line for line in self._lines.values() if not (line.tickets or line.parked)]
        for line in idle:
            if line.counter <= self.floor:
                del self._lines[line.tenant]

    # ── the lines ──

    def _insert(self, line: _Line[Item], ticket: Ticket[Item]) -> None:
        line.tickets.add(ticket.due, ticket.serial, ticket.prompt_tokens, ticket.output_tokens, ticket)
        line.backlog.count(ticket, 1)
        if line.entry:
            self.backlog.count(ticket, 1)
            self._reorder(line)
        else:
            self._join(line)

    def _extract(self, line: _Line[Item], ticket: Ticket[Item]) -> None:
        line.tickets.remove(ticket.due, ticket.serial)
        line.backlog.count(ticket, -1)
        if line.entry:
            self.backlog.count(ticket, -1)
            if not line.tickets:
                self._leave(line)
            else:
                self._reorder(line)

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
        """Give the line its place in the orders; the entries that it had are void."""
        self._entries += 1
        line.entry = self._entries
        first = line.tickets.first()
        line.urgency = self.urgency(first) if first is not None else 0
        for order in self._orders[: line.urgency + 1]:
            heapq.heappush(order, (line.counter, line.entry, line))
            if len(order) > 2 * self.tenants + 64:
                order[:] = [entry for entry in order if entry[2].entry == entry[1]]
                heapq.heapify(order)

    def _reorder(self, line: _Line[Item]) -> None:
        """Give the line another place if its first request has another urgency than before."""
        first = line.tickets.first()
        if line.entry and first is not None and self.urgency(first) != line.urgency:
            self._enter(line)


def _first(order: list[_Entry[Item]]) -> _Line[Item] | None:
    while order:
        _, entry, line = order[0]
        if line.entry == entry:
            return line
        heapq.heappop(order)
    return None
