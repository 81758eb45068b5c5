"""Evaluates alert rules on the recorded history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from appliance.alert_rules import AlertRule
from appliance.monitoring.alerts.evaluation import Evaluator, Transition
from store.samples import TelemetrySample
from store.telemetry import RESOLUTIONS
from store.telemetry_reader import TelemetryReader


class BackTest(NamedTuple):
    """The result of evaluating alert rules on the recorded history."""

    since: float
    """Time of the first evaluated sample, in unix seconds."""
    until: float
    samples: int
    transitions: list[Transition]
    lasting: int
    """Number of alerts that were still active at the end of the period, except suppressed ones."""


def back_test(path: Path, rules: Sequence[AlertRule], since: float, until: float) -> BackTest:
    """Evaluate alert rules on the recorded history in the database at `path`. Each part of the history is
    read at the finest resolution available. Raises `StoreError` if the database cannot be read."""
    evaluator, transitions = Evaluator(rules), []
    first = last = 0.0
    count = 0
    for sample in recorded_samples(TelemetryReader(path), since, until):
        first, last, count = first or sample.at, sample.at, count + 1
        transitions += evaluator.step(sample)
    lasting = sum(alert.announced and alert.ended_at is None for alert in evaluator.alerts.values())
    return BackTest(first, last, count, transitions, lasting)


def recorded_samples(reader: TelemetryReader, since: float, until: float) -> Iterator[TelemetrySample]:
    """Yield all recorded samples between two times, oldest first. Each part of the history is read at the
    finest resolution available."""
    begins = [reader.begin(resolution) for resolution in RESOLUTIONS]
    end_times = [
        until,
        *(min(found for found in (begin, until) if found is not None) for begin in begins[:-1]),
    ]
    for number in range(1, len(end_times)):
        end_times[number] = min(end_times[number], end_times[number - 1])
    for resolution, end in reversed(list(zip(RESOLUTIONS, end_times, strict=True))):
        last = end if resolution is RESOLUTIONS[0] else end - resolution.seconds
        for recorded in reader.samples(since, last, resolution):
            yield recorded.sample
