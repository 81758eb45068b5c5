"""Fields and metrics of alerts, the audit trail, log lines, settings, findings and comparisons."""

from __future__ import annotations

from console.explanations.explanation import NOW, Explanation

LISTS: dict[str, Explanation] = {
    "severity": Explanation("SEVERITY", "", NOW, "‼ critical, ! warning, i info.", "alerts: severity"),
    "alert_state": Explanation(
        "STATE",
        "",
        NOW,
        "firing: the condition has held for long enough. acknowledged or silenced: by an operator. resolved: "
        "the condition has ended.",
        "alerts: state",
    ),
    "alert_age": Explanation(
        "AGE",
        "s",
        "since the condition began",
        "How long the alert's condition has held. For a resolved alert: how long it held.",
        "alerts: since, ended_at",
    ),
    "since": Explanation("SINCE", "date and time", "", "When the alert's condition began.", "alerts: since"),
    "where": Explanation(
        "WHERE",
        "",
        "",
        "The model, replica, front process, GPU, tenant or database that the alert is about.",
        "alerts: where",
    ),
    "description": Explanation(
        "DESCRIPTION", "", NOW, "Description of the alert's condition.", "alerts: description"
    ),
    "rule": Explanation(
        "RULE",
        "",
        "",
        'The alert rule that matched; "problem" means a current service problem.',
        "alerts: rule",
    ),
    "suppressed": Explanation(
        "ALSO, explains",
        "alerts",
        NOW,
        "Other alerts caused by this one.",
        "alerts: suppressed",
    ),
    "cause": Explanation(
        "likely cause",
        "",
        "the minutes before the alert",
        "An earlier event that probably caused the alert.",
        "alerts: cause",
    ),
    "remedy": Explanation("next step", "", "", "What the operator should do next.", "alerts: remedy"),
    "alert_value": Explanation(
        "value",
        "as shown",
        "when the alert was raised",
        "The metric's value when the alert was raised, and the rule's threshold.",
        "alerts: value, threshold, unit",
    ),
    "alert_ended": Explanation(
        "ended", "date and time", "", "When the alert's condition ended.", "alerts: ended_at"
    ),
    "silenced_until": Explanation(
        "silenced until",
        "date and time",
        "",
        "The alert is not sent to receivers until this time.",
        "alerts: silenced_until",
    ),
    "silence_id": Explanation("SILENCE", "", "", "Silence id.", "silences: id"),
    "silence_rule": Explanation(
        "RULE", "", "", "Rule whose alerts are silenced. * matches any text.", "silences: rule"
    ),
    "silence_subject": Explanation(
        "WHERE",
        "",
        "",
        "The model, replica, GPU or other component whose alerts are silenced. * matches any text.",
        "silences: subject",
    ),
    "until": Explanation("UNTIL", "date and time", "", "When the silence ends.", "silences: until"),
    "created_by": Explanation(
        "SILENCED BY", "", "", "The local user or key that silenced the alerts.", "silences: created_by"
    ),
    "created_at": Explanation(
        "SINCE", "date and time", "", "When the alerts were silenced.", "silences: created_at"
    ),
    "silence_reason": Explanation("REASON", "", "", "The operator's reason.", "silences: reason"),
    "silence_ends_in": Explanation("ends in", "s", NOW, "Time until the silence ends.", "silences: until"),
    "silenced_alerts": Explanation(
        "silenced alerts", "", NOW, "Active alerts that the silence matches.", "alerts: rule, where"
    ),
    "seq": Explanation(
        "SEQ", "row number", "", "The row's sequence number in the audit chain.", "audit: seq"
    ),
    "audit_at": Explanation("TIME", "date and time", "", "When the action began.", "audit: at"),
    "actor": Explanation(
        "OPERATOR", "", "", "The local user or key that performed the action.", "audit: actor"
    ),
    "action": Explanation("ACTION", "", "", "The action.", "audit: action"),
    "audit_target": Explanation("TARGET", "", "", "The object that the action changes.", "audit: params"),
    "outcome": Explanation(
        "RESULT",
        "",
        "",
        "The action's result: ok, or why it was refused or failed.",
        "audit: result",
    ),
    "audit_rows": Explanation(
        "anchored",
        "rows",
        NOW,
        "Number of rows proven unchanged by chain heads recorded outside the database.",
        "status: audit.recorded_rows",
    ),
    "audit_host": Explanation("host", "", "", "The machine on which the action was recorded.", "audit: host"),
    "audit_parameters": Explanation(
        "parameters", "", "", "The action's parameters, without secrets.", "audit: params"
    ),
    "audit_change": Explanation(
        "before, after", "", "", "The target's state before and after the action.", "audit: before, after"
    ),
    "audit_note": Explanation("note", "", "", "The operator's remark.", "audit: note"),
    "audit_ended": Explanation("ended", "date and time", "", "When the action ended.", "audit: ended_at"),
    "audit_hash": Explanation(
        "hash", "", "", "SHA-256 of the row and the previous row's hash.", "status: audit.head"
    ),
    "audit_chain": Explanation(
        "chain",
        "",
        "the last verification",
        "ok if every row is unchanged and matches the recorded heads; otherwise the first wrong or missing "
        "row.",
        "audit/verify: ok, rows, heads, broken_seq, problems",
    ),
    "at": Explanation("TIME", "date and time", "", "When the line was written.", "logs: at"),
    "level": Explanation("LEVEL", "", "", "Severity of the log line or finding.", "logs: level"),
    "process": Explanation(
        "PROCESS",
        "",
        "",
        "The process that wrote the line: the core, a front process or a replica. To see only one process, "
        "filter with process:front-0.",
        "logs: process",
    ),
    "area": Explanation("AREA", "", "", "The component that wrote the line.", "logs: area"),
    "message": Explanation("MESSAGE", "", "", "The log message.", "logs: message"),
    "setting": Explanation("SETTING", "", "", "Setting name, as in the settings file.", "config: settings"),
    "setting_value": Explanation("VALUE", "", NOW, "The value currently in effect.", "config: settings"),
    "setting_source": Explanation(
        "SOURCE",
        "",
        "",
        "Where the setting comes from: FILE:LINE, a command-line option, or default.",
        "config: places",
    ),
    "finding": Explanation(
        "FINDING, SUBJECT, remedy",
        "",
        "the last check",
        "What appliance doctor found, where, and what to do about it.",
        "appliance doctor",
    ),
    "metric": Explanation("METRIC", "", "", "Metric name, as in the admin API.", "GET /telemetry: metrics"),
    "first": Explanation(
        "FIRST",
        "the metric's unit",
        "the first time",
        "The metric's value at the first of the two times.",
        "GET /telemetry",
    ),
    "second": Explanation(
        "SECOND",
        "the metric's unit",
        "the displayed time",
        "The metric's value at the displayed time.",
        "GET /telemetry",
    ),
    "difference": Explanation(
        "DIFFERENCE",
        "the metric's unit, or percentage points",
        "both times",
        "SECOND minus FIRST.",
        "GET /telemetry",
    ),
    "change": Explanation(
        "CHANGE",
        "% of the first value",
        "both times",
        "DIFFERENCE as a percentage of FIRST.",
        "GET /telemetry",
    ),
}
