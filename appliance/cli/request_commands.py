"""The commands for the request log, and their options. The implementation, in `appliance.cli.requests`, is
loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.action_commands import add_commands
from appliance.cli.failure import CommandLineError
from appliance.cli.options import Json, Limit, RunDir, StateDir

commands = typer.Typer()
requests = typer.Typer(help="Show the request log, oldest requests first.", invoke_without_command=True)
commands.add_typer(requests, name="requests")


@requests.callback()
def requests_read(
    context: typer.Context,
    limit: Limit = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep running and print requests when they finish.")
    ] = False,
    request_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Show only this request, with all its fields.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show only requests from this tenant.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show only requests for this model.")
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(
            "--status",
            metavar="STATUS",
            help="Show only requests with this HTTP status, or in this state (open or ended).",
        ),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Show only requests with a status ≥ 400 or an error.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Show only requests since this date, or since this long ago (30m, 1h, 7d)."
        ),
    ] = None,
    running: Annotated[
        bool,
        typer.Option(
            "--running",
            help="Show the unfinished requests instead of the log, with their age, phase and token count. "
            "Can be combined with --tenant and --model.",
        ),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="With --running: keep running and update the list of requests every second."
        ),
    ] = False,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if running:
        from appliance.cli.running import show_running

        show_running(run_dir, tenant=tenant, model=model, watch=watch, as_json=json)
        return
    if watch:
        raise CommandLineError(
            "--watch updates the list of unfinished requests: add --running, or use --follow"
        )
    from appliance.cli.requests import request_query, show_requests

    query = request_query(request_id, tenant, model, status, failed, since)
    show_requests(run_dir, state_dir, query, limit=limit, follow=follow, as_json=json)


add_commands(requests, "requests.cancel", "requests.show")


@commands.command()
def usage(
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="First day of usage: a date, or a time span (7d). Default: 30 days ago."
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="Last day of usage. Default: today.", show_default=False),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this tenant.", show_default=False)
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="ID", help="Only the key with this id.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this model.", show_default=False)
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="COLUMNS", help="Columns to group by: day, tenant, key, model.")
    ] = "day,tenant,key",
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Show token usage by day (UTC), tenant and key, and its cost if the settings contain prices. Only
    requests that have ended are counted."""
    from appliance.cli.usage import show_usage

    show_usage(run_dir, since=since, until=until, tenant=tenant, key=key, model=model, by=by, as_json=json)
