"""The commands that run and inspect the service, and their options. The implementations, in the other modules
of this package, are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.options import Config, Json, Limit, RunDir, StateDir, whole_number
from appliance.protocol import LogLevel
from engine.messages import Device, DType, LoadFormat, Quantization


def serve(
    config: Config = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FOLDER",
            help="Serve the checkpoint in FOLDER under NAME, or under the folder's own name. May be "
            "repeated. Default: the shipped model, named demo.",
            show_default=False,
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Also serve TCP clients on this address. They need a bearer key."
        ),
    ] = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    fronts: Annotated[
        int | None, typer.Option(metavar="N", help="Number of front processes.", parser=whole_number(1, 256))
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="Device that runs the models.", show_default=False)
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(help="Data type of the models' weights and activations.", show_default=False),
    ] = None,
    quantization: Annotated[
        Quantization | None,
        typer.Option(
            help="Quantization of the layers' weights; fp8 converts them to FP8 while they are loaded.",
            show_default=False,
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        Quantization | None,
        typer.Option(help="Data type of the KV cache; fp8 stores it in FP8.", show_default=False),
    ] = None,
    load_format: Annotated[
        LoadFormat | None,
        typer.Option(
            help="Source of the weights; dummy creates random weights to measure speed.", show_default=False
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of ranks per replica; each rank uses one GPU.",
            parser=whole_number(1, 64),
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Maximum length of a sequence (prompt and output) in tokens.",
            parser=whole_number(1, 10_000_000),
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Maximum number of sequences that run at the same time in a replica.",
            parser=whole_number(1, 65_536),
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Maximum number of tokens computed per step.",
            parser=whole_number(1, 1_048_576),
        ),
    ] = None,
    kv_blocks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of KV cache blocks of 64 tokens each.",
            parser=whole_number(1, 1_000_000_000),
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of replicas of each model.",
            parser=whole_number(1, 1024),
        ),
    ] = None,
    log_level: Annotated[
        LogLevel | None, typer.Option(help="Minimum level of log messages.", show_default=False)
    ] = None,
) -> None:
    """Run the service in the foreground until Ctrl-C or SIGTERM."""
    options = locals()
    from appliance.core.process import run
    from appliance.settings import Flags

    raise typer.Exit(run(Flags(models=options.pop("model") or [], **options)))


def status(run_dir: RunDir = None, json: Json = False) -> None:
    """Show the state of the service: sockets, front processes, models, queue, databases and problems."""
    from appliance.cli.status import show_status

    show_status(run_dir, as_json=json)


def logs(
    limit: Limit = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep running, and print new lines.")
    ] = False,
    level: Annotated[
        LogLevel | None, typer.Option(help="Show only lines of at least this level.", show_default=False)
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text", metavar="TEXT", help="Show only lines that contain this text.", show_default=False
        ),
    ] = None,
    process: Annotated[
        str | None,
        typer.Option(
            "--process",
            metavar="NAME",
            help="Show only lines of this process: core, or the name of a front process or replica.",
            show_default=False,
        ),
    ] = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Show the newest log lines of the core, the front processes and the replicas, oldest first. Older lines
    are in the journal."""
    from appliance.cli.logs import show_logs

    show_logs(run_dir, limit=limit, follow=follow, level=level, text=text, process=process, as_json=json)


def doctor(
    config: Config = None, run_dir: RunDir = None, state_dir: StateDir = None, json: Json = False
) -> None:
    """Check for anything that can prevent the service from working, and suggest remedies. The exit code is 1
    if there is a problem. If the run directory contains only a socket forwarded from another machine, the
    service there checks itself."""
    from appliance.cli.doctor import show_findings

    raise typer.Exit(show_findings(config, run_dir, state_dir, as_json=json))
