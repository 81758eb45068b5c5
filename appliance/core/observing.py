"""The components that read and record the service's state: snapshots and their history, the event stream, log
lines, usage and forecasts."""

from __future__ import annotations

import contextlib

from appliance.admin.checks import CheckRunner, examination_routes
from appliance.admin.events import EventFeeds, event_route
from appliance.admin.kv_blocks import BlockMaps, kv_blocks_route
from appliance.admin.log_reading import LogReading
from appliance.admin.log_routes import log_routes
from appliance.admin.running import RunningRequests
from appliance.admin.snapshots import SnapshotParts, SnapshotReader
from appliance.admin.status import StatusReader
from appliance.admin.streams import Streams
from appliance.admin.telemetry_routes import telemetry_routes
from appliance.admin.what_if import WhatIf, what_if_routes
from appliance.core.log_lines import LogLines
from appliance.core.recording import Recorder
from appliance.core.reload import LiveSettings
from appliance.core.serving import ServingParts
from appliance.core.state import State
from appliance.monitoring.alerts.manager import AlertManager
from appliance.monitoring.ended import EndedRequests
from appliance.monitoring.machine_reader import MachineReader
from appliance.monitoring.samples import CounterSampler
from store.telemetry import TelemetryLog


class ObservingParts:
    """The components that read and record the service's state."""

    def __init__(
        self,
        settings: LiveSettings,
        state: State,
        parts: ServingParts,
        ended: EndedRequests,
        status: StatusReader,
        alerts: AlertManager,
        held: contextlib.AsyncExitStack,
    ) -> None:
        """The `held` exit stack closes everything that the constructor opens."""
        control = state.control
        lines = LogLines()
        lines.attach()
        held.callback(lines.close)
        self._streams = Streams()
        reading = LogReading(state.history, control, lines, self._streams, lambda: settings.current.prices)
        held.callback(reading.close)
        self.running = RunningRequests(parts.requests.state, parts.fronts.progress, lambda: control.policies)
        self._sampler = CounterSampler(lambda: parts.models.replicas, parts.requests.state, ended)
        snapshots = SnapshotParts(
            status=status,
            running=self.running,
            sampler=self._sampler,
            ended=ended,
            policies=lambda: control.policies,
            alerts=alerts.list,
            stalls=parts.models.connections.stalls.list,
            machine=MachineReader(reading.threads),
        )
        blocks = BlockMaps(lambda: parts.models.replicas, parts.requests.state)
        self._recorder = Recorder(
            SnapshotReader(snapshots).read,
            TelemetryLog(state.history),
            blocks.recent,
            [alerts.observe],
        )
        # A reader that receives one frame per second receives exactly the recorded snapshots.
        feeds = EventFeeds(
            lambda hz: self._recorder.reader() if hz == 1 else SnapshotReader(snapshots).read, self._streams
        )
        checks = CheckRunner(settings)
        held.callback(checks.close)
        self.routes = [
            *log_routes(reading, self._streams),
            *telemetry_routes(state.history.path, reading.threads),
            *examination_routes(checks),
            event_route(feeds, self._streams),
            kv_blocks_route(blocks),
            *what_if_routes(
                WhatIf(parts.requests.state, lambda: control.policies, lambda: settings.current.queue)
            ),
        ]
        """Admin API routes that read the service's state."""

    def start(self) -> None:
        """Start recording the service's state."""
        self._sampler.start()
        self._recorder.start()

    async def stop(self) -> None:
        """Stop recording and end all streams."""
        await self._recorder.stop()
        self._sampler.stop()
        self._streams.close()
