"""A replica's status, for operators."""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.models.cgroups import LIMITS_REMEDY
from appliance.models.load_progress import load_text
from appliance.models.replica import Replica
from appliance.protocol import Degradation, ReplicaStatus
from engine.messages import ReplicaInfo
from engine.rank_messages import ReplicaStats, Report


def replica_status(replica: Replica) -> ReplicaStatus:
    """Return a replica's status for operators."""
    load = replica.load_status
    known = _reported_fields(replica)
    known |= {
        "name": replica.name,
        "state": replica.operator_state,
        "detail": replica_detail(replica),
        "fraction": load.done / load.total if load is not None and load.total else None,
        "load": load,
        "pids": replica.group.pids if replica.group else [],
        "tensor_parallel_size": replica.spec.tensor_parallel_size,
        "links": replica.resources.links,
        "last_report_s": replica.heartbeat.silent_s if replica.group is not None else None,
        **replica.sleeping.stats(),
        "restarts": replica.restarts,
        "deaths": replica.deaths,
        "breaker": replica.breaker,
        "remedy": replica_remedy(replica),
        "degraded": _degradations(replica),
        "last_error": replica.last_error,
    }
    return ReplicaStatus(**known)


def replica_detail(replica: Replica) -> str:
    """Explain a replica's state. Empty if the state needs no explanation."""
    if replica.sleeping.asleep:
        return replica.sleeping.detail
    if (load := replica.load_status) is not None:
        return load_text(load)
    if replica.state in ("restarting", "failed"):
        return f"restarts in {replica.next_start_s:.1f} s"
    heartbeat = replica.heartbeat
    if heartbeat.silent:
        silent_s = heartbeat.silent_s
        left_s = max(0.0, heartbeat.hang_limit_s(replica.hang_timeout_s) - silent_s)
        return f"no report for {silent_s:.0f} s; will be killed and restarted in {left_s:.0f} s"
    return ""


def replica_remedy(replica: Replica) -> str:
    """Explain how an operator can fix the replica's persistent failure. Empty if no action is needed."""
    if replica.breaker != "open":
        return ""
    return (
        f"fix the cause, then run `appliance models retry {replica.model}`; otherwise, the next "
        f"start is attempted in {replica.next_start_s:.0f} s, or when the model's files change"
    )


def _degradations(replica: Replica) -> list[Degradation]:
    found = []
    if replica.fallback:
        remedy = f"fix the cause, then run: appliance models retry {replica.model}"
        description = f"runs on the CPU instead of a GPU: {replica.fallback}"
        found.append(Degradation(description=description, remedy=remedy))
    if without_limits := replica.resources.without_limits:
        found.append(Degradation(description=without_limits, remedy=LIMITS_REMEDY))
    return found


def _reported_fields(replica: Replica) -> dict[str, Any]:
    """Return the fields of `ReplicaStatus` that the replica's messages contain."""
    report, credit = replica.latest_report, replica.account
    known = _fields(replica.info, ReplicaInfo) | _fields(report, ReplicaStats)
    # A report contains the total credits granted so far, but operators need the credits that are currently
    # available.
    return known | {
        "prefix_cache_hit_rate": _hit_rate(report),
        "credit_seqs": credit.available_slots if credit else 0,
        "credit_tokens": credit.available_tokens if credit else 0,
    }


def _fields(source: msgspec.Struct | None, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields that `kind` and `ReplicaStatus` have in common, with their values in `source`. Empty
    if `source` is None."""
    if source is None:
        return {}
    names = set(kind.__struct_fields__) & set(ReplicaStatus.__struct_fields__)
    return {name: getattr(source, name) for name in names}


def _hit_rate(report: Report | None) -> float | None:
    """Return the fraction of prompt tokens found in the prefix cache. None before the first prompt."""
    if report is None or not report.prompt_tokens:
        return None
    return report.cached_tokens / report.prompt_tokens
