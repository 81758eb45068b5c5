"""Defines the benchmark's named workloads and runs a workload on an engine."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Literal

from engine.core import StepTiming
from engine.generate import LocalEngine
from engine.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineWorkload:
    """A workload that sends `requests` prompts of random tokens, either all at once or one after another.
    Each request generates exactly `output_tokens` tokens; end-of-sequence tokens are ignored. No prompt is in
    the prefix cache."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    metric: Literal["p99_ms", "ms", "output_tok_s", "prompt_tok_s"]
    """The reported metric. "p99_ms" requires `one_at_a_time`."""
    one_at_a_time: bool = False
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def sequence_tokens(self) -> int:
        """Sequence length in tokens, including the prompt."""
        return self.prompt_tokens + self.output_tokens

    @property
    def unit(self) -> str:
        return {"p99_ms": "ms p99", "ms": "ms", "output_tok_s": "tok/s", "prompt_tok_s": "tok/s"}[self.metric]

    @property
    def lower_is_better(self) -> bool:
        return self.metric in ("p99_ms", "ms")


WORKLOADS: dict[str, EngineWorkload] = {
    "b1_50tok": EngineWorkload(40, 128, 50, "p99_ms", one_at_a_time=True),
    "b1_decode": EngineWorkload(1, 512, 256, "output_tok_s"),
    "b8_decode": EngineWorkload(8, 512, 256, "output_tok_s"),
    "b64_decode": EngineWorkload(64, 512, 256, "output_tok_s"),
    "n1024": EngineWorkload(1024, 512, 256, "output_tok_s"),
    "n1024_sampled": EngineWorkload(1024, 512, 256, "output_tok_s", temperature=0.8, top_p=0.95),
    "prefill": EngineWorkload(16, 4096, 1, "prompt_tok_s"),
    "long": EngineWorkload(32, 8192, 128, "output_tok_s"),
    "ttft2k": EngineWorkload(1, 2048, 1, "ms"),
    "ttft8k": EngineWorkload(1, 8192, 1, "ms"),
}


@dataclass(slots=True)
class StepStats:
    """Statistics of a run's decode-only or mixed steps: count, mean duration, and mean time the device waited
    for the host before a step."""

    count: int
    ms: float
    idle_us: float
    idle_fraction: float
    plan_us: float = 0.0
    """Mean time per step that rank 0 spent sending the plan to the other ranks."""


@dataclass(slots=True)
class WorkloadResult:
    """The result of one workload run."""

    result: float
    """The value of the workload's metric."""
    seconds: float
    p50_ms: float | None
    decode: StepStats
    """Statistics of the run's decode-only steps."""
    mixed: StepStats
    """Statistics of the run's steps with prefill."""


def run(engine: LocalEngine, workload: EngineWorkload, seed: int) -> WorkloadResult:
    """Run a workload once, with prompts derived from `seed`. Raises RuntimeError if a request ends before
    generating all of its tokens, because such a run is not comparable with others.
    """
    draw = random.Random(seed)
    vocabulary = engine.info.vocab_size
    prompts = [
        [draw.randrange(vocabulary) for _ in range(workload.prompt_tokens)] for _ in range(workload.requests)
    ]
    before = len(engine.timings)
    times: list[float] = []
    batches = [[prompt] for prompt in prompts] if workload.one_at_a_time else [prompts]
    started = time.perf_counter()
    for batch in batches:
        began = time.perf_counter()
        _generate(engine, batch, workload, seed)
        times.append(1e3 * (time.perf_counter() - began))
    seconds = time.perf_counter() - started
    timings = engine.timings[before:]
    return WorkloadResult(
        result=_result(workload, times, seconds),
        seconds=seconds,
        p50_ms=statistics.median(times) if workload.one_at_a_time else None,
        decode=_steps([timing for timing in timings if not timing.mixed]),
        mixed=_steps([timing for timing in timings if timing.mixed]),
    )


def _steps(timings: list[StepTiming]) -> StepStats:
    count = len(timings)
    if not count:
        return StepStats(0, 0.0, 0.0, 0.0)
    ms = sum(timing.ms for timing in timings) / count
    idle_us = sum(timing.idle_us for timing in timings) / count
    plan_us = sum(timing.plan_us for timing in timings) / count
    return StepStats(count, ms, idle_us, idle_us / (1e3 * ms) if ms else 0.0, plan_us)


def _generate(engine: LocalEngine, prompts: list[list[int]], workload: EngineWorkload, seed: int) -> None:
    sampling = SamplingParams(
        max_tokens=workload.output_tokens,
        ignore_eos=True,
        temperature=workload.temperature,
        top_p=workload.top_p,
        seed=seed,
    )
    # Use a new salt for each call to rule out prefix cache hits.
    for samples in engine.generate(prompts, sampling, cache_salt=f"{seed}/{time.perf_counter_ns()}"):
        if len(samples[0].token_ids) != workload.output_tokens:
            raise RuntimeError(
                f"a request ended after {len(samples[0].token_ids)} of {workload.output_tokens} tokens "
                f"({samples[0].finish_reason}): {samples[0].error}"
            )


def _result(workload: EngineWorkload, times_ms: list[float], seconds: float) -> float:
    if workload.metric == "p99_ms":
        return sorted(times_ms)[max(0, -(-99 * len(times_ms) // 100) - 1)]
    if workload.metric == "ms":
        return 1e3 * seconds
    tokens = workload.output_tokens if workload.metric == "output_tok_s" else workload.prompt_tokens
    return workload.requests * tokens / seconds
