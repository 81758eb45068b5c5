"""The tree of all commands. The module that declares a command is imported when the command runs or its help
is printed. Importing all of these modules would take longer than most commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

_MODULES = {
    "serve": "service_commands",
    "status": "service_commands",
    "console": "console_commands",
    "top": "console_commands",
    "usage": "request_commands",
    "logs": "service_commands",
    "drain": "operating_commands",
    "resume": "operating_commands",
    "backup": "audit_commands",
    "doctor": "service_commands",
    "chat": "client_commands",
    "bench": "client_commands",
    "models": "model_commands",
    "config": "operating_commands",
    "tenants": "tenant_commands",
    "keys": "tenant_commands",
    "peers": "tenant_commands",
    "requests": "request_commands",
    "audit": "audit_commands",
    "alerts": "alert_commands",
    "history": "console_commands",
}
"""The module of each command, in the order in which `appliance --help` lists the commands."""


class _Commands(Mapping[str, Any]):
    """The commands of `_MODULES`. Reading a command imports its module."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            module = import_module(f"appliance.cli.{_MODULES[name]}")
            merged = typer.Typer(rich_markup_mode=None)
            merged.add_typer(module.commands)
            self._built |= get_group(merged).commands
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class _Root(TyperGroup):
    """The command `appliance` itself."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "commands": _Commands()})


app = typer.Typer(
    cls=_Root,
    help="Run and operate an LLM inference service on one server.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from appliance.monitoring.versions import product_version

        print(f"appliance {product_version()}")
        raise typer.Exit
