"""Describes, for operators, the effects of a change to a model's settings."""

from __future__ import annotations

from appliance.settings import ModelSettings


def describe_change(
    former: ModelSettings | None, wanted: ModelSettings | None, running: int, drain_grace_s: float
) -> str:
    """Describe what happens to a model when its settings change from `former` to `wanted`. None means that
    the settings do not contain the model. `running` is the model's current number of replicas."""
    if wanted is None:
        return f"is being removed; its requests have {drain_grace_s:g} s to finish"
    if former is None:
        return f"is being added with {wanted.replicas} replica{'s' if wanted.replicas > 1 else ''}"
    if former == wanted:
        return "retrying the settings that previously failed to load"
    if former.spec("") != wanted.spec(""):
        return "its replicas are being replaced one by one"
    if former.replica_range() == wanted.replica_range():
        return "the change does not affect running replicas"
    least, most = wanted.replica_range()
    return f"{running} → {least} replicas" if least == most else f"{running} → {least} to {most} replicas"
