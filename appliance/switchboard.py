"""The switchboard between fronts, replicas, listeners and the ledger: who is told what, when.

It makes the channels between every front and every replica, keeps fronts informed of what is served and who
may ask, and hands each word on a request to the ledger. It decides nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from appliance.fronts import Dealer, Front
from appliance.identities import IdentityTable, changes
from appliance.listeners import Listener
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
    Refused,
    Release,
    Retried,
    ServedModel,
    Settle,
)
from appliance.models.registry import describe
from appliance.models.replicas import Launch, Replica
from appliance.problems import Problems
from appliance.settings import Settings
from appliance.traffic.claims import Claims
from appliance.traffic.requests import Ledger, RowSink
from engine.client import ReplicaGroup
from engine.messages import Report
from store.policies import Policies

log = logging.getLogger(__name__)

_TICK_S = 0.25
_ENGINE_CANCEL_S = 2.0
_LAST_WORDS_S = 3.0
"""For a front to tell its clients that their requests were aborted."""


class Switchboard:
    """Everything between the sockets and the store. All methods belong on the event loop's thread."""

    def __init__(
        self,
        settings: Settings,
        models: list[ServedModel],
        *,
        rows: RowSink,
        salt: Callable[[str], str],
        clock: Callable[[], float],
        identities: IdentityTable,
        launch: Launch = ReplicaGroup.launch,
        front_module: str = "appliance.front",
    ) -> None:
        self.problems = Problems()
        self.models = {model.name: model for model in models}
        self.ledger = Ledger(
            send=self._send,
            rows=rows,
            salt=salt,
            clock=clock,
            rules=settings.queue,
        )
        for model in models:
            self.ledger.add_model(model.name, model.version)
        hang_timeout_s = settings.hang_timeout_s
        self.fronts = [
            Front(
                number,
                self,
                hang_timeout_s=hang_timeout_s,
                log_level=settings.log_level,
                module=front_module,
            )
            for number in range(settings.fronts)
        ]
        self.replicas = [
            Replica(
                name,
                model.spec(f"{name}-{number}"),
                self,
                run_dir=Path(settings.run_dir),
                hang_timeout_s=hang_timeout_s,
                load_timeout_s=settings.load_timeout_s,
                launch=launch,
            )
            for name, model in settings.models.items()
            for number in range(model.replicas)
        ]
        self.dealer = Dealer(self.fronts)
        self.claims = Claims(time.monotonic, settings.idempotency.keep_s)
        self.listeners: list[Listener] = []
        self.draining = False
        self._limits = settings.limits
        self._retry_rules = settings.idempotency
        self._model_settings = settings.models
        self._tasks: set[asyncio.Task[None]] = set()
        self._identities = identities
        self._told_identities: Identities | None = None
        self._told_policies: Policies | None = None
        self._told_models: tuple[list[ServedModel], str] | None = None
        self._by_name: dict[str, Front] = {}
        self._tick_timer: asyncio.TimerHandle | None = None

    # ── start and stop ──

    def start(self, listeners: list[Listener]) -> None:
        """Start every process; connections are taken as soon as a front is ready."""
        self.listeners = listeners
        self._tell_models()
        # Replicas first: theirs is the longer way.
        for replica in self.replicas:
            replica.start()
        for front in self.fronts:
            front.start()
        self._tick()

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Take nothing new, let what runs finish within the grace (or until `hurry`), then end everything.

        Afterwards every process is gone and every request has ended.
        """
        self.draining = True
        self.ledger.close(None, "the service is stopping")
        for listener in self.listeners:
            listener.close()
        self._tell_models()
        for front in self.fronts:
            front.begin_stop(grace_s)
        ended = asyncio.gather(*(front.ended() for front in self.fronts))
        await _first_of(ended, hurry, grace_s)
        if not ended.done():
            if aborted := self.ledger.abort_all("the service is stopping"):
                log.warning("%d requests did not finish in time", aborted)
            await _first_of(ended, None, _LAST_WORDS_S)
        for front in self.fronts:
            if front.pid is not None:
                log.warning("%s (pid %d) did not end in time: killed", front.name, front.pid)
                front.kill("it did not end in time")
        await ended
        await self._until_counted(1.0)
        await asyncio.gather(*(replica.stop(2.0) for replica in self.replicas))
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        if len(self.ledger):
            log.error("%d requests have no end: their rows are sealed at the next start", len(self.ledger))

    async def _until_counted(self, timeout_s: float) -> None:
        """Give the replicas a moment to say what was generated for the requests that ended last."""
        deadline = time.monotonic() + timeout_s
        while len(self.ledger) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _tick(self) -> None:
        self._tick_timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self.ledger.expire()
        for front in self.fronts:
            front.check()
        for replica in self.replicas:
            replica.check()
        self.update_listeners()
        self.tell_identities()

    def update_listeners(self) -> None:
        """Accept connections exactly while somebody takes them."""
        for listener in self.listeners:
            listener.update()

    # ── what fronts know ──

    def tell_identities(self) -> None:
        """Tell the ledger and every front what is different in who may ask and have what, if anything is."""
        if (policies := self._identities.policies) is not self._told_policies:
            self._told_policies = policies
            self.ledger.set_policies(policies)
        table, told = self._identities.current(), self._told_identities
        if table is told:
            return
        self._told_identities = table
        if (news := table if told is None else changes(told, table)) is not None:
            for front in self.fronts:
                front.send(news)

    def readiness(self) -> str:
        """Why not every model answers; empty when all do."""
        if self.draining:
            return "the service is stopping"
        waits = []
        for name in self.models:
            replicas = [replica for replica in self.replicas if replica.model == name]
            if not any(replica.account for replica in replicas):
                states = ", ".join(f"{replica.name} is {replica.word}" for replica in replicas)
                waits.append(f"model {name!r} does not answer ({states})")
            elif problem := self.front_trouble(name):
                waits.append(f"model {name!r} does not answer ({problem})")
        return "; ".join(waits)

    def front_trouble(self, model: str) -> str:
        """Why a front cannot serve the model; empty when all can."""
        troubled: dict[str, list[str]] = {}
        for front in self.fronts:
            if model in front.problems:
                troubled.setdefault(front.problems[model], []).append(front.name)
        return "; ".join(f"{', '.join(names)}: {why}" for why, names in troubled.items())

    def _tell_models(self) -> None:
        reason = self.readiness()
        if (known := (list(self.models.values()), reason)) == self._told_models:
            return
        if self._told_models is not None and bool(self._told_models[1]) != bool(reason):
            log.info("not ready: %s", reason) if reason else log.info("ready: every model answers")
        self._told_models = known
        for front in self.fronts:
            front.configure(self._configure(front))

    def _configure(self, front: Front) -> Configure:
        reason = self.readiness()
        models = list(self.models.values())
        return Configure(
            front=front.name,
            models=models,
            limits=self._limits,
            ready=not reason,
            reason=reason,
            retries=self._retry_rules,
        )

    # ── fronts (FrontEvents) ──

    def front_started(self, front: Front) -> None:
        self._by_name[front.name] = front
        front.configure(self._configure(front))
        front.send(self._told_identities or self._identities.current())
        for replica in self.replicas:
            if replica.account is not None:
                self._attach(front, replica)

    def front_ready(self, front: Front) -> None:
        self.update_listeners()

    def front_asks(self, front: Front, message: AboutRequest) -> None:
        if isinstance(message, Admit):
            # A front says who asks; what they may do is ours to know.
            identity = self._identities.of(message.identity)
            self.ledger.admit(front.name, msgspec.structs.replace(message, identity=identity))
        elif isinstance(message, Settle):
            self.ledger.settle(front.name, message)
        elif isinstance(message, Retried):
            self.ledger.log_retry(message)
        else:
            self.ledger.reject(message)

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

    def front_changed(self, front: Front, problems: dict[str, str]) -> None:
        for model, why in front.problems.items():
            if problems.get(model) != why:
                self.problems.note(front.name, f"model {model!r} cannot be used: {why}")
        self._tell_models()

    def front_lost(self, front: Front, name: str) -> None:
        del self._by_name[name]
        self.ledger.lose_front(name)
        if lost := self.claims.lose_front(name):
            log.warning("%s had %d answers for retries of requests: these run anew", name, lost)
        self.update_listeners()
        self._tell_models()

    def front_problem(self, front: Front, what: str) -> None:
        self.problems.note(front.name, what)

    # ── replicas (ReplicaEvents) ──

    def replica_starting(self, replica: Replica) -> None:
        # Its folder may hold other files than it did for the life before.
        task = asyncio.get_running_loop().create_task(self._describe(replica, replica.lives))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _describe(self, replica: Replica, life: int) -> None:
        try:
            model = await asyncio.to_thread(describe, replica.model, self._model_settings[replica.model])
        except OSError:
            return  # the engine, which reads the same folder, says what is wrong with it
        if replica.lives == life:
            replica.described = model
            if replica.account is not None:
                self._learn(replica)
                self._tell_models()

    def _learn(self, replica: Replica) -> None:
        """What a ready replica and its folder say about their model."""
        model, info = replica.described or self.models[replica.model], replica.info
        if info is not None:
            model = msgspec.structs.replace(
                model, max_model_len=info.max_model_len, vocab_size=info.vocab_size
            )
        if model.version != self.models[model.name].version:
            log.info("model %s: version %s from now on", model.name, model.version)
        self.models[model.name] = model
        self.ledger.set_version(model.name, model.version)
        if replica.account is not None:
            replica.account.version = model.version

    def replica_ready(self, replica: Replica) -> None:
        self._learn(replica)
        self.ledger.recover_model(replica.model)
        for front in self._by_name.values():
            self._attach(front, replica)
        if replica.account is not None:
            # Only now: an `Admitted` must find the front's channel to its replica in place.
            self.ledger.add_replica(replica.account)
        self._tell_models()

    def replica_reported(self, replica: Replica, report: Report) -> None:
        if replica.account is not None:
            self.ledger.report(replica.account, report)
        for name in report.fronts_gone:
            front = self._by_name.get(name)
            if front is not None and not self.draining:
                # Either it is dying too, or it is of no use without the replica.
                front.kill_soon(f"it closed its channel to {replica.name}")

    def replica_lost(self, replica: Replica) -> None:
        if replica.account is not None:
            self.ledger.lose_replica(replica.account)

    def replica_problem(self, replica: Replica, what: str) -> None:
        self.problems.note(replica.name, what)

    def replica_changed(self, replica: Replica) -> None:
        siblings = [other for other in self.replicas if other.model == replica.model]
        if all(other.failure for other in siblings):
            self.ledger.fail_model(replica.model, replica.failure)
        else:
            self.ledger.recover_model(replica.model)
        self._tell_models()

    def _attach(self, front: Front, replica: Replica) -> None:
        if replica.group is not None:
            front.attach(replica.name, replica.model, replica.group.attach_front(front.name))

    # ── requests ──

    def cancel(self, request_id: str, message: str) -> bool:
        """End a request: its front tells the client, and the engine if the front does not. False if there is
        no such request."""
        if not self.ledger.abort(request_id, message):
            return False
        asyncio.get_running_loop().call_later(_ENGINE_CANCEL_S, self._cancel_in_engine, request_id)
        return True

    def _cancel_in_engine(self, request_id: str) -> None:
        accounts = self.ledger.accounts_of(request_id)
        for replica in self.replicas:
            if replica.account in accounts and replica.group is not None:
                replica.group.cancel_request(request_id)

    def _send(self, front: str, message: Admitted | Refused | Abort) -> None:
        known = self._by_name.get(front)
        if known is not None:
            known.send(message)


async def _first_of(ended: asyncio.Future[list[None]], hurry: asyncio.Event | None, timeout_s: float) -> None:
    """Wait for the first of three."""
    waits: list[asyncio.Future[object]] = [ended]  # type: ignore[list-item]
    hurried = asyncio.ensure_future(hurry.wait()) if hurry is not None else None
    if hurried is not None:
        waits.append(hurried)  # type: ignore[arg-type]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if hurried is not None:
        hurried.cancel()
