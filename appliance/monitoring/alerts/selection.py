"""Finds the metrics that match a rule's pattern, and the objects they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from store.samples import TelemetryLayout

Scope = frozenset[tuple[str, str]]
"""The objects that an alert is about: models, replicas, GPUs and tenants, each as a (kind, name) pair."""

_KINDS = {
    "models": "model",
    "replicas": "replica",
    "kv": "replica",
    "batches": "replica",
    "gpus": "GPU",
    "tenants": "tenant",
    "fronts": "front",
    "processes": "process",
    "classes": "class",
    "drains": "drain",
    "current_problems": "problem",
}
"""The lists in a sample whose entries can be the subjects of alerts, with the kind of object that each list
contains."""
_PLAIN = ("replica", "front", "process", "problem")
"""Kinds of objects that are omitted from a subject's description, because the subject's name implies them."""
_ENTRY = re.compile(r"([A-Za-z_0-9]+)\[([^\]]*)\]")


class Selected(NamedTuple):
    """A metric that matches a rule's pattern."""

    name: str
    where: str
    """The subject of the metric's alert, such as "demo-1", "GPU 3" or "queue"."""
    scope: Scope
    position: int
    """Index of the metric among a sample's numbers; -1 if its value is text."""
    per: int
    """Index of the number to divide the metric by; -1 if it is not divided."""
    text: str
    """The metric's value, if it is text."""
    remedy: str
    """The `remedy` field of the object that contains the metric."""


def select(layout: TelemetryLayout, pattern: str, per: str, is_text: bool) -> Iterator[Selected]:
    """Yield the metrics in a sample layout that match the pattern. Metrics without the divisor `per` are
    skipped."""
    matching = _pattern(pattern)
    values = layout.texts if is_text else layout.metrics
    for name, value in values.items():
        if not matching.fullmatch(name):
            continue
        parent = name.rpartition(".")[0]
        divisor = -1
        if per:
            found = layout.metrics.get(per if "." in per or not parent else f"{parent}.{per}")
            if found is None:
                continue
            divisor = found
        where, scope = subject(layout, name)
        text = value if isinstance(value, str) else ""
        position = -1 if isinstance(value, str) else value
        remedy = layout.texts.get(f"{parent}.remedy", "") if parent else ""
        yield Selected(name, where, scope, position, divisor, text, remedy)


def subject(layout: TelemetryLayout, name: str) -> tuple[str, Scope]:
    """Return the description and the scope of the object that a metric belongs to."""
    scope: set[tuple[str, str]] = set()
    where = name.partition(".")[0]
    for match in _ENTRY.finditer(name):
        kind, key = _KINDS.get(match[1]), match[2]
        if kind is None:
            continue
        where = key if kind in _PLAIN else f"{kind} {key}"
        scope.update(_related(layout, kind, key, name[: match.end()]))
    return where, frozenset(scope)


def _related(layout: TelemetryLayout, kind: str, key: str, entry: str) -> Iterator[tuple[str, str]]:
    texts = layout.texts
    if kind == "problem":
        word, _, rest = key.partition(" ")
        kind, key = (
            ("model", rest) if word == "model" else ("front" if word.startswith("front-") else "replica", key)
        )
    yield kind, key
    if (model := texts.get(f"{entry}.model")) is not None:
        yield "model", model
    if kind == "GPU":
        number = 0
        while (replica := texts.get(f"{entry}.replicas[{number}]")) is not None:
            yield "replica", replica
            yield from ((("model", model),) if (model := texts.get(f"kv[{replica}].model")) else ())
            number += 1


def related(one: Scope, other: Scope) -> bool:
    """Return whether alerts with these scopes can have the same cause. The scopes must share at least one
    object of each kind that occurs in both."""
    kinds = {kind for kind, _ in one} & {kind for kind, _ in other}
    return all(any(kind == shared for shared, _ in one & other) for kind in kinds)


def matches_text(text: str, patterns: list[str]) -> bool:
    """Return whether a text matches one of the patterns."""
    return any(fnmatchcase(text, pattern) for pattern in patterns)


def _pattern(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\[\*\])", pattern)
    return re.compile("".join(r"\[[^\]]*\]" if part == "[*]" else re.escape(part) for part in parts))
