"""The process of one rank: `python -m engine.replica --channel FD`.

Rank 0 plans and talks: submissions in from the fronts, one frame out to each front a step, reports to the
core. The other ranks replay its plans. A rank whose core is gone, whose peer is gone or whose engine failed
ends at once: a replica is alive as a whole or not at all.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.garbage import settle_garbage
from engine.logs import LineFormatter, log_state, log_to_stderr
from engine.messages import (
    Attach,
    Cancel,
    CancelRequest,
    DataInbound,
    Fatal,
    LongStep,
    Progress,
    RankInbound,
    Ready,
    Report,
    Start,
    StepFrame,
    StepPlan,
    Stop,
    Submit,
)
from engine.plans import PlanSender, check_plans, plan_channel
from engine.step_forecast import StepForecast
from engine.wire import Channel

if TYPE_CHECKING:
    from engine.core import EngineCore, StepResult, StepTiming
    from engine.launched import Launched
    from engine.runner import Runner

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
FRESH_S = 0.1
"""While it computes, the core knows how full the cache is as of so lately, or as of the last step: gateways
take what is older than 200 ms for saturation."""
MEETING_TIMEOUT_S = 600.0
"""How long ranks wait for each other: one may read from a slower disk. Deaths are the core's to notice."""
LOOK_AFTER_S = 0.05
"""How soon a rank that follows sees that a step failed when no plan comes to wake it."""
LAST_WORD_S = 1.0
"""How long a rank that failed waits for the core to take its reason."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the rank that the core's `Start` names; returns when told to stop or when the core is gone."""
    log_to_stderr(LineFormatter("replica"))
    parser = argparse.ArgumentParser(prog="python -m engine.replica", description=__doc__.split("\n")[0])
    parser.add_argument("--channel", type=int, required=True, help="descriptor of the channel to the core")
    arguments = parser.parse_args()
    _die_with_parent()
    # The core decides when a rank ends (Stop, or the end of the channel). A signal to the whole group, Ctrl-C
    # or systemd's, must not cut off what the core lets finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control: Channel[RankInbound] = Channel(socket.socket(fileno=arguments.channel), RankInbound)
    start = _await_start(control)
    ranks = start.spec.tensor_parallel_size
    log_to_stderr(LineFormatter(_name(start).replace("%", "%%")))
    peers: list[Channel[Any]] = [
        plan_channel(control.take_fd()) for _ in range(ranks - 1 if start.rank == 0 else 1) if ranks > 1
    ]
    code = 0
    try:
        runner = _build_runner(start, control)
        if start.rank == 0:
            _lead(start, control, peers, runner)
        else:
            _follow(control, peers[0], runner)
    except Exception as error:
        kind = _kind_of(error)
        if kind == "internal":
            # The others were foreseen: their message, which the core logs, says what to do.
            log.exception("the engine failed")
        control.send(Fatal(kind, f"{type(error).__name__}: {error}"))
        control.drain(LAST_WORD_S)
        code = 1
    # Peers and device libraries may hold threads that never end; everything that matters is written.
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)


def _name(start: Start) -> str:
    """Return the name of this rank in the log."""
    several = start.spec.tensor_parallel_size > 1
    return start.spec.replica + (f" rank {start.rank}" if several else "")


def _lead(start: Start, control: Channel[RankInbound], peers: list[Channel[Any]], runner: Runner) -> None:
    from engine.core import EngineCore
    from engine.scheduler import Scheduler

    info = runner.info()
    if peers:
        check_plans(
            max_rows=info.max_rows,
            max_model_len=info.max_model_len,
            step_tokens=info.step_tokens,
            kv_blocks=info.kv_blocks,
        )
    scheduler = Scheduler(
        max_rows=info.max_rows,
        step_tokens=info.step_tokens,
        mixed_tokens=start.spec.mixed_tokens,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        blocks=info.kv_blocks,
        prefix_cache=start.spec.prefix_cache,
    )
    config = runner.config
    forecast = StepForecast(
        parameters=info.parameters,
        attention_width=config.layers * config.heads * config.head_dim,
        on_gpu=runner.device.type == "cuda",
    )
    engine = EngineCore(scheduler, PlanSender(runner, peers), overlap=start.spec.overlap)
    settle_garbage()
    control.send(Ready(info))
    Replica(engine, control, forecast).run()


def _follow(control: Channel[RankInbound], plans: Channel[Any], runner: Runner) -> None:
    """Replay rank 0's plans until it or the core is gone. Raises what a step raised."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(plans, selectors.EVENT_READ)
    unread: deque[Launched] = deque()
    while not (control.closed or plans.closed):
        selector.select(LOOK_AFTER_S if unread else None)
        if any(isinstance(message, Stop) for message in control.read()):
            return
        unread.extend(runner.launch(plan) for plan in plans.read())
        # A step that failed here must not go unnoticed: rank 0 may wait for it in a collective, and send no
        # further plan.
        while unread and unread[0].ready():
            unread.popleft().wait()


class Replica:
    """Rank 0's loop: intake, step, emit, report."""

    def __init__(self, engine: EngineCore, control: Channel[RankInbound], forecast: StepForecast) -> None:
        self._engine = engine
        engine.before_wait = self._announce
        self._control = control
        self._forecast = forecast
        self._fronts: dict[str, Channel[DataInbound]] = {}
        self._fronts_gone: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._watch(control, self._take_control)
        self._stopping = False
        self._reported_at = 0.0
        self._decode_steps, self._mixed_steps = _StepMeans(), _StepMeans()

    def run(self) -> None:
        """Serve until the core says stop or is gone."""
        while not (self._stopping or self._control.closed):
            self._take_in()
            if self._engine.has_work:
                self._emit(self._engine.step())
            elif time.monotonic() - self._reported_at >= HEARTBEAT_S:
                self._report(None)

    def _take_in(self) -> None:
        """Read what the core and the fronts sent, write what they left unread as they make room for it; wait
        for something when there is nothing to compute."""
        # At once, before an `Attach` brings a channel with the number of the closed one's descriptor.
        for front in [name for name, channel in self._fronts.items() if channel.closed]:
            self._lose_front(front)
        self._watch_for_room()
        timeout = 0.0
        if not self._engine.has_work:
            timeout = max(0.0, self._reported_at + HEARTBEAT_S - time.monotonic())
        for key, events in self._selector.select(timeout):
            channel, take = key.data
            if events & selectors.EVENT_WRITE:
                channel.flush()
            if events & selectors.EVENT_READ:
                take()

    def _watch(self, channel: Channel[Any], take: Callable[[], None]) -> None:
        """Have the selector tell of what comes on a channel: `take` reads it."""
        self._selector.register(channel, selectors.EVENT_READ, (channel, take))

    def _watch_for_room(self) -> None:
        """Have the selector tell of room in the channels that have a backlog; the others always have some."""
        for key in list(self._selector.get_map().values()):
            channel, _ = key.data
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.backlog_bytes else 0)
            if events != key.events:
                self._selector.modify(channel, events, key.data)

    def _take_control(self) -> None:
        for message in self._control.read():
            match message:
                case Attach(front):
                    channel: Channel[DataInbound] = Channel(
                        socket.socket(fileno=self._control.take_fd()), DataInbound
                    )
                    self._fronts[front] = channel
                    self._watch(channel, partial(self._take_from_front, front))
                case CancelRequest(request_id):
                    self._engine.cancel_request(request_id)
                case Stop():
                    self._stopping = True

    def _take_from_front(self, front: str) -> None:
        channel = self._fronts[front]
        for message in channel.read():
            match message:
                case Submit():
                    self._engine.submit(front, message)
                case Cancel(handle, sample):
                    self._engine.cancel(front, handle, sample)
        if channel.closed:
            self._lose_front(front)

    def _lose_front(self, front: str) -> None:
        """Its channel is closed: it died, broke the protocol, or left too much unread."""
        self._selector.unregister(self._fronts.pop(front))
        self._engine.cancel_origin(front)
        self._fronts_gone.append(front)
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
        news = result.finished or result.credits_changed or self._fronts_gone
        if news or time.monotonic() - self._reported_at >= FRESH_S:
            self._report(result)

    def _announce(self, plan: StepPlan) -> None:
        """Tell the core of a step so long that the core could take this replica for dead."""
        expected_s = self._forecast.predict_s(plan)
        if expected_s > HEARTBEAT_S:
            self._control.send(LongStep(expected_s))

    def _report(self, result: StepResult | None) -> None:
        gauges = self._engine.gauges()
        decode_steps, step_ms, idle_us = self._decode_steps.take()
        mixed_steps, mixed_step_ms, mixed_idle_us = self._mixed_steps.take()
        self._control.send(
            Report(
                step=gauges.step,
                credit_rows=gauges.credit_rows,
                credit_tokens=gauges.credit_tokens,
                finished=result.finished if result else [],
                fronts_gone=self._fronts_gone,
                running=gauges.running,
                waiting=gauges.waiting,
                blocks_total=gauges.blocks_total,
                blocks_used=gauges.blocks_used,
                blocks_cached=gauges.blocks_cached,
                preemptions=gauges.preemptions,
                prompt_tokens=gauges.prompt_tokens,
                cached_tokens=gauges.cached_tokens,
                computed_tokens=gauges.computed_tokens,
                generated_tokens=gauges.generated_tokens,
                decode_steps=decode_steps,
                step_ms=step_ms,
                idle_us=idle_us,
                mixed_steps=mixed_steps,
                mixed_step_ms=mixed_step_ms,
                mixed_idle_us=mixed_idle_us,
                log_dropped_lines=log_state().dropped_lines,
            )
        )
        self._fronts_gone = []
        self._reported_at = time.monotonic()


class _StepMeans:
    """Of the steps of one kind since the last report."""

    def __init__(self) -> None:
        self._count, self._ms, self._idle_us = 0, 0.0, 0.0

    def add(self, timing: StepTiming) -> None:
        self._count += 1
        self._ms += timing.ms
        self._idle_us += timing.idle_us

    def take(self) -> tuple[int, float, float]:
        """Their number, milliseconds of one, microseconds of idleness before it; 0 where there was none."""
        count = max(1, self._count)
        means = self._count, self._ms / count, self._idle_us / count
        self._count, self._ms, self._idle_us = 0, 0.0, 0.0
        return means


def _build_runner(start: Start, control: Channel[RankInbound]) -> Runner:
    from engine import parallel
    from engine.device import select_device
    from engine.runner import Runner

    def progress(stage: str, fraction: float) -> None:
        control.send(Progress(stage, fraction))

    progress("starting", 0.0)
    spec = start.spec
    size = spec.tensor_parallel_size
    device = select_device(spec.device, start.rank, size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    ranks = parallel.join(size, start.rank, spec.rendezvous, backend, timeout_seconds=MEETING_TIMEOUT_S)
    return Runner(spec, ranks, progress)


def _await_start(control: Channel[RankInbound]) -> Start:
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        selector.select()
        for message in control.read():
            if isinstance(message, Start):
                return message
        if control.closed:
            os._exit(0)  # the core ended before it said anything


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it ended just before; had it ended earlier still, the channel says so


def _kind_of(error: Exception) -> str:
    import torch

    from engine.config import CheckpointError, UnfitError
    from engine.device import DeviceError

    if isinstance(error, CheckpointError | UnfitError):
        return "checkpoint"
    # On a CPU torch says in words alone that memory ran out.
    out_of_memory = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if out_of_memory or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "memory"
    if isinstance(error, DeviceError | torch.AcceleratorError):
        return "device"
    return "internal"


if __name__ == "__main__":
    main()
