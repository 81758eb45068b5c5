"""The commands of the operator console, and their options. They are implemented in `appliance.cli.console`,
which is loaded on demand."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from appliance.cli.options import Json, RunDir

Theme = Literal["dark", "light", "ansi", "mono", "high-contrast"]
Screen = Literal[
    "overview", "batches", "kv", "requests", "gpus", "models", "tenants", "alerts", "audit", "logs"
]
Demo = Annotated[bool, typer.Option("--demo", help="Show a simulated service instead of a running one.")]


def console(
    demo: Demo = False,
    write: Annotated[
        bool, typer.Option("--write", help="Permit actions. Without this option, the console is read-only.")
    ] = False,
    theme: Annotated[
        Theme | None,
        typer.Option(
            help="Colours. Default: dark, or mono if NO_COLOR is set; ansi needs the fewest bytes.",
            show_default=False,
        ),
    ] = None,
    run_dir: RunDir = None,
) -> None:
    """Open the operator console, which shows the service live. Press ? for help."""
    from appliance.cli.console import open_console

    raise typer.Exit(open_console(run_dir, demo=demo, write=write, theme=theme))


def top(
    screen: Annotated[Screen, typer.Option(help="The screen to print.")] = "overview",
    demo: Demo = False,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Print one frame of the console and exit.

    The figures per second cover the second before. With --json, print one object with batches, kv, requests,
    gpus, models, tenants and alerts."""
    from appliance.cli.console import print_frame

    print_frame(run_dir, screen=screen, demo=demo, as_json=json)
