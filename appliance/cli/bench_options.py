"""The options of `appliance bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.options import TOKENS, count_option, number, whole_number

MAX_REQUESTS = 2_000_000
"""The value of `appliance.bench.rates.MAX_REQUESTS`, repeated here because that module is slow to import."""
MILLISECONDS = number(0.001, 86_400_000)

Workloads = Annotated[
    list[str] | None,
    typer.Argument(metavar="[WORKLOAD]...", help="Workload names, from the list below.", show_default=False),
]
BaseUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="URL of an OpenAI-compatible server, such as http://127.0.0.1:8080/v1."),
]
Socket = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Unix socket of the server. Default: the service's socket."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Bearer key. With --base-url, the default is $OPENAI_API_KEY."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="NAME", help="Model to measure. Default: the server's first model."
    ),
]
VocabSize = Annotated[
    int | None,
    count_option(
        "Use random token ids below N as prompts. Default: the vocabulary size reported by the server.",
        TOKENS,
    ),
]
Concurrency = Annotated[
    int | None, count_option("Number of concurrent streams (default 16).", whole_number(1, 100_000))
]
Requests = Annotated[
    int | None,
    count_option("Total number of requests (default 4 per stream).", whole_number(1, MAX_REQUESTS)),
]
PromptTokens = Annotated[int | None, count_option("Prompt tokens per request (default 512).", TOKENS)]
OutputTokens = Annotated[int | None, count_option("Output tokens per request (default 128).", TOKENS)]
Rate = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="Send R requests per second for --duration, without waiting for answers (open loop, "
        "Poisson arrivals).",
        parser=number(0.001, 100_000),
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="Time during which requests are sent, in seconds (default 30).",
        show_default=False,
        parser=number(0.1, 7 * 86_400),
    ),
]
FindRate = Annotated[
    bool,
    typer.Option(
        "--find-rate",
        help="Search for the highest request rate that meets --ttft-p99-ms and --itl-p99-ms, starting "
        "at --rate.",
    ),
]
TtftP99Ms = Annotated[
    float | None,
    typer.Option(
        metavar="MS",
        help="Maximum 99th-percentile time to first token, in milliseconds.",
        parser=MILLISECONDS,
    ),
]
ItlP99Ms = Annotated[
    float | None,
    typer.Option(
        metavar="MS",
        help="Maximum 99th-percentile time between tokens, in milliseconds.",
        parser=MILLISECONDS,
    ),
]
Runs = Annotated[
    int | None, count_option("Number of runs (default 1). The median run is shown.", whole_number(1, 1000))
]
WarmUp = Annotated[
    bool, typer.Option("--warm-up/--no-warm-up", help="Send unmeasured requests before the first run.")
]
Workers = Annotated[
    int | None,
    count_option(
        "Number of client processes. The default depends on the number of streams and cores.",
        whole_number(1, 256),
    ),
]
Seed = Annotated[
    int | None,
    count_option(
        "Seed for prompts and arrival times. Default: random, so that no prompt is in the server's cache.",
        whole_number(0, 2**63 - 1),
    ),
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write all measurements to FILE as JSON; - writes to standard output.",
    ),
]
