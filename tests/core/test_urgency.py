"""Tests of the order of urgent requests: which requests of their own tenant and of other tenants they
overtake."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from appliance.traffic.fairness import FairQueue, Ticket
from appliance.traffic.queue import RequestQueue
from engine.levels import URGENCIES, level_of
from tests.core.tickets import ALL_LEVELS, RULES, Serial, levels

NEVER = float("inf")


def test_urgent_requests_have_their_turn_even_if_no_other_level_is_open() -> None:
    queue, serial = RequestQueue[str](RULES), Serial()
    for fair in queue.classes:
        fair.set_urgent(2, 1000)
    # The light tenant's prompts of 100 tokens fill more than a sixteenth of the 1,000 tokens of a step.
    short, long = levels((1, 5)), levels((1, 5), (1, 4), (1, 3), (1, 2), (1, 1))
    queue.push(serial.ticket("heavy", 1), 1.0, light=False)
    assert queue.next(long, 0.0, 0.0) is None
    wide = serial.ticket("wide", 1, num_seqs=3)
    queue.push(wide, 1.0, light=True)
    assert queue.next(long, 0.0, 0.0) is None
    lengthy = serial.ticket("lengthy", 1, prompt=1001)
    queue.push(lengthy, 1.0, light=True)
    assert queue.next(short, 0.0, 0.0) is None
    assert queue.next(long, 0.0, 0.0) == (lengthy, level_of(1, 1))
    light = serial.ticket("light", 1)
    queue.push(light, 1.0, light=True)
    queue.classes[1].charge("light", 1000.0)
    assert queue.next(short, 0.0, 0.0) == (light, level_of(1, 5)), (
        "a tenant may exceed its share by a step's tokens"
    )
    queue.classes[1].charge("light", 1.0)
    assert queue.next(short, 0.0, 0.0) is None
    reserved = short._replace(slots=short.open)
    assert queue.next(reserved, 0.0, 0.0) is None, "a sequence would have to be preempted"
    reserved = reserved._replace(free=short.open)
    assert queue.next(reserved, 0.0, 0.0) == (light, level_of(1, 5)), (
        "other tenants cannot use reserved slots"
    )
    queue.classes[1].charge("light", -1.0)
    real_time = serial.ticket("rt", 0)
    queue.push(real_time, 1.0, light=True)
    assert queue.next(levels((0, 5)), 0.0, 0.0) == (real_time, level_of(0, 5))
    assert queue.next(levels(), 0.0, 0.0) is None


def test_the_urgency_of_a_tenant_is_updated_when_its_first_request_changes() -> None:
    queue, serial = RequestQueue[str](RULES), Serial()
    fair = queue.classes[1]
    fair.set_urgent(1, 1000)
    wide, narrow = serial.ticket("a", 1, num_seqs=2), serial.ticket("a", 1, due=1.0)
    queue.push(wide, 1.0, light=True)
    assert fair.next(1) is None
    queue.push(narrow, 1.0, light=True)
    assert fair.next(2) is narrow
    queue.remove(narrow)
    assert fair.next(1) is None
    fair.set_urgent(2, 1000)
    assert fair.next(2) is wide
    fair.set_tenant("a", 1.0, light=False)
    assert fair.next(1) is None and fair.next(0) is wide


def test_the_urgency_of_the_only_tenant_of_a_class_is_never_suspended() -> None:
    """Fair shares are computed among the tenants of one class, so a tenant that alone sends P0 requests is
    not limited by its share."""
    queue, serial = RequestQueue[str](RULES), Serial()
    fair = queue.classes[0]
    fair.set_urgent(2, 1000)
    lower = [serial.ticket(f"lower-{number}", number) for number in (1, 2, 3)]
    tickets = [serial.ticket("only", 0, now=float(number)) for number in range(20)]
    held = serial.ticket("held", 0)
    for ticket in (*lower, *tickets, held):
        queue.push(ticket, 1.0, light=ticket.request_class < 2)
    fair.hold("held")
    fair.charge("only", 1e9)
    occupied = levels((0, 5))
    for ticket in tickets:
        for one in (occupied, occupied._replace(free=occupied.open)):
            found = queue.next(one, 0.0, 0.0)
            assert found == (ticket, level_of(0, 5))
        queue.take(ticket, 0.0)


def test_a_request_overtakes_less_urgent_requests_of_its_own_tenant() -> None:
    queue, serial = RequestQueue[str](RULES), Serial()
    fair = queue.classes[0]
    fair.set_urgent(2, 1000)
    long = [serial.ticket("a", 0, prompt=5000) for _ in range(3)]
    wide = serial.ticket("a", 0, num_seqs=50)
    short = [serial.ticket("a", 0, prompt=100) for _ in range(2)]
    for ticket in (*long, wide, *short):
        queue.push(ticket, 1.0, light=True)
    assert fair.ahead("a", 1.0, NEVER, urgency=5)[0] == 15_300, "three requests would not be few"
    assert queue.next(ALL_LEVELS, 0.0, 0.0) == (long[0], level_of(0, 1)), "every level has credit"
    only_short = levels((0, 5))
    assert queue.next(only_short, 0.0, 0.0) == (short[0], level_of(0, 5))
    queue.take(short[0], 0.0)
    assert fair.ahead("a", 1.0, NEVER, urgency=5)[0] == 100
    assert queue.next(only_short, 0.0, 0.0) == (short[1], level_of(0, 5))
    more = [serial.ticket("a", 0, prompt=100) for _ in range(2)]
    for ticket in more:
        queue.push(ticket, 1.0, light=True)
    assert queue.next(only_short, 0.0, 0.0) is None, "many short requests must not starve the long one"
    for ticket in (*more, short[1]):
        queue.remove(ticket)
    assert queue.next(only_short, 0.0, 0.0) is None
    assert queue.next(levels((0, 1), (0, 5)), 0.0, 0.0) == (long[0], level_of(0, 1))


def test_more_urgent_requests_have_their_turn_even_if_many_less_urgent_ones_wait() -> None:
    """Reproduces a bug: the queue considered only the lowest open urgency. If many of a tenant's requests had
    that urgency and its first request had none, the tenant's more urgent requests had to wait too."""
    queue, serial = RequestQueue[str](RULES), Serial()
    fair = queue.classes[0]
    fair.set_urgent(2, 1000)
    wide, long = serial.ticket("a", 0, num_seqs=64), [serial.ticket("a", 0, prompt=5000) for _ in range(3)]
    for ticket in (wide, *long):
        queue.push(ticket, 1.0, light=True)
    all_urgent = levels(*((0, urgency) for urgency in range(1, 9)))
    assert queue.next(all_urgent, 0.0, 0.0) is None, "three requests are not few"
    assert fair.ahead("a", 1.0, NEVER, urgency=8) == (0.0, 0.0)
    short, medium = serial.ticket("a", 0, prompt=10), serial.ticket("a", 0, prompt=600)
    for ticket in (short, medium):
        queue.push(ticket, 1.0, light=True)
        assert queue.next(all_urgent, 0.0, 0.0) == (short, level_of(0, 8))
    other = serial.ticket("b", 0, num_seqs=64)
    queue.push(other, 1.0, light=True)
    fair.charge("a", 1000.0)
    assert queue.next(all_urgent, 0.0, 0.0) == (short, level_of(0, 8))
    fair.charge("a", 1.0)
    assert queue.next(all_urgent, 0.0, 0.0) is None, (
        "the tenant exceeds its share by more than one step's tokens"
    )
    fair.charge("a", -1.0)
    queue.remove(short)
    assert queue.next(all_urgent, 0.0, 0.0) == (medium, level_of(0, 2))
    queue.remove(medium)
    queue.remove(wide)
    assert queue.next(all_urgent, 0.0, 0.0) is None, "many urgent requests do not overtake another tenant"
    fair.charge("b", 1001.0)
    assert queue.next(all_urgent, 0.0, 0.0) == (long[0], level_of(0, 1))


_TENANTS = "abc"


_CHANGES = st.one_of(
    st.tuples(
        st.just("push"),
        st.sampled_from(_TENANTS),
        st.sampled_from((10, 100, 600, 5000)),
        st.sampled_from((1, 64)),
        st.integers(0, 3),
    ),
    st.tuples(st.just("charge"), st.sampled_from(_TENANTS), st.sampled_from((1, 300, 1000, 1001, 3000))),
    st.tuples(st.sampled_from(("remove", "take", "park")), st.integers(0, 100)),
    st.tuples(st.sampled_from(("hold", "release", "light", "heavy")), st.sampled_from(_TENANTS)),
)


@given(changes=st.lists(_CHANGES, min_size=20, max_size=60))
def test_the_next_request_is_the_one_that_the_rule_selects_property(
    changes: list[tuple[Any, ...]],
) -> None:
    """Compare `FairQueue.next` with a search over all waiting requests."""
    fair, serial = FairQueue[str](), Serial()
    fair.set_urgent(2, 1000)
    waiting: list[Ticket[str]] = []
    light = dict.fromkeys(_TENANTS, True)
    for kind, *values in changes:
        if kind == "push":
            tenant, prompt, samples, due = values
            ticket = serial.ticket(tenant, 1, prompt=prompt, num_seqs=samples, due=float(due))
            fair.push(ticket, 1.0 + _TENANTS.index(tenant) % 2, light[tenant])
            waiting.append(ticket)
        elif kind in ("remove", "take", "park") and waiting:
            ticket = waiting.pop(values[0] % len(waiting))
            {"remove": fair.remove, "take": fair.take, "park": fair.park}[kind](ticket)
        elif kind == "charge":
            fair.charge(*values)
        elif kind in ("light", "heavy"):
            light[values[0]] = kind == "light"
            fair.set_tenant(values[0], 1.0 + _TENANTS.index(values[0]) % 2, kind == "light")
        elif kind == "release" or any(ticket.tenant == values[0] for ticket in waiting):
            (fair.hold if kind == "hold" else fair.release)(*values)
        for urgency in range(URGENCIES):
            for only_reserved in (False, True):
                found = fair.next(urgency, only_reserved=only_reserved)
                allowed = _allowed_next(fair, waiting, urgency, only_reserved=only_reserved)
                assert (found in allowed) if allowed else found is None


def _allowed_next(
    fair: FairQueue[str], waiting: list[Ticket[str]], urgency: int, *, only_reserved: bool
) -> list[Ticket[str]]:
    """Return the requests that `FairQueue.next` may return: one request of each tenant that has the lowest
    counter among the tenants with a request that may be next."""
    lines = {
        tenant: sorted(
            (one for one in waiting if one.tenant == tenant), key=lambda one: (one.due, one.serial)
        )
        for tenant in {one.tenant for one in waiting}
        if not fair.is_held(tenant)
    }
    counters = {tenant: fair._lines[tenant].counter for tenant in lines}
    found: list[tuple[float, Ticket[str]]] = []
    for tenant, tickets in lines.items():
        ahead = (counters[tenant] - min(counters.values())) * fair._lines[tenant].weight
        if fair.urgency(tickets[0]) >= urgency and ahead <= 0:
            found.append((counters[tenant], tickets[0]))
        elif only_reserved or ahead <= 1000:
            for least in range(max(1, urgency), URGENCIES):
                urgent = [one for one in tickets if fair.urgency(one) >= least]
                if urgent and len(urgent) <= 2:
                    found.append((counters[tenant], urgent[0]))
                    break
    lowest = min((counter for counter, _ in found), default=0.0)
    return [ticket for counter, ticket in found if counter == lowest]


def test_tenants_that_cannot_be_next_do_not_hide_other_tenants() -> None:
    """Reproduces a bug: the search ended after eight tenants, no matter why it had skipped them."""
    queue, serial = RequestQueue[str](RULES), Serial()
    fair = queue.classes[1]
    fair.set_urgent(2, 1000)
    queue.push(serial.ticket("busy", 1), 1.0, light=False)
    for number in range(20):
        stuck = f"stuck-{number}"
        queue.push(serial.ticket(stuck, 1, num_seqs=number % 2 * 64 + 1), 1.0, light=True)
        for _ in range(3):
            queue.push(serial.ticket(stuck, 1), 1.0, light=True)
        fair.charge(stuck, 1.0)
    light = serial.ticket("light", 1)
    queue.push(light, 1.0, light=True)
    fair.charge("light", 1000.0)
    assert queue.next(levels((1, 5)), 0.0, 0.0) == (light, level_of(1, 5))
    for number in range(20):
        over = f"over-{number}"
        queue.push(serial.ticket(over, 1), 1.0, light=True)
        fair.charge(over, 1001.0)
    assert queue.next(levels((1, 5)), 0.0, 0.0) == (light, level_of(1, 5))
    queue.remove(light)
    assert queue.next(levels((1, 5)), 0.0, 0.0) is None


def test_a_new_request_would_be_next_only_if_the_order_of_its_class_allows_it() -> None:
    queue, serial = RequestQueue[str](RULES), Serial()
    fair = queue.classes[0]
    fair.set_urgent(2, 1000)
    short, other = levels((0, 5)), serial.ticket("b", 0, num_seqs=64)

    def would_be_next(ticket: Ticket[str]) -> bool:
        before = len(queue), list(fair), fair.tenants, fair.backlog.tickets
        result = queue.would_be_next(ticket, 1.0, True, short, 0.0, 0.0)
        assert before == (len(queue), list(fair), fair.tenants, fair.backlog.tickets)
        assert not ticket.waiting
        return result

    assert would_be_next(serial.ticket("a", 0))
    queue.push(other, 1.0, light=True)
    assert would_be_next(serial.ticket("a", 0))
    assert not would_be_next(serial.ticket("a", 0, num_seqs=64)), "its level is not open"
    queue.push(serial.ticket("a", 0, prompt=600), 1.0, light=True)
    fair.charge("a", 1001.0)
    assert not would_be_next(serial.ticket("a", 0)), (
        "its tenant exceeds its share by more than one step's tokens"
    )
    assert would_be_next(serial.ticket("c", 0))
    fair.hold("a")
    queue.remove(other)
    assert not would_be_next(serial.ticket("a", 0)), "its tenant is held"


def test_a_returning_tenant_starts_at_the_lowest_counter_though_an_urgent_request_overtook_it() -> None:
    serial, fair = Serial(), FairQueue[str]()
    fair.set_urgent(1, 1000)
    fair.push(serial.ticket("waits"), 1.0, light=False)
    fair.push(serial.ticket("light"), 1.0, light=True)
    fair.charge("light", 900.0)
    overtaking = fair.next(1)
    assert overtaking is not None and overtaking.tenant == "light"
    fair.take(overtaking)
    fair.push(serial.ticket("returns"), 1.0, light=False)
    fair.charge("waits", 1.0)
    first = fair.next()
    assert first is not None and first.tenant == "returns"
