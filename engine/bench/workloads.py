"""What is measured: the workloads by name, and how one is run on an engine."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from engine.core import StepTiming
from engine.generate import LocalEngine
from engine.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` prompts of `prompt_tokens` random tokens, at once or one at a time; `output_tokens` each,
    end tokens ignored, nothing found in the prefix cache."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    figure: str
    """What is reported: "p99_ms" (of one-at-a-time requests), "output_tok_s", "prompt_tok_s" or "ms"."""
    one_at_a_time: bool = False
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def sequence_tokens(self) -> int:
        """Of a prompt and its output together."""
        return self.prompt_tokens + self.output_tokens

    @property
    def unit(self) -> str:
        return {"p99_ms": "ms p99", "ms": "ms", "output_tok_s": "tok/s", "prompt_tok_s": "tok/s"}[self.figure]

    @property
    def less_is_better(self) -> bool:
        return self.figure in ("p99_ms", "ms")


WORKLOADS: dict[str, Workload] = {
    "b1_50tok": Workload(40, 128, 50, "p99_ms", one_at_a_time=True),
    "b1_decode": Workload(1, 512, 256, "output_tok_s"),
    "b8_decode": Workload(8, 512, 256, "output_tok_s"),
    "b64_decode": Workload(64, 512, 256, "output_tok_s"),
    "n1024": Workload(1024, 512, 256, "output_tok_s"),
    "n1024_sampled": Workload(1024, 512, 256, "output_tok_s", temperature=0.8, top_p=0.95),
    "prefill": Workload(16, 4096, 1, "prompt_tok_s"),
    "long": Workload(32, 8192, 128, "output_tok_s"),
    "ttft8k": Workload(1, 8192, 1, "ms"),
}


@dataclass(slots=True)
class Steps:
    """The steps of one kind in a run: how many, their mean time, and how long the device then waited for the
    host, on average and as a part of the step."""

    count: int
    ms: float
    idle_us: float
    idle_fraction: float


@dataclass(slots=True)
class Measured:
    """One run of a workload."""

    figure: float
    seconds: float
    p50_ms: float | None
    decode: Steps
    """Steps that only decoded."""
    mixed: Steps
    """Steps that computed prompts."""


def run(engine: LocalEngine, workload: Workload, seed: int) -> Measured:
    """Run a workload once; prompts follow from `seed`. Raises RuntimeError when a request does not end as it
    must: a fast wrong answer is not a result."""
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
    return Measured(
        figure=_figure(workload, times, seconds),
        seconds=seconds,
        p50_ms=statistics.median(times) if workload.one_at_a_time else None,
        decode=_steps([timing for timing in timings if not timing.mixed]),
        mixed=_steps([timing for timing in timings if timing.mixed]),
    )


def _steps(timings: list[StepTiming]) -> Steps:
    count = len(timings)
    if not count:
        return Steps(0, 0.0, 0.0, 0.0)
    ms = sum(timing.ms for timing in timings) / count
    idle_us = sum(timing.idle_us for timing in timings) / count
    return Steps(count, ms, idle_us, idle_us / (1e3 * ms) if ms else 0.0)


def _generate(engine: LocalEngine, prompts: list[list[int]], workload: Workload, seed: int) -> None:
    sampling = SamplingParams(
        max_tokens=workload.output_tokens,
        ignore_eos=True,
        temperature=workload.temperature,
        top_p=workload.top_p,
        seed=seed,
    )
    # A salt of its own: no run finds its prompts in the cache.
    for samples in engine.generate(prompts, sampling, cache_salt=f"{seed}/{time.perf_counter_ns()}"):
        if len(samples[0].token_ids) != workload.output_tokens:
            raise RuntimeError(
                f"a request ended after {len(samples[0].token_ids)} of {workload.output_tokens} tokens "
                f"({samples[0].finish}): {samples[0].error}"
            )


def _figure(workload: Workload, times_ms: list[float], seconds: float) -> float:
    if workload.figure == "p99_ms":
        return sorted(times_ms)[max(0, -(-99 * len(times_ms) // 100) - 1)]
    if workload.figure == "ms":
        return 1e3 * seconds
    tokens = workload.output_tokens if workload.figure == "output_tok_s" else workload.prompt_tokens
    return workload.requests * tokens / seconds
