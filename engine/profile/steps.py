"""Runs a workload and records some of its steps with torch's profiler."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from engine.bench.workloads import EngineWorkload
from engine.core import EngineCore, LaunchedStep, StepRunner
from engine.generate import LocalEngine
from engine.messages import SamplingParams, Submit, pack_tokens
from engine.plan import StepPlan

Kind = Literal["decode", "mixed"]
"""Kind of step: decode-only ("decode") or with prefill ("mixed")."""


class MissingStepsError(RuntimeError):
    """Raised if the workload has no steps of the requested kind."""


_ORIGIN = "profile"
_SETTLE: dict[Kind, int] = {"decode": 3, "mixed": 0}
"""Default number of steps to skip before recording. It is 0 for mixed steps, because some workloads have only
one."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The token counts of one step."""

    contexts: list[int]
    """Each decode's context length: the number of tokens in the sequence, including the new token."""
    chunks: list[tuple[int, int]]
    """For each prefill chunk, the number of tokens before it and the number of tokens in it."""
    logit_rows: int

    @property
    def tokens(self) -> int:
        return len(self.contexts) + sum(count for _, count in self.chunks)


@dataclass(slots=True)
class _Recorder:
    """Wraps a step runner and records consecutive steps of the requested kind."""

    runner: StepRunner
    kind: Kind
    skip: int
    recording: profile
    gpu: bool
    shapes: list[StepShape] = field(default_factory=list)
    """Shapes of the recorded steps."""
    most_in_a_row: int = 0
    """Length of the longest run of consecutive skipped steps of the requested kind."""
    ended: bool = False
    _passed: int = 0
    _lengths: dict[int, int] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        shape = self._shape(plan)
        if (self.kind == "mixed") != bool(plan.chunks):
            self._passed = 0
            self.end()
        elif self._passed < self.skip:
            self._passed += 1
            self.most_in_a_row = max(self.most_in_a_row, self._passed)
        elif not self.ended:
            if not self.shapes:
                # The device may still be executing an earlier step.
                _synchronize(self.gpu)
                self.recording.start()
            self.shapes.append(shape)
        return self.runner.launch(plan)

    def end(self) -> None:
        """Wait for the recorded steps to finish, then stop recording."""
        if self.shapes and not self.ended:
            _synchronize(self.gpu)
            self.recording.stop()
            self.ended = True

    def _shape(self, plan: StepPlan) -> StepShape:
        for slot in plan.decodes:
            self._lengths[slot] = self._lengths.get(slot, 0) + 1
        contexts = [self._lengths[slot] for slot in plan.decodes]
        chunks = [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]
        for chunk in plan.chunks:
            for slot in chunk.sample_slots:
                self._lengths[slot] = chunk.start + len(chunk.token_ids)
        logit_rows = len(contexts) + sum(bool(chunk.sample_slots) for chunk in plan.chunks)
        return StepShape(contexts, chunks, logit_rows)


def record(
    engine: LocalEngine, workload: EngineWorkload, kind: Kind, steps: int, skip: int | None, trace: Path
) -> list[StepShape]:
    """Record up to `steps` consecutive steps of one kind, write their Chrome trace, and return their shapes.
    The first `skip` steps of that kind are not recorded; None selects the default for that kind. The
    recording is shorter if a step of the other kind follows or the workload ends. All of the workload's
    requests are submitted before the first step, or only one of them if the workload sends its requests one
    at a time. They are cancelled after the recording. Raises MissingStepsError if the workload has no steps
    of this kind.
    """
    gpu = engine.runner.device.type == "cuda"
    skip = _SETTLE[kind] if skip is None else skip
    recorder = _Recorder(engine.runner, kind, skip, profile(**_options(gpu)), gpu)
    # A CPU runner cannot be synchronised, so disable overlap to ensure that every step has finished before
    # the recording stops.
    core = EngineCore(engine.scheduler, recorder, overlap=gpu, plans=engine.core.plans)
    for submit in _submits(workload, engine.info.vocab_size):
        engine.scheduler.add(_ORIGIN, submit)
    while core.has_work and not recorder.ended and len(recorder.shapes) < steps:
        core.step()
    recorder.end()
    engine.scheduler.cancel_origin(_ORIGIN)
    while core.has_work:
        core.step()
    if not recorder.shapes:
        raise MissingStepsError(_no_steps(kind, skip, recorder.most_in_a_row))
    trace.parent.mkdir(parents=True, exist_ok=True)
    recorder.recording.export_chrome_trace(str(trace))
    return recorder.shapes


def _no_steps(kind: Kind, skip: int, most_in_a_row: int) -> str:
    if not most_in_a_row:
        return f"the workload has no {kind} steps: choose another --kind or --workload"
    return (
        f"--skip is {skip}, but the workload has at most {most_in_a_row} consecutive {kind} steps: lower "
        "--skip, or choose another --kind or --workload"
    )


def _submits(workload: EngineWorkload, vocabulary: int) -> list[Submit]:
    draw = random.Random(0)
    sampling = SamplingParams(
        max_tokens=workload.output_tokens,
        ignore_eos=True,
        temperature=workload.temperature,
        top_p=workload.top_p,
    )
    requests = 1 if workload.one_at_a_time else workload.requests
    # Use a new salt, so that prompts from earlier recordings are not found in the prefix cache.
    salt = f"profile/{time.perf_counter_ns()}"
    return [
        Submit(
            handle=handle,
            request_id=f"profile-{handle}",
            prompt=pack_tokens(draw.randrange(vocabulary) for _ in range(workload.prompt_tokens)),
            sampling=sampling,
            cache_salt=salt,
        )
        for handle in range(1, requests + 1)
    ]


def _options(gpu: bool) -> dict[str, Any]:
    """Return the options for torch's profiler. On a GPU, only kernels are recorded, because recording host
    operations would slow down the host."""
    if gpu:
        return {"activities": [ProfilerActivity.CUDA]}
    # Steps run on the runner's thread, not on the calling thread.
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return {"activities": [ProfilerActivity.CPU], "experimental_config": every}


def _synchronize(gpu: bool) -> None:
    if gpu:
        torch.cuda.synchronize()
