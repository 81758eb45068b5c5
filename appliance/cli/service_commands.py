"""The commands that run and inspect the service, and their options. The implementations, in the other modules
of this package, are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli import serve_options
from appliance.cli.options import Config, Json, Limit, RunDir, StateDir
from appliance.protocol import LogLevel
from engine.garbage import permanent_objects

commands = typer.Typer()


@commands.command()
def serve(
    config: Config = None,
    model: serve_options.Models = None,
    listen: serve_options.Listen = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    fronts: serve_options.Fronts = None,
    device: serve_options.Device = None,
    dtype: serve_options.Dtype = None,
    quantization: serve_options.Quantization = None,
    kv_cache_dtype: serve_options.KvCacheDtype = None,
    load_format: serve_options.LoadFormat = None,
    tensor_parallel_size: serve_options.TensorParallelSize = None,
    max_model_len: serve_options.MaxModelLen = None,
    max_num_seqs: serve_options.MaxNumSeqs = None,
    max_num_batched_tokens: serve_options.MaxNumBatchedTokens = None,
    kv_blocks: serve_options.KvBlocks = None,
    replicas: serve_options.Replicas = None,
    log_level: serve_options.LogLevel = None,
) -> None:
    """Run the service in the foreground until Ctrl-C or SIGTERM."""
    options = locals()
    with permanent_objects():
        from appliance.core.process import run
        from appliance.settings import Flags

    raise typer.Exit(run(Flags(models=options.pop("model") or [], **options)))


@commands.command()
def status(run_dir: RunDir = None, json: Json = False) -> None:
    """Show the state of the service: sockets, front processes, models, queue, databases and problems."""
    from appliance.cli.status import show_status

    show_status(run_dir, as_json=json)


@commands.command()
def logs(
    limit: Limit = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep running and print new lines.")] = False,
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


@commands.command()
def doctor(
    config: Config = None, run_dir: RunDir = None, state_dir: StateDir = None, json: Json = False
) -> None:
    """Check for anything that can prevent the service from working and suggest remedies. The exit code is 1
    if there is a problem. If the run directory contains only a socket forwarded from another machine, the
    service there checks itself."""
    from appliance.cli.doctor import show_findings

    raise typer.Exit(show_findings(config, run_dir, state_dir, as_json=json))
