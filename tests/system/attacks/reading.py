"""What `status` and `doctor` say about a service in trouble."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.system.service import APPLIANCE, Service, service


@contextmanager
def configured(settings: str, *flags: str) -> Iterator[Service]:
    """A service with these lines in its settings file."""
    with TemporaryDirectory(prefix="appl-") as folder:
        path = Path(folder) / "appliance.toml"
        path.write_text(settings)
        with service("--config", str(path), *flags) as running:
            yield running


def problem(running: Service, where: str, text: str, timeout_s: float = 60) -> dict[str, Any]:
    """Wait until the status lists a current problem of `where` with this text; return it."""

    def look() -> Any:
        found = running.status()["current_problems"]
        return next((one for one in found if one["where"] == where and text in one["what"]), None)

    found: dict[str, Any] = running.wait_until(look, timeout_s, f"{where}: {text}")
    assert found["remedy"]
    return found


def no_problem(running: Service, timeout_s: float = 60) -> None:
    """Wait until the service is ready and lists no current problem."""

    def look() -> bool:
        status = running.status()
        return status["state"] == "ready" and not status["current_problems"]

    running.wait_until(look, timeout_s, "the problems to end")


def doctor(running: Service, *levels: str) -> list[str]:
    """What `doctor` finds of these levels, with the remedies; without levels, the problems."""
    directories = ("--run-dir", str(running.run_dir), "--state-dir", str(running.state_dir))
    done = subprocess.run(
        [APPLIANCE, "doctor", *directories, "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)["findings"]
    return [f"{one['text']} → {one['remedy']}" for one in found if one["level"] in (levels or ("problem",))]
