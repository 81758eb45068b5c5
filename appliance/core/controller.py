"""The switchboard between fronts, replicas, listeners and the request manager: who is told what, when.

It makes the channels between every front and every replica, keeps fronts informed of what is served and who
may ask, and passes messages about requests to the request manager.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

import msgspec

from appliance.background import Background
from appliance.core.drains import STOPPING, Drain, DrainError, Drains
from appliance.core.problems import Problems
from appliance.core.readiness import Readiness
from appliance.front_pool.claims import Claims
from appliance.front_pool.front import Dealer, Front
from appliance.front_pool.identities import IdentityTable, changes
from appliance.front_pool.listeners import Listener
from appliance.messages import (
    Abort,
    AboutRequest,
    Admit,
    Admitted,
    Claim,
    Configure,
    Connection,
    HandOver,
    Identities,
    Keep,
    Refused,
    Release,
    Retried,
    ServedModel,
    Settle,
    Worked,
)
from appliance.models.manager import Fleet
from appliance.models.replica import Launch, Replica
from appliance.settings import ModelSettings, Settings
from appliance.traffic.quotas import Quotas
from appliance.traffic.request_manager import RequestManager, RowSink
from engine.client import ReplicaGroup
from engine.messages import Report
from store.policies import Policies

log = logging.getLogger(__name__)

_TICK_S = 0.25
_ENGINE_CANCEL_S = 2.0
_ANNOUNCE_S = 2.0
"""A front that has not said by then that it knows is busy, or dying."""
_CLOSE_S = 1.0
_LAST_WORDS_S = 3.0
"""For fronts to tell clients that their requests were ended, and then to close the connections: at most."""


class Switchboard:
    """Everything between the sockets and the store. All methods belong on the event loop's thread."""

    def __init__(
        self,
        settings: Settings,
        models: list[ServedModel],
        *,
        rows: RowSink,
        salt: Callable[[str], str],
        quotas: Quotas,
        identities: IdentityTable,
        keep: Callable[[Keep, int], None],
        launch: Launch = ReplicaGroup.launch,
        front_module: str = "appliance.front",
    ) -> None:
        self.problems = Problems()
        self.requests = RequestManager(
            send=self._send,
            rows=rows,
            salt=salt,
            clock=time.monotonic,
            unix=time.time,
            rules=settings.queue,
            quotas=quotas,
        )
        self.fleet = Fleet(
            settings,
            models,
            requests=self.requests,
            events=self,
            problems=self.problems,
            tell=self.tell_configuration,
            launch=launch,
        )
        self.settings = settings
        self.fronts: list[Front] = []
        self.dealer = Dealer(self.fronts)
        self.claims = Claims(time.monotonic, settings.idempotency.keep_s)
        self.listeners: list[Listener] = []
        self.drains = Drains(self)
        self.stopping: Drain | None = None
        """The service's own drain, once it was told to stop."""
        self.readiness = Readiness(self)
        self._identities = identities
        self._keep = keep
        self._told_identities: Identities | None = None
        self._told_policies: Policies | None = None
        self._told: Configure | None = None
        self._serial = 0
        self._by_name: dict[str, Front] = {}
        self._tick_timer: asyncio.TimerHandle | None = None
        self._front_module = front_module
        self._front_numbers = itertools.count()
        self._leaving: set[Front] = set()
        self._background = Background()
        self.set_fronts(settings.fronts)

    @property
    def models(self) -> dict[str, ServedModel]:
        """The served models, as fronts know them."""
        return self.fleet.models

    @property
    def replicas(self) -> list[Replica]:
        """Of all models."""
        return self.fleet.replicas

    # ── start and stop ──

    def start(self, listeners: list[Listener]) -> None:
        """Start every process; connections are taken as soon as a front is ready."""
        self.listeners = listeners
        self.tell_configuration()
        # Replicas first: theirs is the longer way.
        self.fleet.start()
        for front in self.fronts:
            front.start()
        self._tick()

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drain the service (until `hurry`), then end everything. What comes meanwhile is refused; on sockets
        that outlive the service it waits for its successor.

        Afterwards every process is gone and every request has ended.
        """
        settings = self.settings
        self.drains.leave_off()
        self.stopping = Drain(
            self,
            None,
            why=STOPPING,
            grace_s=settings.drain_grace_s,
            notice_s=settings.drain_notice_s,
            hurry=hurry,
            last_words_s=_LAST_WORDS_S,
        )
        for listener in self.listeners:
            listener.begin_stop()
        await self.stopping.run()
        for listener in self.listeners:
            listener.close()
        for front in self.fronts:
            front.begin_stop(_CLOSE_S)
        ended = asyncio.gather(*(front.ended() for front in self.fronts))
        await asyncio.wait([ended], timeout=_LAST_WORDS_S)
        for front in self.fronts:
            front.kill("it did not end in time")
        await ended
        await self._until_counted(1.0)
        await self.fleet.stop()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        if len(self.requests):
            log.error("%d requests have no end: their rows are sealed at the next start", len(self.requests))

    async def _until_counted(self, timeout_s: float) -> None:
        """Give the replicas a moment to say what was generated for the requests that ended last."""
        deadline = time.monotonic() + timeout_s
        while len(self.requests) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _tick(self) -> None:
        self._tick_timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self.requests.expire()
        for front in self.fronts:
            front.check()
        self.fleet.check()
        self.update_listeners()
        self.tell_identities()

    def update_listeners(self) -> None:
        """Accept connections exactly while somebody takes them."""
        for listener in self.listeners:
            listener.update()

    # ── what fronts know ──

    def tell_identities(self) -> None:
        """Send changed tenants, keys and peers to the request manager and to every front."""
        if (policies := self._identities.policies) is not self._told_policies:
            self._told_policies = policies
            self.requests.set_policies(policies)
        table, told = self._identities.current(), self._told_identities
        if table is told:
            return
        self._told_identities = table
        if (news := table if told is None else changes(told, table)) is not None:
            for front in self.fronts:
                front.send(news)

    def tell_configuration(self) -> None:
        """Tell the fronts what is served, if that is not what they were told last."""
        told, now = self._told, self._configuration()
        if told is not None:
            if msgspec.structs.replace(told, serial=0) == now:
                return
            if told.ready != now.ready:
                log.info("ready: every model answers") if now.ready else log.info("not ready: %s", now.reason)
        self._serial += 1
        self._told = msgspec.structs.replace(now, serial=self._serial)
        for front in self.fronts:
            self._configure(front)

    def _configure(self, front: Front) -> None:
        if self._told is not None:
            front.configure(msgspec.structs.replace(self._told, front=front.name))

    def _configuration(self) -> Configure:
        readiness = self.readiness
        reason, closed = readiness.reason(), readiness.closed()
        silent = {name: why for name in self.models if (why := closed or readiness.silence(name))}
        return Configure(
            front="",
            models=list(self.models.values()),
            limits=self.settings.limits,
            ready=not reason,
            reason=reason,
            silent=silent,
            log_level=self.settings.log_level,
            retries=self.settings.idempotency,
            keeping=self.settings.log,
        )

    async def announce(self) -> None:
        """Tell every front what is ready, and return when they say that they know."""
        self.tell_configuration()
        deadline = time.monotonic() + _ANNOUNCE_S
        while time.monotonic() < deadline and any(
            front.state == "ready" and front.configured < self._serial for front in self.fronts
        ):
            await asyncio.sleep(0.005)

    # ── changes while it runs ──

    def drain(self, model: str | None, *, grace_s: float, hold: bool) -> Drain:
        """Begin an operator's drain. Raises DrainError."""
        if self.stopping is not None:
            raise DrainError(f"{STOPPING}: nothing else can be drained")
        if model is not None and model not in self.models:
            raise DrainError(f"there is no model {model!r}: there are {', '.join(self.models) or 'none'}")
        name = "the service" if model is None else f"model {model!r}"
        drain = Drain(
            self,
            model,
            why=f"{name} is draining",
            grace_s=grace_s,
            notice_s=self.settings.drain_notice_s,
            hold=hold,
        )
        self.drains.begin(drain)
        return drain

    def resume(self, model: str | None) -> Drain:
        """End an operator's drain. Raises DrainError."""
        if self.stopping is not None:
            raise DrainError(f"{STOPPING}: it cannot be kept from it")
        drain = self.drains.end(model)
        self.tell_configuration()
        return drain

    def change_models(self, wanted: dict[str, ModelSettings], served: list[ServedModel]) -> list[str]:
        """Serve these models from now on, as `Fleet.change` says."""
        for drain in list(self.drains):
            if drain.model is not None and drain.model not in wanted:
                self.drains.forget(drain.model)
        return self.fleet.change(wanted, served)

    def set_timeouts(self) -> None:
        """Take the times after which what hangs is killed from the settings."""
        for front in self.fronts:
            front.hang_timeout_s = self.settings.hang_timeout_s
            front.load_timeout_s = self.settings.load_timeout_s
        for replica in self.replicas:
            replica.hang_timeout_s = self.settings.hang_timeout_s
            replica.load_timeout_s = self.settings.load_timeout_s

    def set_fronts(self, count: int) -> None:
        """Have so many fronts; those that are too many finish what streams first."""
        staying = [front for front in self.fronts if front not in self._leaving]
        for front in staying[count:]:
            self._leaving.add(front)
            front.begin_stop(self.settings.drain_grace_s)
            self._background.run(self._forget(front))
        for _ in range(count - len(staying)):
            # Never a number again: what replicas say late of a front that is gone must not meet another one.
            front = Front(
                next(self._front_numbers),
                self,
                hang_timeout_s=self.settings.hang_timeout_s,
                load_timeout_s=self.settings.load_timeout_s,
                log_level=self.settings.log_level,
                module=self._front_module,
            )
            self.fronts.append(front)
            if self._tick_timer is not None:
                front.start()

    async def _forget(self, front: Front) -> None:
        await front.ended()
        self.fronts.remove(front)
        self._leaving.discard(front)

    # ── fronts (FrontEvents) ──

    def front_started(self, front: Front) -> None:
        self._by_name[front.name] = front
        self.requests.add_front(front.name)
        self._configure(front)
        front.send(self._told_identities or self._identities.current())
        for replica in self.replicas:
            if replica.account is not None:
                self._attach(front, replica)

    def front_ready(self, front: Front) -> None:
        self.update_listeners()

    def front_reported(self, front: Front) -> None:
        self.update_listeners()

    def front_asks(self, front: Front, message: AboutRequest) -> None:
        if isinstance(message, Admit):
            # A front says who asks; what they may do is ours to know.
            identity = self._identities.of(message.identity)
            self.requests.admit(front.name, msgspec.structs.replace(message, identity=identity))
        elif isinstance(message, Settle):
            self.requests.settle(front.name, message)
        elif isinstance(message, Retried):
            self.requests.log_retry(message)
        elif isinstance(message, Worked):
            self.requests.charge_work(message)
        else:
            self.requests.reject(message)

    def front_claims(self, front: Front, message: Claim | Release) -> None:
        if isinstance(message, Claim):
            front.send(self.claims.claim(front.name, message))
        else:
            self.claims.release(front.name, message)

    def front_hands_over(self, front: Front, message: HandOver, descriptors: tuple[int, int]) -> None:
        connection = Connection(message.kind, message.peer, has_request=True)
        owner = self._by_name.get(self.claims.owner(message.scope) or "")
        if owner is not None:
            owner.give(connection, *descriptors)
        else:
            # The answer is lost since: whoever gets the request runs it.
            self.dealer.deal(connection, *descriptors)

    def front_keeps(self, front: Front, message: Keep, descriptor: int) -> None:
        # A front says who asked; what of it may be kept is ours to know.
        identity = self._identities.of(message.identity)
        self._keep(msgspec.structs.replace(message, identity=identity), descriptor)

    def front_changed(self, front: Front, problems: dict[str, str]) -> None:
        for model, why in front.problems.items():
            if problems.get(model) != why:
                self.problems.note(front.name, f"model {model!r} cannot be used: {why}")
        self.tell_configuration()

    def front_lost(self, front: Front, name: str) -> None:
        del self._by_name[name]
        self.requests.lose_front(name)
        if lost := self.claims.lose_front(name):
            log.warning("%s had %d answers for retries of requests: these run anew", name, lost)
        self.update_listeners()
        self.tell_configuration()

    def front_problem(self, front: Front, what: str) -> None:
        self.problems.note(front.name, what)

    # ── replicas (ReplicaEvents) ──

    def replica_starting(self, replica: Replica) -> None:
        self.fleet.look_at_folder(replica)

    def replica_ready(self, replica: Replica) -> None:
        self.fleet.learn(replica)
        self.requests.recover_model(replica.model)
        try:
            for front in self._by_name.values():
                self._attach(front, replica)
        except OSError as error:
            replica.kill(f"its channels to fronts could not be made: {error}")
            return
        if replica.account is not None:
            # Only now: an `Admitted` must find the front's channel to its replica in place.
            self.requests.add_replica(replica.account)
        self.tell_configuration()

    def replica_reported(self, replica: Replica, report: Report) -> None:
        if replica.account is not None:
            self.requests.report(replica.account, report)
        for name in report.fronts_gone:
            front = self._by_name.get(name)
            if front is not None and self.stopping is None:
                # Either it is dying too, or it is of no use without the replica.
                front.kill_soon(f"it closed its channel to {replica.name}")

    def replica_silent(self, replica: Replica) -> None:
        if replica.account is not None:
            self.requests.retire_replica(replica.account)
        self.tell_configuration()

    def replica_heard(self, replica: Replica) -> None:
        if replica.account is not None and not replica.retiring:
            self.requests.add_replica(replica.account)
        self.tell_configuration()

    def replica_lost(self, replica: Replica) -> None:
        if replica.account is not None:
            self.requests.lose_replica(replica.account)

    def replica_problem(self, replica: Replica, what: str) -> None:
        self.problems.note(replica.name, what)

    def replica_changed(self, replica: Replica) -> None:
        siblings = [other for other in self.replicas if other.model == replica.model]
        if all(other.failure for other in siblings):
            self.requests.fail_model(replica.model, replica.failure)
        else:
            self.requests.recover_model(replica.model)
        self.tell_configuration()

    def _attach(self, front: Front, replica: Replica) -> None:
        if replica.group is not None:
            front.attach(replica.name, replica.model, replica.group.attach_front(front.name))

    # ── requests ──

    def cancel(self, request_id: str, message: str) -> bool:
        """End a request: its front tells the client, and the engine if the front does not. False if there is
        no such request."""
        if not self.requests.abort(request_id, message):
            return False
        asyncio.get_running_loop().call_later(_ENGINE_CANCEL_S, self._cancel_in_engine, request_id)
        return True

    def _cancel_in_engine(self, request_id: str) -> None:
        accounts = self.requests.accounts_of(request_id)
        for replica in self.replicas:
            if replica.account in accounts and replica.group is not None:
                replica.group.cancel_request(request_id)

    def _send(self, front: str, message: Admitted | Refused | Abort) -> None:
        known = self._by_name.get(front)
        if known is not None:
            known.send(message)
