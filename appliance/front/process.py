"""Runs the front process, which receives messages from the core and reports back to it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import socket
from functools import partial

from appliance.channel.core_messages import (
    Abort,
    Admitted,
    AskProgress,
    AttachReplica,
    Claimed,
    ClientConnection,
    Configure,
    CoreToFront,
    Identities,
    Preempted,
    Refused,
    StopFront,
)
from appliance.channel.front_messages import FrontProgress, FrontReady, FrontReport, NotTaken, Taken
from appliance.front.app import build_app
from appliance.front.app_state import AppState
from appliance.front.capacity import descriptors_for_connections, limits_within
from appliance.host.memory_files import read_memory
from appliance.http import HttpServer
from engine.client import Channel
from engine.logs import log_state

log = logging.getLogger(__name__)

_REPORT_EVERY_S = 0.5
_MEND_EVERY_S = 5.0
"""Interval, in seconds, at which the front looks for changes to the files of models that could not be
loaded."""
_ERROR_EVENT_GRACE_S = 1.0
"""Time, in seconds, allowed after the grace period for sending error events to the clients of unfinished
requests."""


class FrontProcess:
    """Runs a front process on the current event loop, from its first message until `ended` is set."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel: Channel[CoreToFront] = Channel(sock, CoreToFront)
        self._state = AppState(self._channel.send, self._channel.send, self._tell)
        _, application = build_app(self._state)
        identities = self._state.identities
        self._server = HttpServer(application, known=identities.knows, tenant_of=identities.tenant_of)
        self._configurations: asyncio.Queue[Configure] = asyncio.Queue()
        self._latest: Configure | None = None
        self._configured = self._routed = 0
        self._unreceived = 0
        """Number of connections whose descriptors could not be received."""
        self._is_configured = False
        """Whether the first configuration has been applied."""
        self.ended = asyncio.Event()
        """An event that is set when the front has stopped."""

    def start(self) -> None:
        """Start receiving the core's messages and sending reports."""
        self._channel.listen(self._take, _core_exited)
        self._state.background.run(self._configure())
        self._state.background.run(self._report())
        self._state.background.run(self._mend())

    # ── messages from the core ──

    def _take(self, message: CoreToFront) -> None:
        if isinstance(message, Admitted):
            generation = self._state.active.get(message.request_id)
            if generation is not None:
                generation.admitted(message)
        elif isinstance(message, ClientConnection):
            self._take_connection(message)
        elif isinstance(message, Claimed):
            self._state.retries.take(message)
        elif isinstance(message, Refused):
            generation = self._state.active.get(message.request_id)
            if generation is not None:
                generation.refused(message)
        elif isinstance(message, Abort):
            generation = self._state.active.get(message.request_id)
            if generation is not None:
                generation.abort(message.message)
        elif isinstance(message, Preempted):
            generation = self._state.active.get(message.request_id)
            if generation is not None:
                generation.preempted()
        elif isinstance(message, AskProgress):
            running = self._state.active.values()
            self._channel.send(FrontProgress(message.number, [one.progress() for one in running]))
        elif isinstance(message, Identities):
            self._state.identities.take(message)
        elif isinstance(message, AttachReplica):
            try:
                self._state.replicas.attach(message.replica, self._take_socket())
            except LookupError:
                # The front cannot work without this channel, so it exits, and the core restarts it.
                log.error(
                    "too many open files to open the channel to replica %s: raise the open file limit "
                    "(ulimit -n)",
                    message.replica,
                )
                os._exit(1)
        elif isinstance(message, Configure):
            self._configurations.put_nowait(message)
            # Apply this part of the configuration immediately: during a drain, the very next request must be
            # refused, but loading models may take a long time.
            self._state.silent_models = self._state.silent_models | message.silent
            if not message.ready:
                self._state.ready, self._state.not_ready_reason = False, message.reason
            catalog = self._state.catalog
            catalog.max_held, catalog.hold_timeout_s = message.max_held, message.hold_timeout_s
            catalog.route(message.routes)
            self._routed = message.serial
            if self._is_configured:
                self._tell()
        elif isinstance(message, StopFront):
            self._state.background.run(self._stop(message.grace_s))

    def _take_connection(self, message: ClientConnection) -> None:
        sock = None
        try:
            sock = self._take_socket()
            request = read_memory(self._channel.take_fd()) if message.has_request else b""
        except LookupError:
            # The kernel has dropped a descriptor because this process has too many open files.
            if sock is not None:
                sock.close()
            self._unreceived += 1
            self._limit_connections()
            self._server.make_space()
            self._channel.send(NotTaken(message.number))
            return
        # If this process exits before sending `Taken`, the core gives the connection to another front.
        taken = partial(self._channel.send, Taken(message.number))
        self._state.background.run(self._server.adopt(sock, message.peer, request, taken))

    def _take_socket(self) -> socket.socket:
        return socket.socket(fileno=self._channel.take_fd())

    async def _configure(self) -> None:
        """Apply configurations in the order in which they arrive from the core. If one fails, log the error
        and continue with the next."""
        while True:
            configure = self._latest = await self._configurations.get()
            try:
                await self._apply(configure)
            except Exception:
                log.exception("applying configuration %d failed", configure.serial)

    async def _apply(self, configure: Configure) -> None:
        """Apply a configuration. The first configuration makes the front ready."""
        self._state.limits = self._state.bodies.limits = configure.limits
        self._limit_connections()
        self._state.retries.rules = configure.retries
        self._state.keeper.rules = configure.keeping
        await self._state.catalog.replace(configure.models)
        if self._configurations.empty():
            self._state.ready, self._state.not_ready_reason = configure.ready, configure.reason
            self._state.silent_models = configure.silent
        self._configured = configure.serial
        logging.getLogger().setLevel(configure.log_level.upper())
        self._tell()
        if not self._is_configured:
            self._is_configured = True
            # All current objects are permanent, so exempt them from garbage collection.
            gc.collect()
            gc.freeze()
            self._channel.send(FrontReady())
            log.info(
                "serving %d %s", len(configure.models), "model" if len(configure.models) == 1 else "models"
            )

    async def _mend(self) -> None:
        """Periodically retry failed model loads by reapplying the latest configuration."""
        while True:
            await asyncio.sleep(_MEND_EVERY_S)
            if self._state.catalog.problems and self._latest is not None and self._configurations.empty():
                self._configurations.put_nowait(self._latest)

    async def _stop(self, grace_s: float) -> None:
        state = self._state
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        stopping = asyncio.create_task(self._server.stop(grace_s + _ERROR_EVENT_GRACE_S))
        while state.active and loop.time() < deadline:
            await asyncio.sleep(0.02)
        for generation in list(state.active.values()):
            generation.abort("the service stopped before this request was finished")
        await stopping
        await state.keeper.flush()
        # Wait until the core has received `Settle` for the last requests.
        deadline = loop.time() + _ERROR_EVENT_GRACE_S
        while self._channel.backlog_bytes and loop.time() < deadline:
            await asyncio.sleep(0.01)
        self.ended.set()

    # ── reports to the core ──

    async def _report(self) -> None:
        while True:
            self._limit_connections()
            self._tell()
            await asyncio.sleep(_REPORT_EVERY_S)

    def _limit_connections(self) -> None:
        limits = self._state.limits
        descriptors = descriptors_for_connections(limits, self._server.connections)
        self._server.limits = limits_within(limits, descriptors)

    def _tell(self) -> None:
        state, server = self._state, self._server
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._channel.send(
            FrontReport(
                connections=server.connections,
                busy_connections=server.known_pool.busy,
                max_connections=server.limits.max_connections,
                unauthenticated_connections=len(server.unknown_pool),
                refused_connections=server.refused,
                evicted_connections=server.unknown_pool.evicted,
                cut_off_connections=server.cut_off.total,
                unreceived_connections=self._unreceived,
                refused_bodies=state.bodies.refused,
                refused_heads=server.request_memory.refused,
                refused_prompts=state.refused_prompts,
                streams=state.streams,
                requests=state.requests,
                tokens=state.tokens,
                unauthenticated=state.denials.total,
                cpu_seconds=usage.ru_utime + usage.ru_stime,
                kept_answers=len(state.retries.runs),
                kept_bytes=state.retries.kept_bytes,
                dropped_texts=state.keeper.dropped,
                problems=state.catalog.problems,
                template_problems=state.catalog.template_problems,
                log_dropped_lines=log_state().dropped_lines,
                configured=self._configured,
                routed=self._routed,
                preparing=state.catalog.preparing,
                wanted=state.catalog.wanted,
            )
        )


def _core_exited() -> None:
    """Exit immediately, closing all client connections, because the core has exited."""
    os._exit(0)


async def run_front(sock: socket.socket) -> None:
    """Serve requests until the core stops this front process."""
    front = FrontProcess(sock)
    front.start()
    await front.ended.wait()
