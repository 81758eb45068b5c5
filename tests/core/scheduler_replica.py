"""A replica in virtual time: the engine's step loop and scheduler on a simulated device (see
`tests.core.simulated_server`).

Tests compare the product's forecasts with this replica. The forecasts use a separate simulation without a
scheduler (`appliance.traffic.simulated_replica`). The two simulations share no code, so a mistake in one
cannot hide in the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from appliance.traffic.credits import CreditAccount
from engine.core import EngineCore
from engine.leader import StepMeans
from engine.messages import Submit
from engine.plan import StepPlan, StepTokens
from engine.rank_messages import Finished, Report
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.simulated_runner import sampling_slots

if TYPE_CHECKING:
    from tests.core.simulated_server import SimulatedServer

FRONT = "front-0"
MODEL = "m"
HOP_S = 0.0001
"""Time, in seconds, that a message between two processes takes."""
HOST_S = 0.0002
"""Time, in seconds, that the host needs between two steps."""


class Speed(NamedTuple):
    """The speed of a device: the base duration of a step, and the additional time per sequence and per prompt
    token. All times are in seconds."""

    step_s: float = 0.005
    seq_s: float = 0.020 / 1024
    prompt_token_s: float = 1 / 40_000
    first_steps: int = 0
    """Number of initial (warm-up) steps, which take `first_step_s` longer."""
    first_step_s: float = 0.0

    def of(self, plan: StepPlan) -> float:
        """Return the duration of a step in seconds, without the additional time of warm-up steps."""
        seqs = len(plan.decodes) + sum(len(chunk.sample_slots) for chunk in plan.chunks)
        prompts = sum(len(chunk.token_ids) for chunk in plan.chunks)
        return self.step_s + self.seq_s * seqs + self.prompt_token_s * prompts


class _Step:
    """A step on the simulated device."""

    host_gap_us = 0.0

    def __init__(self, device: _Device, plan: StepPlan, ends_at: float, seconds: float) -> None:
        self._device, self._ends_at, self._seconds = device, ends_at, seconds
        self._tokens = StepTokens([1] * len(sampling_slots(plan)), None, {})

    def wait(self) -> StepTokens:
        self._device.waited_until, self._device.step_s = self._ends_at, self._seconds
        return self._tokens

    def ready(self) -> bool:
        return True


class _Device:
    """A device that executes plans one after another."""

    def __init__(self, server: SimulatedServer, speed: Speed) -> None:
        self._server, self.speed = server, speed
        self._busy_until = 0.0
        self._launched = 0
        self.waited_until = 0.0
        self.step_s = 0.0
        self.busy_s = 0.0

    def launch(self, plan: StepPlan) -> _Step:
        seconds = self.speed.of(plan)
        if self._launched < self.speed.first_steps:
            seconds += self.speed.first_step_s
        self._launched += 1
        begins = max(self._server.now, self._busy_until)
        self._busy_until = begins + seconds
        self.busy_s += seconds
        return _Step(self, plan, self._busy_until, seconds)


class SchedulerReplica:
    """A replica with the engine's scheduler."""

    def __init__(
        self,
        server: SimulatedServer,
        name: str,
        *,
        slots: int,
        max_num_batched_tokens: int,
        max_mixed_tokens: int | None,
        blocks: int,
        prefix_cache: bool,
        speed: Speed,
    ) -> None:
        self.server = server
        self.account = CreditAccount(name, MODEL, "simulated")
        self.device = _Device(server, speed)
        self.scheduler = Scheduler(
            max_num_seqs=slots,
            max_num_batched_tokens=max_num_batched_tokens,
            max_mixed_tokens=max_mixed_tokens,
            max_model_len=131_072,
            vocab_size=10,
            blocks=blocks,
            prefix_cache=prefix_cache,
        )
        self.core = EngineCore(self.scheduler, self.device)
        self._inbox: list[Submit] = []
        self._looping = False
        self._decode_steps, self._mixed_steps = StepMeans(), StepMeans()
        self._reported_at = 0.0
        self.longest_step_s = 0.0
        self.dead = False

    def submit(self, submit: Submit) -> None:
        """Receive a front's submission."""
        self._inbox.append(submit)
        if not self._looping:
            self._looping = True
            self._loop()

    def _loop(self) -> None:
        if self.dead:
            return
        for submit in self._inbox:
            self.scheduler.add(FRONT, submit)
        self._inbox.clear()
        if not self.core.has_work:
            self._looping = False
            self.report([])
            return
        self.device.waited_until = self.server.now
        result = self.core.step()
        if result.timing is not None:
            steps = self._mixed_steps if result.timing.mixed else self._decode_steps
            steps.add(replace(result.timing, ms=1e3 * self.device.step_s))
            self.longest_step_s = max(self.longest_step_s, self.device.step_s)

        def emit() -> None:
            if self.dead:
                return
            outputs = [output for of_front in result.outputs.values() for output in of_front]
            if outputs:
                self.server.after(HOP_S, lambda: self.server.hear(self, outputs))
            news = result.finished or result.credits_changed
            if news or self.server.now - self._reported_at >= 0.5:
                self.report(result.finished)
            self.server.after(HOST_S, self._loop)

        self.server.at(self.device.waited_until, emit)

    def report(self, finished: list[Finished]) -> None:
        """Send the replica's state and the ended submissions to the request manager."""
        decode_steps, step_ms, _ = self._decode_steps.take()
        mixed_steps, mixed_step_ms, _ = self._mixed_steps.take()
        report = Report(
            **msgspec.structs.asdict(self.core.gauges()),
            finished=finished,
            decode_steps=decode_steps,
            step_ms=step_ms,
            mixed_steps=mixed_steps,
            mixed_step_ms=mixed_step_ms,
        )
        self._reported_at = self.server.now
        self.server.after(
            HOP_S, lambda: None if self.dead else self.server.requests.report(self.account, report)
        )
