"""The front pool: all front processes, and the messages that they receive and send.

                 Controller, ModelManager, reload hooks
                     │ set_count, connect_replica, publish_configuration, publish_identities, send
                     ▼
    Listeners ──► ConnectionBalancer ──► FrontPool ──► Front ──► one process
                                             │
             FrontRequests, configuration(), keep(), note(), on_availability()

In this diagram, calls go down. Messages from fronts go up, through the `FrontRequests` protocol and the
callbacks passed to the pool. The pool knows nothing about requests. All it stores about a replica is its name
and a function that opens a channel.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from appliance.background import Background
from appliance.channel.core_messages import Configure, CoreToFront, Identities
from appliance.channel.front_messages import (
    AboutRequest,
    Admit,
    Claim,
    FrontProgress,
    Keep,
    Rejected,
    Release,
    Retried,
    Settle,
    ShadowDone,
    Worked,
)
from appliance.front_pool.balancer import ConnectionBalancer
from appliance.front_pool.claims import Claims
from appliance.front_pool.front import Front, Untaken
from appliance.front_pool.identities import IdentityRegistry, changes
from appliance.front_pool.progress import ProgressReader
from appliance.settings import Settings

log = logging.getLogger(__name__)

_ROUTED_WITHIN_S = 20.0
"""Time limit, in seconds, for a front to confirm that it uses new routes. A confirmation normally takes
milliseconds."""
_ROUTED_CHECK_S = 0.005
_CLOSE_S = 1.0
_STOP_S = 3.0
"""Time, in seconds, that a front has to close its connections and exit before it is killed."""


class FrontRequests(Protocol):
    """Receives fronts' messages about requests and is notified when a front starts or exits."""

    def add_front(self, front: str) -> None: ...
    def lose_front(self, front: str) -> None: ...
    def admit(self, front: str, admit: Admit) -> None: ...
    def settle(self, front: str, settle: Settle) -> None: ...
    def reject(self, rejected: Rejected) -> None: ...
    def charge_work(self, worked: Worked) -> None: ...
    def log_retry(self, retried: Retried) -> None: ...
    def shadow_done(self, done: ShadowDone) -> None: ...


class FrontPool:
    """All front processes. All methods must be called on the event loop thread."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        *,
        requests: FrontRequests,
        identities: IdentityRegistry,
        configuration: Callable[[], Configure],
        keep: Callable[[Keep, int], None],
        note: Callable[[str, str], None],
        on_availability: Callable[[], None],
        on_wanted: Callable[[str], None],
        module: str,
    ) -> None:
        """Create the pool without starting any fronts.

        - `settings` returns the current settings.
        - `configuration` returns the current configuration for fronts.
        - `keep` stores prompts and answers.
        - `note` reports a problem (its location and description) to the operator.
        - `on_availability` is called when a front may have started or stopped accepting connections.
        - `on_wanted` is called repeatedly with a model's name while requests are waiting for the model to be
          loaded or woken.
        - `module` is the Python module to run as a front process.
        """
        self.fronts: list[Front] = []
        self.balancer = ConnectionBalancer(self.fronts, note)
        self.progress = ProgressReader(self.fronts)
        self._settings = settings
        self._requests = requests
        self._identities = identities
        self._configuration = configuration
        self._keep = keep
        self._note = note
        self._on_availability = on_availability
        self._on_wanted = on_wanted
        self._module = module
        self._claims = Claims()
        self._by_name: dict[str, Front] = {}
        """Fronts with a running process, keyed by process name."""
        self._replicas: dict[str, Callable[[str], int]] = {}
        """For each ready replica, the function that opens a channel to it."""
        self._numbers = itertools.count()
        self._leaving: set[Front] = set()
        self._sent_identities: Identities | None = None
        self._sent_configuration: Configure | None = None
        self._serial = 0
        self._started = False
        self._background = Background()
        self.set_count(settings().fronts)

    # ── start and stop ──

    def start(self) -> None:
        """Start all front processes."""
        self._started = True
        for front in self.fronts:
            front.start()

    async def stop(self) -> None:
        """Stop all front processes within a few seconds. Client connections are closed."""
        for front in self.fronts:
            front.begin_stop(_CLOSE_S)
        ended = asyncio.gather(*(front.ended() for front in self.fronts))
        await asyncio.wait([ended], timeout=_STOP_S)
        for front in self.fronts:
            front.kill("it did not exit in time")
        await ended

    def check(self) -> None:
        """Kill hung front processes. Call this a few times per second."""
        for front in self.fronts:
            front.check()

    def set_count(self, count: int) -> None:
        """Change the number of fronts to `count`. Surplus fronts finish the answers in progress and then
        exit."""
        settings = self._settings()
        staying = [front for front in self.fronts if front not in self._leaving]
        for front in staying[count:]:
            self._leaving.add(front)
            front.begin_stop(settings.drain_grace_s)
            self._background.run(self._remove(front))
        for _ in range(count - len(staying)):
            # Front numbers are not reused, so that a replica's late message about an exited front cannot be
            # mistaken for one about a different front.
            front = Front(
                next(self._numbers),
                self,
                hang_timeout_s=settings.hang_timeout_s,
                load_timeout_s=settings.load_timeout_s,
                log_level=settings.log_level,
                module=self._module,
            )
            self.fronts.append(front)
            if self._started:
                front.start()

    async def _remove(self, front: Front) -> None:
        await front.ended()
        self.fronts.remove(front)
        self._leaving.discard(front)

    def set_timeouts(self) -> None:
        """Apply the configured time limits after which front processes are killed."""
        for front in self.fronts:
            front.hang_timeout_s = self._settings().hang_timeout_s
            front.load_timeout_s = self._settings().load_timeout_s

    # ── messages to fronts ──

    def publish_identities(self) -> None:
        """Send every front the changes to the identity table."""
        table, sent = self._identities.current(), self._sent_identities
        if table is sent:
            return
        self._sent_identities = table
        if (news := table if sent is None else changes(sent, table)) is not None:
            for front in self.fronts:
                front.send(news)

    def publish_configuration(self) -> None:
        """If the configuration has changed, send it to every front."""
        sent, now = self._sent_configuration, self._configuration()
        if sent is not None:
            if msgspec.structs.replace(sent, serial=0) == now:
                return
            if sent.ready != now.ready:
                log.info("ready: all models can answer requests") if now.ready else log.info(
                    "not ready: %s", now.reason
                )
        self._serial += 1
        self._sent_configuration = msgspec.structs.replace(now, serial=self._serial)
        for front in self.fronts:
            self._configure(front)

    async def applied(self, timeout_s: float) -> bool:
        """Send the configuration to every front and wait until every ready front has applied it and loaded
        its models. Return False if this takes longer than `timeout_s` seconds."""
        self.publish_configuration()
        serial, deadline = self._serial, time.monotonic() + timeout_s
        while any(front.state == "ready" and front.report.configured < serial for front in self.fronts):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def routed(self) -> None:
        """Send the configuration to every front and wait until every front serving connections uses its
        routes. A front that does not confirm this in time is killed. A front that is starting gets the routes
        before its first connection."""
        self.publish_configuration()
        serial, checks = self._serial, 0
        while late := [front for front in self._serving() if front.report.routed < serial]:
            # Count checks instead of reading a clock, because a pause of the core must not count.
            checks += 1
            if checks * _ROUTED_CHECK_S > _ROUTED_WITHIN_S:
                for front in late:
                    front.kill(f"it did not confirm new routes within {_ROUTED_WITHIN_S:g} s")
            await asyncio.sleep(_ROUTED_CHECK_S)

    def prepares(self, unit: str) -> bool:
        """Return whether a front may still be preparing a request for this model, even if no route leads to
        the model any more."""
        serial = self._serial
        return any(
            front.report.routed < serial or unit in front.report.preparing for front in self._serving()
        )

    def problem_with(self, unit: str) -> str:
        """Return why a front cannot serve this model, or an empty string if every front can."""
        found = (
            f"{front.name}: {front.report.problems[unit]}"
            for front in self.fronts
            if unit in front.report.problems
        )
        return next(found, "")

    def _serving(self) -> list[Front]:
        return [
            front for front in self.fronts if front.state in ("ready", "stopping") and front.pid is not None
        ]

    def send(self, front: str, message: CoreToFront) -> None:
        """Send a message to the front process with this name, unless it has exited."""
        known = self._by_name.get(front)
        if known is not None:
            known.send(message)

    def _configure(self, front: Front) -> None:
        if self._sent_configuration is not None:
            front.configure(msgspec.structs.replace(self._sent_configuration, front=front.name))

    # ── channels to replicas ──

    def connect_replica(self, name: str, open_channel: Callable[[str], int]) -> None:
        """Connect every front, including fronts that start later, to a replica that has become ready.
        `open_channel` returns the descriptor of a new channel for the named front. Raises OSError if too many
        files are open."""
        for front in self._by_name.values():
            front.attach(name, open_channel(front.name))
        self._replicas[name] = open_channel

    def disconnect_replica(self, name: str) -> None:
        """Stop opening channels to an exited replica."""
        self._replicas.pop(name, None)

    def channel_closed(self, front: str, replica: str) -> None:
        """Restart a front that has closed its channel to a running replica, because the front is either
        exiting or unable to use the replica."""
        known = self._by_name.get(front)
        if known is not None and known.state != "stopping":
            known.kill_soon(f"it closed its channel to {replica}")

    # ── messages from fronts (FrontEvents) ──

    def front_started(self, front: Front) -> None:
        self._by_name[front.name] = front
        self._requests.add_front(front.name)
        self._configure(front)
        front.send(self._sent_identities or self._identities.current())
        for name, open_channel in self._replicas.items():
            front.attach(name, open_channel(front.name))

    def front_available(self, front: Front) -> None:
        self.balancer.assign()
        self._on_availability()

    def front_returns(self, front: Front, connection: Untaken) -> None:
        self.balancer.assign(connection)
        self._on_availability()

    def name_wanted(self, name: str) -> None:
        self._on_wanted(name)

    def request_message(self, front: Front, message: AboutRequest) -> None:
        requests = self._requests
        if isinstance(message, Admit) and message.shadow_of:
            requests.admit(front.name, message)
        elif isinstance(message, Admit):
            # The front only identifies the caller. The core reads the caller's rights from its own table.
            identity = self._identities.of(message.identity)
            requests.admit(front.name, msgspec.structs.replace(message, identity=identity))
        elif isinstance(message, Settle):
            requests.settle(front.name, message)
        elif isinstance(message, Retried):
            requests.log_retry(message)
        elif isinstance(message, Worked):
            requests.charge_work(message)
        elif isinstance(message, ShadowDone):
            requests.shadow_done(message)
        elif isinstance(message, Claim):
            front.send(self._claims.claim(front.name, message))
        elif isinstance(message, Release):
            self._claims.release(message.scope)
        else:
            requests.reject(message)

    def front_hands_over(self, front: Front, scope: bytes, connection: Untaken) -> None:
        owner = self._by_name.get(self._claims.owner(scope))
        if owner is not None:
            try:
                owner.give(connection)
                return
            except OSError:
                # Too many files are open. Any front may take the connection and hand it over again later.
                pass
        # If no front owns the key, the answer was lost while the connection was being passed on, and the
        # front that receives the connection reruns the request.
        self.balancer.assign(connection)

    def front_keeps(self, front: Front, message: Keep, descriptor: int) -> None:
        # The front only identifies the caller. The core's own table determines which texts may be stored.
        identity = self._identities.of(message.identity)
        self._keep(msgspec.structs.replace(message, identity=identity), descriptor)

    def front_progress(self, front: Front, message: FrontProgress) -> None:
        self.progress.take(front.name, message)

    def front_changed(self, front: Front, former: dict[str, str]) -> None:
        for model, reason in front.report.problems.items():
            if former.get(model) != reason:
                self._note(front.name, f"model {model!r} cannot be used: {reason}")
        self.publish_configuration()

    def front_exited(self, front: Front, name: str) -> None:
        del self._by_name[name]
        self.progress.lose_front(name)
        self._requests.lose_front(name)
        if removed := self._claims.lose_front(name):
            log.warning(
                "%s exited with %d stored answers: retries will run these requests again", name, removed
            )
        self.balancer.assign(*front.take_back())
        self._on_availability()
        self.publish_configuration()

    def front_problem(self, front: Front, description: str) -> None:
        self._note(front.name, description)
