"""The commands for the operator console and the recorded history, and their options. The implementations, in
`appliance.cli.console` and `appliance.cli.history`, are loaded on demand."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from appliance.cli.options import Json, RunDir, StateDir

commands = typer.Typer()

Theme = Literal["dark", "light", "ansi", "mono", "high-contrast"]
Screen = Literal[
    "overview", "batches", "kv", "requests", "gpus", "models", "tenants", "alerts", "audit", "logs"
]
Demo = Annotated[bool, typer.Option("--demo", help="Show a simulated service instead of a running one.")]


Replay = Annotated[
    str | None,
    typer.Option(
        "--replay",
        metavar="FILE",
        help="Replay an incident file or a history.db instead of showing a running service.",
        show_default=False,
    ),
]


@commands.command()
def console(
    demo: Demo = False,
    replay: Replay = None,
    write: Annotated[
        bool, typer.Option("--write", help="Permit actions. Without this option, the console is read-only.")
    ] = False,
    theme: Annotated[
        Theme | None,
        typer.Option(
            help="Colour theme. Default: dark, or mono if NO_COLOR is set; ansi sends the fewest bytes.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            "--keys",
            metavar="FILE",
            help="Keymap file. Default: ~/.config/appliance/keys.toml, if it exists.",
            show_default=False,
        ),
    ] = None,
    no_mouse: Annotated[
        bool,
        typer.Option("--no-mouse", help="Leave the mouse to the terminal, for example to select text."),
    ] = False,
    web: Annotated[
        bool,
        typer.Option(
            "--web",
            help="Serve the console to browsers on this machine, read-only. The printed address contains a "
            "random token.",
        ),
    ] = False,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="TCP port on 127.0.0.1 for --web; 0 chooses a free port."),
    ] = 8400,
    run_dir: RunDir = None,
) -> None:
    """Open the operator console, which shows the service live. Press ? for help."""
    from appliance.cli.console import open_console

    raise typer.Exit(
        open_console(
            run_dir,
            demo=demo,
            replay=replay,
            write=write,
            theme=theme,
            keys=keys,
            web=web,
            port=port,
            mouse=not no_mouse,
        )
    )


@commands.command()
def top(
    screen: Annotated[Screen, typer.Option(help="The console screen to print.")] = "overview",
    demo: Demo = False,
    replay: Replay = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="Print a past state: a time of day (14:03), a time span before now (20m), or a date.",
            show_default=False,
        ),
    ] = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Print one frame of the console and exit.

    Per-second values cover the preceding second. With --json, the output is one object with the fields
    batches, kv, requests, gpus, models, tenants and alerts.
    """
    from appliance.cli.console import print_frame

    print_frame(run_dir, screen=screen, demo=demo, replay=replay, at=at, as_json=json)


history = typer.Typer(help="Export the recorded history of the service.", no_args_is_help=True)
commands.add_typer(history, name="history")


@history.command("export")
def history_export(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="The file to write. It must not already exist.", show_default=False
        ),
    ],
    since: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Start of the slice: a time of day (14:03), a time span before now (20m), or a date "
            "(2026-11-20T14:03).",
        ),
    ] = "15m",
    until: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="End of the slice, in the same format as --since. Default: now.",
            show_default=False,
        ),
    ] = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Export a slice of the recorded history to an incident file: measurements, requests, alerts, operators'
    actions and log lines.

    `appliance console --replay FILE` shows the file on any machine. The file contains no prompts and no
    answers. The history comes from the running service. If no service is running, or with --state-dir, the
    history is read from the files.
    """
    from appliance.cli.history import export_history

    export_history(run_dir, state_dir, file, since=since, until=until, as_json=json)
