"""`appliance tenants`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from appliance.actions import CreateTenant, SetTenant
from appliance.cli.actions import perform
from appliance.cli.failure import CommandLineError, Failure
from appliance.cli.fields import given_fields
from appliance.cli.output import Column, of_count, paint, print_json, printable, table, terminal_width
from appliance.cli.service import admin_client
from appliance.cli.times import local, of_span
from appliance.durations import duration
from appliance.protocol import Key, LimitUsage, Tenant
from store.policies import Quota

_COLUMNS = (
    Column("NAME", flexible=True),
    Column("STATE", colours={"suspended": "red"}),
    Column("WEIGHT", right=True, drop=3),
    Column("CLASS", drop=2),
    Column("BEST", drop=4),
    Column("KEYS", right=True),
    Column("PEERS", right=True, drop=5),
    Column("CACHE GROUP", flexible=True, drop=6),
    Column("LOG", drop=7),
    Column("LIMITS", flexible=True, drop=1),
)
_USAGE_COLUMNS = (
    Column("SCOPE", flexible=True),
    Column("LIMIT"),
    Column("USED", right=True),
    Column("OF", right=True),
    Column("HELD", right=True, drop=2),
    Column("RESETS IN", drop=1),
)
_LIMIT_NAMES = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "tokens_per_day": "tokens a day",
    "concurrent_requests": "requests at once",
    "queued_requests": "requests waiting",
    "kv_share": "tokens in the KV cache",
}


def list_tenants(run_dir: str | None, *, as_json: bool) -> None:
    """Print all tenants."""
    with admin_client(run_dir) as client:
        found = client.tenants()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            printable(tenant.name),
            _state(tenant),
            f"{tenant.weight:g}",
            f"P{max(tenant.default_class, tenant.highest_class)}",
            f"P{tenant.highest_class}",
            of_count(tenant.keys),
            of_count(tenant.peers),
            printable(tenant.cache_group or ""),
            tenant.log_policy,
            ", ".join(limits(tenant.quota)) or "none",
        )
        for tenant in found
    ]
    heading, *lines = table(_COLUMNS, rows, width=terminal_width())
    print(paint(heading, "dim"))
    for line in lines:
        print(line)


def show_tenant(run_dir: str | None, name: str, *, as_json: bool) -> None:
    """Print a tenant. Raises Failure if there is none of this name."""
    with admin_client(run_dir) as client:
        found = [tenant for tenant in client.tenants() if tenant.name == name]
        keys = [] if as_json else client.keys()
    if not found:
        raise Failure(f"no tenant {name!r}: list the tenants with: appliance tenants list")
    if as_json:
        print_json(found[0])
        return
    _print(found[0])
    rows = [_used("tenant", usage) for usage in found[0].usage]
    rows += [
        _used(f"key {key.name}", usage)
        for key in keys
        if key.tenant == name and _valid(key)
        for usage in key.usage
    ]
    if rows:
        print()
        heading, *lines = table(_USAGE_COLUMNS, rows, width=terminal_width())
        print(paint(heading, "dim"))
        for line in lines:
            print(line)


def create_tenant(run_dir: str | None, name: str, options: Mapping[str, Any], *, as_json: bool) -> None:
    """Create a tenant and print it."""
    asked = CreateTenant(name=name, **given_fields(options, CreateTenant))
    perform(run_dir, asked, as_json=as_json, show=_print)


def set_tenant(run_dir: str | None, name: str, options: Mapping[str, Any], *, as_json: bool) -> None:
    """Change a tenant and print it."""
    fields = given_fields(options, SetTenant)
    if not fields:
        raise CommandLineError("nothing to change was given: see appliance tenants set --help")
    perform(run_dir, SetTenant(name=name, **fields), as_json=as_json, show=_print)


def limits(quota: Quota) -> list[str]:
    """Return a text for each limit of a quota."""
    found = [
        (quota.requests_per_minute, "requests/min"),
        (quota.tokens_per_minute, "tokens/min"),
        (quota.tokens_per_day, "tokens/day"),
        (quota.concurrent_requests, "at once"),
        (quota.queued_requests, "waiting"),
        (quota.context_tokens, "tokens context"),
    ]
    words = [f"{limit:,.15g} {what}" for limit, what in found if limit is not None]
    return words + ([] if quota.kv_share is None else [f"{quota.kv_share:.3g} of KV"])


def _used(whose: str, usage: LimitUsage) -> tuple[str, ...]:
    if usage.resets_in_s is None:
        reset = "when they end" if usage.used else "-"
    else:
        reset = duration(usage.resets_in_s) if usage.used else "-"
    return (
        printable(whose),
        _LIMIT_NAMES.get(usage.limit, usage.limit),
        of_count(usage.used),
        of_count(usage.capacity),
        of_count(usage.held),
        reset,
    )


def _valid(key: Key) -> bool:
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > time.time())


def _print(tenant: Tenant) -> None:
    for name, value in _fields(tenant):
        print(f"{paint(f'{name:20}', 'dim')}  {printable(value)}")


def _fields(tenant: Tenant) -> Iterable[tuple[str, str]]:
    quota = tenant.quota
    yield "name", tenant.name + (" (built in)" if tenant.built_in else "")
    since = "" if tenant.suspended_at is None else f" since {local(tenant.suspended_at)}"
    yield "state", _state(tenant) + since
    yield "created", local(tenant.created_at)
    yield "keys", f"{of_count(tenant.keys)} valid"
    yield "peers", of_count(tenant.peers)
    yield "weight", f"{tenant.weight:g}"
    yield "class", f"P{max(tenant.default_class, tenant.highest_class)}, at best P{tenant.highest_class}"
    yield "default max_tokens", _or(tenant.default_max_tokens, "up to the model's length")
    yield "requests a minute", _or(quota.requests_per_minute)
    yield "tokens a minute", _or(quota.tokens_per_minute)
    yield "tokens a day", _or(quota.tokens_per_day)
    yield "burst", of_span(quota.burst_s)
    yield "requests at once", _or(quota.concurrent_requests)
    yield "requests waiting", _or(quota.queued_requests)
    yield "context tokens", _or(quota.context_tokens, "the model's")
    yield "share of KV blocks", "no limit" if quota.kv_share is None else f"{quota.kv_share:.3g}"
    yield "cache group", tenant.cache_group or "none: shares no prefixes"
    days = "" if tenant.log_days is None else f" for {tenant.log_days:g} days"
    yield "request log", tenant.log_policy + days


def _or(limit: float | None, without: str = "no limit") -> str:
    return without if limit is None else f"{limit:,.15g}"


def _state(tenant: Tenant) -> str:
    return "served" if tenant.suspended_at is None else "suspended"
