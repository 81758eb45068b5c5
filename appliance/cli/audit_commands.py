"""The audit trail and backup commands and their options. The implementations, in `appliance.cli.audit` and
`appliance.cli.backup`, are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.options import Config, Json, Limit, RunDir, StateDir

commands = typer.Typer()
audit = typer.Typer(
    help="List, verify and export the audit trail of operators' actions. On the service's machine, "
    "verifying and exporting require read access to the state directory. The service need not be running.",
    no_args_is_help=True,
)
commands.add_typer(audit, name="audit")

File = Annotated[
    str | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="Read this copy of control.db instead of the service's database.",
        show_default=False,
    ),
]


@audit.command("list")
def audit_list(
    limit: Limit = 20,
    actor: Annotated[
        str | None,
        typer.Option(
            metavar="ACTOR", help="List only actions by this actor, such as uid:0.", show_default=False
        ),
    ] = None,
    action: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="List only this action, such as keys.create. A name that ends with a dot, such as "
            '"keys.", selects all actions with this prefix.',
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="List only actions since this date, or since this long ago (30m, 1h, 7d)."
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Keep running and print each action when its result is recorded."
        ),
    ] = False,
    file: File = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List actions with their actor and result, oldest first. The actions come from the running service. If
    no service is running, or with --state-dir or --file, they are read from the audit files."""
    from appliance.cli.audit_list import list_actions

    list_actions(
        run_dir,
        state_dir,
        file,
        limit=limit,
        actor=actor,
        action=action,
        since=since,
        follow=follow,
        as_json=json,
    )


@audit.command("verify")
def audit_verify(
    heads: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Also verify the audit trail against the recorded heads in this text file, such as the "
            "output of journalctl; - reads standard input. May be repeated.",
            show_default=False,
        ),
    ] = None,
    journal: Annotated[
        bool | None,
        typer.Option(
            "--journal/--no-journal",
            help="Also verify the audit trail against all recorded heads in the journal. By default, only "
            "the heads that were recorded for this state directory are used.",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SEQ:HASH",
            help="Also verify the audit trail against this head, which you saved earlier. May be repeated.",
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="Verify this copy of control.db or this export instead of the service's database.",
            show_default=False,
        ),
    ] = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Verify that the audit trail is complete and unchanged. If it is not, the command reports the first
    invalid row and exits with code 1. If the run directory contains only a socket forwarded from another
    machine, the service there verifies its own trail."""
    from appliance.cli.audit import verify

    raise typer.Exit(
        verify(run_dir, state_dir, file, heads=heads or [], journal=journal, noted=head or [], as_json=json)
    )


@audit.command("export")
def audit_export(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="File to write the export to. Default: standard output.",
            show_default=False,
        ),
    ] = None,
    file: File = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Export the audit trail: each row as a line of JSON, followed by a line with the signature. With FILE,
    --json prints a summary of the export.
    """
    from appliance.cli.audit import export

    export(run_dir, state_dir, file, target, as_json=json)


@commands.command()
def backup(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="Path of a new folder or archive (.tar, .tar.gz, .tgz). If PATH is an existing folder, a "
            "new folder is created in it.",
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
    """Back up the databases, the audit trail and the settings, and verify the backup. The service may keep
    running."""
    from appliance.cli.backup import take_backup

    take_backup(run_dir, state_dir, config, path, contents=contents, as_json=json)
