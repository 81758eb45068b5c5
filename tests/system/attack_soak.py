"""Measures how much floods delay another tenant's short requests: `scripts/soak --attacks`.

Separate processes at nice 19 generate each flood. Latencies are measured with the same requests in two
situations. In the first, the baseline, the same number of processes at nice 19 only use CPU time. In the
second, they generate the flood. The two situations alternate for several rounds, because the speed of a
virtual machine changes over time. The resident memory (RSS from /proc) of the core and the fronts is
compared with its size before the flood: at its peak, and again after a period without attackers. All traffic
uses loopback addresses and Unix sockets, and stops by itself.

A 99th percentile depends on the slowest 1% of the requests, so each situation needs about 1,000 requests. Its
95% confidence interval then extends from the 17th-slowest to the 5th-slowest request. One pause of half a
second delays five requests, even if the whole machine paused. The breakdown of the slowest request's latency
and the largest delay of a timer in the measuring process show whether the service or the machine caused a
delay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.core.simulated_clients import percentile
from tests.system.attackers import Orders
from tests.system.attacks.conftest import Target, target
from tests.system.attacks.wire import post
from tests.system.usage import PeakMemory, processes_of

TIMER_S = 0.005
"""Interval of the timer that is used to measure delays."""
ATTACKER = Path(__file__).with_name("attackers.py")
MAX_BODY_BYTES = 2 << 20
"""Size of the attackers' bodies, in bytes. It is within the service's limit, so the service reads the
bodies."""


@dataclass(frozen=True)
class Flood:
    """A kind of attack, and the socket that it targets."""

    kind: str
    """Kind of the attack: a key of `attackers.FLOODS`."""
    socket: str
    """The socket that is attacked: tcp, unix or metrics."""
    connections: int
    """Number of connections per process."""
    path: str = "/v1/completions"
    with_key: bool = False
    """Whether the attackers send a tenant's key. On the Unix socket, attackers without a key count as local
    users."""

    @property
    def name(self) -> str:
        """Name of the flood in the table."""
        key = " with a key" if self.with_key else ""
        return f"{self.kind.replace('_', ' ')}{key}, {self.socket}"


FLOODS = (
    Flood("pipelining", "tcp", 65, "/"),
    Flood("pipelining", "unix", 65, "/v1/models"),
    Flood("pipelining", "metrics", 20, "/metrics"),
    Flood("bad_keys", "tcp", 20, "/v1/models"),
    Flood("bad_keys", "unix", 20, "/v1/models"),
    Flood("huge_prompts", "tcp", 8, with_key=True),
    Flood("huge_prompts", "unix", 8, with_key=True),
    Flood("huge_prompts", "unix", 8, "/tokenize", with_key=True),
    Flood("huge_bodies", "tcp", 50),
    Flood("huge_bodies", "tcp", 50, with_key=True),
    Flood("huge_bodies", "unix", 50, with_key=True),
    Flood("huge_bodies", "metrics", 20, "/metrics"),
    Flood("slow_bodies", "tcp", 100, with_key=True),
    Flood("slow_bodies", "unix", 100, with_key=True),
    Flood("slow_bodies", "metrics", 40, "/metrics"),
    Flood("slow_heads", "tcp", 1000, "/v1/models", with_key=True),
    Flood("slow_heads", "unix", 1000, "/v1/models"),
    Flood("idle_connections", "tcp", 300),
    Flood("idle_connections", "unix", 300),
    Flood("idle_connections", "metrics", 50),
    Flood("slow_streams", "tcp", 8, with_key=True),
    Flood("slow_streams", "unix", 8, with_key=True),
    Flood("slow_answers", "tcp", 50, "/tokenize", with_key=True),
    Flood("slow_answers", "unix", 50, "/tokenize", with_key=True),
    Flood("slow_answers", "metrics", 40, "/metrics"),
)


@dataclass(frozen=True)
class Plan:
    """The duration of a flood's measurements, and the bounds on their results."""

    rounds: int = 5
    """Number of times that the baseline load and the flood are measured, in alternation."""
    requests: int = 200
    """Number of short requests per round. They are sent during the baseline load, and again during the
    flood."""
    rate: float = 10.0
    """Number of short requests per second. On two CPU cores, 20 requests per second keep the replica so busy
    that the requests delay each other."""
    start_s: float = 3.0
    """Time, in seconds, from the start of the attackers to the first measured request."""
    processes: int = 2
    """Number of attacking processes in a flood."""
    min_requests: int = 0
    """Number of requests of each attacking process until which a flood goes on."""
    idle_s: float = 30.0
    """Time, in seconds, between the end of a flood and the memory comparison."""
    max_ratio: float = 3.0
    """Maximum ratio of the 99th percentile during the flood to the 99th percentile during the baseline
    load."""
    min_bound_s: float = 0.0
    """A 99th percentile of at most this many seconds is accepted, whatever the baseline is."""
    max_latency_s: float = 1.0
    max_growth_mb: float = 150.0
    max_left_mb: float = 30.0


@dataclass
class Row:
    """The measurements of one flood. Times are in milliseconds. Memory is in MiB, for the process that grew
    most."""

    flood: str
    baseline_p50_ms: float
    baseline_p99_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    baseline_p99_interval_ms: tuple[float, float]
    """95% confidence interval of the 99th percentile."""
    p99_interval_ms: tuple[float, float]
    slowest: dict[str, float]
    """Breakdown of the latency of the slowest request during the flood: the times until it left the queue,
    until its first token and until its end, as the front process recorded them in the request log."""
    timer_delay_ms: float
    """Largest delay of a timer in the measuring process during the flood."""
    core_growth_mb: float
    front_growth_mb: float
    core_left_mb: float
    front_left_mb: float
    attackers: dict[str, Any]
    """Counts reported by the attackers."""
    failures: list[str] = field(default_factory=list)
    """Messages about the bounds that were exceeded."""


@dataclass
class Latencies:
    """Latencies of short requests, in seconds. Each is measured from the time at which the request was
    due."""

    seconds: list[float] = field(default_factory=list)
    slowest: tuple[float, str] = 0.0, ""
    """The longest latency, and the id of its request."""
    timer_delay_s: float = 0.0
    """Largest delay of a timer in this process."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of answers with a status other than 200."""


# ── attackers ──


def give_way() -> None:
    """Set this process to nice 19. With autogroup, Linux divides CPU time between sessions first, and nice
    values count only within a session. The process therefore starts a separate session, and sets that session
    to nice 19 too."""
    os.setsid()
    os.nice(19)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


@contextmanager
def attackers(
    orders: Sequence[Orders], prepare: Callable[[], None] = give_way
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process for each of the orders, and stop all processes at the end of the block. Each process
    calls `prepare` before it runs; by default, this sets the process to nice 19."""
    with ExitStack() as stack:
        started = []
        for one in orders:
            process = subprocess.Popen(
                [sys.executable, "-I", str(ATTACKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                preexec_fn=prepare,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(one)).encode() + b"\n")
            process.stdin.flush()
            started.append(process)
        yield started


def reports(processes: Sequence[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Wait until the attackers have finished, and return the totals of their reports. Raises if an attacker
    failed."""
    found = []
    for process in processes:
        assert process.stdout is not None
        output = process.stdout.read()
        if process.wait():
            raise RuntimeError(f"an attacker ended with exit code {process.returncode}")
        found.append(json.loads(output))
    return sum_of(found)


def sum_of(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the total of each count across all attackers' reports."""
    total: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    for report in reports:
        statuses.update(report["statuses"])
        total.update({name: count for name, count in report.items() if name != "statuses"})
    return {**total, "statuses": dict(statuses)}


def orders_of(flood: Flood, attacked: Target, seconds: float, key: str) -> Orders:
    """Return the orders for one process of the flood."""
    addresses = {"tcp": attacked.tcp, "unix": attacked.unix, "metrics": attacked.metrics}
    return Orders(
        flood.kind,
        addresses[flood.socket],
        seconds,
        flood.connections,
        flood.path,
        key if flood.with_key else "",
        MAX_BODY_BYTES,
    )


# ── the other tenant ──


async def ask(path: str, request: bytes, due: float, into: Latencies) -> None:
    """Send one request on a new connection when it is due, and read the whole answer."""
    await asyncio.sleep(due - time.monotonic())
    status, request_id = "no answer", ""
    try:
        async with asyncio.timeout(120):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(request)
            answer = await reader.read(-1)
            writer.close()
            if answer:
                status = answer.split(b" ", 2)[1].decode()
                request_id = answer.partition(b"x-appliance-request-id: ")[2].partition(b"\r")[0].decode()
    except OSError as error:
        status = type(error).__name__
    into.seconds.append(time.monotonic() - due)
    into.slowest = max(into.slowest, (into.seconds[-1], request_id))
    if status != "200":
        into.refused[status] += 1


def latencies_of(attacked: Target, requests: int, rate: float, into: Latencies) -> None:
    """Send the tenant's short requests at a fixed rate, without waiting for earlier answers. Add their
    latencies to `into`."""
    body = {"model": "demo", "prompt": "x = ", "max_tokens": 2, "temperature": 0}
    request = post("/v1/completions", body, attacked.authorization, "Connection: close")

    async def watch_timer() -> None:
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(TIMER_S)
            into.timer_delay_s = max(into.timer_delay_s, time.monotonic() - slept_at - TIMER_S)

    async def measure() -> None:
        start, watch = time.monotonic(), asyncio.create_task(watch_timer())
        await asyncio.gather(
            *(ask(str(attacked.unix), request, start + number / rate, into) for number in range(requests))
        )
        watch.cancel()

    asyncio.run(measure())


# ── one flood ──


def measure(flood: Flood, attacked: Target, key: str, plan: Plan) -> Row:
    """Measure the latencies of requests during a baseline load and during the flood, and the growth of memory
    use."""
    seconds = plan.start_s + plan.requests / plan.rate + 1.0
    load = Orders("cpu_load", "", seconds, 0)
    flooding = replace(orders_of(flood, attacked, seconds, key), min_requests=plan.min_requests)
    everyone = processes_of(attacked.running)
    memory = PeakMemory({name: one for name, one in everyone.items() if not name.startswith("replica")})
    memory.start()
    baseline, beside = Latencies(), Latencies()
    done: list[dict[str, Any]] = []
    for _ in range(plan.rounds):
        for orders, latencies in ((load, baseline), (flooding, beside)):
            with attackers([orders] * plan.processes) as processes:
                time.sleep(plan.start_s)
                latencies_of(attacked, plan.requests, plan.rate, latencies)
                if orders is flooding:
                    done.append(reports(processes))
    memory.stop()
    growth, left = memory.peak_growth_mb(), memory.growth_after_mb(plan.idle_s, plan.max_left_mb)
    row = Row(
        flood.name,
        1e3 * statistics.median(baseline.seconds),
        1e3 * percentile(baseline.seconds, 0.99),
        1e3 * statistics.median(beside.seconds),
        1e3 * percentile(beside.seconds, 0.99),
        1e3 * max(beside.seconds),
        p99_interval_ms(baseline.seconds),
        p99_interval_ms(beside.seconds),
        parts_of(attacked, *beside.slowest),
        1e3 * beside.timer_delay_s,
        growth["core"],
        max(size for name, size in growth.items() if name != "core"),
        left["core"],
        max((size for name, size in left.items() if name != "core"), default=0.0),
        sum_of(done),
    )
    row.failures = failures_of(row, plan)
    row.failures += [f"{name} has ended" for name, process in everyone.items() if not process.is_running()]
    if baseline.refused or beside.refused:
        row.failures.append(f"refused: {dict(baseline.refused + beside.refused)}")
    return row


def p99_interval_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the 95% confidence interval of the 99th percentile, in milliseconds, with the normal
    approximation. With few requests, the upper end is the slowest request."""
    known, middle = sorted(seconds), 0.99 * len(seconds)
    margin = 1.96 * math.sqrt(0.01 * middle)
    low, high = (min(max(int(rank), 0), len(known) - 1) for rank in (middle - margin, middle + margin))
    return 1e3 * known[low], 1e3 * known[high]


def parts_of(attacked: Target, seconds: float, request_id: str) -> dict[str, float]:
    """Return the parts of a request's latency, in milliseconds: the client's total, and the times in the
    request log."""
    rows = attacked.running.rows(request_id=request_id)
    logged = {name: row[name] for row in rows for name in ("queue_ms", "ttft_ms", "e2e_ms")}
    return {"client_ms": round(1e3 * seconds, 1), **logged}


def failures_of(row: Row, plan: Plan) -> list[str]:
    """Return a message for each bound that the row exceeds, with the bound and the measured value."""
    bound_ms = max(plan.max_ratio * row.baseline_p99_ms, 1e3 * plan.min_bound_s)
    checks = (
        ("p99 in ms", row.p99_ms, bound_ms),
        ("slowest in ms", row.max_ms, 1e3 * plan.max_latency_s),
        ("growth of the core in MB", row.core_growth_mb, plan.max_growth_mb),
        ("growth of a front in MB", row.front_growth_mb, plan.max_growth_mb),
        ("memory left in the core in MB", row.core_left_mb, plan.max_left_mb),
        ("memory left in a front in MB", row.front_left_mb, plan.max_left_mb),
    )
    failures = [f"{name}: {value:.0f} > {bound:.0f}" for name, value, bound in checks if value > bound]
    if not row.attackers["connections"]:
        failures.append("the attackers had no connection: nothing was measured")
    return failures


HEADINGS = (
    f"{'flood':40} | {'load p50   p99':14} | {'flood p50   p99   max':21} | core +MB  left | front +MB left "
    "| bounds exceeded"
)


def line_of(row: Row) -> str:
    """Format the row as a line of the table."""
    verdict = "; ".join(row.failures) or "ok"
    return (
        f"{row.flood:40} | {row.baseline_p50_ms:8.0f} {row.baseline_p99_ms:5.0f} | {row.p50_ms:9.0f} "
        f"{row.p99_ms:5.0f} {row.max_ms:5.0f} | {row.core_growth_mb:8.0f} {row.core_left_mb:5.0f} | "
        f"{row.front_growth_mb:8.0f} {row.front_left_mb:5.0f} | {verdict}; "
        f"p99 from {row.p99_interval_ms[0]:.0f} to {row.p99_interval_ms[1]:.0f} (load: "
        f"{row.baseline_p99_interval_ms[0]:.0f} to {row.baseline_p99_interval_ms[1]:.0f}); slowest: "
        f"{row.slowest}; timer delayed by {row.timer_delay_ms:.0f}"
    )


@contextmanager
def attacked_service(*flags: str) -> Iterator[tuple[Target, str]]:
    """Yield a warmed-up service with two fronts and all sockets, and the key of the attackers' tenant.
    `flags` are options of `appliance serve`."""
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        target(Path(folder), fronts=2, flags=flags) as attacked,
    ):
        attacked.running.tenant("attacker")
        key = attacked.running.key("attacker", "attacker")
        latencies_of(attacked, 40, 20.0, Latencies())
        yield attacked, key


def run(floods: Sequence[Flood], plan: Plan) -> Iterator[Row]:
    """Measure the floods one after another on the same service."""
    with attacked_service() as (attacked, key):
        for flood in floods:
            yield measure(flood, attacked, key, plan)


def main() -> int:
    """Measure floods. The exit code is 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="scripts/soak --attacks", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--requests", type=int, default=Plan.requests, help="per round")
    parser.add_argument("--rate", type=float, default=Plan.rate)
    parser.add_argument("--processes", type=int, default=Plan.processes, help="attackers of each flood")
    parser.add_argument("--idle-seconds", type=float, default=Plan.idle_s)
    parser.add_argument("--only", default="", metavar="TEXT", help="floods whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep the result")
    options = parser.parse_args()
    plan = Plan(
        rounds=options.rounds,
        requests=options.requests,
        rate=options.rate,
        processes=options.processes,
        idle_s=options.idle_seconds,
    )
    floods = [flood for flood in FLOODS if options.only in flood.name]
    if not floods:
        parser.error(
            f"--only {options.only}: no such flood; choose from {', '.join(one.name for one in FLOODS)}"
        )
    print(f"Latencies in ms; RSS growth, in MiB, of the process that grew most.\n{HEADINGS}", flush=True)
    rows = []
    for row in run(floods, plan):
        rows.append(row)
        print(line_of(row), flush=True)
    if options.json is not None:
        result = {"plan": asdict(plan), "floods": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
