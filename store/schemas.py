"""The tables, indexes and views of `history.db` and `contents.db`. `docs/store.md` explains each column.

A released migration never changes; append a new one instead.
"""

from __future__ import annotations

from store.migrations import Migration, Schema

# Times are unix seconds. A request is open while finished_at is null. Changes to rows are numbered; sequence
# is the number of the row's last change. To follow the log, a reader selects rows with a higher sequence than
# the last row it has read.
_REQUESTS = (
    """
CREATE TABLE requests (
    request_id TEXT PRIMARY KEY NOT NULL,
    created_at REAL NOT NULL,
    finished_at REAL,
    tenant TEXT,
    key_id TEXT,
    peer TEXT,
    endpoint TEXT NOT NULL,
    model TEXT,
    version TEXT,
    class TEXT NOT NULL,
    stream INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL,
    billed_tokens INTEGER NOT NULL,
    queue_ms REAL,
    ttft_ms REAL,
    itl_ms REAL,
    e2e_ms REAL,
    finish_reason TEXT,
    status INTEGER,
    error TEXT,
    batch_size_at_start INTEGER,
    replica TEXT,
    devices TEXT,
    preemptions INTEGER NOT NULL,
    resubmissions INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    state TEXT GENERATED ALWAYS AS (CASE WHEN finished_at IS NULL THEN 'open' ELSE 'ended' END) VIRTUAL,
    double_ends INTEGER NOT NULL DEFAULT 0
)
""",
    "CREATE UNIQUE INDEX requests_sequence ON requests (sequence)",
    "CREATE INDEX requests_created_at ON requests (created_at)",
    "CREATE INDEX requests_tenant ON requests (tenant, created_at)",
    "CREATE INDEX requests_model ON requests (model, created_at)",
    # These partial indexes always stay small or empty. The first contains open rows, which must be closed at
    # startup after a crash; the second contains rows that were closed more than once (double_ends), which
    # indicates a bug.
    "CREATE INDEX requests_open ON requests (request_id) WHERE finished_at IS NULL",
    "CREATE INDEX requests_double_ends ON requests (request_id) WHERE double_ends > 0",
    """
CREATE VIEW request_summary AS
SELECT
    request_id,
    strftime('%Y-%m-%d %H:%M:%f', created_at, 'unixepoch') AS created_utc,
    strftime('%Y-%m-%d %H:%M:%f', finished_at, 'unixepoch') AS finished_utc,
    state, tenant, key_id, peer, endpoint, model, version, class, status, finish_reason,
    prompt_tokens, cached_tokens, generated_tokens, billed_tokens,
    round(queue_ms, 1) AS queue_ms,
    round(ttft_ms, 1) AS ttft_ms,
    round(itl_ms, 2) AS itl_ms,
    round(e2e_ms, 1) AS e2e_ms,
    replica, devices, error
FROM requests
""",
    """
CREATE VIEW tenant_daily_usage AS
SELECT
    date(created_at, 'unixepoch') AS day_utc,
    tenant, model,
    count(*) AS requests,
    sum(status >= 400) AS failed_requests,
    sum(prompt_tokens) AS prompt_tokens,
    sum(cached_tokens) AS cached_tokens,
    sum(generated_tokens) AS generated_tokens,
    sum(billed_tokens) AS billed_tokens,
    round(avg(queue_ms), 1) AS mean_queue_ms,
    round(avg(ttft_ms), 1) AS mean_ttft_ms,
    round(avg(e2e_ms), 1) AS mean_e2e_ms
FROM requests
WHERE finished_at IS NOT NULL
GROUP BY day_utc, tenant, model
""",
    """
CREATE VIEW failed_requests AS
SELECT
    request_id,
    strftime('%Y-%m-%d %H:%M:%f', created_at, 'unixepoch') AS created_utc,
    tenant, key_id, peer, endpoint, model, replica, status, finish_reason, error,
    generated_tokens,
    round(e2e_ms, 1) AS e2e_ms
FROM requests
WHERE finished_at IS NOT NULL AND (status >= 400 OR error IS NOT NULL)
""",
)


# sequence is the number of the newest request log change that the quota levels reflect.
_QUOTA_LEVELS = (
    "ALTER TABLE requests ADD COLUMN quota_tokens INTEGER NOT NULL DEFAULT 0",
    """
CREATE TABLE quota_levels (
    scope TEXT NOT NULL,
    name TEXT NOT NULL,
    at REAL NOT NULL,
    requests_per_minute REAL,
    tokens_per_minute REAL,
    tokens_per_day REAL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (scope, name)
)
""",
)

_RETRIES = (
    "ALTER TABLE requests ADD COLUMN retry TEXT",
    "ALTER TABLE requests ADD COLUMN retry_of TEXT",
)

_USER = ("ALTER TABLE requests ADD COLUMN user TEXT",)
_UNIT = ("ALTER TABLE requests ADD COLUMN unit TEXT",)
_FALLBACK = ("ALTER TABLE requests ADD COLUMN fallback_of TEXT",)

# Usage rows are kept longer than request rows. Tokens are counted only for requests that ran to completion: a
# refused request has no quota_tokens, and an interrupted request's tokens are unknown. Clients can send any
# model name, so the names of unknown models (requests without a version) are not kept.
_USAGE_OF_REQUESTS = """
SELECT
    date(finished_at, 'unixepoch'), ifnull(tenant, ''), ifnull(key_id, ''),
    CASE WHEN version IS NULL THEN '' ELSE ifnull(model, '') END,
    count(*),
    ifnull(sum(status >= 400 OR error IS NOT NULL), 0),
    sum(CASE WHEN quota_tokens > 0 AND finish_reason IS NOT 'interrupted' THEN prompt_tokens ELSE 0 END),
    sum(CASE WHEN quota_tokens > 0 AND finish_reason IS NOT 'interrupted' THEN cached_tokens ELSE 0 END),
    sum(billed_tokens)
FROM requests WHERE {where} GROUP BY 1, 2, 3, 4
"""
_USAGE = (
    """
CREATE TABLE usage (
    day TEXT NOT NULL,
    tenant TEXT NOT NULL,
    key_id TEXT NOT NULL,
    model TEXT NOT NULL,
    requests INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, key_id, model)
) WITHOUT ROWID
""",
    "INSERT INTO usage " + _USAGE_OF_REQUESTS.format(where="finished_at IS NOT NULL"),
)
ADD_USAGE = (
    "INSERT INTO usage "
    + _USAGE_OF_REQUESTS.format(where="request_id = ? AND finished_at IS NOT NULL")
    + """ON CONFLICT (day, tenant, key_id, model) DO UPDATE SET
    requests = requests + excluded.requests,
    failed = failed + excluded.failed,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    output_tokens = output_tokens + excluded.output_tokens
"""
)
"""Adds the finished request with the given id to the daily usage."""

# Each row of a telemetry table contains the numbers of one sample or interval in the order of its layout, in
# the format of store.samples.pack. The indexes are used to find layouts that are no longer in use.
_TELEMETRY = (
    """
CREATE TABLE telemetry_layouts (
    id INTEGER PRIMARY KEY NOT NULL,
    sha256 BLOB NOT NULL UNIQUE,
    document BLOB NOT NULL
)
""",
    *(
        statement
        for table in ("telemetry_1s", "telemetry_10s", "telemetry_60s")
        for statement in (
            f"""
CREATE TABLE {table} (
    at INTEGER PRIMARY KEY NOT NULL,
    layout INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    numbers BLOB NOT NULL
)
""",
            f"CREATE INDEX {table}_layout ON {table} (layout)",
        )
    ),
)

# A row contains either a full frame (`whole`) or the changes since the preceding row.
_TELEMETRY_DETAILS = (
    """
CREATE TABLE telemetry_details (
    at INTEGER PRIMARY KEY NOT NULL,
    whole INTEGER NOT NULL,
    document BLOB NOT NULL
)
""",
    "CREATE INDEX telemetry_details_whole ON telemetry_details (at) WHERE whole",
)

_ALERTS = (
    """
CREATE TABLE alerts (
    id TEXT PRIMARY KEY NOT NULL,
    rule TEXT NOT NULL,
    severity TEXT NOT NULL,
    subject TEXT NOT NULL,
    what TEXT NOT NULL,
    cause TEXT NOT NULL,
    remedy TEXT NOT NULL,
    since REAL NOT NULL,
    raised_at REAL NOT NULL,
    ended_at REAL,
    value REAL,
    threshold REAL,
    unit TEXT NOT NULL,
    scope TEXT NOT NULL,
    suppressed_by TEXT NOT NULL,
    suppressed INTEGER NOT NULL,
    acknowledged_by TEXT NOT NULL,
    acknowledged_at REAL
)
""",
    "CREATE INDEX alerts_raised_at ON alerts (raised_at)",
    # This partial index is small, because it contains only active alerts.
    "CREATE INDEX alerts_open ON alerts (raised_at) WHERE ended_at IS NULL",
    """
CREATE TABLE silences (
    id TEXT PRIMARY KEY NOT NULL,
    rule TEXT NOT NULL,
    subject TEXT NOT NULL,
    until REAL NOT NULL,
    reason TEXT NOT NULL,
    created_by TEXT NOT NULL,
    created_at REAL NOT NULL
)
""",
)

_ALERT_DESCRIPTION = ("ALTER TABLE alerts RENAME COLUMN what TO description",)

# This database stores prompts and answers as required by tenants' log policies. Only the service's user can
# read the file.
_CONTENTS = (
    """
CREATE TABLE contents (
    request_id TEXT NOT NULL,
    part TEXT NOT NULL,
    number INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    created_at REAL NOT NULL,
    sha256 TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    text TEXT,
    truncated INTEGER NOT NULL,
    redactions INTEGER NOT NULL,
    PRIMARY KEY (request_id, part, number)
)
""",
    "CREATE INDEX contents_tenant ON contents (tenant, created_at)",
)

CONTENTS = Schema("contents", (Migration("contents", _CONTENTS),), mode=0o600)
HISTORY = Schema(
    "history",
    (
        Migration("requests", _REQUESTS),
        Migration("quota levels", _QUOTA_LEVELS),
        Migration("retries", _RETRIES),
        Migration("user", _USER),
        Migration("usage", _USAGE),
        Migration("telemetry", _TELEMETRY),
        Migration("alerts", _ALERTS),
        Migration("telemetry details", _TELEMETRY_DETAILS),
        Migration("unit", _UNIT),
        Migration("fallback", _FALLBACK),
        Migration("alert description", _ALERT_DESCRIPTION),
    ),
)
