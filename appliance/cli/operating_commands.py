"""The commands that operate the running service: drain, resume and config. The implementations, in
neighbouring modules, are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.action_commands import add_commands
from appliance.cli.options import Config, Json, RunDir, Yes

config = typer.Typer(help="Check, show and reload the settings.", no_args_is_help=True)

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="Name of the model. Default: the whole service."),
]


def drain(
    model: Model = None,
    grace_s: Annotated[
        str,
        typer.Option(
            "--grace", metavar="SPAN", help="Time after which unfinished requests end with an error."
        ),
    ] = "120s",
    queue: Annotated[
        bool,
        typer.Option("--queue", help="Instead of refusing new requests, hold them until service resumes."),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Show the progress until the drain is complete.")
    ] = True,
    yes: Yes = False,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Stop accepting requests and finish those already accepted.

    Shows the progress until the drain is complete. Ctrl-C asks whether to cancel the drain; without a
    terminal, the drain continues. With --json, each update is one line. The exit code is 1 if any requests
    were stopped with an error, or if the drain was cancelled."""
    from appliance.cli.drain import drain

    raise typer.Exit(
        drain(run_dir, model=model, grace=grace_s, queue=queue, wait=wait, yes=yes, as_json=json)
    )


@config.command("check")
def config_check(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="Settings file to check, together with the conf.d folder next to it. Default: the "
            "service's settings file.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check the settings files, and print each mistake with its line. The exit code is 1 if there are any
    mistakes."""
    from appliance.cli.config import check

    raise typer.Exit(check(file, as_json=json))


@config.command("show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Show the source of each setting.")] = False,
    config: Config = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Print all settings of the running service. With --config, or if no service is running, print the
    settings from the settings file."""
    from appliance.cli.config import show

    show(run_dir, config, origin=origin, as_json=json)


add_commands(config, "config.reload")
