"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

RunDir = Annotated[
    str | None,
    typer.Option("--run-dir", metavar="DIR", help="Where the service's sockets are.", show_default=False),
]
StateDir = Annotated[
    str | None,
    typer.Option("--state-dir", metavar="DIR", help="Where the databases are.", show_default=False),
]
Config = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="Settings file (TOML).", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
