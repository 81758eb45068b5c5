"""Represents one front process in the core: starts the process, sends it the configuration and connections,
and restarts it after it exits. A `Front` does not depend on requests, models or other fronts. It passes the
process's messages to a `FrontEvents`, implemented by `appliance.front_pool.pool.FrontPool`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Iterable

import msgspec

from appliance.background import Backoff
from appliance.channel.core_messages import AttachReplica, ClientConnection, Configure, CoreToFront, StopFront
from appliance.channel.front_messages import (
    FrontProgress,
    FrontReady,
    FrontReport,
    FrontToCore,
    HandOver,
    Keep,
    NotTaken,
    Taken,
)
from appliance.channel.front_stats import FrontStats
from appliance.front_pool.front_child import FrontChild
from appliance.front_pool.front_events import FrontEvents
from appliance.front_pool.refusals import RefusalWatch
from appliance.protocol import LogLevel
from appliance.protocol.status import FrontState, FrontStatus

log = logging.getLogger(__name__)

_MAX_UNREAD_BYTES = 64 << 10
"""The core stops sending connections to a front while its control channel has more unread bytes than this."""
_MAX_UNTAKEN = 12
"""Maximum number of connections that have been sent to a front but not yet taken by it. This is less than
half of the descriptors that a front keeps free (`RESERVED_DESCRIPTORS`), because the descriptors of an equal
number of closed connections may still be open while the front takes the new ones. A connection handed over by
another front comes with a second descriptor, from which the front reads the request before closing it. If
many such connections use up the reserve, the front returns the connections it cannot receive (`NotTaken`).
The maximum is also at most an eighth of the core's descriptor limit, because the core keeps duplicates of
each connection's descriptors, and the kernel counts descriptors in transit on a channel against the same
limit.
"""
_QUIET_S = 3.0
"""The core stops sending connections to a front that has sent no message for this many seconds. Fronts
normally report twice a second."""
_SLOW_START_S = 30.0
"""A front that takes longer than this many seconds to start is reported as a problem. Reading a model's
tokenizer takes about two seconds."""
_NO_REPORT = FrontReport()


class Untaken:
    """An accepted connection that no front has taken yet. This object owns the connection's descriptors."""

    def __init__(self, connection: ClientConnection, descriptors: Iterable[int]) -> None:
        self.connection = connection
        self.descriptors = list(descriptors)

    def close(self) -> None:
        """Close the connection's descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())


class Front:
    """Supervises one front process. All methods must be called on the event loop thread. That thread must
    keep running, because the kernel kills a front process when the thread that spawned it exits. Every
    process has a unique name ("front-0", then "front-0.1", …), so that a replica's late message about an
    exited front cannot be mistaken for one about its successor.
    """

    def __init__(
        self,
        number: int,
        events: FrontEvents,
        *,
        hang_timeout_s: float,
        load_timeout_s: float,
        log_level: LogLevel = "info",
        module: str = "appliance.front",
    ) -> None:
        self.number = number
        self.name = f"front-{number}"
        self.state: FrontState = "stopped"
        self.detail = ""
        self.restarts = 0
        self.last_error = ""
        self.max_connections = 0
        """The configured maximum number of connections from authenticated clients."""
        self._events = events
        self.hang_timeout_s = hang_timeout_s
        self.load_timeout_s = load_timeout_s
        self._module = module
        self.log_level = log_level
        self._backoff = Backoff()
        self._child: FrontChild | None = None
        self._report: FrontReport | None = None
        self._started_at = 0.0
        self._ready_at: float | None = None
        self._last_sign = 0.0
        self._silent = False
        """Whether the process had been silent for `_QUIET_S` at the last check and has sent no message
        since."""
        self._given = 0
        """Number of connections given to the current process."""
        self._untaken: dict[int, Untaken] = {}
        """Connections given to the process but not yet read by it, keyed by connection number."""
        self._max_untaken = _max_untaken()
        self._receives_connections = True
        """False if the process has run out of file descriptors and returned a connection since its last
        report, otherwise True."""
        self._refusals = RefusalWatch()
        self._stopping = False
        self._ended = asyncio.Event()
        self._ended.set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running front process, or None."""
        return self._child.pid if self._child else None

    @property
    def takes_connections(self) -> bool:
        """Whether the front can currently be given a connection."""
        child = self._child
        if self.operator_state != "ready" or child is None or not self._receives_connections:
            return False
        return child.channel.backlog_bytes < _MAX_UNREAD_BYTES and len(self._untaken) < self._max_untaken

    @property
    def has_capacity(self) -> bool:
        """Whether the front has room for another connection. Connections that were sent but not yet taken
        count as well. A full front still accepts connections, but refuses them with 503."""
        report = self._report
        return report is None or report.busy_connections + len(self._untaken) < report.max_connections

    @property
    def report(self) -> FrontReport:
        """The process's latest report, or an empty report if it has sent none."""
        return self._report or _NO_REPORT

    @property
    def operator_state(self) -> FrontState:
        """The state shown to operators. A ready front that has stopped reporting is "silent"."""
        return "silent" if self.state == "ready" and self._silent else self.state

    @property
    def _silent_s(self) -> float:
        return time.monotonic() - self._last_sign

    @property
    def _starting_s(self) -> float:
        """How long the front has been starting, in seconds, or 0 if it is not starting."""
        return time.monotonic() - self._started_at if self.state == "starting" else 0.0

    # ── start and stop ──

    def start(self) -> None:
        """Spawn the front process. If that fails, retry after the same delay as after an exit."""
        self.name = f"front-{self.number}" + (f".{self.restarts}" if self.restarts else "")
        self.state, self.detail = "starting", ""
        self._report, self._ready_at = None, None
        self._given, self._refusals, self._receives_connections = 0, RefusalWatch(), True
        self._started_at = self._last_sign = time.monotonic()
        self._silent = False
        try:
            child = FrontChild(self._module, self.name, self.log_level, self._message, self._exited)
        except OSError as error:
            self._restart(f"the front process could not be started: {error}")
            return
        self._child = child
        self._ended.clear()
        log.info("%s is starting (pid %d)", self.name, child.pid)
        try:
            self._events.front_started(self)
        except OSError as error:
            self.kill(f"its channels could not be created: {error}")

    def send(self, message: CoreToFront) -> None:
        """Send a message to the front process if it is running."""
        if self._child is not None:
            self._child.channel.send(message)

    def configure(self, configure: Configure) -> None:
        """Send the configuration to the front process."""
        self.max_connections = configure.limits.max_connections
        self.send(configure)

    def attach(self, replica: str, descriptor: int) -> None:
        """Send a replica channel's descriptor to the front process and close this process's copy. Raises
        OSError if too many files are open."""
        try:
            if self._child is not None:
                self._child.channel.send(AttachReplica(replica), (descriptor,))
        finally:
            os.close(descriptor)

    def give(self, untaken: Untaken) -> None:
        """Send a client connection to the front process, which must be running. Raises OSError if too many
        files are open; the caller then still owns the connection."""
        assert self._child is not None
        connection = msgspec.structs.replace(untaken.connection, number=self._given + 1)
        self._child.channel.send(connection, tuple(untaken.descriptors))
        self._given += 1
        self._untaken[self._given] = untaken

    def take_back(self) -> list[Untaken]:
        """Return the connections that the process had not yet read from when it exited."""
        untaken, self._untaken = list(self._untaken.values()), {}
        return untaken

    def begin_stop(self, grace_s: float) -> None:
        """Let the front process finish the answers in progress and exit. The process is not restarted."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self._child is None:
            self.state, self.detail = "stopped", ""
            return
        self.state = "stopping"
        self.send(StopFront(grace_s))

    async def ended(self) -> None:
        """Wait until the front process has exited."""
        await self._ended.wait()

    def kill(self, reason: str) -> None:
        """Kill the front process immediately."""
        if self._child is not None:
            self._child.kill(reason)

    def kill_soon(self, reason: str) -> None:
        """Kill the front process unless it exits within half a second."""
        if self._child is not None:
            self._child.kill_soon(reason)

    def check(self) -> None:
        """Kill the front process if it hangs or takes too long to start, and notice if it is silent. Must be
        called about once a second. A call must not directly follow a pause of the core, after which no
        message has been read and every front would count as silent."""
        self._silent = self._silent_s > _QUIET_S
        limit_s = self.load_timeout_s if self._ready_at is None else self.hang_timeout_s
        if self._silent_s > limit_s:
            self.kill(f"it sent no message for {self._silent_s:.0f} s while {self.state}")
        elif self._starting_s > self.load_timeout_s:
            self.kill(f"it was not ready within {self._starting_s:.0f} s of its start (load_timeout_s)")

    def _message(self, message: FrontToCore) -> None:
        self._last_sign, self._silent = time.monotonic(), False
        if isinstance(message, FrontReport):
            before, self._report = self.report, message
            self._receives_connections = True
            if message.problems != before.problems:
                self._events.front_changed(self, before.problems)
            self._events.front_available(self)
            for name in message.wanted:
                self._events.name_wanted(name)
            for problem in self._refusals.problems(message):
                self._events.front_problem(self, problem)
            for model, (count, reason) in message.template_problems.items():
                if count > before.template_problems.get(model, (0, ""))[0]:
                    self._events.front_problem(self, f"model {model!r}: {reason}")
        elif isinstance(message, FrontReady):
            if self.state == "starting":
                self.state, self._ready_at = "ready", time.monotonic()
                log.info("%s is ready", self.name)
                self._events.front_available(self)
        elif isinstance(message, Taken):
            took_connections = self.takes_connections
            if (taken := self._untaken.pop(message.number, None)) is not None:
                taken.close()
            if not took_connections:
                self._events.front_available(self)
        elif isinstance(message, NotTaken):
            self._receives_connections = False
            if (untaken := self._untaken.pop(message.number, None)) is not None:
                self._events.front_returns(self, untaken)
        elif isinstance(message, HandOver):
            if descriptors := self._descriptors(2):
                connection = ClientConnection(message.peer, has_request=True)
                self._events.front_hands_over(self, message.scope, Untaken(connection, descriptors))
        elif isinstance(message, Keep):
            for descriptor in self._descriptors(1):
                try:
                    self._events.front_keeps(self, message, descriptor)
                finally:
                    os.close(descriptor)
        elif isinstance(message, FrontProgress):
            self._events.front_progress(self, message)
        else:
            self._events.request_message(self, message)

    def _descriptors(self, count: int) -> list[int]:
        """Return the descriptors sent with a message; the caller must close them. If the kernel has dropped
        any of them because this process has too many open files, close the others and return an empty
        list."""
        taken: list[int] = []
        try:
            if self._child is not None:
                for _ in range(count):
                    taken.append(self._child.channel.take_fd())
        except LookupError:
            while taken:
                os.close(taken.pop())
            self._events.front_problem(
                self,
                "a file descriptor could not be received because too many files are open: raise the "
                "open file limit (ulimit -n)",
            )
        return taken

    def _exited(self, reason: str) -> None:
        child, self._child, self._report = self._child, None, None
        assert child is not None
        self._ended.set()
        self._events.front_exited(self, self.name)
        if not self._stopping:
            self._restart(f"pid {child.pid} ended: {reason}")
            return
        self.state, self.detail = "stopped", ""
        if child.kill_reason:
            self._events.front_problem(self, f"pid {child.pid} was killed: {child.kill_reason}")

    def _restart(self, error: str) -> None:
        self.last_error = error
        served_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        delay_s = self._backoff.delay_s(served_s)
        self.state, self.detail = "restarting", f"restarting in {delay_s:.1f} s"
        self.restarts += 1
        self._events.front_problem(self, error)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.start)

    # ── status for operators ──

    def status(self) -> FrontStatus:
        """Return the front's status for operators."""
        report = self._report
        stats = {name: getattr(report, name) for name in FrontStats.__struct_fields__} if report else {}
        return FrontStatus(
            **stats,
            name=self.name,
            state=self.operator_state,
            detail=self._explained(report),
            pid=self.pid,
            restarts=self.restarts,
            last_error=self.last_error,
            cpu_us_per_token=report.cpu_seconds * 1e6 / report.tokens if report and report.tokens else None,
        )

    def _explained(self, report: FrontReport | None) -> str:
        """Return an explanation of the front's state for operators, or an empty string if all is well."""
        if self._starting_s > _SLOW_START_S:
            return (
                f"starting for {self._starting_s:.0f} s: the models' tokenizers and chat "
                "templates are still loading; the process will be killed and restarted after "
                f"load_timeout_s = {self.load_timeout_s:g}"
            )
        if self.operator_state == "silent":
            return f"no report for {self._silent_s:.0f} s: the process gets no new connections"
        return self.detail or (self._limits_reached(report) if report else "")

    def _limits_reached(self, report: FrontReport) -> str:
        """Describe the connection limit that the front has reached, or return an empty string if it has
        reached none."""
        if report.max_connections and report.busy_connections >= report.max_connections:
            return (
                f"full: all {report.max_connections:,} connections are in use, and new connections are "
                "refused"
            )
        if 0 < report.max_connections < self.max_connections:
            return (
                f"the open file limit allows only {report.max_connections:,} connections, fewer "
                f"than limits.max_connections = {self.max_connections:,}: raise the open file limit "
                "(ulimit -n)"
            )
        return ""


def _max_untaken() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MAX_UNTAKEN, max(descriptors // 8, 1))
