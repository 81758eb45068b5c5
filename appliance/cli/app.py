"""Registers all commands, in the order in which `appliance --help` lists them."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.action_commands import add_command
from appliance.cli.alert_commands import alerts
from appliance.cli.audit_commands import audit, backup
from appliance.cli.client_commands import BENCH_EPILOG, bench, chat
from appliance.cli.console_commands import console, history, top
from appliance.cli.model_commands import models
from appliance.cli.operating_commands import add_drain, config
from appliance.cli.request_commands import requests, usage
from appliance.cli.service_commands import doctor, logs, serve, status
from appliance.cli.tenant_commands import keys, peers, tenants

app = typer.Typer(
    help="Run and operate an LLM inference service on one server.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (serve, status, console, top, usage, logs):
    app.command()(command)
add_drain(app)
add_command(app, "resume")
for other in (backup, doctor, chat):
    app.command()(other)
app.command(epilog=BENCH_EPILOG)(bench)
for name, commands in (
    ("models", models),
    ("config", config),
    ("tenants", tenants),
    ("keys", keys),
    ("peers", peers),
    ("requests", requests),
    ("audit", audit),
    ("alerts", alerts),
    ("history", history),
):
    app.add_typer(commands, name=name, rich_help_panel=None)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from appliance.monitoring.versions import product_version

        print(f"appliance {product_version()}")
        raise typer.Exit
