"""The tables and views of `control.db`: tenants, keys, the audit chain and the model registry.
`docs/store.md` explains each column.

A released migration never changes; append a new one instead. New fields of tenants and keys need no
hand-written migration, because their columns are derived from the field declarations (`_added_fields`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_type_hints

import msgspec

from store.fields import declared, is_optional
from store.migrations import Migration, Schema
from store.policies import KeyFields, TenantRecord
from store.records import column_type, column_value

# The key itself is not stored, only its SHA-256 and its first characters, by which people recognise it.
_KEYS = (
    """
CREATE TABLE keys (
    id TEXT PRIMARY KEY NOT NULL,
    name TEXT NOT NULL,
    tenant TEXT NOT NULL,
    prefix TEXT NOT NULL,
    sha256 TEXT NOT NULL UNIQUE,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL
)
""",
    """
CREATE VIEW key_list AS
SELECT
    id, name, tenant, prefix,
    strftime('%Y-%m-%d %H:%M:%S', created_at, 'unixepoch') AS created_utc,
    strftime('%Y-%m-%d %H:%M:%S', expires_at, 'unixepoch') AS expires_utc,
    strftime('%Y-%m-%d %H:%M:%S', revoked_at, 'unixepoch') AS revoked_utc
FROM keys
""",
)


_TENANT_LIST = """
CREATE VIEW tenant_list AS
SELECT
    name,
    strftime('%Y-%m-%d %H:%M:%S', created_at, 'unixepoch') AS created_utc,
    strftime('%Y-%m-%d %H:%M:%S', suspended_at, 'unixepoch') AS suspended_utc,
    weight,
    'P' || highest_class AS highest_class,
    'P' || default_class AS default_class,
    (SELECT count(*) FROM keys WHERE keys.tenant = tenants.name AND revoked_at IS NULL) AS keys,
    (SELECT count(*) FROM peers WHERE peers.tenant = tenants.name) AS peers,
    cache_group, log_policy, log_days, default_max_tokens, quota{added}
FROM tenants
"""


_KEY_LIST = """
CREATE VIEW key_list AS
SELECT
    id, name, tenant, prefix,
    strftime('%Y-%m-%d %H:%M:%S', created_at, 'unixepoch') AS created_utc,
    strftime('%Y-%m-%d %H:%M:%S', expires_at, 'unixepoch') AS expires_utc,
    strftime('%Y-%m-%d %H:%M:%S', revoked_at, 'unixepoch') AS revoked_utc,
    scopes, models,
    'P' || highest_class AS highest_class,
    quota, replaced_by{added}
FROM keys
"""


# "local" is the tenant of local users without a mapping; "default" is the tenant of keys created without a
# tenant. Keys that were created before the `tenants` table existed keep their tenant's name.
_TENANTS = (
    """
CREATE TABLE tenants (
    name TEXT PRIMARY KEY NOT NULL,
    created_at REAL NOT NULL,
    weight REAL NOT NULL DEFAULT 1.0,
    highest_class INTEGER NOT NULL DEFAULT 1,
    default_class INTEGER NOT NULL DEFAULT 1,
    default_max_tokens INTEGER,
    cache_group TEXT,
    log_policy TEXT NOT NULL DEFAULT 'metadata',
    log_days REAL,
    quota TEXT NOT NULL DEFAULT '{}',
    suspended_at REAL
)
""",
    """
CREATE TABLE peers (
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,
    tenant TEXT NOT NULL REFERENCES tenants (name),
    created_at REAL NOT NULL,
    PRIMARY KEY (kind, number)
)
""",
    """ALTER TABLE keys ADD COLUMN scopes TEXT NOT NULL DEFAULT '["inference"]'""",
    "ALTER TABLE keys ADD COLUMN models TEXT",
    "ALTER TABLE keys ADD COLUMN highest_class INTEGER",
    "ALTER TABLE keys ADD COLUMN quota TEXT NOT NULL DEFAULT '{}'",
    "ALTER TABLE keys ADD COLUMN replaced_by TEXT",
    """
INSERT INTO tenants (name, created_at)
SELECT name, CAST(strftime('%s', 'now') AS REAL)
FROM (SELECT 'local' AS name UNION SELECT 'default' UNION SELECT tenant FROM keys)
""",
    _TENANT_LIST.format(added=""),
    "DROP VIEW key_list",
    _KEY_LIST.format(added=""),
)


# AUTOINCREMENT records the highest seq ever used (in sqlite_sequence), so that removal of the last rows can
# be detected.
_AUDIT = (
    """
CREATE TABLE audit (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    params TEXT NOT NULL,
    result TEXT NOT NULL,
    previous_hash TEXT NOT NULL,
    hash TEXT NOT NULL
)
""",
    """
CREATE TRIGGER audit_rows_do_not_change BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'audit rows are never changed'); END
""",
    """
CREATE TRIGGER audit_rows_do_not_go BEFORE DELETE ON audit
BEGIN SELECT RAISE(ABORT, 'audit rows are never deleted'); END
""",
)


# These columns are null in rows written by earlier versions. Null columns are not hashed, so those rows keep
# their hashes.
_AUDIT_ACTS = (
    "ALTER TABLE audit ADD COLUMN host TEXT",
    "ALTER TABLE audit ADD COLUMN act TEXT",
    "ALTER TABLE audit ADD COLUMN phase TEXT",
    "ALTER TABLE audit ADD COLUMN before TEXT",
    "ALTER TABLE audit ADD COLUMN after TEXT",
    "ALTER TABLE audit ADD COLUMN note TEXT",
    "CREATE INDEX audit_act ON audit (act, phase)",
    """
CREATE VIEW audit_actions AS
SELECT
    first.seq AS seq,
    last.seq AS result_seq,
    substr(first.at, 1, 19) AS asked_utc,
    substr(last.at, 1, 19) AS ended_utc,
    first.actor AS actor,
    first.host AS host,
    first.action AS action,
    first.params AS params,
    CASE WHEN first.phase = 'intent' THEN last.result ELSE first.result END AS result,
    CASE WHEN first.phase = 'intent' THEN last.before ELSE first.before END AS before,
    CASE WHEN first.phase = 'intent' THEN last.after ELSE first.after END AS after,
    coalesce(last.note, first.note) AS note
FROM audit AS first
LEFT JOIN audit AS last ON last.act = first.act AND last.phase = 'result' AND first.phase = 'intent'
WHERE first.phase IS NOT 'result'
    OR NOT EXISTS (SELECT 1 FROM audit WHERE act = first.act AND phase = 'intent')
""",
)


_MODELS = (
    """
CREATE TABLE models (
    name TEXT PRIMARY KEY NOT NULL,
    created_at REAL NOT NULL,
    default_version INTEGER NOT NULL,
    previous_version INTEGER,
    next_version INTEGER NOT NULL
)
""",
    """
CREATE TABLE model_versions (
    model TEXT NOT NULL REFERENCES models (name),
    version INTEGER NOT NULL,
    created_at REAL NOT NULL,
    folder TEXT NOT NULL,
    files TEXT NOT NULL,
    settings TEXT NOT NULL,
    loaded_at REAL,
    PRIMARY KEY (model, version)
)
""",
    """
CREATE TABLE aliases (
    name TEXT PRIMARY KEY NOT NULL,
    target TEXT NOT NULL,
    created_at REAL NOT NULL
)
""",
)


_SPLITS = (
    """
CREATE TABLE splits (
    name TEXT PRIMARY KEY NOT NULL,
    weights TEXT NOT NULL,
    created_at REAL NOT NULL
)
""",
)


_SHADOWS = (
    """
CREATE TABLE shadows (
    name TEXT PRIMARY KEY NOT NULL,
    target TEXT NOT NULL,
    share REAL NOT NULL,
    created_at REAL NOT NULL
)
""",
)


def _added_fields(
    table: str, record: type[msgspec.Struct], after: str, view: str, view_sql: str
) -> Iterator[Migration]:
    """Yield a migration for each field of `record` that is declared after the field named in `after`. The
    migration adds the field's column to `table` and its view. Hand-written migrations create the columns of
    earlier fields."""
    names = record.__struct_fields__
    hints, fields, added = get_type_hints(record), declared(record), ""
    for name in names[names.index(after) + 1 :]:
        default = "" if fields[name].default is None else f" DEFAULT {_literal(fields[name].default)}"
        null = "" if is_optional(hints[name]) else " NOT NULL"
        added += f", {name}"
        yield Migration(
            f"{table}.{name}",
            (
                f"ALTER TABLE {table} ADD COLUMN {name} {column_type(hints[name])}{null}{default}",
                f"DROP VIEW {view}",
                view_sql.format(added=added),
            ),
        )


def _literal(value: object) -> str:
    stored = column_value(value)
    if isinstance(stored, str):
        return "'" + stored.replace("'", "''") + "'"
    return repr(stored)


CONTROL = Schema(
    "control",
    (
        Migration("keys", _KEYS),
        Migration("audit", _AUDIT),
        Migration("tenants", _TENANTS),
        Migration("audit acts", _AUDIT_ACTS),
        *_added_fields("tenants", TenantRecord, "suspended_at", "tenant_list", _TENANT_LIST),
        *_added_fields("keys", KeyFields, "replaced_by", "key_list", _KEY_LIST),
        Migration("models", _MODELS),
        Migration("splits", _SPLITS),
        Migration("shadows", _SHADOWS),
    ),
)
