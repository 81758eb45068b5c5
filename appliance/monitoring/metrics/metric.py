"""Metrics and the functions that read their values. Metrics with the same source form a group."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from appliance.monitoring.metrics.exposition import (
    Histograms,
    MetricFamily,
    MetricKind,
    Numbers,
    Summaries,
    Value,
)

Source = TypeVar("Source")


class Metric(NamedTuple):
    """A metric and the function that reads its value."""

    kind: MetricKind
    name: str
    unit: Literal["", "requests", "tokens", "seconds", "bytes", "rows", "lines", "blocks", "sequences"]
    help: str
    read: Callable[[Any], Any]
    """Reads the metric's value from the group's source: a number, the count and sum of a summary, or None if
    there is no value. If `labels` is not empty, the function returns a mapping from each label value, or
    tuple of label values, to the value."""
    labels: tuple[str, ...] = ()
    """The metric's labels, in addition to the group's."""
    bounds: tuple[float, ...] = ()
    """Bucket bounds of a histogram."""


class Group(Generic[Source]):
    """Metrics with the same source and labels, and their series."""

    def __init__(self, labels: tuple[str, ...], *metrics: Metric) -> None:
        self.metrics = metrics
        self.labels = labels
        self.families: list[MetricFamily[Any]] = [_family(metric, labels) for metric in metrics]
        both = list(zip(metrics, self.families, strict=True))
        self._plain = [(metric.read, family) for metric, family in both if _is_plain(metric)]
        self._plain_series: dict[tuple[str, ...], list[tuple[Callable[[Any], float], Value]]] = {}
        """For each combination of the group's label values: the functions that read the plain metrics, and
        the series that hold their values. A scrape sets thousands of series, so looking up each one would be
        slow."""
        self._others = [
            (metric.read, bool(metric.labels), _setter(family))
            for metric, family in both
            if not _is_plain(metric)
        ]
        self._counters = [
            (
                metric.read,
                bool(metric.labels),
                family.observe if isinstance(family, Histograms) else family.add,
            )
            for metric, family in both
            if isinstance(family, Histograms | Numbers)
        ]

    def set(self, source: Source, *labels: str) -> None:
        """Set this source's series to their current values."""
        plain = self._plain_series.get(labels)
        if plain is None:
            plain = self._plain_series[labels] = [(read, family.of(*labels)) for read, family in self._plain]
        for read, series in plain:
            series.value = read(source)
        for read, labelled, set_to in self._others:
            found = read(source)
            if labelled:
                for more, value in found.items():
                    set_to(value, *labels, *((more,) if isinstance(more, str) else more))
            else:
                set_to(found, *labels)

    def count(self, source: Source, *labels: str) -> None:
        """Add this source's values to the counters and histograms."""
        for read, labelled, add in self._counters:
            found = read(source)
            if labelled:
                for more, value in found.items():
                    add(value, *labels, more)
            elif found is not None:
                add(found, *labels)

    def clear(self) -> None:
        """Remove all of the group's series."""
        self._plain_series.clear()
        for family in self.families:
            family.clear()

    def keep(self, label: str, values: Collection[str]) -> None:
        """If the group has this label, remove all series with a label value that is not in `values`."""
        if label in self.labels:
            self._plain_series.clear()
            for family in self.families:
                family.keep(label, values)


def _family(metric: Metric, labels: tuple[str, ...]) -> MetricFamily[Any]:
    every = (*labels, *metric.labels)
    if metric.kind == "histogram":
        return Histograms(metric.name, metric.help, metric.bounds, *every)
    if metric.kind == "summary":
        return Summaries(metric.name, metric.help, *every)
    return Numbers(metric.kind, metric.name, metric.help, *every)


def _is_plain(metric: Metric) -> bool:
    """Return whether the metric is a number without additional labels."""
    return metric.kind in ("counter", "gauge") and not metric.labels


def _setter(family: MetricFamily[Any]) -> Callable[..., None]:
    """Return a function that sets a series of the metric, given the value and the label values."""
    if isinstance(family, Summaries):
        return lambda value, *labels: family.set(*value, *labels)
    if isinstance(family, Numbers):
        return family.set
    return lambda value, *labels: family.of(*labels).observe(value)
