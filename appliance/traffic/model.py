"""One served model: its replicas, the next request to dispatch to them, and predicted waiting times."""

from __future__ import annotations

import sys
from typing import NamedTuple

from appliance.channel.front_messages import Admit
from appliance.traffic.credits import REAL_TIME, CreditAccount, Levels
from appliance.traffic.expected_ends import MIN_RUN_S, ExpectedEnds
from appliance.traffic.fairness import Ticket
from appliance.traffic.forecast import Forecast
from appliance.traffic.load_shedder import LoadShedder
from appliance.traffic.model_uses import ModelUses
from appliance.traffic.queue import RequestQueue
from appliance.traffic.recent_ttft import RecentTtft
from appliance.traffic.remaining import Outstanding
from appliance.traffic.request import OnReplica, Request
from appliance.traffic.rules import QueueRules
from appliance.traffic.service_load import ServiceLoad, StartedTokens
from appliance.traffic.tenants import Tenants, TenantTraffic
from engine.levels import level_of, split_level, urgency_of
from engine.messages import BLOCK_TOKENS
from store.policies import CLASSES, INTERACTIVE

_LIGHT_PART, _MIN_LIGHT_SLOTS = 32, 2
"""A tenant is light while it occupies fewer slots than the larger of `_MIN_LIGHT_SLOTS` and the number of
slots divided by `_LIGHT_PART`. The maximum number of samples for an urgent request is computed in the same
way."""
_NEARLY_EQUAL_PART = 8
"""Two replicas are treated as having the same number of free slots if the difference is at most a replica's
slot count divided by this number."""
_MAX_PROMISED = 0.8
"""Maximum share of a model's capacity promised to requests with deadlines. The remaining capacity is left for
later arrivals."""
_UNKNOWN_RUN_S = 1.0


def most_kv_tokens(admit: Admit) -> int:
    """Return the maximum number of cache tokens that a request may occupy. Each sample's last block may be
    partly filled. Samples that share a prompt each have their own copy of the prompt's last block."""
    partial_blocks = admit.num_seqs if admit.num_seqs == admit.submissions else 2 * admit.num_seqs
    return admit.prompt_tokens + admit.max_tokens + partial_blocks * BLOCK_TOKENS


class Turn(NamedTuple):
    """The next request, the replica that will run it, and the service level at which it will run."""

    request: Request
    account: CreditAccount
    level: int


class ModelTraffic:
    """One served model. Used only by the request manager. All times are on the request manager's clock."""

    def __init__(self, name: str, version: str, rules: QueueRules, tenants: Tenants) -> None:
        self.name = name
        self.version = version
        self.rules = rules
        self.failure: str | None = None
        self.queue: RequestQueue[Request] = RequestQueue(rules)
        self.resumed: dict[str, Request] = {}
        """Requests that lost their replica mid-answer and are therefore served first."""
        self.stranded: dict[str, Request] = {}
        """Waiting requests that are not dispatched, because their fronts are in
        `TrafficState.broken_fronts`."""
        self.asked_at: float | None = None
        """When the latest request was accepted; None before the first."""
        self.uses = ModelUses()
        """Each tenant's use of the model, which determines how long the model stays loaded."""
        self.accounts: list[CreditAccount] = []
        self.outstanding = Outstanding()
        self.forecast = Forecast()
        self.shedder = LoadShedder()
        self.ttft = RecentTtft()
        self._tenants = tenants
        self._running: dict[str, Request] = {}
        self._expected_ends = ExpectedEnds()
        self._load = ServiceLoad()
        self._started = StartedTokens()
        self._set_limits()

    @property
    def queued(self) -> int:
        """Number of requests waiting for the model."""
        return len(self.queue) + len(self.resumed) + len(self.stranded)

    @property
    def kv_tokens(self) -> int:
        """Combined KV cache capacity of all replicas, in tokens; 0 while unknown."""
        return sum(account.kv_tokens for account in self.accounts)

    @property
    def running(self) -> int:
        """Number of requests running on the model's replicas."""
        return len(self._running)

    def waiting(self) -> list[Request]:
        """Return all requests waiting for the model."""
        return [*self.resumed.values(), *self.stranded.values(), *self.queue]

    def set_rules(self, rules: QueueRules) -> None:
        """Apply new queue rules."""
        self.rules = self.queue.rules = rules
        self._set_limits()

    # ── waiting requests ──

    def push(self, request: Request, serial: int) -> None:
        """Queue a request for its first dispatch."""
        tenant = self._tenants.of(request.tenant)
        request.ticket = self._ticket(request, serial)
        light = self._may_be_urgent(request.request_class, tenant)
        self.queue.push(request.ticket, tenant.weight, light, request.promised_s)

    def _ticket(self, request: Request, serial: int) -> Ticket[Request]:
        prompt_tokens = request.admit.prompt_tokens
        return Ticket(
            item=request,
            tenant=request.tenant,
            key_id=request.key_id,
            request_class=request.request_class,
            serial=serial,
            queued_at=request.queued_at or 0.0,
            due=request.due,
            service=prompt_tokens + self.rules.output_weight * request.expected_tokens,
            prompt_tokens=prompt_tokens,
            output_tokens=request.expected_tokens,
            num_seqs=request.admit.num_seqs,
            begin_by=request.begin_by,
        )

    def remove(self, request: Request) -> None:
        """Remove a waiting request."""
        if request.ticket is not None and request.ticket.waiting:
            self.queue.remove(request.ticket)
            request.ticket = None
        self.resumed.pop(request.request_id, None)
        self.stranded.pop(request.request_id, None)

    def strand(self, request: Request) -> None:
        """Keep a request waiting without dispatching it."""
        self.remove(request)
        self.stranded[request.request_id] = request

    def reconsider(self, tenant: TenantTraffic, key_id: str = "", most: int | None = None) -> None:
        """Update the queue order after a tenant's weight, limits or usage have changed. Put the tenant's
        requests back into the serving order. If `key_id` names one of the tenant's keys, also put back that
        key's parked requests. `most` is the maximum number of parked requests to put back (None for all)."""
        for number, fair in enumerate(self.queue.classes):
            fair.set_tenant(tenant.name, tenant.weight, self._may_be_urgent(number, tenant))
            fair.release(tenant.name)
            if key_id:
                fair.unpark(tenant.name, key_id, most)

    # ── choosing the next request ──

    def levels(self) -> Levels:
        """Return the union of all replicas' `Levels`."""
        share, accepted, slots, free = self._reserved_share(), 0, 0, 0
        for account in self.accounts:
            one = account.levels(share)
            accepted |= one.open
            slots |= one.slots
            free |= one.free
        return Levels(accepted, slots, free)

    def next_turn(self, now: float) -> Turn | None:
        """Return the next request to dispatch, or None. A request is chosen only if a replica has credit for
        its level. During the search, tenants that have reached their limits are held, and requests whose keys
        have reached their limits are parked.
        """
        levels = self.levels()
        if not levels.open:
            return None
        if (resumed := self._next_resumed(levels.open)) is not None:
            return resumed
        promises_from = self.promises_from(now)
        while (found := self.queue.next(levels, now, promises_from)) is not None:
            ticket, level = found
            request, fair = ticket.item, self.queue.classes[ticket.request_class]
            tenant = self._tenants.of(ticket.tenant)
            if not self._may_run(tenant, request, key=False):
                fair.hold(ticket.tenant)
                tenant.held_at.add((self.name, ""))
            elif not self._may_run(tenant, request, key=True):
                fair.park(ticket)
                tenant.held_at.add((self.name, ticket.key_id))
            else:
                account = self._account_for(level, request)
                return None if account is None else Turn(request, account, level)
        return None

    def _next_resumed(self, levels: int) -> Turn | None:
        """Return the next resumed request that a replica can accept at its level, or None."""
        for request in self.resumed.values():
            level = self._level_of(request, self._tenants.of(request.tenant))
            if levels >> level & 1 and (account := self._account_for(level, request)) is not None:
                return Turn(request, account, level)
        return None

    def _level_of(self, request: Request, tenant: TenantTraffic) -> int:
        """Return a request's service level, which depends on its class and urgency.

        P0 requests and the P1 requests of light tenants are urgent unless they have many samples. Shorter
        prompts have higher urgency.
        """
        number, admit = request.request_class, request.admit
        own = request.running_seqs if request.keeps_place else 0
        if not self._may_be_urgent(number, tenant, own) or admit.num_seqs > self._max_samples:
            return level_of(number, 0)
        return level_of(number, urgency_of(admit.prompt_tokens, self._max_step_prompt_tokens))

    def _may_be_urgent(self, request_class: int, tenant: TenantTraffic, resumed_seqs: int = 0) -> bool:
        """True if the tenant's requests of the given class may be urgent. P0 requests may always be urgent.
        P1 requests may be urgent if the tenant has few running sequences, not counting a resumed request's
        `resumed_seqs`."""
        if request_class != INTERACTIVE:
            return request_class == REAL_TIME
        return tenant.use.seqs.get(self.name, 0) - resumed_seqs < self._light_slots

    def _set_limits(self) -> None:
        """Set the limits for urgent requests, which depend on the replicas' slots and step sizes."""
        accounts = self.accounts
        self._light_slots = max(_MIN_LIGHT_SLOTS, sum(one.slots for one in accounts) // _LIGHT_PART)
        """A tenant is light while it occupies fewer slots than this."""
        slots = min((one.slots for one in accounts), default=0)
        self._max_samples = max(_MIN_LIGHT_SLOTS, slots // _LIGHT_PART)
        """Maximum number of samples for an urgent request."""
        self._max_step_prompt_tokens = min((one.tokens for one in accounts), default=0)
        """Number of prompt tokens that fit in one step on every replica."""

    def starts_at_once(self, request: Request, tenant: TenantTraffic, now: float) -> bool:
        """True if a new request would be dispatched immediately."""
        levels = self.levels()
        if not levels.open >> self._level_of(request, tenant) & 1:
            return False
        if self._next_resumed(levels.open) is not None:
            return False
        if not (self._may_run(tenant, request, key=False) and self._may_run(tenant, request, key=True)):
            return False
        return self.queue.would_be_next(
            self._ticket(request, sys.maxsize),
            tenant.weight,
            self._may_be_urgent(request.request_class, tenant),
            levels,
            now,
            self.promises_from(now),
        )

    def _may_run(self, tenant: TenantTraffic, request: Request, *, key: bool) -> bool:
        use, quota = tenant.use, tenant.quota
        if key:
            if not request.key_id:
                return True
            use, quota = tenant.key(request.key_id), self._tenants.key_quota(request.key_id)
        return use.may_run(quota, self.name, most_kv_tokens(request.admit), self.kv_tokens)

    def _account_for(self, level: int, request: Request) -> CreditAccount | None:
        """Return the replica that should run the request, or None if no replica has credit for `level`. Among
        the replicas with nearly the most free slots, choose the one that has probably cached the longest
        prefix of the prompt. Exclude replicas on which the request has already run, because the request's
        front has lost its channel to them, even if the core has not noticed yet."""
        share = self._reserved_share()
        fit = {
            account: account.free_slots(level, share)
            for account in self.accounts
            if account not in request.tried and account.levels(share).open >> level & 1
        }
        most_free = max(fit.values(), default=0)

        def preference(account: CreditAccount) -> tuple[int, int, int]:
            free, cached = fit[account], 0
            if free > 0 and most_free - free <= account.slots // _NEARLY_EQUAL_PART:
                cached = account.prefixes.matching(request.tenant, request.admit.prefixes)
            return cached, free, account.tokens_left(level)

        return max(fit, key=preference, default=None)

    def _reserved_share(self) -> float:
        return self.rules.reserved_slots if self._tenants.several else 0.0

    # ── running requests ──

    def start(self, turn: Turn, now: float) -> int:
        """Count a request as running on its replica. Return the number of the replica's slots reserved for
        urgent requests."""
        request, account, level = turn
        admit, tenant = request.admit, self._tenants.of(request.tenant)
        if request.ticket is not None and request.ticket.waiting:
            self.queue.take(request.ticket, now)
            request.charged = request.ticket.prompt_tokens
            request.ticket = None
        account.spend(level, admit.num_seqs, admit.prompt_tokens)
        account.prefixes.add(request.tenant, admit.prefixes)
        if not request.dispatched and not request.keeps_place:
            request.running_seqs = admit.num_seqs
            request.kv_tokens = most_kv_tokens(admit)
            for use in tenant.uses(request.key_id):
                use.run(self.name, admit.num_seqs, request.kv_tokens)
            self.reconsider(tenant, request.key_id, 1)
        request.keeps_place = False
        if not request.dispatched:
            self._tenants.count_answer(request.tenant, 1)
        request.dispatched[account] = OnReplica(admit, account.generated_each, level)
        self._running[request.request_id] = request
        request.tried.add(account)
        request.latest = account
        request.cached_tokens = 0
        request.began_at = now
        self._started.add(admit, request.expected_tokens)
        if self.forecast.known:
            self._load.start(request.request_class, self._serving_s(request))
        self._expected_ends.expect(request, now + self._expected_run_s(request))
        return account.reserved_slots(self._reserved_share())

    def stop(self, request: Request) -> None:
        """Stop counting a request as running. Call this once no replica holds any of its submissions."""
        del self._running[request.request_id]
        self._tenants.count_answer(request.tenant, -1)

    def charge(self, request: Request, service: float) -> None:
        """Correct the tenant's charge to match the request's total service."""
        self.queue.classes[request.request_class].charge(request.tenant, service - request.charged)
        request.charged = service

    def learned(self) -> None:
        """Update the forecast and the limits for urgent requests after a replica has reported, started or
        stopped."""
        self._set_limits()
        queue, started = self.queue, self._started
        self.forecast.refresh(
            self.accounts,
            started.tokens_per_seq,
            started.prompt_tokens,
            started.prompts_per_output(
                (fair.backlog for fair in queue.classes),
                queue.promised_requests,
                queue.promised_prompt_tokens,
            ),
        )
        for fair in queue.classes:
            fair.set_urgent(self._max_samples, self._max_step_prompt_tokens)

    def tick(self, now: float) -> None:
        """Update the measured load, tenants' charges and load shedding. Call this a few times per second."""
        self._load.tick(now)
        self._charge_output()
        self._expected_ends.postpone(now)
        self.shedder.observe(self.rules, now, self.waits_s(now))

    def _charge_output(self) -> None:
        """Charge tenants for the estimated output of their running requests since the last call. Exact counts
        arrive when requests finish."""
        services: list[dict[str, float]] = [{} for _ in range(CLASSES)]
        for request in self._running.values():
            made = 0.0
            for account, left in request.dispatched.items():
                made += left.seqs * (account.generated_each - left.charged_each)
                left.charged_each = account.generated_each
            service = self.rules.output_weight * min(made, request.first.max_tokens)
            request.charged += service
            by_tenant = services[request.request_class]
            by_tenant[request.tenant] = by_tenant.get(request.tenant, 0.0) + service
        for fair, by_tenant in zip(self.queue.classes, services, strict=True):
            for tenant, service in by_tenant.items():
                fair.charge(tenant, service)

    def demand(self) -> float:
        """Return how many replicas the running and waiting requests would fill, or 0 if there are no
        replicas."""
        slots = sum(account.slots for account in self.accounts)
        if not slots:
            return 0.0
        busy = slots - sum(account.available_slots for account in self.accounts)
        waiting = 0 if self._has_credit() else self.queued
        return (busy + waiting) * len(self.accounts) / slots

    def replica_wait_s(self, now: float) -> float:
        """Return how long the oldest request has waited for a replica, in seconds; 0 if requests are waiting
        only because of tenant or key limits."""
        return 0.0 if not self.queued or self._has_credit() else self.oldest_wait_s(now)

    def _has_credit(self) -> bool:
        """True if a replica has credit to start an ordinary interactive request now."""
        return bool(self.levels().open >> level_of(INTERACTIVE, 0) & 1)

    # ── predictions ──

    @property
    def predictable(self) -> bool:
        """Whether waiting and run times can be predicted."""
        return self.forecast.known and bool(self.accounts)

    def expect_load(self, request: Request) -> None:
        """Add a new request to the offered load, even if the request is subsequently refused."""
        if self.forecast.known:
            self._load.offer(self._serving_s(request))

    def wait_s(self, request: Request, tenant: TenantTraffic, now: float) -> float:
        """Return a new request's predicted waiting time in seconds. Like all predictions, it is valid only
        while `predictable` is true."""
        number, level = request.request_class, self._level_of(request, tenant)
        urgency = split_level(level)[1]
        ahead = self.queue.classes[number].ahead(tenant.name, tenant.weight, request.due, urgency=urgency)
        return self.first_credit_s(level, now) + self._served_s(number, *ahead)

    def waits_s(self, now: float) -> list[float | None]:
        """Return, for each class, the predicted waiting time, in seconds, for a request that joins the end of
        the queue, or None if unknown."""
        if not self.predictable:
            return [None] * CLASSES
        waits_s: list[float | None] = []
        for number, fair in enumerate(self.queue.classes):
            credit_s = self.first_credit_s(level_of(number, 0), now)
            backlog = fair.backlog
            waits_s.append(credit_s + self._served_s(number, backlog.prompt_tokens, backlog.output_tokens))
        return waits_s

    def run_s(self, request: Request, output_tokens: float) -> float:
        """Return a request's predicted run time in seconds if it generates `output_tokens` tokens per
        sample."""
        waiting = sum(fair.backlog.tickets for fair in self.queue.classes)
        more_slots = waiting / max(1, self.forecast.replicas)
        # Near full load, slots that are currently free will soon be occupied.
        filling_slots = self._load.filling * self.forecast.slots_each - self.forecast.slots_busy
        more_slots = max(more_slots, filling_slots)
        return self.forecast.running_s(request.admit.prompt_tokens, output_tokens, more_slots)

    def promises_from(self, now: float) -> float:
        """Return the earliest time at which requests with a promised start can be served. Only requests that
        lost their replica are served before them."""
        resumed = self.resumed.values()
        prompt_tokens = sum([request.tokens_to_prefill for request in resumed])
        output_tokens = sum([request.expected_tokens for request in resumed])
        return now + 2.0 * self.forecast.step_s + self.forecast.serving_s(prompt_tokens, output_tokens)

    def promise_s(self, request: Request, output_tokens: float) -> float:
        """Return the delay, in seconds, that this request causes for other requests with a promised start.
        The delay takes into account that higher-priority classes and requests without deadlines keep their
        share of the service."""
        share = self._load.share_left(request.request_class, _MAX_PROMISED)
        return self.forecast.serving_s(request.admit.prompt_tokens, output_tokens) / share

    def first_credit_s(self, level: int, now: float) -> float:
        """Return the time in seconds until a replica has credit for `level`."""
        levels = self.levels()
        if levels.open >> level & 1:
            return 0.0
        if levels.slots >> level & 1:
            return self.forecast.step_s
        end = self._expected_ends.first()
        return self.forecast.step_s if end is None else max(0.0, end - now)

    def oldest_wait_s(self, now: float) -> float:
        """Return the oldest request's waiting time in seconds."""
        since = [oldest for number in range(CLASSES) if (oldest := self.queue.oldest(number)) is not None]
        for others in (self.resumed, self.stranded):
            since += [r.queued_at for r in list(others.values())[:1] if r.queued_at is not None]
        return max(0.0, now - min(since)) if since else 0.0

    def _served_s(self, request_class: int, prompt_tokens: float, output_tokens: float) -> float:
        """Return the time in seconds to serve all requests queued in higher-priority classes, followed by the
        given numbers of tokens in the class itself."""
        for fair in self.queue.classes[:request_class]:
            prompt_tokens += fair.backlog.prompt_tokens
            output_tokens += fair.backlog.output_tokens
        share = self._load.share_left(request_class)
        return self.forecast.serving_s(prompt_tokens, output_tokens) / share

    def _serving_s(self, request: Request) -> float:
        return self.forecast.serving_s(request.admit.prompt_tokens, request.expected_tokens)

    def _expected_run_s(self, request: Request) -> float:
        if not self.forecast.known:
            return _UNKNOWN_RUN_S
        return max(MIN_RUN_S, self.run_s(request, request.expected_tokens / max(1, request.admit.num_seqs)))
