"""The values around all screens: in the header, in the banners of drains and on the timeline of history."""

from __future__ import annotations

from console.explanations.explanation import NOW, START, Explanation

FRAME: dict[str, Explanation] = {
    "service_state": Explanation(
        "ready, draining",
        "",
        NOW,
        "State of the service: starting, ready, degraded (it has current problems), draining or drained.",
        "status: state",
    ),
    "uptime": Explanation("up", "s", START, "Time since the service started.", "status: uptime_s"),
    "firing_alerts": Explanation("ALERTS", "alerts", NOW, "Number of firing alerts.", "alerts: state"),
    "stale": Explanation(
        "STALE",
        "s",
        "since the newest data",
        "Age of all values, shown when the service does not answer or answers late.",
        "events: at",
    ),
    "restarted": Explanation(
        "RESTARTED",
        "",
        "last 60 s",
        "The service has restarted, so its counters started again at 0.",
        "status: started_at",
    ),
    "history_time": Explanation(
        "HISTORY",
        "date and time",
        "1 s, or the mean of 10 s or 60 s",
        "The displayed time, and its resolution: with a resolution of 10 s or 60 s, values are means.",
        "GET /telemetry",
    ),
    "stopping": Explanation(
        "STOPPING",
        "",
        NOW,
        "The service is stopping: it finishes its requests and then ends, so the drain cannot be ended.",
        "status: drains.stopping",
    ),
    "drained_requests": Explanation(
        "running, queued, held",
        "requests",
        NOW,
        "Requests that a drain waits for, and new requests that wait until the drain ends.",
        "status: drains.running, drains.queued, drains.held",
    ),
    "drain_eta": Explanation(
        "ETA",
        "s",
        NOW,
        "Predicted time until the requests of a drain have finished, based on the measured rates.",
        "status: drains.eta_s",
    ),
    "grace_left": Explanation(
        "grace left",
        "s",
        NOW,
        "Time until a drain cancels the requests that are still running.",
        "status: drains.grace_left_s",
    ),
    "drain_took": Explanation(
        "took",
        "s",
        "the drain",
        "Time from the beginning of a drain until its last request had finished.",
        "status: drains.elapsed_s",
    ),
    "timeline_peak": Explanation(
        "output peak",
        "tokens/s",
        "the period of the timeline",
        "Highest rate of output tokens on the timeline. ▲ marks operator actions, and ! marks alerts.",
        "events: rates.generated_tokens_per_s",
    ),
}
