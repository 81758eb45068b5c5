"""Implements `appliance bench`, which measures an OpenAI-compatible server under load."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import typer

from appliance.bench.load import Target
from appliance.bench.processes import BenchError
from appliance.bench.rates import MAX_REQUESTS, Search
from appliance.bench.results import Slo
from appliance.bench.server import Server, find_server, parse_url, socket_target
from appliance.bench.session import Result, Session
from appliance.bench.workloads import WORKLOADS, Shape, Workload
from appliance.cli.bench_report import BenchReport, ProgressBar
from appliance.cli.failure import Failure, as_failure
from appliance.cli.output import printable
from appliance.cli.service import find_run_dir
from appliance.monitoring.versions import product_version
from appliance.ownership import trusted_directory
from appliance.rundir import start_remedy

_INTERRUPTED = 130
_DEFAULT_SHAPE = Shape(prompt_tokens=512, output_tokens=128)
_DEFAULT_CONCURRENCY = 16
_DEFAULT_DURATION_S = 30.0
_REQUESTS_PER_STREAM = 4


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `appliance bench`. Omitted options are None."""

    workloads: list[str] | None
    base_url: str | None
    socket: str | None
    run_dir: str | None
    api_key: str | None
    model: str | None
    vocab_size: int | None
    concurrency: int | None
    requests: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    rate: float | None
    duration: float | None
    find_rate: bool
    ttft_p99_ms: float | None
    itl_p99_ms: float | None
    runs: int | None
    warm_up: bool
    workers: int | None
    seed: int | None
    json: str | None

    @property
    def is_open_loop(self) -> bool:
        return self.find_rate or self.rate is not None

    @property
    def duration_s(self) -> float:
        return self.duration or _DEFAULT_DURATION_S


class Document(msgspec.Struct, kw_only=True):
    """The JSON document that `appliance bench --json` writes. Fields ending in `_ms` are in milliseconds,
    fields ending in `_s` in seconds. null means that nothing was measured."""

    appliance: str
    at: str
    target: str
    model: str
    vocab_size: int
    seed: str
    slo: Slo
    results: list[Result]
    search: Search | None


def bench(options: Options) -> int:
    """Run the benchmark and print its results. Return 1 if a request failed or no rate was sustained. Raises
    Failure, or typer's error if options conflict."""
    workloads = _workloads(options)
    slo = Slo(options.ttft_p99_ms, options.itl_p99_ms)
    if options.find_rate and not slo.is_set:
        raise typer.BadParameter(
            "--find-rate requires a latency limit: add --ttft-p99-ms, --itl-p99-ms or both"
        )
    report = BenchReport(sys.stderr if options.json == "-" else sys.stdout)
    _check_writable(options.json)
    seed = str(int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed)
    try:
        with as_failure(BenchError):
            server = find_server(_target(options), options.model, options.vocab_size)
            report.wrapped(
                f"{printable(server.model)} at {server.target} · prompt token ids below "
                f"{server.vocab_size:,} ({server.vocab_size_source}) · seed {seed}",
                "dim",
            )
            results, search = _run(options, workloads, slo, server, seed, report)
    except KeyboardInterrupt:
        report.line()
        print("appliance: interrupted", file=sys.stderr)
        return _INTERRUPTED
    if len(results) > 1:
        report.comparison(results)
    if search is not None:
        report.search(search, options.duration_s)
    if options.json is not None:
        _write(options.json, _document(server, seed, slo, results, search))
    failed = any(run.failures for result in results for run in result.runs)
    return int(failed or (search is not None and search.best is None))


def _run(
    options: Options,
    workloads: dict[str, Workload],
    slo: Slo,
    server: Server,
    seed: str,
    report: BenchReport,
) -> tuple[list[Result], Search | None]:
    session = Session(
        server,
        seed,
        show=ProgressBar().show,
        workers=options.workers,
        slo=slo,
        warm_up=options.warm_up,
    )
    if options.find_rate or options.rate is not None:
        shape = next(iter(workloads.values())).shape
        search = None
        if options.find_rate:
            search, result = session.search(shape, options.rate or 1.0, options.duration_s)
        else:
            result = session.open(shape, options.rate or 1.0, options.duration_s, options.runs or 1)
        if result is not None:
            report.result(result)
        return [result] if result is not None else [], search
    results = []
    for name, workload in workloads.items():
        results.append(session.closed(name, workload, options.runs or 1))
        report.result(results[-1])
    return results, None


def _workloads(options: Options) -> dict[str, Workload]:
    """Return the workloads described by the options. An open-loop run uses only the first workload's prompt
    and answer lengths. Raises typer's error if the options conflict."""
    names = options.workloads or []
    for name in names:
        if name not in WORKLOADS:
            raise typer.BadParameter(
                f"unknown workload {name!r}; available workloads: {', '.join(WORKLOADS)}"
            )
    given = {
        "--concurrency": options.concurrency,
        "--requests": options.requests,
        "--prompt-tokens": options.prompt_tokens,
        "--output-tokens": options.output_tokens,
        "--duration": options.duration,
        "--runs": options.runs,
    }
    conflicts = (
        (bool(names), list(given)[:4], "the named workload sets this value"),
        (
            options.is_open_loop,
            list(given)[:2],
            "with --rate or --find-rate, requests arrive at a fixed rate for --duration",
        ),
        (not options.is_open_loop, ["--duration"], "it can be used only with --rate or --find-rate"),
        (options.find_rate, ["--runs"], "--find-rate repeats trials as needed"),
    )
    for applies, flags, reason in conflicts:
        for flag in flags:
            if applies and given[flag] is not None:
                raise typer.BadParameter(f"remove {flag}: {reason}")
    if options.is_open_loop and len(names) > 1:
        raise typer.BadParameter("--rate and --find-rate use a single workload: name only one")
    if options.rate is not None and options.rate * options.duration_s > MAX_REQUESTS:
        raise typer.BadParameter(
            f"--rate {options.rate:g} for --duration {options.duration_s:g} would send more than "
            f"{MAX_REQUESTS:,} requests: reduce the rate or the duration"
        )
    if names:
        return {name: WORKLOADS[name] for name in names}
    shape = Shape(
        options.prompt_tokens or _DEFAULT_SHAPE.prompt_tokens,
        options.output_tokens or _DEFAULT_SHAPE.output_tokens,
    )
    concurrency = options.concurrency or min(_DEFAULT_CONCURRENCY, options.requests or _DEFAULT_CONCURRENCY)
    requests = options.requests or _REQUESTS_PER_STREAM * concurrency
    return {"custom": Workload(requests, min(concurrency, requests), shape)}


def _target(options: Options) -> Target:
    """Return the server named by the options, or the service in the run directory. Raises Failure or
    BenchError if no server can be used."""
    if len([one for one in (options.base_url, options.socket, options.run_dir) if one is not None]) > 1:
        raise typer.BadParameter(
            "--base-url, --socket and --run-dir cannot be combined: use only one of them"
        )
    if options.base_url is not None:
        # $OPENAI_API_KEY is meant for servers on the network, so it is not sent over a Unix socket: a service
        # that identifies clients by uid would reject an unknown key.
        return parse_url(options.base_url, options.api_key or os.environ.get("OPENAI_API_KEY"))
    if options.socket is not None:
        return socket_target(options.socket, options.api_key)
    run_dir = find_run_dir(options.run_dir)
    socket = run_dir / "api.sock"
    uids = trusted_directory(run_dir, "--run-dir")
    if not os.path.lexists(socket):
        raise Failure(
            f"no service is running at {socket}: set another server with --base-url or --socket, or "
            f"{start_remedy(run_dir)}"
        )
    return socket_target(str(socket), options.api_key, uids)


def _document(server: Server, seed: str, slo: Slo, results: list[Result], search: Search | None) -> Document:
    if search is not None:  # `results` contains the best trial's requests
        trials = [msgspec.structs.replace(trial, per_request=[]) for trial in search.trials]
        best = search.best and msgspec.structs.replace(search.best, per_request=[])
        search = Search(best=best, trials=trials, note=search.note)
    return Document(
        appliance=product_version(),
        at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        target=str(server.target),
        model=server.model,
        vocab_size=server.vocab_size,
        seed=seed,
        slo=slo,
        results=results,
        search=search,
    )


def _check_writable(path: str | None) -> None:
    """Raise Failure before the run if the file cannot be written. The check leaves no file behind, because
    the run may still fail."""
    if path is None or path == "-":
        return
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        with file.open("a"):
            pass
        if is_new:
            file.resolve().unlink()  # remove the target of a symbolic link, not the link
    except OSError as error:
        raise Failure(f"--json {path!r} cannot be written: {error.strerror}") from error


def _write(path: str, document: Document) -> None:
    encoded = msgspec.json.encode(document) + b"\n"
    if path == "-":
        print(encoded.decode(), end="")
        return
    try:
        Path(path).write_bytes(encoded)
    except OSError as error:
        raise Failure(f"--json {path!r} cannot be written: {error.strerror}") from error
