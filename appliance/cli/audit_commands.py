"""The audit trail and backup commands, and their options. They are implemented in `appliance.cli.audit` and
`appliance.cli.backup`, which are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.options import Config, Json, Limit, RunDir, StateDir

audit = typer.Typer(
    help="List, verify and export the audit trail of operators' actions. Needs only read rights, and no "
    "running service.",
    no_args_is_help=True,
)

File = Annotated[
    str | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="Read this copy of control.db instead of the one of the service.",
        show_default=False,
    ),
]


@audit.command("list")
def audit_list(
    limit: Limit = 20,
    actor: Annotated[
        str | None,
        typer.Option(metavar="ACTOR", help="Only actions of this actor, such as uid:0.", show_default=False),
    ] = None,
    action: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only this action, such as keys.create, or all with a prefix, such as: keys.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only actions since this date, or within this span (30m, 1h, 7d)."),
    ] = None,
    file: File = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List actions, oldest first: actor, action and result."""
    from appliance.cli.audit import list_actions

    list_actions(run_dir, state_dir, file, limit=limit, actor=actor, action=action, since=since, as_json=json)


@audit.command("verify")
def audit_verify(
    heads: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Also check the heads in this text, such as the output of journalctl; - is standard input. "
            "May be repeated.",
            show_default=False,
        ),
    ] = None,
    journal: Annotated[
        bool | None,
        typer.Option(
            "--journal/--no-journal",
            help="Also check the heads in the journal. By default, only those of this state directory.",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="SEQ:HASH", help="A head from your own records. May be repeated."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="Verify this copy of control.db, or this export, instead of the database of the service.",
            show_default=False,
        ),
    ] = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Verify that the audit trail is complete and unchanged, and name the first wrong row if it is not. Exit
    code 1 if the check fails."""
    from appliance.cli.audit import verify

    raise typer.Exit(
        verify(run_dir, state_dir, file, heads=heads or [], journal=journal, noted=head or [], as_json=json)
    )


@audit.command("export")
def audit_export(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="Default: standard output.", show_default=False),
    ] = None,
    file: File = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Write every row as a line of JSON, and a last line with the signature. With FILE, --json prints a
    summary of the export.
    """
    from appliance.cli.audit import export

    export(run_dir, state_dir, file, target, as_json=json)


def backup(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A new folder or archive (.tar, .tar.gz, .tgz); in an existing folder, a new folder.",
            show_default=False,
        ),
    ],
    contents: Annotated[
        bool, typer.Option("--contents/--no-contents", help="Include stored prompts and answers.")
    ] = True,
    config: Config = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Copy databases, audit and settings while the service runs, and check the copy."""
    from appliance.cli.backup import take_backup

    take_backup(run_dir, state_dir, config, path, contents=contents, as_json=json)
