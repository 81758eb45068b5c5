"""The fields and metrics of alerts, the audit trail, log lines, settings, findings and comparisons."""

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
        "How long the condition has held. For a resolved alert: how long it held.",
        "alerts: since, ended_at",
    ),
    "since": Explanation("SINCE", "date and time", "", "Time at which the condition began.", "alerts: since"),
    "where": Explanation(
        "WHERE",
        "",
        "",
        "The model, replica, front process, GPU, tenant or database that the alert concerns.",
        "alerts: where",
    ),
    "description": Explanation(
        "DESCRIPTION", "", NOW, "Description of the condition.", "alerts: description"
    ),
    "rule": Explanation(
        "RULE",
        "",
        "",
        'The alert rule that matched; "problem" means a current problem of the service.',
        "alerts: rule",
    ),
    "suppressed": Explanation(
        "ALSO, explains",
        "alerts",
        NOW,
        "Number of other alerts that this alert caused.",
        "alerts: suppressed",
    ),
    "cause": Explanation(
        "likely cause",
        "",
        "the minutes before the alert",
        "An event shortly before the condition began that probably explains it.",
        "alerts: cause",
    ),
    "remedy": Explanation("next step", "", "", "What the operator should do next.", "alerts: remedy"),
    "alert_value": Explanation(
        "value",
        "as shown",
        "when the alert was raised",
        "The metric's value when the alert was raised, and the threshold of the rule.",
        "alerts: value, threshold, unit",
    ),
    "alert_ended": Explanation(
        "ended", "date and time", "", "Time at which the condition ended.", "alerts: ended_at"
    ),
    "silenced_until": Explanation(
        "silenced until",
        "date and time",
        "",
        "Time until which the alert is not sent to receivers.",
        "alerts: silenced_until",
    ),
    "silence_id": Explanation("SILENCE", "", "", "Id of the silence.", "silences: id"),
    "silence_rule": Explanation(
        "RULE", "", "", "Rule whose alerts are silenced. * stands for any characters.", "silences: rule"
    ),
    "silence_subject": Explanation(
        "WHERE",
        "",
        "",
        "The model, replica, GPU or other component whose alerts are silenced. * stands for any characters.",
        "silences: subject",
    ),
    "until": Explanation("UNTIL", "date and time", "", "Time at which the silence ends.", "silences: until"),
    "created_by": Explanation(
        "SILENCED BY", "", "", "The local user or key that silenced the alerts.", "silences: created_by"
    ),
    "created_at": Explanation(
        "SINCE", "date and time", "", "Time at which the alerts were silenced.", "silences: created_at"
    ),
    "silence_reason": Explanation("REASON", "", "", "The reason that the operator gave.", "silences: reason"),
    "silence_ends_in": Explanation("ends in", "s", NOW, "Time until the silence ends.", "silences: until"),
    "silenced_alerts": Explanation(
        "silenced alerts", "", NOW, "The active alerts that the silence matches.", "alerts: rule, where"
    ),
    "seq": Explanation(
        "SEQ", "row number", "", "Sequence number of the row in the audit chain.", "audit: seq"
    ),
    "audit_at": Explanation("TIME", "date and time", "", "Time at which the action began.", "audit: at"),
    "actor": Explanation(
        "OPERATOR", "", "", "The local user or key that performed the action.", "audit: actor"
    ),
    "action": Explanation("ACTION", "", "", "The action.", "audit: action"),
    "audit_target": Explanation("TARGET", "", "", "The object that the action changes.", "audit: params"),
    "outcome": Explanation(
        "RESULT",
        "",
        "",
        "Result of the action: ok, or the reason why it was refused or failed.",
        "audit: result",
    ),
    "audit_rows": Explanation(
        "anchored",
        "rows",
        NOW,
        "Rows proven unchanged by chain heads that were anchored outside the database.",
        "status: audit.recorded_rows",
    ),
    "audit_host": Explanation("host", "", "", "The machine on which the action was recorded.", "audit: host"),
    "audit_parameters": Explanation(
        "parameters", "", "", "Parameters of the action, without secrets.", "audit: params"
    ),
    "audit_change": Explanation(
        "before, after", "", "", "State of the target before and after the action.", "audit: before, after"
    ),
    "audit_note": Explanation("note", "", "", "A remark that the operator gave.", "audit: note"),
    "audit_ended": Explanation(
        "ended", "date and time", "", "Time at which the action ended.", "audit: ended_at"
    ),
    "audit_hash": Explanation(
        "hash", "", "", "SHA-256 of the row together with the previous row's hash.", "status: audit.head"
    ),
    "audit_chain": Explanation(
        "chain",
        "",
        "the last verification",
        "ok if every row of the chain is unchanged and agrees with the recorded heads. Otherwise, the first "
        "wrong or missing row.",
        "audit/verify: ok, rows, heads, broken_seq, problems",
    ),
    "at": Explanation("TIME", "date and time", "", "Time at which the line was written.", "logs: at"),
    "level": Explanation("LEVEL", "", "", "Severity of the log line or finding.", "logs: level"),
    "process": Explanation(
        "PROCESS",
        "",
        "",
        "The process that wrote the line: core, a front or a replica. Filter with process:front-0 to see one "
        "process.",
        "logs: process",
    ),
    "area": Explanation("AREA", "", "", "The component that wrote the line.", "logs: area"),
    "message": Explanation("MESSAGE", "", "", "The text of the log line.", "logs: message"),
    "setting": Explanation(
        "SETTING", "", "", "Name of the setting, as in the settings file.", "config: settings"
    ),
    "setting_value": Explanation(
        "VALUE", "", NOW, "The value that is currently in effect.", "config: settings"
    ),
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
        "What appliance doctor found, what it concerns, and what to do.",
        "appliance doctor",
    ),
    "metric": Explanation(
        "METRIC", "", "", "Name of the metric, as in the admin API.", "GET /telemetry: metrics"
    ),
    "first": Explanation(
        "FIRST",
        "of the metric",
        "the first time",
        "Value at the first time.",
        "GET /telemetry",
    ),
    "second": Explanation(
        "SECOND",
        "of the metric",
        "the displayed time",
        "Value at the displayed time.",
        "GET /telemetry",
    ),
    "difference": Explanation(
        "DIFFERENCE",
        "of the metric, or percentage points",
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
