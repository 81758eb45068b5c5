"""The alert commands and their options. The implementations, in `appliance.cli.alerts` and
`appliance.cli.alert_backtest`, are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.action_commands import add_commands
from appliance.cli.options import Json, RunDir, StateDir

commands = typer.Typer()
alerts = typer.Typer(
    help="List, acknowledge and silence alerts, and test alert rules on recorded history.",
    no_args_is_help=True,
)
commands.add_typer(alerts, name="alerts")


@alerts.command("list")
def alerts_list(run_dir: RunDir = None, json: Json = False) -> None:
    """List active alerts and alerts that ended within the last hour, newest first, with their likely causes
    and next steps. Without --json, also list the active silences."""
    from appliance.cli.alerts import list_alerts

    list_alerts(run_dir, as_json=json)


@alerts.command("silences")
def alerts_silences(run_dir: RunDir = None, json: Json = False) -> None:
    """List the active silences, oldest first."""
    from appliance.cli.alerts import list_silences

    list_silences(run_dir, as_json=json)


add_commands(alerts, "alerts.ack", "alerts.silence", "alerts.unsilence")


@alerts.command("test")
def alerts_test(
    rules: Annotated[
        str,
        typer.Argument(
            metavar="RULES",
            help="TOML file with [[alerts.rules]], such as the settings file, or `built-in`.",
            show_default=False,
        ),
    ],
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="HISTORY",
            help="`history` for the service's own history, or the path of a copy of history.db.",
        ),
    ] = "history",
    since: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Test only the history since this date, or since this long ago (30m, 1h, 7d).",
        ),
    ] = "30d",
    every: Annotated[bool, typer.Option("--all", help="Also show the alerts of the built-in rules.")] = False,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Test alert rules against the recorded history and show when alerts would have been raised and ended.
    The built-in rules are evaluated too, because their alerts can explain others. Requires read access to the
    state directory, but no running service.
    """
    from appliance.cli.alert_backtest import back_test_rules

    back_test_rules(run_dir, state_dir, rules, on=on, since=since, every=every, as_json=json)
