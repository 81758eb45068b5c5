"""Tests of the values that are computed from samples of the service's counters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from appliance.monitoring.samples import HIT_WINDOW_S, CounterSample, CounterSampler

REPLICA = "m-0"


class Sampler(CounterSampler):
    """Takes the given samples instead of reading counters."""

    def __init__(self, samples: Iterable[CounterSample]) -> None:
        unused: Any = None
        super().__init__(lambda: (), unused, unused)
        self._given = iter(samples)

    def sample(self) -> CounterSample:
        return next(self._given)


def a_sample(at: float, prompt_tokens: int, cached_tokens: int, replica: str = REPLICA) -> CounterSample:
    unused: Any = None
    return CounterSample(at, unused, {}, {}, {replica: (prompt_tokens, cached_tokens)})


def hit_rate(*samples: CounterSample) -> tuple[float | None, float | None]:
    """Return the replica's hit rate after all samples have been taken."""

    async def taken() -> CounterSampler:
        sampler = Sampler(samples)
        for _ in samples:
            sampler.start()
            sampler.stop()
        return sampler

    return asyncio.run(taken()).hit_rate(samples[-1], REPLICA)


def test_the_hit_rate_covers_the_last_minute() -> None:
    # In the first 100 s, no prompt is found in the cache. Later, a quarter of each prompt is found.
    samples = [a_sample(float(at), 80 * at, 20 * max(0, at - 100)) for at in range(200)]
    assert hit_rate(*samples) == (0.25, HIT_WINDOW_S)
    assert hit_rate(*samples[:131]) == (pytest.approx(0.125), HIT_WINDOW_S)
    assert hit_rate(*samples[:11]) == (0.0, 10.0)


def test_the_hit_rate_is_unknown_without_prompts_and_after_a_restart() -> None:
    assert hit_rate(a_sample(0.0, 50, 20), a_sample(10.0, 50, 20)) == (None, 10.0)
    assert hit_rate(a_sample(0.0, 50, 20), a_sample(10.0, 60, 0)) == (None, 10.0)
    assert hit_rate(a_sample(0.0, 50, 20, "other-0"), a_sample(10.0, 60, 30)) == (None, None)
