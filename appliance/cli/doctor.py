"""Implements `appliance doctor`, which prints its findings as text or JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from appliance import calls
from appliance.cli.failure import Failure
from appliance.cli.output import cells, paint, print_json, printable, terminal_width
from appliance.cli.service import admin_client, find_run_dir, find_state_dir, is_forwarded
from appliance.cli.times import local
from appliance.monitoring.doctor import examine
from appliance.monitoring.findings import Examination, Finding
from appliance.ownership import UntrustedError
from appliance.settings import (
    Flags,
    Settings,
    SettingsError,
    default_run_dir,
    default_state_dir,
    load_settings,
)

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
_INDENT = 12


def show_findings(config: str | None, run_dir: str | None, state_dir: str | None, *, as_json: bool) -> int:
    """Examine the service and print the findings. If the socket was forwarded from another machine, the
    service there examines itself. Return exit code 1 if there is a problem, and 0 otherwise; warnings do not
    count as problems."""
    run, state, settings = _find(config, run_dir, state_dir)
    if config is None and state_dir is None and _is_remote(run):
        with admin_client(str(run)) as client:
            examination = client.call(calls.findings())
    else:
        examination = examine(run, state, settings)
    if as_json:
        print_json(examination)
    else:
        for line in examination_lines(examination, terminal_width()):
            print(line)
    return 1 if examination.problems else 0


def _is_remote(run_dir: Path) -> bool:
    """Return True if the service runs on another machine and therefore examines itself."""
    try:
        return is_forwarded(run_dir)
    except UntrustedError:  # a finding reports the problem with the directory
        return False


def _find(
    config: str | None, run_dir: str | None, state_dir: str | None
) -> tuple[Path, Path, Settings | SettingsError]:
    """Return the service's directories, and either the settings or their faults. The directories can be
    determined even if the settings file is unusable."""
    settings: Settings | SettingsError
    try:
        settings = load_settings(Flags(config=config, run_dir=run_dir, state_dir=state_dir))
    except SettingsError as error:
        settings = error
    try:
        run = find_run_dir(run_dir, config)
    except Failure:  # the settings are invalid, so use the flags and defaults
        run = Path(run_dir or default_run_dir()).absolute()
    try:
        return run, find_state_dir(state_dir, run, config), settings
    # Either the settings are unusable or the run directory is not trusted; a finding reports which.
    except (Failure, UntrustedError):
        return run, Path(state_dir or default_state_dir()).absolute(), settings


def examination_lines(examination: Examination, width: int | None) -> Iterable[str]:
    """Yield the findings as lines of text, grouped by area, followed by a summary."""
    yield paint(f"{printable(examination.host)}, {local(examination.at)}", "dim")
    area = ""
    for finding in examination.findings:
        if finding.area != area:
            area = finding.area
            yield ""
            yield paint(area.upper(), "bold")
        yield from _finding_lines(finding, width)
    yield ""
    yield _verdict(examination)


def _finding_lines(finding: Finding, width: int | None) -> Iterable[str]:
    text = printable(finding.text)
    if finding.area == "models" and finding.subject not in text:
        text = f"{printable(finding.subject)}: {text}"
    mark = f"  {finding.level}"
    first = " " * (_INDENT - cells(mark))
    lines = _wrapped(text, width)
    yield "  " + paint(finding.level, _COLOURS[finding.level]) + first + lines[0]
    for line in lines[1:]:
        yield " " * _INDENT + line
    if finding.remedy:
        for number, line in enumerate(_wrapped(printable(finding.remedy), width, space=2)):
            yield " " * _INDENT + ("→ " if number == 0 else "  ") + line


def _wrapped(text: str, width: int | None, space: int = 0) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, max(24, width - _INDENT - space), break_on_hyphens=False) or [""]


def _verdict(examination: Examination) -> str:
    if examination.problems:
        return paint(
            f"{_counted(examination.problems, 'problem')}, {_counted(examination.warnings, 'warning')}", "red"
        )
    if examination.warnings:
        return paint(f"no problem, {_counted(examination.warnings, 'warning')}", "yellow")
    return paint("no problems", "green")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
