"""Runs a workload up to the steps that are wanted, and records these with torch's profiler."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from engine.bench.workloads import Workload
from engine.core import EngineCore, Launched, Runner
from engine.generate import LocalEngine
from engine.messages import SamplingParams, StepPlan, Submit

Kind = Literal["decode", "mixed"]
"""Steps that only decode; steps that compute prompts."""

_ORIGIN = "profile"
_SETTLE: dict[Kind, int] = {"decode": 3, "mixed": 0}
"""Steps of a kind that pass before the first that is recorded. Some workloads have one mixed step."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """How much one step computes."""

    contexts: list[int]
    """Of each sequence that decodes: its tokens in the cache, the new one included."""
    chunks: list[tuple[int, int]]
    """Of each prompt slice: tokens of the sequence before it, and its own."""
    logit_rows: int

    @property
    def tokens(self) -> int:
        return len(self.contexts) + sum(count for _, count in self.chunks)


@dataclass(slots=True)
class _Recorder:
    """A runner that begins to record in front of the first step that is wanted, and ends behind the last:
    while it records, nothing else is launched."""

    runner: Runner
    kind: Kind
    skip: int
    recording: profile
    gpu: bool
    shapes: list[StepShape] = field(default_factory=list)
    """Of what was recorded."""
    most_in_a_row: int = 0
    """Steps of the kind that passed unrecorded, one after another."""
    ended: bool = False
    _passed: int = 0
    _lengths: dict[int, int] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> Launched:
        shape = self._shape(plan)
        if (self.kind == "mixed") != bool(plan.chunks):
            self._passed = 0
            self.end()
        elif self._passed < self.skip:
            self._passed += 1
            self.most_in_a_row = max(self.most_in_a_row, self._passed)
        elif not self.ended:
            if not self.shapes:
                # The device may still be at a step that was launched before.
                _synchronize(self.gpu)
                self.recording.start()
            self.shapes.append(shape)
        return self.runner.launch(plan)

    def end(self) -> None:
        """Stop recording, when what is recorded has run."""
        if self.shapes and not self.ended:
            _synchronize(self.gpu)
            self.recording.stop()
            self.ended = True

    def _shape(self, plan: StepPlan) -> StepShape:
        for row in plan.decodes:
            self._lengths[row] = self._lengths.get(row, 0) + 1
        contexts = [self._lengths[row] for row in plan.decodes]
        chunks = [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]
        for chunk in plan.chunks:
            for row in chunk.sample_slots:
                self._lengths[row] = chunk.start + len(chunk.token_ids)
        logit_rows = len(contexts) + sum(bool(chunk.sample_slots) for chunk in plan.chunks)
        return StepShape(contexts, chunks, logit_rows)


def record(
    engine: LocalEngine, workload: Workload, kind: Kind, steps: int, skip: int | None, trace: Path
) -> list[StepShape]:
    """Write the Chrome trace of up to `steps` steps of a kind that follow one another, the first of which
    `skip` others of the kind precede (None: as many as it takes to settle); return their shapes, fewer than
    asked for where a step of the other kind follows, or none. The workload's requests are sent at once (one,
    where it sends one at a time), and given up afterwards.

    Raises RuntimeError where the workload has no such steps.
    """
    gpu = engine.runner.device.type == "cuda"
    skip = _SETTLE[kind] if skip is None else skip
    recorder = _Recorder(engine.runner, kind, skip, profile(**_options(gpu)), gpu)
    # On a CPU a step must have ended before the recording does: its thread is not to be waited for.
    core = EngineCore(engine.scheduler, recorder, overlap=gpu)
    for submit in _submits(workload, engine.info.vocab_size):
        core.submit(_ORIGIN, submit)
    while core.has_work and not recorder.ended and len(recorder.shapes) < steps:
        core.step()
    recorder.end()
    core.cancel_origin(_ORIGIN)
    while core.has_work:
        core.step()
    if not recorder.shapes:
        raise RuntimeError(_no_steps(kind, skip, recorder.most_in_a_row))
    trace.parent.mkdir(parents=True, exist_ok=True)
    recorder.recording.export_chrome_trace(str(trace))
    return recorder.shapes


def _no_steps(kind: Kind, skip: int, most_in_a_row: int) -> str:
    if not most_in_a_row:
        return f"the workload has no {kind} steps: choose another --kind or --workload"
    return (
        f"--skip is {skip}, but the workload has no more than {most_in_a_row} {kind} steps in a row: lower "
        "--skip, or choose another --kind or --workload"
    )


def _submits(workload: Workload, vocabulary: int) -> list[Submit]:
    draw = random.Random(0)
    sampling = SamplingParams(
        max_tokens=workload.output_tokens,
        ignore_eos=True,
        temperature=workload.temperature,
        top_p=workload.top_p,
    )
    requests = 1 if workload.one_at_a_time else workload.requests
    # Of its own: what was recorded before is not found in the cache.
    salt = f"profile/{time.perf_counter_ns()}"
    return [
        Submit(
            handle=handle,
            request_id=f"profile-{handle}",
            prompt_token_ids=[draw.randrange(vocabulary) for _ in range(workload.prompt_tokens)],
            sampling=sampling,
            cache_salt=salt,
        )
        for handle in range(1, requests + 1)
    ]


def _options(gpu: bool) -> dict[str, Any]:
    """On a GPU its kernels alone: noting what the host does would make it slower than it is."""
    if gpu:
        return {"activities": [ProfilerActivity.CUDA]}
    # Steps run on the runner's thread.
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return {"activities": [ProfilerActivity.CPU], "experimental_config": every}


def _synchronize(gpu: bool) -> None:
    if gpu:
        torch.cuda.synchronize()
