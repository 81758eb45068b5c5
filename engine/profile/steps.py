"""Runs a workload up to the steps that are wanted, and records these with torch's profiler."""

from __future__ import annotations

import random
from collections.abc import Callable
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
_SETTLE = 3
"""Steps of the wanted kind that pass before the first that is recorded."""


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
    """A runner whose plans are kept as shapes."""

    runner: Runner
    shapes: list[StepShape] = field(default_factory=list)
    _lengths: dict[int, int] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> Launched:
        for row in plan.decodes:
            self._lengths[row] = self._lengths.get(row, 0) + 1
        contexts = [self._lengths[row] for row in plan.decodes]
        chunks = [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]
        for chunk in plan.chunks:
            for row in chunk.sample_rows:
                self._lengths[row] = chunk.start + len(chunk.token_ids)
        logit_rows = len(contexts) + sum(bool(chunk.sample_rows) for chunk in plan.chunks)
        self.shapes.append(StepShape(contexts, chunks, logit_rows))
        return self.runner.launch(plan)


def record(
    engine: LocalEngine, workload: Workload, kind: Kind, steps: int, skip: int, trace: Path
) -> list[StepShape]:
    """Write the Chrome trace of `steps` steps of a kind, after `skip` more of that kind than it takes to
    settle; return their shapes. The workload's requests are sent at once (one, where it sends one at a time),
    and given up afterwards.

    Raises RuntimeError where the workload has no such steps.
    """
    gpu = engine.runner.device.type == "cuda"
    recorder = _Recorder(engine.runner)
    # On a CPU a step must have ended before the recording does: its thread is not to be waited for.
    core = EngineCore(engine.scheduler, recorder, overlap=gpu)
    for submit in _submits(workload, engine.info.vocab_size):
        core.submit(_ORIGIN, submit)
    _until(
        core, lambda: _seen(recorder.shapes, kind) >= 1 + (skip or (_SETTLE if kind == "decode" else 0)), kind
    )
    first = len(recorder.shapes)
    _synchronize(gpu)
    with profile(**_options(gpu)) as recording:
        _until(core, lambda: len(recorder.shapes) >= first + steps, kind)
        _synchronize(gpu)
    trace.parent.mkdir(parents=True, exist_ok=True)
    recording.export_chrome_trace(str(trace))
    core.cancel_origin(_ORIGIN)
    while core.has_work:
        core.step()
    return recorder.shapes[first:]


def _seen(shapes: list[StepShape], kind: Kind) -> int:
    """Steps of a kind since the last of the other."""
    count = 0
    for shape in reversed(shapes):
        if (kind == "mixed") != bool(shape.chunks):
            break
        count += 1
    return count


def _until(core: EngineCore, done: Callable[[], bool], kind: Kind) -> None:
    while not done():
        if not core.has_work:
            raise RuntimeError(
                f"the workload ended before enough {kind} steps had run: ask for fewer (--steps, --skip), or "
                "for another --kind or --workload"
            )
        core.step()


def _submits(workload: Workload, vocabulary: int) -> list[Submit]:
    draw = random.Random(0)
    sampling = SamplingParams(
        max_tokens=workload.output_tokens,
        ignore_eos=True,
        temperature=workload.temperature,
        top_p=workload.top_p,
    )
    requests = 1 if workload.one_at_a_time else workload.requests
    return [
        Submit(
            handle=handle,
            request_id=f"profile-{handle}",
            prompt_token_ids=[draw.randrange(vocabulary) for _ in range(workload.prompt_tokens)],
            sampling=sampling,
            cache_salt="profile",
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
