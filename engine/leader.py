"""Rank 0's main loop: reads messages, runs steps, sends outputs to the front processes, and reports to the
core."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from engine.block_survey import BlockSurvey
from engine.core import EngineCore, StepResult, StepTiming
from engine.logs import log_state
from engine.messages import Cancel, DataInbound, StepFrame, Submit
from engine.plan import StepPlan
from engine.rank_messages import (
    AskBlocks,
    Attach,
    CancelSequences,
    LongStep,
    RankInbound,
    Report,
    Sleep,
    Stop,
    Wake,
)
from engine.sleeping import SleepControl
from engine.step_forecast import StepForecast
from engine.wire import Channel

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
"""Interval, in seconds, between reports while no step is running."""
REPORT_S = 0.1
"""Maximum interval, in seconds, between reports while steps are running. Inference gateways treat a replica
as saturated if its cache statistics are older than 200 ms."""


class LeaderLoop:
    """Runs rank 0's step loop and exchanges messages with the core and the front processes."""

    def __init__(
        self,
        engine: EngineCore,
        control: Channel[RankInbound],
        forecast: StepForecast,
        sleeping: SleepControl,
    ) -> None:
        self._engine = engine
        self._sleeping = sleeping
        engine.before_wait = self._before_wait
        self._survey = BlockSurvey(engine.scheduler)
        self._forecast = forecast
        self._scheduler = engine.scheduler
        self._control = control
        self._fronts: dict[str, Channel[DataInbound]] = {}
        self._disconnected_fronts: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._register(control, self._read_control)
        # `run` polls `sleeping` after every wait, so the descriptor of `sleeping` is only needed to end a
        # wait.
        self._selector.register(sleeping, selectors.EVENT_READ)
        self._stopping = False
        self._reported_at = 0.0
        self._decode_steps, self._mixed_steps = StepMeans(), StepMeans()

    def run(self) -> None:
        """Serve requests until the core sends Stop or closes its channel."""
        while not (self._stopping or self._control.closed):
            self._read_messages()
            if (changed := self._sleeping.poll()) is not None:
                self._control.send(changed)
            if self._engine.has_work:
                self._emit(self._engine.step())
                continue
            while self._survey.active:
                self._survey_blocks()
            if time.monotonic() - self._reported_at >= HEARTBEAT_S:
                self._report(None)

    def _read_messages(self) -> None:
        """Read messages from the core and the front processes, and write queued output. Waits for a message
        if there is no work."""
        # Remove closed channels before reading new messages, because an Attach message may reuse a closed
        # channel's descriptor number.
        for front in [name for name, channel in self._fronts.items() if channel.closed]:
            self._drop_front(front)
        self._select_backlogs()
        timeout = 0.0
        if not self._engine.has_work:
            timeout = max(0.0, self._reported_at + HEARTBEAT_S - time.monotonic())
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._sleeping:
                continue
            channel, read = key.data
            if events & selectors.EVENT_WRITE:
                channel.flush()
            if events & selectors.EVENT_READ:
                read()

    def _register(self, channel: Channel[Any], read: Callable[[], None]) -> None:
        """Call `read` whenever a channel is readable."""
        self._selector.register(channel, selectors.EVENT_READ, (channel, read))

    def _select_backlogs(self) -> None:
        """Watch a channel for writability only while it has queued output."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is self._sleeping:
                continue
            channel, _ = key.data
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.backlog_bytes else 0)
            if events != key.events:
                self._selector.modify(channel, events, key.data)

    def _read_control(self) -> None:
        for message in self._control.read():
            match message:
                case Attach(front):
                    self._attach(front)
                case CancelSequences(request_id):
                    self._scheduler.cancel_request(request_id)
                case Sleep():
                    self._sleeping.request(True)
                case Wake():
                    self._sleeping.request(False)
                case AskBlocks():
                    self._survey.request()
                case Stop():
                    self._stopping = True

    def _attach(self, front: str) -> None:
        """Receive the channel to a front process. If the kernel has dropped the channel's descriptor, report
        the front as disconnected, so that the core restarts it."""
        try:
            sock = socket.socket(fileno=self._control.take_fd())
        except LookupError:
            log.error(
                "too many open files to open the channel to %s: raise the open file limit (ulimit -n)", front
            )
            self._disconnected_fronts.append(front)
            return
        channel: Channel[DataInbound] = Channel(sock, DataInbound)
        self._fronts[front] = channel
        self._register(channel, partial(self._read_front, front))

    def _read_front(self, front: str) -> None:
        channel = self._fronts[front]
        for message in channel.read():
            match message:
                case Submit():
                    self._scheduler.add(front, message)
                case Cancel(handle, sample):
                    self._scheduler.cancel(front, handle, sample)
        if channel.closed:
            self._drop_front(front)

    def _drop_front(self, front: str) -> None:
        """Remove a front process whose channel has closed, because the process exited, sent an invalid frame,
        or left too much output unread."""
        self._selector.unregister(self._fronts.pop(front))
        self._scheduler.cancel_origin(front)
        self._disconnected_fronts.append(front)
        if not self._engine.has_work:
            self._report(None)

    def _emit(self, result: StepResult) -> None:
        for front, outputs in result.outputs.items():
            channel = self._fronts.get(str(front))
            if channel is not None:
                channel.send(StepFrame(result.step, outputs))
        if result.timing is not None:
            steps = self._mixed_steps if result.timing.mixed else self._decode_steps
            steps.add(result.timing)
            self._forecast.learn(result.timing.plan, result.timing.ms / 1e3)
        news = result.finished or result.credits_changed or self._disconnected_fronts
        if news or time.monotonic() - self._reported_at >= REPORT_S:
            self._report(result)

    def _before_wait(self, plan: StepPlan) -> None:
        """Before waiting for the device, announce a long step and continue the block survey if the core has
        requested one."""
        self._announce(plan)
        self._survey_blocks()

    def _survey_blocks(self) -> None:
        if (use := self._survey.advance()) is not None:
            self._control.send(use)

    def _announce(self, plan: StepPlan) -> None:
        """Announce a step that will take longer than a heartbeat interval, so that the core does not consider
        this replica hung."""
        expected_s = self._forecast.predict_s(plan)
        if expected_s > HEARTBEAT_S:
            self._control.send(LongStep(expected_s))

    def _report(self, result: StepResult | None) -> None:
        # The scheduler may have postponed some of a disconnected front's cancellations to later steps.
        open_fronts = [one for one in self._disconnected_fronts if self._scheduler.accounting.of_origin(one)]
        disconnected = [front for front in self._disconnected_fronts if front not in open_fronts]
        self._disconnected_fronts = open_fronts
        decode_steps, step_ms, idle_us = self._decode_steps.take()
        mixed_steps, mixed_step_ms, mixed_idle_us = self._mixed_steps.take()
        self._control.send(
            Report(
                **msgspec.structs.asdict(self._engine.gauges()),
                finished=result.finished if result else [],
                longest_step=self._engine.take_longest_step(),
                disconnected_fronts=disconnected,
                decode_steps=decode_steps,
                step_ms=step_ms,
                idle_us=idle_us,
                mixed_steps=mixed_steps,
                mixed_step_ms=mixed_step_ms,
                mixed_idle_us=mixed_idle_us,
                log_dropped_lines=log_state().dropped_lines,
            )
        )
        self._reported_at = time.monotonic()


class StepMeans:
    """Mean duration and idle time of decode-only or mixed steps since the last report."""

    def __init__(self) -> None:
        self._count, self._ms, self._idle_us = 0, 0.0, 0.0

    def add(self, timing: StepTiming) -> None:
        self._count += 1
        self._ms += timing.ms
        self._idle_us += timing.idle_us

    def take(self) -> tuple[int, float, float]:
        """Return the step count, the mean duration in ms, and the mean idle time before a step in µs, then
        reset all three."""
        count = max(1, self._count)
        means = self._count, self._ms / count, self._idle_us / count
        self._count, self._ms, self._idle_us = 0, 0.0, 0.0
        return means
