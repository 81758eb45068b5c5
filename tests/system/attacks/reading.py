"""Helpers that read the reports of `status` and `doctor` about a service with problems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from appliance.monitoring.doctor import examine
from appliance.monitoring.findings import Finding
from appliance.settings import Flags, load_settings
from tests.system.service import Service, service


@contextmanager
def configured(settings: str, *flags: str) -> Iterator[Service]:
    """Start a service with these lines in its settings file."""
    with TemporaryDirectory(prefix="appl-") as folder:
        path = Path(folder) / "appliance.toml"
        path.write_text(settings)
        with service("--config", str(path), *flags) as running:
            yield running


def problem(running: Service, where: str, text: str, timeout_s: float = 120) -> dict[str, Any]:
    """Wait until the status lists a current problem with this `where` whose text contains the given text.
    Return the problem."""

    def look() -> Any:
        found = running.status()["current_problems"]
        return next((one for one in found if one["where"] == where and text in one["description"]), None)

    found: dict[str, Any] = running.wait_until(look, timeout_s, f"{where}: {text}")
    assert found["remedy"]
    return found


def past_problem(running: Service, where: str, text: str) -> None:
    """Wait until the status lists a current or past problem with this `where` whose text contains the given
    text. Return the problem. A past problem counts because, for example, a replica may have been restarted
    before the status is read again."""

    def look() -> bool:
        return any(
            one["where"] == where and text in one["description"] for one in running.status()["problems"]
        )

    running.wait_until(look, 120, f"{where}: {text}")


def no_problem(running: Service, timeout_s: float = 120) -> None:
    """Wait until the service is ready and lists no current problem."""

    def look() -> bool:
        status = running.status()
        return status["state"] == "ready" and not status["current_problems"]

    running.wait_until(look, timeout_s, "the problems to end")


def doctor(running: Service, *levels: str) -> list[str]:
    """Return the doctor's findings at the given levels, with their remedies. By default, return only the
    problems."""
    found = findings(running)
    return [f"{one.text} → {one.remedy}" for one in found if one.level in (levels or ("problem",))]


def findings(running: Service) -> list[Finding]:
    """Return all findings of `appliance doctor` without starting a process."""
    settings = load_settings(Flags(run_dir=str(running.run_dir), state_dir=str(running.state_dir)))
    return examine(running.run_dir, running.state_dir, settings).findings
