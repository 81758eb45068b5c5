"""Values shown around every screen: in the header, the drain banners and the history timeline."""

from __future__ import annotations

from console.explanations.explanation import NOW, START, Explanation

FRAME: dict[str, Explanation] = {
    "service_state": Explanation(
        "ready, draining",
        "",
        NOW,
        "Service state: starting, ready, degraded (there are current problems), draining or drained.",
        "status: state",
    ),
    "uptime": Explanation("up", "s", START, "Time since the service started.", "status: uptime_s"),
    "firing_alerts": Explanation("ALERTS", "alerts", NOW, "Number of firing alerts.", "alerts: state"),
    "stale": Explanation(
        "STALE",
        "s",
        "since the newest data",
        "Age of the displayed values. Shown when the service responds late or not at all.",
        "events: at",
    ),
    "restarted": Explanation(
        "RESTARTED",
        "",
        "last 60 s",
        "The service has restarted, so its counters were reset to 0.",
        "status: started_at",
    ),
    "history_time": Explanation(
        "HISTORY",
        "date and time",
        "1 s, or the mean of 10 s or 60 s",
        "The displayed time, and the resolution of the values. At 10 s or 60 s, values are averages.",
        "GET /telemetry",
    ),
    "stopping": Explanation(
        "STOPPING",
        "",
        NOW,
        "The service is stopping. It will exit once its requests have finished, so the drain cannot be "
        "ended.",
        "status: drains.stopping",
    ),
    "drained_requests": Explanation(
        "running, queued, held",
        "requests",
        NOW,
        "Running and queued: requests that the drain is waiting for. Held: new requests that are waiting for "
        "the drain to end.",
        "status: drains.running, drains.queued, drains.held",
    ),
    "drain_eta": Explanation(
        "ETA",
        "s",
        NOW,
        "Predicted time until the drain is complete, based on measured rates.",
        "status: drains.eta_s",
    ),
    "grace_left": Explanation(
        "grace left",
        "s",
        NOW,
        "Time until the drain cancels requests that are still running.",
        "status: drains.grace_left_s",
    ),
    "drain_took": Explanation(
        "took",
        "s",
        "the drain",
        "Time from the start of the drain to the end of its last request.",
        "status: drains.elapsed_s",
    ),
    "timeline_peak": Explanation(
        "output peak",
        "tokens/s",
        "the timeline's period",
        "Highest output token rate on the timeline. ▲ marks operator actions, and ! marks alerts.",
        "events: rates.generated_tokens_per_s",
    ),
}
