"""The commands that operate the running service: drain, resume and config. The implementations, in
neighbouring modules, are loaded on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from appliance.cli.action_commands import add_command, keyword
from appliance.cli.options import Config, Json, RunDir

commands = typer.Typer()
config = typer.Typer(help="Check, show and reload the settings.", no_args_is_help=True)
commands.add_typer(config, name="config")

Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Show the progress until the drain is complete.")
]


def _drain(asked: Any, given: Mapping[str, Any]) -> None:
    from appliance.cli.drain import drain

    options = {name: given[name] for name in ("wait", "yes")}
    raise typer.Exit(drain(given["run_dir"], asked, **options, as_json=given["json"]))


add_command(
    commands,
    "drain",
    keyword("wait", Wait, True),
    perform=_drain,
    details="\n\nShows the progress until the drain is complete. Ctrl-C asks whether to cancel the drain; "
    "without a terminal, the drain continues. With --json, each update is one line. The exit code is 1 "
    "if any requests were stopped with an error, or if the drain was cancelled.",
)
add_command(commands, "resume")


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


add_command(config, "config.reload")
