"""Implements `appliance alerts test`, which reads the recorded history from disk instead of asking the
service."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from appliance.alert_rules import effective_rules
from appliance.cli.failure import CommandLineError, Failure, as_failure
from appliance.cli.output import Column, of_count, print_json, print_table, printable
from appliance.cli.service import check_databases, find_run_dir, find_state_dir
from appliance.cli.times import local, moment
from appliance.monitoring.alerts.backtest import BackTest, back_test
from appliance.monitoring.alerts.evaluation import Transition
from appliance.settings import AlertSettings, SettingsError, read_alert_settings
from store.errors import StoreError

BUILT_IN_WORD = "built-in"
HISTORY_WORD = "history"


def back_test_rules(
    run_dir: str | None,
    state_dir: str | None,
    rules: str,
    *,
    on: str,
    since: str,
    every: bool,
    as_json: bool,
) -> None:
    """Evaluate alert rules against the recorded history and print when alerts start and end."""
    settings = _settings(rules)
    path = _history(run_dir, state_dir, on)
    begin = moment(since, "--since", ahead=False)
    with as_failure(StoreError):
        result = back_test(path, effective_rules(settings.rules, settings.disabled), begin, time.time())
    if not result.samples:
        raise Failure(
            f"{path} has no samples since {local(begin)}: the service records samples only while running"
        )
    tested = {rule.name for rule in settings.rules}
    shown = [one for one in result.transitions if every or rules == BUILT_IN_WORD or one.alert.rule in tested]
    if as_json:
        print_json(_document(result, shown))
        return
    if shown:
        _print(shown)
    raised = sum(one.event == "raised" for one in shown)
    print(
        f"{of_count(raised)} alert{'' if raised == 1 else 's'} in {of_count(result.samples)} samples from "
        f"{local(result.since)} to {local(result.until)}"
    )


def _settings(rules: str) -> AlertSettings:
    if rules == BUILT_IN_WORD:
        return AlertSettings()
    path = Path(rules)
    if not path.is_file():
        raise CommandLineError(
            f"{rules} is not a file: give a TOML file with [[alerts.rules]], or {BUILT_IN_WORD}"
        )
    with as_failure(SettingsError):
        settings = read_alert_settings(path)
    if not settings.rules:
        raise CommandLineError(f"{rules} has no [[alerts.rules]]: add a rule, or give {BUILT_IN_WORD}")
    return settings


def _history(run_dir: str | None, state_dir: str | None, on: str) -> Path:
    if on != HISTORY_WORD:
        return Path(on)
    run = find_run_dir(run_dir)
    folder = find_state_dir(state_dir, run)
    check_databases(folder, run, "history.db")
    return folder / "history.db"


def _print(transitions: list[Transition]) -> None:
    columns = [
        Column("TIME"),
        Column("EVENT"),
        Column("RULE"),
        Column("WHERE", flexible=True),
        Column("DESCRIPTION", flexible=True, drop=1),
        Column("LIKELY CAUSE", flexible=True, drop=2),
    ]
    rows = [
        [
            local(one.at),
            one.event,
            one.alert.rule,
            printable(one.alert.subject),
            printable(one.alert.description) if one.event == "raised" else "",
            printable(one.alert.cause) if one.event == "raised" else "",
        ]
        for one in transitions
    ]
    print_table(columns, rows)


def _document(result: BackTest, shown: list[Transition]) -> dict[str, Any]:
    return {
        "since": result.since,
        "until": result.until,
        "samples": result.samples,
        "lasting": result.lasting,
        "transitions": [
            {
                "at": one.at,
                "event": one.event,
                "id": one.alert.id,
                "rule": one.alert.rule,
                "severity": one.alert.severity,
                "where": one.alert.subject,
                "description": one.alert.description,
                "cause": one.alert.cause,
                "value": one.alert.value,
                "threshold": one.alert.threshold,
            }
            for one in shown
        ],
    }
