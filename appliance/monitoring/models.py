"""Checks whether the models can run. Configured models are checked before they are loaded; a running
service's models are checked through its status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from appliance.models.fit import MachineMemory
from appliance.models.preflight import check_model
from appliance.models.readable import service_user
from appliance.monitoring.findings import Finding
from appliance.protocol import FindingLevel, ModelStatus, precision
from appliance.quantities import of_bytes
from appliance.settings import ModelSettings


def configured_models(models: Mapping[str, ModelSettings], memory: MachineMemory) -> Iterator[Finding]:
    """Check whether the configured models could run if the service were started now."""
    for name, model in models.items():
        for found in check_model(model, memory, service_user()):
            yield _finding(name, found.level, found.text, found.remedy)


def running_models(models: list[ModelStatus]) -> Iterator[Finding]:
    """Check a running service's models through its status."""
    for model in models:
        for replica in model.replicas:
            if replica.state != "ready":
                continue
            difference = replica.used_bytes / max(1, replica.predicted_bytes) - 1
            where = ", ".join(dict.fromkeys(replica.devices))
            held = precision(replica.dtype, replica.weights, replica.kv_cache_dtype)
            yield _finding(
                model.name,
                "ok",
                f"{replica.name} is running on {where} in {held}: {of_bytes(replica.used_bytes)} used, "
                f"{of_bytes(replica.predicted_bytes)} predicted ({difference:+.0%})",
            )
        if _is_removed(Path(model.folder)):
            yield _finding(
                model.name,
                "problem",
                f"{model.folder} was removed: running replicas continue, but no replica can be started",
                "restore the folder",
            )


def _is_removed(folder: Path) -> bool:
    """Return whether the folder was removed. This check uses the current user's permissions; the service's
    user may be able to access more folders."""
    try:
        return not folder.is_dir()
    except PermissionError:
        return False


def _finding(name: str, level: FindingLevel, text: str, remedy: str = "") -> Finding:
    return Finding(area="models", subject=name, level=level, text=text, remedy=remedy)
