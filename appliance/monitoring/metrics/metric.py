"""Metrics and the functions that read their values. Metrics with the same source form a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from appliance.monitoring.metrics.exposition import Histograms, MetricFamily, Numbers, Summaries

Source = TypeVar("Source")
Unit = Literal["", "requests", "tokens", "seconds", "bytes", "rows", "lines", "blocks", "sequences"]


class Metric(NamedTuple):
    """A metric and the function that reads its value."""

    kind: Literal["counter", "gauge", "histogram", "summary"]
    name: str
    unit: Unit
    help: str
    read: Callable[[Any], Any]
    """Reads the value of the metric from the group's source: a number, or the count and the sum of a summary.
    The result is None if there is no value. If `labels` is not empty, the function returns a mapping from
    each label value, or tuple of label values, to the value."""
    labels: tuple[str, ...] = ()
    """Labels of the metric in addition to the labels of the group."""
    bounds: tuple[float, ...] = ()
    """Bounds of the buckets of a histogram."""


class Group(Generic[Source]):
    """Metrics with the same source and the same labels, and their series."""

    def __init__(self, labels: tuple[str, ...], *metrics: Metric) -> None:
        self.metrics = metrics
        self.families: list[MetricFamily[Any]] = [_family(metric, labels) for metric in metrics]
        self._series = [
            (metric.read, bool(metric.labels), _setter(family))
            for metric, family in zip(metrics, self.families, strict=True)
        ]
        self._counters = [
            (
                metric.read,
                bool(metric.labels),
                family.observe if isinstance(family, Histograms) else family.add,
            )
            for metric, family in zip(metrics, self.families, strict=True)
            if isinstance(family, Histograms | Numbers)
        ]

    def set(self, source: Source, *labels: str) -> None:
        """Set the series of this source to their current values."""
        for read, labelled, set_to in self._series:
            found = read(source)
            if labelled:
                for more, value in found.items():
                    set_to(value, *labels, *((more,) if isinstance(more, str) else more))
            else:
                set_to(found, *labels)

    def count(self, source: Source, *labels: str) -> None:
        """Add the values of this source to the counters and histograms."""
        for read, labelled, add in self._counters:
            found = read(source)
            if labelled:
                for more, value in found.items():
                    add(value, *labels, more)
            elif found is not None:
                add(found, *labels)

    def clear(self) -> None:
        """Remove all series of the group."""
        for family in self.families:
            family.clear()


def _family(metric: Metric, labels: tuple[str, ...]) -> MetricFamily[Any]:
    every = (*labels, *metric.labels)
    if metric.kind == "histogram":
        return Histograms(metric.name, metric.help, metric.bounds, *every)
    if metric.kind == "summary":
        return Summaries(metric.name, metric.help, *every)
    return Numbers(metric.kind, metric.name, metric.help, *every)


def _setter(family: MetricFamily[Any]) -> Callable[..., None]:
    """Return a function that sets a series of the metric. The function's arguments are the value and the
    label values."""
    if isinstance(family, Summaries):
        return lambda value, *labels: family.set(*value, *labels)
    if isinstance(family, Numbers):
        return family.set
    return lambda value, *labels: family.of(*labels).observe(value)
