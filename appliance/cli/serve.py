"""`appliance serve`: settings, then the core in this process."""

from __future__ import annotations

from appliance.cli.failure import Failure, told
from appliance.settings import Flags, Settings, SettingsError, load_settings


def serve(flags: Flags, *, step_tokens: int | None, load_format: str | None) -> int:
    """Run the service until it is told to stop; its exit code. Raises Failure for settings that cannot be
    used."""
    from appliance.core import run

    with told(SettingsError):
        settings = load_settings(flags)
    _apply(settings, step_tokens, load_format)
    return run(settings)


def _apply(settings: Settings, step_tokens: int | None, load_format: str | None) -> None:
    """Lay over every model what `Flags` does not carry."""
    if step_tokens is not None and step_tokens < 1:
        raise Failure(f"--step-tokens {step_tokens} cannot be used: at least 1 is needed")
    for model in settings.models.values():
        if step_tokens is not None:
            model.step_tokens = step_tokens
        if load_format == "dummy":
            model.load_format = "dummy"
        elif load_format == "safetensors":
            model.load_format = "safetensors"
