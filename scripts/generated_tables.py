#!/usr/bin/env python3
"""Writes the tables in docs/ that are derived from the code.

Usage: scripts/generated_tables.py [--check]

Comments mark each table's beginning (`generated: NAME`) and end (`end`). With --check, nothing is written,
and the exit code is 1 if a table is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from appliance.actions import flag  # noqa: E402
from appliance.alert_rules import AlertRule, AlertSink  # noqa: E402
from appliance.cli.fields import shown  # noqa: E402
from appliance.monitoring.metrics import families  # noqa: E402
from appliance.monitoring.metrics.metric import Group  # noqa: E402
from console.explanations import EXPLANATIONS  # noqa: E402
from console.keys import KEYS, shown_name  # noqa: E402
from scripts.alert_tables import field_table, rule_table  # noqa: E402
from scripts.field_tables import table  # noqa: E402
from scripts.request_tables import request_tables  # noqa: E402
from scripts.settings_tables import settings_sections  # noqa: E402
from store.fields import Declared, declared  # noqa: E402
from store.policies import KeyFields, Quota, TenantRecord  # noqa: E402

GENERATED = re.compile(r"<!-- generated: ([a-z ]+) -->\n.*?<!-- end -->", re.DOTALL)


def options(fields: Iterable[Declared]) -> str:
    """Return the table of command-line options."""
    return table(
        ("option", "value", "meaning"),
        (
            (
                f"`{flag(field.name)}`",
                "P0, P1, P2 or P3" if field.kind == "class" else values(field),
                field.description + default(field),
            )
            for field in fields
        ),
    )


def columns(fields: Iterable[Declared]) -> str:
    """Return the table of database columns."""
    return table(
        ("column", "unit or values", "meaning"),
        (
            (
                f"`{field.name}`",
                " or ".join([*filter(None, [unit(field)]), *(["null"] if field.optional else [])]),
                field.field.help + (f"; null: {field.field.none}" if field.optional else ""),
            )
            for field in fields
        ),
    )


def values(field: Declared) -> str:
    """Describe a field's possible values."""
    return {"span": "a duration such as 90s", "time": "a duration such as 90d, or a date"}.get(
        field.kind, field.expected
    ) + (", or none" if field.optional else "")


def unit(field: Declared) -> str:
    """Return a column's unit, or a description of its values."""
    if field.kind == "class":
        return "0 … 3"
    if field.kind == "list":
        return "JSON list"
    if field.choices:
        return ", ".join(f"`{choice}`" for choice in field.choices)
    return field.field.unit or {"text": "text", "count": "count"}.get(field.kind, "number")


def default(field: Declared) -> str:
    """Return a field's default value in brackets, or an empty string if it has none."""
    return "" if field.default in (None, msgspec.NODEFAULT) else f" (default {shown(field, field.default)})"


def metrics(*groups: Group[Any]) -> str:
    """Return a table of the metrics in the given groups."""
    return table(
        ("metric", "kind", "labels", "unit", "meaning"),
        (
            (
                f"`{metric.name}`",
                metric.kind,
                ", ".join(f"`{label}`" for label in family.labels),
                metric.unit,
                metric.help,
            )
            for group in groups
            for metric, family in zip(group.metrics, group.families, strict=True)
        ),
    )


def keys() -> str:
    """Return the table of the console's keys."""
    rows = []
    for key in KEYS:
        names = " ".join(f"`{shown_name(one)}`" for one in key.keys)
        rows.append((names, key.title, f"`{key.command}`"))
    return table(("keys", "meaning", "command"), rows)


def explanations() -> str:
    """Return the table that explains the values shown in the console."""
    return table(
        ("field or metric", "unit", "window", "meaning", "source"),
        ((one.title, one.unit, one.window, one.text, one.source) for one in EXPLANATIONS.values()),
    )


FAMILIES = families.Families()
TENANT, KEY, QUOTA = (list(declared(record).values()) for record in (TenantRecord, KeyFields, Quota))
TABLES: dict[str, Callable[[], str]] = {
    "tenant options": lambda: options([*TENANT, *QUOTA]),
    "key options": lambda: options(KEY),
    "tenant columns": lambda: columns(TENANT),
    "key columns": lambda: columns(KEY),
    "service metrics": lambda: metrics(FAMILIES.service),
    "request metrics": lambda: metrics(
        FAMILIES.rows, FAMILIES.retries, FAMILIES.times, FAMILIES.models, FAMILIES.residency
    ),
    "arm metrics": lambda: metrics(FAMILIES.arms, FAMILIES.fallbacks, FAMILIES.shadows),
    "tenant metrics": lambda: metrics(FAMILIES.tenant_rows, FAMILIES.tenants, FAMILIES.limits),
    "replica metrics": lambda: metrics(FAMILIES.replicas),
    "front metrics": lambda: metrics(FAMILIES.fronts),
    "store metrics": lambda: metrics(FAMILIES.databases, FAMILIES.audit),
    "process metrics": lambda: metrics(FAMILIES.process, FAMILIES.logs),
    "gateway metrics": lambda: metrics(FAMILIES.gateways),
    "console keys": keys,
    "console explanations": explanations,
    "alert rules": rule_table,
    "alert rule fields": lambda: field_table(AlertRule),
    "alert sink fields": lambda: field_table(AlertSink),
    "request fields": request_tables,
    "settings": settings_sections,
    "quota fields": lambda: columns(QUOTA).replace("| column |", "| field |"),
}


def page(former: str) -> str:
    """Return a page with regenerated tables."""
    return GENERATED.sub(
        lambda found: f"<!-- generated: {found[1]} -->\n{TABLES[found[1]]()}<!-- end -->", former
    )


def main() -> int:
    """Write the pages, or with `--check` only compare them with the files. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check, code = parser.parse_args().check, 0
    for path in sorted((ROOT / "docs").glob("*.md")):
        former = path.read_text(encoding="utf-8")
        text = page(former)
        if check and text != former:
            print(f"{path} is out of date: run scripts/generated_tables.py", file=sys.stderr)
            code = 1
        elif text != former:
            path.write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
