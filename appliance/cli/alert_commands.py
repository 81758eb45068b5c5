"""The alert commands, and their options. They are implemented in `appliance.cli.alerts` and
`appliance.cli.alert_backtest`, which are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.options import Json, RunDir, StateDir

alerts = typer.Typer(
    help="List, acknowledge and silence alerts, and test alert rules on recorded history.",
    no_args_is_help=True,
)

AlertId = Annotated[
    str, typer.Argument(metavar="ID", help="The alert's id, as shown by `alerts list`.", show_default=False)
]


@alerts.command("list")
def alerts_list(run_dir: RunDir = None, json: Json = False) -> None:
    """List active alerts and those that ended within the last hour, newest first, with their likely cause and
    next step. Also lists the silences."""
    from appliance.cli.alerts import list_alerts

    list_alerts(run_dir, as_json=json)


@alerts.command("ack")
def alerts_ack(alert_id: AlertId, run_dir: RunDir = None, json: Json = False) -> None:
    """Acknowledge an alert: record that you are handling it."""
    from appliance.cli.alerts import acknowledge

    acknowledge(run_dir, alert_id, as_json=json)


@alerts.command("silence")
def alerts_silence(
    rule: Annotated[
        str,
        typer.Argument(
            metavar="RULE", help="Name of the rule; * stands for any characters.", show_default=False
        ),
    ],
    where: Annotated[
        str,
        typer.Option(
            "--where",
            metavar="SUBJECT",
            help="Silence only alerts of this subject, such as a model, replica or GPU; * stands for any "
            "characters.",
        ),
    ] = "*",
    for_s: Annotated[
        str, typer.Option("--for", metavar="SPAN", help="Length of the silence, up to 30d.")
    ] = "1h",
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why the alerts are silenced.")
    ] = "",
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Stop announcing the alerts of a rule for a limited time. Silenced alerts are still listed and
    recorded."""
    from appliance.cli.alerts import silence

    silence(run_dir, rule, where=where, span=for_s, reason=reason, as_json=json)


@alerts.command("unsilence")
def alerts_unsilence(
    silence_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="The silence's id, as shown by `alerts list`.", show_default=False),
    ],
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """End a silence before it expires."""
    from appliance.actions import UnsilenceAlerts
    from appliance.cli.actions import perform

    perform(run_dir, UnsilenceAlerts(id=silence_id), as_json=json)


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
            help="Test only the history since this date, or within this time span (30m, 1h, 7d).",
        ),
    ] = "30d",
    every: Annotated[bool, typer.Option("--all", help="Also show the alerts of the built-in rules.")] = False,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Test alert rules on recorded history: show when they would have raised and ended alerts.

    The built-in rules are evaluated too, because they can explain the alerts of the tested rules. Requires
    read access to the state directory, but no running service."""
    from appliance.cli.alert_backtest import back_test_rules

    back_test_rules(run_dir, state_dir, rules, on=on, since=since, every=every, as_json=json)
