"""The commands that operate the running service: drain, resume and config. They are implemented in
neighbouring modules, which are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.options import Config, Json, RunDir, Yes

config = typer.Typer(help="Check, show and reload the settings.", no_args_is_help=True)

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="Only this model. Default: the whole service."),
]


def drain(
    model: Model = None,
    grace_s: Annotated[
        str,
        typer.Option("--grace", metavar="SPAN", help="After this time, running requests end with an error."),
    ] = "120s",
    queue: Annotated[
        bool,
        typer.Option("--queue", help="Hold new requests until service is resumed."),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Show the progress until it is done.")
    ] = True,
    yes: Yes = False,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Accept no new requests, and finish those that were accepted.

    Shows the progress until it is done. Ctrl-C stops watching and asks whether to cancel the drain; without a
    terminal the drain continues. With --json, each update is a line. Exit code 1 if requests were ended or
    the drain was cancelled."""
    from appliance.cli.drain import drain

    raise typer.Exit(
        drain(run_dir, model=model, grace=grace_s, queue=queue, wait=wait, yes=yes, as_json=json)
    )


def resume(model: Model = None, run_dir: RunDir = None, json: Json = False) -> None:
    """Cancel or end a drain: accept requests again, held requests first."""
    from appliance.actions import ResumeService
    from appliance.cli.actions import perform

    perform(run_dir, ResumeService(model=model), as_json=json)


@config.command("check")
def config_check(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="The settings file; conf.d beside it is included. Default: the service's file.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check the settings files, and print each mistake with its line. Exit code 1 if there are any."""
    from appliance.cli.config import check

    raise typer.Exit(check(file, as_json=json))


@config.command("show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Show the source of each setting.")] = False,
    config: Config = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Print all settings in effect: those of the running service, or of a file (with --config, or if none
    runs)."""
    from appliance.cli.config import show

    show(run_dir, config, origin=origin, as_json=json)


@config.command("reload")
def config_reload(run_dir: RunDir = None, json: Json = False) -> None:
    """Make the running service read its settings again and apply what changed.

    Models whose settings did not change stay loaded. If a file cannot be used, nothing changes and the exit
    code is 1.
    """
    from appliance.cli.config import reload

    reload(run_dir, as_json=json)
