"""The commands that act as API clients, and their options. The implementations, in `appliance.cli.chat` and
`appliance.cli.bench`, are loaded on demand."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli import bench_options
from appliance.cli.options import TOKENS, RunDir, number

commands = typer.Typer()

_BENCH_EPILOG = (
    "Workloads: http1, http256 and http1024 (1, 256 and 1,024 streams, with 512 prompt and 256 output "
    "tokens), and the engine's workloads b1_50tok, b1_decode, b8_decode, b64_decode, n1024, "
    "n1024_sampled, prefill, long, ttft2k and ttft8k. The exit code is 1 if a request failed."
)


@commands.command()
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


@commands.command(epilog=_BENCH_EPILOG)
def bench(
    workloads: bench_options.Workloads = None,
    base_url: bench_options.BaseUrl = None,
    socket: bench_options.Socket = None,
    api_key: bench_options.ApiKey = None,
    model: bench_options.Model = None,
    vocab_size: bench_options.VocabSize = None,
    concurrency: bench_options.Concurrency = None,
    requests: bench_options.Requests = None,
    prompt_tokens: bench_options.PromptTokens = None,
    output_tokens: bench_options.OutputTokens = None,
    rate: bench_options.Rate = None,
    duration: bench_options.Duration = None,
    find_rate: bench_options.FindRate = False,
    ttft_p99_ms: bench_options.TtftP99Ms = None,
    itl_p99_ms: bench_options.ItlP99Ms = None,
    runs: bench_options.Runs = None,
    warm_up: bench_options.WarmUp = True,
    workers: bench_options.Workers = None,
    seed: bench_options.Seed = None,
    run_dir: RunDir = None,
    json: bench_options.JsonFile = None,
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
