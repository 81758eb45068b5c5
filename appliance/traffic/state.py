"""The request manager's data: requests in flight, served models and counters. It is read by drains, the
status, the metrics and the console, and modified only by the request manager and `RequestLifecycle`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from appliance.protocol import LimitUsage
from appliance.protocol.status import QueueStats
from appliance.traffic import stats
from appliance.traffic.admission_pauses import AdmissionPauses
from appliance.traffic.credits import CreditAccount
from appliance.traffic.model import ModelTraffic
from appliance.traffic.quotas import Quotas
from appliance.traffic.recent import RecentRequests
from appliance.traffic.remaining import Remaining
from appliance.traffic.request import Request
from appliance.traffic.stats import ModelStats
from appliance.traffic.tenants import Tenants
from store.policies import QuotaScope


class TrafficState:
    """The request manager's data, which other modules may read. `clock` is a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float], quotas: Quotas) -> None:
        self.clock = clock
        self.quotas = quotas
        self.tenants = Tenants()
        self.models: dict[str, ModelTraffic] = {}
        self.in_flight: dict[str, Request] = {}
        """Requests in flight, by id."""
        self.recent = RecentRequests()
        self.pauses = AdmissionPauses()
        self.fronts: set[str] = set()
        """Names of the live fronts."""
        self.broken_fronts: set[str] = set()
        """Running fronts that have closed a channel to a replica because they are exiting or faulty. A
        request dispatched for one of them may not reach its replica."""
        self.running = 0
        self.waiting_tokens = 0
        """Prompt tokens of all waiting or held requests."""
        self.admitted = 0
        self.refused = 0
        self.ended = 0
        self.preemptions = 0

    # ── requests ──

    @property
    def waiting(self) -> int:
        """The number of waiting or held requests."""
        return sum(model.queued for model in self.models.values()) + len(self.pauses)

    def unfinished(self, model: str | None = None) -> Iterator[Request]:
        """Yield the in-flight requests that are not held, optionally only those for `model`. A drain waits
        for these requests. No request may be added or removed during the iteration."""
        for request in self.in_flight.values():
            if request not in self.pauses and model in (None, request.unit):
                yield request

    def finished(self, model: str | None = None) -> bool:
        """True if no unfinished requests are left."""
        return next(self.unfinished(model), None) is None

    def remaining(self, model: str | None = None) -> Remaining:
        """Return the remaining work of the unfinished requests for `model`, or for all models if it is
        None."""
        now, total = self.clock(), Remaining()
        for name, traffic in self.models.items():
            if model in (None, name):
                total = total.beside(traffic.outstanding.remaining(traffic.forecast, now))
        return total

    def held(self, model: str | None = None) -> int:
        """Return the number of held requests for `model`, or for all models if it is None."""
        return len(self.pauses) if model is None else len(self.pauses.held(model))

    def accounts_of(self, request_id: str) -> list[CreditAccount]:
        """Return the credit accounts of the replicas that a request is running on."""
        request = self.in_flight.get(request_id)
        return list(request.dispatched) if request else []

    def occupied(self, account: CreditAccount) -> bool:
        """True if any request is running on the replica."""
        return any(account in request.dispatched for request in self.in_flight.values())

    # ── statistics ──

    def queue_stats(self) -> QueueStats:
        """Return the combined statistics of all queues."""
        now, models = self.clock(), self.models.values()
        overload, step = stats.overload(models)
        waits = [model.oldest_wait_s(now) for model in models]
        held_since = self.pauses.held_since
        return QueueStats(
            waiting=self.waiting,
            running=self.running,
            oldest_wait_s=max(0.0, *waits, 0.0 if held_since is None else now - held_since),
            admitted=self.admitted,
            refused=self.refused,
            ended=self.ended,
            waiting_tokens=self.waiting_tokens,
            preemptions=self.preemptions,
            overload=overload,
            overload_step=step,
            classes=stats.classes(models, now),
        )

    def model_stats(self) -> list[ModelStats]:
        """Return the statistics for each model."""
        now = self.clock()
        return [stats.model(model, now) for model in self.models.values()]

    def usage(self, scope: QuotaScope, name: str) -> list[LimitUsage]:
        """Return a tenant's or key's usage of each limit, for operators."""
        kv_tokens = {model.name: model.kv_tokens for model in self.models.values()}
        return [*self.quotas.usage(scope, name), *stats.usage(self.tenants, scope, name, kv_tokens)]
