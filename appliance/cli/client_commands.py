"""The commands that act as API clients, and their options. They are implemented in `appliance.cli.chat` and
`appliance.cli.bench`, which are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.options import RunDir, number, whole_number

MAX_REQUESTS = 2_000_000
"""The value of `appliance.bench.rates.MAX_REQUESTS`, repeated here because importing that module is slow."""
TOKENS = whole_number(1, 10_000_000)
MILLISECONDS = number(0.001, 86_400_000)

BENCH_EPILOG = (
    "Workloads: http1, http256, http1024 (1, 256 and 1,024 streams, 512 prompt and 256 output tokens), and "
    "those of the engine: b1_50tok, b1_decode, b8_decode, b64_decode, n1024, n1024_sampled, prefill, long, "
    "ttft8k. Exit code 1 if a request failed."
)


def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]", help="Print the answer to this prompt and exit.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Default: the service's first model.")
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


def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKLOAD]...", help="Names of workloads; see below.", show_default=False),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Any OpenAI-compatible server, as http://127.0.0.1:8080/v1."),
    ] = None,
    socket: Annotated[
        str | None, typer.Option(metavar="PATH", help="A server on a Unix socket. Default: the service's.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Bearer key. With --base-url also $OPENAI_API_KEY.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Default: the server's first model.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Prompts are random ids below N. Default: what the server reports.",
            parser=TOKENS,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Streams at once (16).", show_default=False, parser=whole_number(1, 100_000)
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of requests in total (4 per stream).",
            show_default=False,
            parser=whole_number(1, MAX_REQUESTS),
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Prompt tokens of each request (512).", show_default=False, parser=TOKENS
        ),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Output tokens of each request (128).", show_default=False, parser=TOKENS
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            help="Open loop: send R requests per second (Poisson) for --duration.",
            parser=number(0.001, 100_000),
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Time during which requests arrive, in seconds (30).",
            show_default=False,
            parser=number(0.1, 7 * 86_400),
        ),
    ] = None,
    find_rate: Annotated[
        bool,
        typer.Option(
            "--find-rate", help="Search for the highest rate that keeps the limits below, starting at --rate."
        ),
    ] = False,
    ttft_p99_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Limit of the time to the first token.", parser=MILLISECONDS),
    ] = None,
    itl_p99_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Limit of the gaps between tokens.", parser=MILLISECONDS),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of runs (1); the median run is shown.",
            show_default=False,
            parser=whole_number(1, 1000),
        ),
    ] = None,
    warm_up: Annotated[
        bool, typer.Option("--warm-up/--no-warm-up", help="Requests before the first run that do not count.")
    ] = True,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of client processes. Default: depends on streams and cores.",
            parser=whole_number(1, 256),
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Seed of prompts and arrivals. Default: random, so that no prompt is cached.",
            parser=whole_number(0, 2**63 - 1),
        ),
    ] = None,
    run_dir: RunDir = None,
    json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all measurements to FILE; - is standard output."),
    ] = None,
) -> None:
    """Measure a server under load: TTFT, ITL, E2E, throughput and goodput.

    Without a workload: --concurrency streams, or --rate, of one shape. Every token is streamed, prompts are
    random token ids, and answers have a fixed length (ignore_eos). Goodput counts requests that keep
    --ttft-p99-ms, and --itl-p99-ms in the mean of their gaps.
    """
    options = locals()
    from appliance.cli.bench import Options, bench

    raise typer.Exit(bench(Options(**options)))
