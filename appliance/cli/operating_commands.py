"""The commands that operate the running service: drain, resume, config. What they do is in the modules beside
this one, loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.options import Config, Json, RunDir, Yes

config = typer.Typer(help="Check, show and reload the settings.", no_args_is_help=True)

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="Only this model; else the whole service."),
]


def drain(
    model: Model = None,
    grace_s: Annotated[
        str, typer.Option("--grace", metavar="SPAN", help="What still runs after it is ended with an error.")
    ] = "120s",
    queue: Annotated[
        bool, typer.Option("--queue", help="New requests wait until service is resumed; else 503.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Show the progress until it is done.")
    ] = True,
    yes: Yes = False,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Take nothing new and finish what was accepted.

    Ctrl-C stops watching and asks whether to leave the drain off; without a terminal it goes on. With --json
    each look is a line. Exit code 1 where requests had to be ended, or the drain was left off.
    """
    from appliance.cli.drain import drain

    raise typer.Exit(
        drain(run_dir, model=model, grace=grace_s, queue=queue, wait=wait, yes=yes, as_json=json)
    )


def resume(model: Model = None, run_dir: RunDir = None, json: Json = False) -> None:
    """Take requests again: leave off or end a drain."""
    from appliance.actions import ResumeService
    from appliance.cli.actions import perform

    perform(run_dir, ResumeService(model=model), as_json=json)


@config.command("check")
def config_check(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="With conf.d beside it. Default: what a service would read.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say what is wrong in the settings files, each with its line. Exit code 1 where something is."""
    from appliance.cli.config import check

    raise typer.Exit(check(file, as_json=json))


@config.command("show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Say where each setting was said.")] = False,
    config: Config = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Print all settings that hold: the running service's, or (--config, or none runs) a file's."""
    from appliance.cli.config import show

    show(run_dir, config, origin=origin, as_json=json)


@config.command("reload")
def config_reload(run_dir: RunDir = None, json: Json = False) -> None:
    """Have the running service read its settings again and apply what changed.

    Models whose settings did not change stay loaded. Where a file cannot be used nothing changes, and the
    exit code is 1.
    """
    from appliance.cli.config import reload

    reload(run_dir, as_json=json)
