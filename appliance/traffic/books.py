"""What is in the house, to be read: for drains, status, metrics and the console. Only the request manager
(`appliance.traffic.request_manager`) writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from appliance.protocol import LimitUsage
from appliance.traffic import stats
from appliance.traffic.admission_pauses import AdmissionPauses
from appliance.traffic.credits import CreditAccount
from appliance.traffic.model import ModelTraffic
from appliance.traffic.quotas import Quotas
from appliance.traffic.remaining import Remaining
from appliance.traffic.request import Request
from appliance.traffic.stats import ModelStats, QueueStats, TenantStats
from appliance.traffic.tenants import Tenants


class Clock(Protocol):
    """Seconds."""

    def __call__(self) -> float: ...


class Books:
    """Every request in flight, the queues, the quotas and what is closed. `clock` never jumps."""

    def __init__(self, clock: Clock, quotas: Quotas) -> None:
        self.quotas = quotas
        self._clock = clock
        self._tenants = Tenants()
        self._models: dict[str, ModelTraffic] = {}
        self._requests: dict[str, Request] = {}
        self._pauses = AdmissionPauses()
        self._running = 0
        self._waiting_tokens = 0
        """Of the prompts of all that wait, or are held."""
        self._admitted = 0
        self._refused = 0
        self._ended = 0
        self._preemptions = 0

    # ── requests ──

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def unfinished(self, model: str | None = None) -> Iterator[Request]:
        """The requests in flight (of `model`, None: of all) that are not held: what a drain waits for. None
        may come or end meanwhile."""
        for request in self._requests.values():
            if request not in self._pauses and model in (None, request.first.model):
                yield request

    def finished(self, model: str | None = None) -> bool:
        """Whether nothing is `unfinished`; looks no further than the first that is."""
        return next(self.unfinished(model), None) is None

    def remaining(self, model: str | None = None) -> Remaining:
        """What is left to do of the unfinished requests (of `model`, None: of all)."""
        now, total = self._clock(), Remaining()
        for name, traffic in self._models.items():
            if model in (None, name):
                total = total.beside(traffic.outstanding.remaining(traffic.forecast, now))
        return total

    def held(self, model: str | None = None) -> int:
        """How many requests are held (for `model`, None: for any)."""
        return len(self._pauses) if model is None else len(self._pauses.held(model))

    def accounts_of(self, request_id: str) -> list[CreditAccount]:
        """Where a request runs now."""
        request = self._requests.get(request_id)
        return list(request.dispatched) if request else []

    # ── models and replicas ──

    def knows(self, name: str) -> bool:
        """Whether requests for this model are taken."""
        return name in self._models

    def failure(self, name: str) -> str | None:
        """Why the model's requests are refused; None if they are not."""
        return self._models[name].failure

    def queued(self, model: str) -> int:
        """Requests that wait for this model."""
        return self._models[model].queued

    def occupied(self, account: CreditAccount) -> bool:
        """Whether anything runs on the replica."""
        return any(account in request.dispatched for request in self._requests.values())

    # ── stats ──

    def stats(self) -> QueueStats:
        """How full the house is."""
        now = self._clock()
        overload, step = stats.overload(self._models.values())
        return QueueStats(
            waiting=self._waiting(),
            running=self._running,
            oldest_wait_s=self._oldest_wait_s(now),
            admitted=self._admitted,
            refused=self._refused,
            ended=self._ended,
            waiting_tokens=self._waiting_tokens,
            preemptions=self._preemptions,
            overload=overload,
            overload_step=step,
            classes=stats.classes(self._models.values(), now),
        )

    def tenant(self, name: str) -> TenantStats:
        """What one tenant has in the house."""
        return stats.tenant(self._tenants.of(name))

    def models(self) -> list[ModelStats]:
        """What there is of each model in the house."""
        now = self._clock()
        return [stats.model(model, now) for model in self._models.values()]

    def usage(self, scope: str, name: str) -> list[LimitUsage]:
        """How much of its limits a tenant or key uses, for operators."""
        kv_tokens = {model.name: model.kv_tokens for model in self._models.values()}
        return [*self.quotas.usage(scope, name), *stats.usage(self._tenants, scope, name, kv_tokens)]

    def _waiting(self) -> int:
        return sum(model.queued for model in self._models.values()) + len(self._pauses)

    def _oldest_wait_s(self, now: float) -> float:
        waits = [model.oldest_wait_s(now) for model in self._models.values()]
        since = self._pauses.held_since
        return max(0.0, *waits, 0.0 if since is None else now - since)
