"""`appliance bench`: load on an OpenAI-compatible server, ours or another's, and how it bore it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import typer
from msgspec import structs

from appliance.bench.document import document
from appliance.bench.messages import Target
from appliance.bench.rates import MOST_REQUESTS, Found
from appliance.bench.results import Slo
from appliance.bench.server import Server, find_server, name_of, target_of
from appliance.bench.session import Result, Session
from appliance.bench.workers import BenchError, Workers
from appliance.bench.workloads import WORKLOADS, Shape, Workload
from appliance.cli.bench_report import ProgressBar, Report
from appliance.cli.failure import Failure, told
from appliance.cli.output import printable
from appliance.cli.service import find_run_dir
from appliance.ownership import trusted_directory
from appliance.rundir import start_remedy
from appliance.watch.versions import product_version

_INTERRUPTED = 130
_DEFAULT_SHAPE = Shape(prompt_tokens=512, output_tokens=128)
_DEFAULT_CONCURRENCY = 16
_DEFAULT_DURATION_S = 30.0
_WAVES = 4
"""Requests a stream, where their number is not given."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line; None where an option was not given."""

    workloads: list[str]
    base_url: str | None
    socket: str | None
    run_dir: str | None
    api_key: str | None
    model: str | None
    vocabulary: int | None
    concurrency: int | None
    requests: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    temperature: float | None
    top_p: float | None
    rate: float | None
    duration_s: float | None
    find_rate: bool
    ttft_p99_ms: float | None
    itl_p99_ms: float | None
    runs: int | None
    warm_up: bool
    workers: int | None
    seed: int | None
    timeout_s: float
    json: str | None


@dataclass(frozen=True, slots=True)
class _Work:
    """What the options come to."""

    workloads: dict[str, Workload]
    """To run one after another; empty for open loop."""
    shape: Shape
    """Of open loop's requests."""


def bench(options: Options) -> int:
    """Run the benchmark and print it; 1 where a request failed or no rate was sustained. Raises Failure, and
    typer's error for options that contradict each other."""
    _check_length(options)
    work = _work(options)
    slo = Slo(options.ttft_p99_ms, options.itl_p99_ms)
    if options.find_rate and not slo.is_set:
        raise typer.BadParameter("--find-rate needs a limit: give --ttft-p99-ms, --itl-p99-ms or both")
    with told(BenchError):
        target = _target(options)
    report = Report(sys.stderr if options.json == "-" else sys.stdout)
    _check_writable(options.json)
    seed = str(int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed)
    try:
        with told(BenchError):
            server, results, found = asyncio.run(_run(options, work, slo, target, seed, report))
    except KeyboardInterrupt:
        report.line()
        print("appliance: interrupted", file=sys.stderr)
        return _INTERRUPTED
    if len(results) > 1:
        report.comparison(results)
    if options.json is not None:
        _write(options.json, document(server, seed, slo, results, found, product_version()))
    failed = any(run.summary.failures for result in results for run in result.runs)
    return int(failed or (found is not None and found.best is None))


async def _run(
    options: Options, work: _Work, slo: Slo, target: Target, seed: str, report: Report
) -> tuple[Server, list[Result], Found | None]:
    server = await find_server(target, options.model, options.vocabulary)
    report.wrapped(
        f"{printable(server.model)} at {name_of(target)} · prompts of ids below {server.vocabulary:,} "
        f"({server.vocabulary_from}) · seed {seed}",
        "dim",
    )
    results: list[Result] = []
    found: Found | None = None
    progress = ProgressBar()
    async with Workers() as pool:
        session = Session(
            server,
            pool,
            progress.show,
            seed=seed,
            workers=options.workers,
            timeout_s=options.timeout_s,
            slo=slo,
        )
        shape, duration = work.shape, options.duration_s or _DEFAULT_DURATION_S
        runs = options.runs or 1
        if options.find_rate:
            found, held = await session.search(shape, options.rate or 1.0, duration, options.warm_up)
            results += [held] if held is not None else []
        elif options.rate is not None:
            results.append(
                await session.open("open loop", shape, options.rate, duration, runs, options.warm_up)
            )
        for name, workload in work.workloads.items():
            results.append(await session.closed(name, workload, runs, options.warm_up))
            report.result(results[-1])
    if not work.workloads:
        for result in results:
            report.result(result)
    if found is not None:
        report.search(found)
    return server, results, found


def _check_length(options: Options) -> None:
    """Refuse a run of more requests than can be kept. Raises typer's error."""
    duration = options.duration_s or _DEFAULT_DURATION_S
    if options.rate is not None and options.rate * duration > MOST_REQUESTS:
        raise typer.BadParameter(
            f"--rate {options.rate:g} for --duration {duration:g} are more than {MOST_REQUESTS:,} "
            f"requests: give less of either"
        )


def _work(options: Options) -> _Work:
    """The options' meaning. Raises typer's error where they contradict each other."""
    open_loop = options.find_rate or options.rate is not None
    for name in options.workloads:
        if name not in WORKLOADS:
            raise typer.BadParameter(f"there is no workload {name!r}: there are {', '.join(WORKLOADS)}")
    own = [
        flag
        for flag, value in (
            ("--concurrency", options.concurrency),
            ("--requests", options.requests),
            ("--prompt-tokens", options.prompt_tokens),
            ("--output-tokens", options.output_tokens),
            ("--temperature", options.temperature),
            ("--top-p", options.top_p),
        )
        if value is not None
    ]
    if options.workloads and own:
        raise typer.BadParameter(
            f"workload {options.workloads[0]!r} has its own {own[0]}: leave one of the two away"
        )
    if open_loop and (options.concurrency is not None or options.requests is not None):
        raise typer.BadParameter(
            "--concurrency and --requests do not go with --rate and --find-rate: requests arrive at the "
            "rate, for --duration"
        )
    if options.find_rate and options.runs is not None:
        raise typer.BadParameter("--runs does not go with --find-rate, which decides itself what to repeat")
    if not open_loop and options.duration_s is not None:
        raise typer.BadParameter(
            "--duration goes with --rate or --find-rate: other runs last as long as their requests take"
        )
    if open_loop and len(options.workloads) > 1:
        raise typer.BadParameter("--rate and --find-rate take the shape of one workload at most")
    if options.workloads:
        named = {name: WORKLOADS[name] for name in options.workloads}
        return _Work({} if open_loop else named, next(iter(named.values())).shape)
    shape = Shape(
        options.prompt_tokens or _DEFAULT_SHAPE.prompt_tokens,
        options.output_tokens or _DEFAULT_SHAPE.output_tokens,
        options.temperature or 0.0,
        1.0 if options.top_p is None else options.top_p,
    )
    if open_loop:
        return _Work({}, shape)
    concurrency = options.concurrency or min(_DEFAULT_CONCURRENCY, options.requests or _DEFAULT_CONCURRENCY)
    requests = options.requests or _WAVES * concurrency
    return _Work({"custom": Workload(requests, min(concurrency, requests), shape)}, shape)


def _target(options: Options) -> Target:
    """The server that is meant: the one named, or the service of the run directory. Raises Failure."""
    if options.base_url is not None and options.socket is not None:
        raise typer.BadParameter("--base-url and --socket name two servers: leave one away")
    if options.run_dir is not None and (options.base_url is not None or options.socket is not None):
        raise typer.BadParameter(
            "--run-dir names our service, --base-url and --socket another server: leave one away"
        )
    if options.base_url is not None:
        # The variable is for servers on the network; a socket that knows its peer would refuse its key.
        return target_of(options.base_url, None, options.api_key or os.environ.get("OPENAI_API_KEY"))
    if options.socket is not None:
        return target_of(None, options.socket, options.api_key)
    run_dir = find_run_dir(options.run_dir)
    socket = run_dir / "api.sock"
    uids = trusted_directory(run_dir, "--run-dir")
    if not os.path.lexists(socket):
        raise Failure(
            f"no service is running at {socket}: name another server with --base-url or --socket, or "
            f"{start_remedy(run_dir)}"
        )
    return structs.replace(target_of(None, str(socket), options.api_key), trusted_uids=sorted(uids))


def _check_writable(path: str | None) -> None:
    """Find out before the run, not after it; where there is no file, a run that fails leaves none. Raises
    Failure."""
    if path is None or path == "-":
        return
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        with file.open("a"):
            pass
        if is_new:
            # A link to no file stays one: what was made is the file that it names.
            file.resolve().unlink()
    except OSError as error:
        raise Failure(f"--json {path!r} cannot be written: {error.strerror}") from error


def _write(path: str, made: dict[str, object]) -> None:
    text = json.dumps(made, separators=(",", ":"), allow_nan=False) + "\n"
    if path == "-":
        print(text, end="")
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"--json {path!r} cannot be written: {error.strerror}") from error
