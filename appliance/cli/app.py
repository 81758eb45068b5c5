"""The commands and their options. What they do is in the other modules of this package, loaded on demand."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from appliance.cli.audit_commands import audit
from appliance.cli.operating_commands import config, drain, resume
from appliance.cli.options import Config, Json, RunDir, StateDir, Yes
from appliance.cli.tenant_commands import keys, peers, tenants

app = typer.Typer(
    help="One box, one service, one socket: an operated LLM inference appliance.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
requests = typer.Typer(help="Read the request log, oldest first.", invoke_without_command=True)
app.command("drain")(drain)
app.command("resume")(resume)
app.add_typer(config, name="config", rich_help_panel=None)
app.add_typer(tenants, name="tenants", rich_help_panel=None)
app.add_typer(keys, name="keys", rich_help_panel=None)
app.add_typer(peers, name="peers", rich_help_panel=None)
app.add_typer(requests, name="requests", rich_help_panel=None)
app.add_typer(audit, name="audit", rich_help_panel=None)


class Device(StrEnum):
    """As in the settings."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class DType(StrEnum):
    """As in the settings."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantised(StrEnum):
    """As in the settings."""

    auto = "auto"
    fp8 = "fp8"


class LoadFormat(StrEnum):
    """As in the settings."""

    safetensors = "safetensors"
    dummy = "dummy"


class LogLevel(StrEnum):
    """As in the settings."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from appliance.watch.versions import product_version

        print(f"appliance {product_version()}")
        raise typer.Exit


@app.command()
def serve(
    config: Config = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="Serve the checkpoint in FOLDER as NAME; may be repeated. Without: the shipped model, "
            "named demo.",
            show_default=False,
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve TCP too, with bearer keys.")
    ] = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    fronts: Annotated[int | None, typer.Option(metavar="N", help="Front processes.")] = None,
    device: Annotated[Device | None, typer.Option(help="Where models run.", show_default=False)] = None,
    dtype: Annotated[DType | None, typer.Option(help="Of the model.", show_default=False)] = None,
    weights: Annotated[
        Quantised | None, typer.Option(help="fp8: quantise the layers' weights.", show_default=False)
    ] = None,
    kv_dtype: Annotated[
        Quantised | None, typer.Option(help="fp8: quantise the KV cache.", show_default=False)
    ] = None,
    load_format: Annotated[
        LoadFormat | None, typer.Option(help="dummy: random weights, to measure speed.", show_default=False)
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks (GPUs) that hold one replica.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", help="Longest sequence, prompt and output, in tokens.")
    ] = None,
    max_rows: Annotated[int | None, typer.Option(metavar="N", help="Sequences that run at once.")] = None,
    step_tokens: Annotated[int | None, typer.Option(metavar="N", help="Token budget of one step.")] = None,
    kv_blocks: Annotated[
        int | None, typer.Option(metavar="N", help="Blocks of 64 tokens in the KV cache.")
    ] = None,
    log_level: Annotated[
        LogLevel | None, typer.Option(help="Least that is logged.", show_default=False)
    ] = None,
) -> None:
    """Run the service in the foreground, until Ctrl-C or SIGTERM."""
    from appliance.cli.serve import serve
    from appliance.settings import Flags

    flags = Flags(
        config=config,
        models=model or [],
        listen=listen,
        fronts=fronts,
        run_dir=run_dir,
        state_dir=state_dir,
        log_level=log_level and log_level.value,
        device=device and device.value,
        dtype=dtype and dtype.value,
        weights=weights and weights.value,
        kv_dtype=kv_dtype and kv_dtype.value,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max_model_len,
        max_rows=max_rows,
        step_tokens=step_tokens,
        kv_blocks=kv_blocks,
        load_format=load_format and load_format.value,
    )
    raise typer.Exit(serve(flags))


@app.command()
def status(run_dir: RunDir = None, json: Json = False) -> None:
    """Say what runs where: sockets, fronts, models, queue, databases, problems."""
    from appliance.cli.status import show_status

    show_status(run_dir, as_json=json)


@requests.callback()
def requests_read(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="At most so many.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then show requests as they end.")] = False,
    request_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Only this request, with every field.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Only this tenant's.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Only this model's.")] = None,
    status: Annotated[
        str | None, typer.Option("--status", metavar="STATUS", help="Only this HTTP status; or: open, ended.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only those with a status ≥ 400 or an error.")
    ] = False,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Not older than this span (30m, 1h, 7d) or this date.")
    ] = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    from appliance.cli.requests import show_requests

    show_requests(
        run_dir,
        state_dir,
        limit=limit,
        follow=follow,
        request_id=request_id,
        tenant=tenant,
        model=model,
        status=status,
        failed=failed,
        since=since,
        as_json=json,
    )


@requests.command("cancel")
def requests_cancel(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="As `requests` shows it.", show_default=False)
    ],
    yes: Yes = False,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """End a request now; its client gets an error."""
    from appliance.actions import CancelRequest
    from appliance.cli.actions import perform

    perform(run_dir, CancelRequest(request_id=request_id), yes=yes, as_json=json)


@requests.command("show")
def requests_show(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="As `requests` shows it.", show_default=False)
    ],
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Show what is kept of a request's prompts and answers. It is in the audit who looked."""
    from appliance.cli.contents import show_contents

    show_contents(run_dir, request_id, as_json=json)


@app.command()
def backup(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A new folder, or an archive (.tar, .tar.gz, .tgz); in an existing folder a new one.",
            show_default=False,
        ),
    ],
    contents: Annotated[
        bool, typer.Option("--contents/--no-contents", help="With prompts and answers that are kept.")
    ] = True,
    config: Config = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Copy databases, audit and settings while the service runs, and check the copy."""
    from appliance.cli.backup import take_backup

    take_backup(run_dir, state_dir, config, path, contents=contents, as_json=json)


@app.command()
def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="Ask this, print the answer and leave.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Default: the service's first.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Longest answer.")] = None,
    run_dir: RunDir = None,
) -> None:
    """Talk to a model from the terminal.

    Ctrl-C cancels an answer, Ctrl-D leaves. With PROMPT or piped input: one answer.
    """
    from appliance.cli.chat import chat

    raise typer.Exit(
        chat(
            run_dir,
            prompt=prompt,
            model=model,
            system=system,
            temperature=temperature,
            max_tokens=max_tokens,
        )
    )


@app.command(
    epilog="Workloads: http1, http256, http1024 (so many streams at once, 512 in, 256 out), and the "
    "engine's: b1_50tok, b1_decode, b8_decode, b64_decode, n1024, n1024_sampled, prefill, long, ttft8k. "
    "Exit code 1 where a request failed."
)
def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKLOAD]...", help="By name; see below.", show_default=False),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Any OpenAI-compatible server, as http://127.0.0.1:8080/v1."),
    ] = None,
    socket: Annotated[
        str | None, typer.Option(metavar="PATH", help="A server on a Unix socket. Default: our service's.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Bearer key. With --base-url also $OPENAI_API_KEY.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Default: the server's first.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Prompts are random ids below N. Default: the server's word."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Streams at once (16).", show_default=False)
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="In all (4 a stream).", show_default=False)
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of each request (512).", show_default=False)
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of each request (128).", show_default=False)
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy, the default.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="1 is off, the default.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R", min=0.001, help="Open loop: R requests a second arrive (Poisson), for --duration."
        ),
    ] = None,
    duration: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="Seconds in which requests arrive.")
    ] = 30.0,
    find_rate: Annotated[
        bool,
        typer.Option(
            "--find-rate", help="Search the highest rate that keeps the limits below, beginning at --rate."
        ),
    ] = False,
    ttft_p99_ms: Annotated[
        float | None, typer.Option(metavar="MS", min=0, help="Limit of the time to the first token.")
    ] = None,
    itl_p99_ms: Annotated[
        float | None, typer.Option(metavar="MS", min=0, help="Limit of the gaps between tokens.")
    ] = None,
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Repeat; the median run is shown.")] = 1,
    warm_up: Annotated[
        bool, typer.Option("--warm-up/--no-warm-up", help="Requests before the first run that do not count.")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Client processes. Default: by streams and cores.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Of prompts and arrivals. Default: a new one, so no cache knows them."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="S", min=0.1, help="Of one request.")] = 600.0,
    run_dir: RunDir = None,
    json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Raw figures into FILE; - is standard output."),
    ] = None,
) -> None:
    """Measure a server under load: TTFT, ITL, E2E, throughput, goodput.

    Without a workload: --concurrency streams, or --rate, of one shape. Every token is streamed, prompts are
    random token ids, and answers have a fixed length (ignore_eos). Goodput counts requests that keep
    --ttft-p99-ms, and --itl-p99-ms in the mean of their gaps.
    """
    from appliance.cli.bench import Options, bench

    raise typer.Exit(
        bench(
            Options(
                workloads=workloads or [],
                base_url=base_url,
                socket=socket,
                run_dir=run_dir,
                api_key=api_key,
                model=model,
                vocabulary=vocab_size,
                concurrency=concurrency,
                requests=requests,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                temperature=temperature,
                top_p=top_p,
                rate=rate,
                duration_s=duration,
                find_rate=find_rate,
                ttft_p99_ms=ttft_p99_ms,
                itl_p99_ms=itl_p99_ms,
                runs=runs,
                warm_up=warm_up,
                workers=workers,
                seed=seed,
                timeout_s=timeout,
                json=json,
            )
        )
    )


@app.command()
def doctor(
    config: Config = None, run_dir: RunDir = None, state_dir: StateDir = None, json: Json = False
) -> None:
    """Say what runs where, what is wrong and what to do. Exit code 1 where something is wrong."""
    from appliance.cli.doctor import show_findings

    raise typer.Exit(show_findings(config, run_dir, state_dir, as_json=json))
