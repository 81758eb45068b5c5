"""Tests that each workload has the same parameters in the engine benchmark and in the service benchmark."""

from __future__ import annotations

import pytest

from appliance.bench.workloads import WORKLOADS
from engine.bench import workloads as engine


@pytest.mark.parametrize("name", engine.WORKLOADS)
def test_a_workload_has_the_same_parameters_as_in_the_engine_benchmark(name: str) -> None:
    theirs, ours = engine.WORKLOADS[name], WORKLOADS[name]
    assert ours.requests == theirs.requests
    assert ours.concurrency == (1 if theirs.one_at_a_time else theirs.requests)
    assert (ours.shape.prompt_tokens, ours.shape.output_tokens) == (
        theirs.prompt_tokens,
        theirs.output_tokens,
    )
    assert (ours.shape.temperature, ours.shape.top_p) == (theirs.temperature, theirs.top_p)
    assert (ours.metric, ours.unit, ours.lower_is_better) == (
        theirs.metric,
        theirs.unit,
        theirs.lower_is_better,
    )


def test_only_workloads_with_http_in_their_name_are_missing_from_the_engine_benchmark() -> None:
    assert set(WORKLOADS) - set(engine.WORKLOADS) == {"http1", "http256", "http1024"}
    for name, streams in (("http1", 1), ("http256", 256), ("http1024", 1024)):
        workload = WORKLOADS[name]
        assert workload.concurrency == streams and workload.requests >= streams
        assert (workload.shape.prompt_tokens, workload.shape.output_tokens) == (512, 256)
