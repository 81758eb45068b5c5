"""The commands that act as API clients, and their options. The implementations, in `appliance.cli.chat` and
`appliance.cli.bench`, are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.options import RunDir, number, whole_number

MAX_REQUESTS = 2_000_000
"""The value of `appliance.bench.rates.MAX_REQUESTS`, repeated here because that module is slow to import."""
TOKENS = whole_number(1, 10_000_000)
MILLISECONDS = number(0.001, 86_400_000)

BENCH_EPILOG = (
    "Workloads: http1, http256 and http1024 (1, 256 and 1,024 streams, with 512 prompt and 256 output "
    "tokens), and the engine's workloads b1_50tok, b1_decode, b8_decode, b64_decode, n1024, "
    "n1024_sampled, prefill, long and ttft8k. The exit code is 1 if a request failed."
)


def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]", help="Print the answer to this prompt and exit.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="NAME", help="Model to use. Default: the service's first model."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy.", parser=number(0, 2))
    ] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum length of an answer, in tokens.", parser=TOKENS)
    ] = None,
    run_dir: RunDir = None,
) -> None:
    """Chat with a model in the terminal.

    Ctrl-C cancels an answer, and Ctrl-D exits. With PROMPT or piped input, the command prints one answer and
    exits.
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


def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]...", help="Workload names, from the list below.", show_default=False
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of an OpenAI-compatible server, such as http://127.0.0.1:8080/v1."
        ),
    ] = None,
    socket: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Unix socket of the server. Default: the service's socket."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Bearer key. With --base-url, the default is $OPENAI_API_KEY."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="NAME", help="Model to measure. Default: the server's first model."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Use random token ids below N as prompts. Default: the vocabulary size reported by the "
            "server.",
            parser=TOKENS,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of concurrent streams (default 16).",
            show_default=False,
            parser=whole_number(1, 100_000),
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Total number of requests (default 4 per stream).",
            show_default=False,
            parser=whole_number(1, MAX_REQUESTS),
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Prompt tokens per request (default 512).", show_default=False, parser=TOKENS
        ),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Output tokens per request (default 128).", show_default=False, parser=TOKENS
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            help="Send R requests per second for --duration, without waiting for answers (open loop, "
            "Poisson arrivals).",
            parser=number(0.001, 100_000),
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Time during which requests are sent, in seconds (default 30).",
            show_default=False,
            parser=number(0.1, 7 * 86_400),
        ),
    ] = None,
    find_rate: Annotated[
        bool,
        typer.Option(
            "--find-rate",
            help="Search for the highest request rate that meets --ttft-p99-ms and --itl-p99-ms, starting "
            "at --rate.",
        ),
    ] = False,
    ttft_p99_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Maximum 99th-percentile time to first token, in milliseconds.",
            parser=MILLISECONDS,
        ),
    ] = None,
    itl_p99_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Maximum 99th-percentile time between tokens, in milliseconds.",
            parser=MILLISECONDS,
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of runs (default 1). The median run is shown.",
            show_default=False,
            parser=whole_number(1, 1000),
        ),
    ] = None,
    warm_up: Annotated[
        bool, typer.Option("--warm-up/--no-warm-up", help="Send unmeasured requests before the first run.")
    ] = True,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of client processes. The default depends on the number of streams and cores.",
            parser=whole_number(1, 256),
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Seed for prompts and arrival times. Default: random, so that no prompt is in the server's "
            "cache.",
            parser=whole_number(0, 2**63 - 1),
        ),
    ] = None,
    run_dir: RunDir = None,
    json: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write all measurements to FILE as JSON; - writes to standard output.",
        ),
    ] = None,
) -> None:
    """Measure a server under load: TTFT, ITL, E2E, throughput and goodput.

    Without a named workload, --prompt-tokens and --output-tokens describe the requests, and --concurrency or
    --rate describes the load. Answers are streamed and have a fixed length (ignore_eos). Prompts are random
    token ids. Goodput counts only requests whose time to first token is within --ttft-p99-ms and whose mean
    time between tokens is within --itl-p99-ms.
    """
    options = locals()
    from appliance.cli.bench import Options, bench

    raise typer.Exit(bench(Options(**options)))
