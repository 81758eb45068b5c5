"""Checks everything that can prevent the service from working, without changing anything. A check that fails
to run is reported as a finding, and the remaining checks still run."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from appliance.client import AdminClient, AdminError, NotAllowedError, ServiceNotRunningError
from appliance.models.fit import MachineMemory, read_memory
from appliance.models.gpus import GpuReport, find_gpus
from appliance.monitoring import machine, models, places, processes
from appliance.monitoring.databases import databases
from appliance.monitoring.findings import Area, Examination, Finding
from appliance.ownership import UntrustedError
from appliance.protocol import FindingLevel
from appliance.protocol.status import Status
from appliance.rundir import start_remedy
from appliance.settings import Settings, SettingsError

_MAX_REPORTED_PROBLEMS = 20
_RECENT_S = 3600.0


def examine(run_dir: Path, state_dir: Path, settings: Settings | SettingsError) -> Examination:
    """Return all findings about the service in `run_dir`. `settings` is a SettingsError if the settings are
    unusable."""
    now = time.time()
    findings: list[Finding] = []
    report = find_gpus()
    status, refusal, kept_out, untrusted = _ask(run_dir)
    running = status is not None

    def look(area: Area, check: Callable[[], Iterable[Finding]]) -> None:
        try:
            findings.extend(check())
        except Exception as error:
            findings.append(
                Finding(
                    area=area,
                    subject=area,
                    level="warning",
                    text=f"this check failed: {type(error).__name__}: {error}",
                    remedy="fix the other findings first, then run the doctor again",
                )
            )

    look("versions", machine.versions)
    look("devices", lambda: machine.devices(report))
    look("directories", lambda: places.directories(run_dir, state_dir))
    if untrusted:
        remedy = "ask the administrator of this machine about this process; no data was sent to it"
        findings.append(_finding("run directory", "problem", untrusted, remedy))
    look("service", lambda: _service(status, refusal, kept_out, settings, now, run_dir))
    look("sockets", lambda: places.sockets(run_dir, places.api_state(run_dir / "api.sock"), running))
    if status is not None:
        served = status.models
        look("models", lambda: models.running_models(served))
    elif isinstance(settings, Settings):
        wanted = settings.models
        look("models", lambda: models.configured_models(wanted, _memory(report)))
    look("databases", lambda: databases(state_dir, run_dir, running or kept_out))
    look("leftovers", lambda: places.leftovers(run_dir, state_dir, running or kept_out))
    look("leftovers", lambda: processes.orphans(status.pid if status is not None else None))
    return Examination(
        at=now,
        host=platform.node(),
        run_dir=str(run_dir),
        state_dir=str(state_dir),
        problems=sum(finding.level == "problem" for finding in findings),
        warnings=sum(finding.level == "warning" for finding in findings),
        findings=findings,
    )


def _ask(run_dir: Path) -> tuple[Status | None, str, bool, str]:
    """Ask the service for its status. Return four values:

    - the status, or None if the status is not available,
    - the reason why the status is not available,
    - whether the reason is that this user lacks access,
    - the reason why the process that listens on the socket is not trusted.
    """
    with AdminClient(run_dir, places.ANSWER_TIMEOUT_S) as client:
        try:
            return client.status(), "", False, ""
        except NotAllowedError as error:
            return None, str(error), True, ""
        except AdminError as error:
            return None, str(error), error.status == 403, ""
        except ServiceNotRunningError as error:
            return None, str(error), False, ""
        except UntrustedError as error:
            return None, "", False, str(error)


def _service(
    status: Status | None,
    refusal: str,
    kept_out: bool,
    settings: Settings | SettingsError,
    now: float,
    run_dir: Path,
) -> Iterable[Finding]:
    if isinstance(settings, SettingsError):
        for fault in settings.faults:
            yield _finding("settings", "problem", f"{fault.place}: {fault.description}", fault.remedy)
    elif settings.config_file:
        yield _finding("settings", "ok", f"{settings.config_file} is valid")
    if status is None:
        if kept_out:
            yield _finding("state", "warning", refusal, "run the doctor as the service's user, or as root")
        else:
            yield _finding("state", "ok", f"no service is running here: {start_remedy(run_dir)}")
        return
    text = f"the service {status.version} (process {status.pid}, uid {status.uid}) is {status.state}"
    if status.state == "degraded":
        reason = f": {status.reason}" if status.reason else ""
        yield _finding("state", "problem", f"{text}{reason}", "see the problems below")
    elif status.state == "ready":
        yield _finding("state", "ok", text)
    else:
        yield _finding("state", "warning", f"{text}: {status.reason}", "wait, then run the doctor again")
    for current in status.current_problems:
        yield _finding(current.where, "problem", f"{current.where}: {current.description}", current.remedy)
    for database in status.databases:
        if database.restored:
            yield _finding(
                os.path.basename(database.path),
                "warning",
                database.restored,
                "find the program that deletes or replaces files in the state directory; to restore a "
                "backup, stop the service first",
            )
        if dropped := database.dropped_rows + database.rejected_rows:
            yield _finding(
                os.path.basename(database.path),
                "problem",
                f"{dropped:,} rows have been dropped since the service started",
                "see the log for the time and cause; check the disk's free space and health",
            )
    recent = [problem for problem in status.problems if now - problem.at < _RECENT_S]
    for problem in recent[:_MAX_REPORTED_PROBLEMS]:
        times = f" ({problem.count:,} times)" if problem.count > 1 else ""
        yield _finding(
            problem.where,
            "warning",
            f"within the last hour{times}: {problem.description}",
            "see the service's log",
        )


def _finding(subject: str, level: FindingLevel, text: str, remedy: str = "") -> Finding:
    return Finding(area="service", subject=subject, level=level, text=text, remedy=remedy)


def _memory(report: GpuReport) -> MachineMemory:
    return msgspec.structs.replace(read_memory(), gpus=report.gpus)
