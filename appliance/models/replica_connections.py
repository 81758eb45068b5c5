"""Connects all replicas with the request manager and the fronts and passes the replicas' events on to
both."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from appliance.background import Background, in_own_thread
from appliance.channel.served_models import ServedModel
from appliance.models.registry import describe
from appliance.models.replica import Replica
from appliance.stalls import StallLog
from appliance.traffic.request_manager import RequestManager
from engine.rank_messages import Report

log = logging.getLogger(__name__)


class FrontChannels(Protocol):
    """Connects fronts with replicas."""

    def connect_replica(self, name: str, open_channel: Callable[[str], int]) -> None:
        """Open a channel between a ready replica and every front, including fronts that start later.
        `open_channel` returns a file descriptor: the replica's end of a channel to the named front. Raises
        OSError if a channel cannot be created."""

    def disconnect_replica(self, name: str) -> None:
        """Stop opening channels to a replica that has exited."""

    def channel_closed(self, front: str, replica: str) -> None:
        """Called when a front has closed its channel to a running replica."""


class ReplicaConnections:
    """Implements `appliance.models.replica_events.ReplicaEvents`. All methods must be called on the event
    loop thread."""

    def __init__(
        self,
        models: dict[str, ServedModel],
        failure: Callable[[str], str],
        requests: RequestManager,
        channels: FrontChannels,
        publish: Callable[[], None],
        note: Callable[[str, str], None],
    ) -> None:
        """`models` holds the model descriptions, which this class updates. `failure` returns why no replica
        of a model can start. `publish` and `note` are the model manager's callbacks."""
        self.was_ready: set[str] = set()
        """Models that have had a ready replica since startup."""
        self.stalls = StallLog()
        self._models = models
        self._failure = failure
        self._requests = requests
        self._channels = channels
        self._publish = publish
        self._note = note
        self._background = Background()

    def replica_starting(self, replica: Replica) -> None:
        # The files in the folder may have changed since the replica's last start.
        self._background.run(self._describe(replica, replica.incarnation))

    def replica_ready(self, replica: Replica) -> None:
        group, account = replica.group, replica.account
        if group is None or account is None:
            return
        self.was_ready.add(replica.model)
        self.learn(replica)
        self._requests.recover_model(replica.model)
        try:
            self._channels.connect_replica(replica.name, group.attach_front)
        except OSError as error:
            replica.kill(f"its channels to the fronts could not be created: {error}")
            return
        # Open the channels first, because a front needs its channel before a request is dispatched to the
        # replica.
        self.update(replica)
        self._publish()

    def replica_reported(self, replica: Replica, report: Report) -> None:
        # Look up the tenant first, because processing the report may remove the request that the report
        # names.
        request_id = report.longest_step.request_id if report.longest_step is not None else ""
        request = self._requests.state.in_flight.get(request_id)
        self.stalls.add(replica.name, time.time(), report, request.tenant if request is not None else "")
        if replica.account is not None:
            self._requests.report(replica.account, report)
        for front in report.disconnected_fronts:
            self._channels.channel_closed(front, replica.name)

    def replica_silence_changed(self, replica: Replica) -> None:
        self.update(replica)
        self._publish()

    def replica_exited(self, replica: Replica) -> None:
        self._channels.disconnect_replica(replica.name)
        self.stalls.forget(replica.name)
        if replica.account is not None:
            self._requests.lose_replica(replica.account)

    def replica_changed(self, replica: Replica) -> None:
        if self._failure(replica.model):
            self._requests.fail_model(replica.model, replica.failure)
        else:
            self._requests.recover_model(replica.model)
        self._publish()

    def replica_problem(self, replica: Replica, description: str) -> None:
        self._note(replica.name, description)

    def update(self, replica: Replica) -> None:
        """Start or stop dispatching requests to the replica, depending on `Replica.answers`. Call this
        whenever that property may have changed."""
        if (account := replica.account) is None:
            return
        self._requests.retire_replica(account)  # so that the replica is not added twice
        if replica.answers:
            self._requests.add_replica(account)

    async def _describe(self, replica: Replica, incarnation: int) -> None:
        try:
            model = await in_own_thread(
                lambda: describe(replica.model, replica.settings), replica.load_timeout_s
            )
        except OSError:  # or TimeoutError, which is an OSError
            return  # The engine also reads the folder and reports the error.
        if replica.incarnation == incarnation:
            replica.described = model
            if replica.account is not None:
                self.learn(replica)
                self._publish()

    def learn(self, replica: Replica) -> None:
        """Update the model's description with information from the replica and from the model's folder."""
        known = self._models.get(replica.model)
        if known is None:
            return
        model, info = replica.described or known, replica.info
        if info is not None:
            model = msgspec.structs.replace(
                model, max_model_len=info.max_model_len, vocab_size=info.vocab_size
            )
        if model.version != known.version:
            log.info("model %s: the version is now %s", model.name, model.version)
        self._models[model.name] = model
        self._requests.set_version(model.name, model.version)
        if replica.account is not None:
            replica.account.version = model.version
