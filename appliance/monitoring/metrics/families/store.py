"""Database and audit chain metrics."""

from __future__ import annotations

from appliance.monitoring.metrics.metric import Metric

# fmt: off
DATABASES = (
    Metric("gauge", "appliance_store_waiting_rows", "rows",
           "Rows waiting to be committed to a database.",
           lambda state: state.lag_rows),
    Metric("gauge", "appliance_store_lag_seconds", "seconds",
           "Waiting time of the oldest uncommitted row.",
           lambda state: state.lag_ms * 1e-3),
    Metric("gauge", "appliance_store_failing_seconds", "seconds",
           "How long writes to a database have been failing.",
           lambda state: state.failing_s),
    Metric("counter", "appliance_store_committed_rows_total", "rows",
           "Rows committed to a database.",
           lambda state: state.committed_rows),
    Metric("counter", "appliance_store_dropped_rows_total", "rows",
           "Rows dropped because the buffer for waiting rows was full.",
           lambda state: state.dropped_rows),
    Metric("counter", "appliance_store_rejected_rows_total", "rows",
           "Rows discarded because the database rejected their values.",
           lambda state: state.rejected_rows),
)
AUDIT = (
    Metric("counter", "appliance_audit_rows_total", "rows",
           "Number of rows in the audit chain.",
           lambda trail: trail.head.seq),
    Metric("gauge", "appliance_audit_spooled_rows", "rows",
           "Audit rows waiting to be written to the database.",
           lambda trail: trail.spool.rows),
    Metric("counter", "appliance_audit_dropped_rows_total", "rows",
           "Audit rows that are only in the service's log, because the spool was full.",
           lambda trail: trail.spool.dropped),
)
# fmt: on
