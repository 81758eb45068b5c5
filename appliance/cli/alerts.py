"""Implements `appliance alerts list` and `appliance alerts silences`."""

from __future__ import annotations

import time

from appliance import calls
from appliance.cli.output import of_seconds, paint, print_json, printable
from appliance.cli.service import admin_client
from appliance.cli.times import local
from appliance.snapshot import Alert
from store.structs import Silence

_COLOURS = {"critical": "red", "warning": "yellow", "info": "dim"}


def list_alerts(run_dir: str | None, *, as_json: bool) -> None:
    """Print alerts and silences. With `as_json`, print only the alerts."""
    with admin_client(run_dir) as client:
        alerts = client.call(calls.ALERTS)
        silences = [] if as_json else client.call(calls.SILENCES)
    if as_json:
        print_json(alerts)
        return
    if not alerts:
        print("no alerts within the last hour")
    now = time.time()
    for alert in sorted(alerts, key=lambda one: one.state == "resolved"):
        for line in alert_lines(alert, now):
            print(line)
    for silence in silences:
        print(silence_line(silence))


def list_silences(run_dir: str | None, *, as_json: bool) -> None:
    """Print the active silences."""
    with admin_client(run_dir) as client:
        silences = client.call(calls.SILENCES)
    if as_json:
        print_json(silences)
        return
    for silence in silences:
        print(silence_line(silence))
    if not silences:
        print("no silences are active")


def alert_lines(alert: Alert, now: float) -> list[str]:
    """Format an alert as lines of text."""
    since = alert.since if alert.since is not None else now
    if alert.ended_at is not None:
        lasted = f"{local(since)}, lasted {of_seconds(alert.ended_at - since)}"
    else:
        lasted = f"since {local(since)} ({of_seconds(max(0.0, now - since))})"
    by = f" by {alert.acknowledged_by}" if alert.acknowledged_by else ""
    colour = "dim" if alert.state == "resolved" else _COLOURS[alert.severity]
    head = f"{alert.severity.upper()}  {alert.description}"
    lines = [
        paint(printable(head), colour),
        printable(f"  {alert.state}{by} · {alert.rule} · {lasted} · id {alert.id}"),
        printable(f"  likely cause: {alert.cause}"),
        printable(f"  next step: {alert.remedy}"),
    ]
    if alert.suppressed:
        lines.append(f"  explains {alert.suppressed} more alert{'' if alert.suppressed == 1 else 's'}")
    return lines


def silence_line(silence: Silence) -> str:
    """Format a silence as one line of text."""
    reason = f": {silence.reason}" if silence.reason else ""
    return printable(
        f"silence {silence.id}: rule {silence.rule} on {silence.subject} until {local(silence.until)}, "
        f"by {silence.created_by}{reason}"
    )
