"""The named workloads. Workloads that also exist in `engine.bench` have the same name, numbers and metric
here. The definitions are repeated because this package must not import the engine's benchmark; a test
compares them. Workloads with `http` in their name exist only here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorkloadMetric = Literal["output_tok_s", "prompt_tok_s", "p99_ms", "ms"]
"""The reported metric: "output_tok_s" or "prompt_tok_s" (tokens divided by total time), "p99_ms" (99th
percentile of the end-to-end time), or "ms" (median of the end-to-end time)."""
MetricUnit = Literal["tok/s", "ms p99", "ms"]
_UNITS: dict[WorkloadMetric, MetricUnit] = {
    "output_tok_s": "tok/s",
    "prompt_tok_s": "tok/s",
    "p99_ms": "ms p99",
    "ms": "ms",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A request's shape: a prompt of `prompt_tokens` random tokens, and exactly `output_tokens` generated
    tokens."""

    prompt_tokens: int
    output_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0

    def __str__(self) -> str:
        sampled = f", temperature {self.temperature:g}, top-p {self.top_p:g}" if self.temperature else ""
        return f"{self.prompt_tokens:,} tokens in, {self.output_tokens:,} out{sampled}"


@dataclass(frozen=True, slots=True)
class Workload:
    """A series of `requests` requests of the same shape, with at most `concurrency` in flight at a time."""

    requests: int
    concurrency: int
    shape: Shape
    metric: WorkloadMetric = "output_tok_s"

    @property
    def unit(self) -> MetricUnit:
        return _UNITS[self.metric]

    @property
    def lower_is_better(self) -> bool:
        return self.metric in ("p99_ms", "ms")


def _at_once(
    requests: int, prompt_tokens: int, output_tokens: int, metric: WorkloadMetric = "output_tok_s"
) -> Workload:
    return Workload(requests, requests, Shape(prompt_tokens, output_tokens), metric)


WORKLOADS: dict[str, Workload] = {
    "b1_50tok": Workload(40, 1, Shape(128, 50), "p99_ms"),
    "b1_decode": _at_once(1, 512, 256),
    "b8_decode": _at_once(8, 512, 256),
    "b64_decode": _at_once(64, 512, 256),
    "n1024": _at_once(1024, 512, 256),
    "n1024_sampled": Workload(1024, 1024, Shape(512, 256, temperature=0.8, top_p=0.95)),
    "prefill": _at_once(16, 4096, 1, "prompt_tok_s"),
    "long": _at_once(32, 8192, 128),
    "ttft2k": _at_once(1, 2048, 1, "ms"),
    "ttft8k": _at_once(1, 8192, 1, "ms"),
    "http256": _at_once(256, 512, 256),
    "http1024": _at_once(1024, 512, 256),
    "http1": Workload(10, 1, Shape(512, 256)),
}
