"""The format of alert rules and alert receivers in the settings."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec

from store.structs import Severity

Measure = Literal["value", "rate", "change", "deviation", "time_to"]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400.0)]
Window = Annotated[float, msgspec.Meta(ge=5, le=86400.0)]
Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
RuleName = Annotated[
    str,
    msgspec.Meta(
        pattern="^[a-z0-9][a-z0-9-]{0,63}$", description="1 to 64 lower-case letters, digits and hyphens"
    ),
]


class AlertRule(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A condition on a metric, which is a value in the service's snapshot. A rule with the same name as
    a built-in rule replaces the built-in rule."""

    name: RuleName
    """Name of the rule."""
    metric: str
    """Name of the metric in the snapshot, such as "queue.waiting" or "gpus[*].temperature_c". `*` matches
    every entry of a list; each entry raises a separate alert."""
    severity: Severity = "warning"
    """How urgent the alert is."""
    per: str = ""
    """Name of a second metric to divide by, such as "blocks_total" for "blocks_used". A name without a dot is
    looked up in the object that contains the metric."""
    measure: Measure = "value"
    """What is compared with the threshold. "value": the metric. "rate": its increase per second over
    `window_s`. "change": the difference between its maximum and minimum within `window_s`. "deviation": its
    distance from its mean over `window_s`, in standard deviations. "time_to": the number of seconds until it
    reaches `target` if its trend over `window_s` continues."""
    window_s: Window = 300.0
    """Time span over which the measure is computed, in seconds."""
    target: Number = 0.0
    """For "time_to": the value that the metric is predicted to reach."""
    at_least: Number | None = None
    """The alert can be raised only while the metric (divided by `per`, if set) is at least this value. Below
    this value, an active alert ends."""
    above: Number | None = None
    """The alert is raised when the measure rises to this threshold."""
    below: Number | None = None
    """The alert is raised when the measure falls to this threshold."""
    clear: Number | None = None
    """The alert ends when the measure returns past this value. Default: 10% away from the threshold. The gap
    prevents the alert from starting and ending repeatedly."""
    texts: list[str] = []
    """For text metrics: the texts that raise the alert. `*` matches any characters. Such a rule has no
    threshold."""
    clear_texts: list[str] = []
    """The texts that end the alert. Default: all texts that do not raise the alert. If set, the alert is
    raised only after one of these texts has been seen."""
    for_s: Seconds = 0.0
    """How long the condition must last before the alert is raised, in seconds."""
    clear_for_s: Seconds = 30.0
    """How long the condition must be over before the alert ends, in seconds."""
    downstream_of: list[str] = []
    """Names of rules that detect possible causes of this alert. While an alert of one of these rules is
    active for the same model, replica or GPU, and for one minute afterwards, this alert is hidden and only
    counted in the alert that caused it."""
    description: str = ""
    """The alert's text. {where}, {value}, {threshold} and {text} are placeholders."""
    remedy: str = ""
    """The operator's next step. {remedy} is replaced with the `remedy` field of the object that contains the
    metric. {tenant} and {model} are replaced with the name of the tenant or model that the alert concerns,
    quoted for a shell, or with TENANT and MODEL if the alert does not concern exactly one."""
    unit: Literal["", "s", "ms", "%", "bytes", "°C", "/s", "requests", "tokens"] = ""
    """Unit of the measure. With "%", the measure is a fraction, shown as a percentage."""


class AlertSink(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A receiver that is notified when alerts are raised and ended. Every alert is also logged."""

    command: list[str] = []
    """Program and arguments. The alert is passed as JSON on standard input."""
    webhook: str = ""
    """URL (http or https). The alert is posted to it as JSON."""
    severity: Severity = "warning"
    """Minimum severity of alerts sent to the receiver."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """Time limit for one attempt, in seconds."""
    attempts: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    """Number of attempts before an alert is dropped. The delay after each attempt doubles, starting at one
    second."""


NAMED_IN_REMEDY = ("tenant", "model")
"""Kinds of objects whose names can be inserted into an alert rule's remedy."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""All severities of alerts, from the least to the most urgent."""


class RuleFault(NamedTuple):
    """A fault in an alert rule or receiver that the type checks of its fields do not detect."""

    field: str
    description: str
    remedy: str


def faults_of_rule(rule: AlertRule) -> list[RuleFault]:
    """Return the faults in an alert rule."""
    faults = []
    thresholds = (rule.above is not None) + (rule.below is not None) + bool(rule.texts)
    if thresholds != 1:
        description = f"rule {rule.name!r} has {thresholds} thresholds instead of one"
        faults.append(RuleFault("above", description, "set exactly one of above, below and texts"))
    threshold = rule.above if rule.above is not None else rule.below
    if rule.clear is not None and threshold is not None:
        wrong = rule.clear > threshold if rule.above is not None else rule.clear < threshold
        if wrong:
            side = "at most" if rule.above is not None else "at least"
            description = f"rule {rule.name!r}: clear = {rule.clear:g} is beyond the threshold"
            faults.append(RuleFault("clear", description, f"set it to {side} {threshold:g}"))
    if not rule.metric or rule.metric.count("[") != rule.metric.count("]"):
        description = f"rule {rule.name!r}: {rule.metric!r} is not the name of a metric"
        faults.append(RuleFault("metric", description, "use a name such as gpus[*].power_w"))
    placeholders = {
        "description": ("where", "value", "threshold", "text"),
        "remedy": ("remedy", *NAMED_IN_REMEDY),
    }
    for field, allowed in placeholders.items():
        try:
            getattr(rule, field).format(**dict.fromkeys(allowed, ""))
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            description = f"rule {rule.name!r}: the text's placeholders cannot be filled in ({error})"
            faults.append(
                RuleFault(field, description, "use only " + ", ".join(f"{{{name}}}" for name in allowed))
            )
    return faults


def faults_of_sink(sink: AlertSink) -> list[RuleFault]:
    """Return the faults in the definition of an alert receiver."""
    if bool(sink.command) == bool(sink.webhook):
        both = "both a command and a webhook" if sink.command else "neither a command nor a webhook"
        return [RuleFault("command", f"the receiver has {both}", "set exactly one of command and webhook")]
    if sink.webhook:
        try:
            parts = urlsplit(sink.webhook)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            description = f"webhook = {sink.webhook!r} is not a URL"
            return [RuleFault("webhook", description, "use a URL such as http://127.0.0.1:9000/alerts")]
    return []
