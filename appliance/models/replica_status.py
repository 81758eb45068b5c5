"""The part of a replica's status that the replica itself reports."""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.protocol import ReplicaStatus
from appliance.traffic.credits import CreditAccount
from engine.messages import ReplicaInfo, ReplicaStats, Report


def reported_fields(
    info: ReplicaInfo | None, report: Report | None, credit: CreditAccount | None
) -> dict[str, Any]:
    """Return the fields of `ReplicaStatus` that the replica's messages contain. Each argument is None if it
    is not known yet."""
    known = _fields(info, ReplicaInfo) | _fields(report, ReplicaStats)
    # A report contains total credits, but operators need the currently available credits.
    return known | {
        "prefix_cache_hit_rate": _hit_rate(report),
        "credit_seqs": credit.available_slots if credit else 0,
        "credit_tokens": credit.available_tokens if credit else 0,
    }


def _fields(source: msgspec.Struct | None, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the values that `source` has for the fields that `kind` and `ReplicaStatus` have in common.
    Empty if `source` is None."""
    if source is None:
        return {}
    names = set(kind.__struct_fields__) & set(ReplicaStatus.__struct_fields__)
    return {name: getattr(source, name) for name in names}


def _hit_rate(report: Report | None) -> float | None:
    """Return the share of prompt tokens found in the prefix cache; None before the first prompt."""
    if report is None or not report.prompt_tokens:
        return None
    return report.cached_tokens / report.prompt_tokens
